"""Functions that load tokenizers from a folder or the Hugging Face Hub, save them, and store them inside checkpoints.

A checkpoint may come from an untrusted source. File names that lead out of the folder, files above the size limits, and rules
that make a short text grow without bound raise an error. No code from a file is run.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightning_mhla.system.tokenizer_rules import check_folder, check_tokenizer
from lightning_mhla.system.untrusted import reason

PackedFiles = dict[str, str | dict[str, str]]
"""Contents of files by their path inside the folder: text as a string, other bytes as ``{"base64": ...}``."""

MOST_FILES = 1000
MOST_CHARACTERS = 1 << 29
MOST_DEPTH = 8
"""Limits for the tokenizer files in a checkpoint: number of files, total number of characters, and depth of a path.

They are far above the needs of published tokenizers.
"""


def load_tokenizer(where: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or from a model on the Hugging Face Hub, without running code that comes with it.

    Args:
        where: path of the folder, or name of the model.

    Raises:
        FileNotFoundError: if the folder or model does not exist, or its tokenizer is missing or cannot be loaded.
        ValueError: if the tokenizer's files are unsafe, for example if a rule makes a short text grow without bound.
    """
    check_folder(Path(where))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(where), trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        kind = "folder" if Path(where).exists() else "folder or model of the hub"
        raise FileNotFoundError(
            f"{where} is not a {kind} with a tokenizer (tokenizer.json); give the folder that holds it, or a model name while "
            f"the network is available ({reason(error)})"
        ) from error
    check_tokenizer(tokenizer, str(where))
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files of a tokenizer, including all its named chat templates, to a folder.

    Raises:
        ValueError: if the name of a chat template is not a valid file name.
    """
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    for name in templates:
        if not isinstance(name, str) or not name or PurePosixPath(name).name != name or set(name) & set("\\:\0"):
            raise ValueError(f"the chat template {str(name)[:60]!r} of the tokenizer has no name for a file; rename it")
    tokenizer.save_pretrained(folder)


def pack_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PackedFiles:
    """Return the contents of a tokenizer's files, for storage in a checkpoint.

    Returns:
        A dict from the relative path of each file to its content: a string for UTF-8 text, otherwise ``{"base64": ...}`` with
        the bytes in base64.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(tokenizer, folder)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): _packed(path.read_bytes()) for path in paths}


def unpack_tokenizer(files: PackedFiles) -> PreTrainedTokenizerBase:
    """Restore a tokenizer from the files that :func:`pack_tokenizer` returned.

    Raises:
        ValueError: if ``files`` are not the files of a tokenizer, or are unsafe.
    """
    if not isinstance(files, dict) or not files:
        raise ValueError("the checkpoint's tokenizer is not a set of files by name")
    contents = dict(_checked(files))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, data in contents.items():
            target = folder.joinpath(*path.parts)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as stream:  # fail if the file exists: never write through a link, or twice
                    stream.write(data)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"the checkpoint's tokenizer has a file {str(path)[:80]!r}: {reason(error)}"
                ) from error
        try:
            return load_tokenizer(folder)
        except FileNotFoundError as error:
            raise ValueError(
                f"the checkpoint's tokenizer cannot be read ({reason(error.__cause__ or error)})"
            ) from error


def _packed(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _checked(files: Mapping[Any, Any]) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Check the files of a packed tokenizer, and yield the relative path and the content of each.

    Args:
        files: files in the format of :func:`pack_tokenizer`, from a checkpoint that may be untrusted.

    Raises:
        ValueError: if a path leads out of the tokenizer's folder, a file is neither text nor base64 data, or there are too many
            files or characters.
    """
    if len(files) > MOST_FILES:
        raise ValueError(f"the checkpoint's tokenizer has {len(files)} files, more than {MOST_FILES}")
    total = 0
    for name, content in files.items():
        path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
        wrong = {"", ".", ".."}.intersection(str(name).split("/")) or set(str(name)) & set("\\:\0")
        if wrong or path.is_absolute() or not 1 <= len(path.parts) <= MOST_DEPTH:
            raise ValueError(
                f"the checkpoint's tokenizer has a file {str(name)[:80]!r}, which is not a path inside a folder"
            )
        text = content.get("base64") if isinstance(content, dict) else content
        if not isinstance(text, str):
            raise ValueError(f"the checkpoint's tokenizer has a file {name[:80]!r} that is neither text nor bytes")
        total += len(text)
        if total > MOST_CHARACTERS:
            raise ValueError(f"the checkpoint's tokenizer has more than {MOST_CHARACTERS} characters")
        try:
            yield path, base64.b64decode(text, validate=True) if isinstance(content, dict) else text.encode()
        except ValueError as error:
            raise ValueError(f"the checkpoint's tokenizer has a broken file {name[:80]!r} ({reason(error)})") from error
