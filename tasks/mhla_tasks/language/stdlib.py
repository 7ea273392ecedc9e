"""Source code of the standard library of the running Python version, tokenized for training."""

from __future__ import annotations

import hashlib
import logging
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from mhla_kernels.own_files import check_own, own_folder
from transformers import PreTrainedTokenizerBase

from lightning_mhla.data.tables import default_cache
from lightning_mhla.system.files import beside, remove
from lightning_mhla.system.untrusted import BROKEN, reason
from mhla_tasks.language.documents import DocumentEncoder
from mhla_tasks.language.tokenizer import load_tokenizer, train_tokenizer

LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "encodings",
}  # fmt: skip
"""Folders that are not part of the library, or hold tables of data."""

HELD_OUT = 20
"""About one in this number of files is held out for validation; the hash of a file's name decides."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StdlibText:
    """Tokenized source code of Python's standard library.

    Attributes:
        tokenizer: tokenizer trained on the training files.
        tokens: dict with the keys ``train`` and ``validate``. Each value holds the tokens of all training or validation files,
            ``[n]`` uint16.
        starts: dict with the same keys. Each value holds the index of the first token of each file, ``[files]`` int64.
    """

    tokenizer: PreTrainedTokenizerBase
    tokens: dict[str, np.ndarray]
    starts: dict[str, np.ndarray]


def stdlib_files() -> list[Path]:
    """List the source files of Python's standard library in alphabetical order.

    Folders that contain tests, data tables, third-party packages, or bundled tools such as IDLE are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(root).parts[:-1]))
    return sorted(path for path in files if not path.relative_to(root).parts[0].startswith("config-"))


@cache
def load_stdlib(vocab_size: int, cache_dir: Path | None = None) -> StdlibText:
    """Load the tokenized source code of Python's standard library from the cache.

    If the cache does not hold the tokenized code, or its files are broken, the tokenizer is trained and the code encoded first.

    Args:
        vocab_size: vocabulary size of the byte-level BPE tokenizer, 258 to 65,536.
        cache_dir: folder of the cache; None for the user's cache.

    Raises:
        ValueError: if ``vocab_size`` is out of range.
        FileNotFoundError: if the source files of the standard library are not installed.
        ForeignFileError: if the cached files belong to a different user.
    """
    if not 258 <= vocab_size <= 65_536:
        raise ValueError(f"vocab_size={vocab_size} must be 258 (256 bytes and two special tokens) to 65536")
    files = stdlib_files()
    if not files:
        raise FileNotFoundError(f"no .py files in {sysconfig.get_path('stdlib')}; choose another data set")
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in files}
    state = repr((vocab_size, sys.version, [(path.name, text) for path, text in texts.items()]))
    folder = (cache_dir or default_cache()) / f"stdlib-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        own_folder(folder, folder.parent)
        for file in folder.iterdir():
            check_own(file)
    if (folder / "tokens.npz").exists():
        try:
            return _read(folder)
        except PermissionError:
            raise
        except (OSError, BadZipFile, zlib.error, *BROKEN) as error:
            log.warning("%s is prepared again, because it cannot be read (%s)", folder, reason(error))
            remove(folder)
    _prepare(texts, vocab_size, folder)
    return _read(folder)


def _read(folder: Path) -> StdlibText:
    with np.load(folder / "tokens.npz", allow_pickle=False) as arrays:
        tokens = {stage: arrays[f"{stage}_tokens"] for stage in ("train", "validate")}
        starts = {stage: arrays[f"{stage}_starts"] for stage in ("train", "validate")}
    return StdlibText(load_tokenizer(folder), tokens, starts)


def _prepare(texts: dict[Path, str], vocab_size: int, folder: Path) -> None:
    held_out = {path for path in texts if hashlib.sha256(path.name.encode()).digest()[0] % HELD_OUT == 0}
    stages = {
        "train": [text for path, text in texts.items() if path not in held_out],
        "validate": [text for path, text in texts.items() if path in held_out],
    }
    log.info("training a tokenizer of %d tokens on %d files of Python", vocab_size, len(stages["train"]))
    tokenizer = train_tokenizer(stages["train"], vocab_size)
    arrays: dict[str, Any] = {}
    for stage, documents in stages.items():
        encoded = DocumentEncoder(tokenizer)(documents)
        arrays |= {f"{stage}_starts": encoded.starts, f"{stage}_tokens": encoded.tokens.astype(np.uint16)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = beside(folder)  # renamed when complete: several processes may prepare the same folder
    try:
        tokenizer.save_pretrained(aside)
        np.savez(aside / "tokens.npz", **arrays)
        try:
            aside.rename(folder)
        except OSError:
            # An earlier version wrote into the folder directly: complete what it left when it was interrupted.
            if not (folder / "tokens.npz").exists():
                for path in sorted(aside.iterdir(), key=lambda path: path.name == "tokens.npz"):
                    path.replace(folder / path.name)
    finally:
        remove(aside)
