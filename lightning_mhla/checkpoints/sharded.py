"""Sharded checkpoints: folders to which every process writes its shards, and which are read without running code.

The tensors are in the format of ``torch.distributed.checkpoint``. ``meta.pt`` holds the other entries of Lightning's
checkpoint. ``manifest.json``, written last, lists every file with its size and CRC-32. A folder without ``manifest.json`` is
incomplete.
"""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch

from lightning_mhla.system.untrusted import BROKEN, reason

MANIFEST, LAYOUT, REST = "manifest.json", "layout.json", "meta.pt"
"""Names of files in a sharded checkpoint: the list of files, the layout of the tensors, and all other entries."""


def check_sharded(path: Path) -> None:
    """Check that every file of a sharded checkpoint has the size and CRC-32 that ``manifest.json`` lists.

    Raises:
        ValueError: if ``manifest.json`` is missing or invalid, or a file that it lists is missing or has a different size or
            CRC-32. The message names the file.
    """
    try:
        listed = json.loads((path / MANIFEST).read_text())
        expected = {name: (int(facts["bytes"]), int(facts["crc32"])) for name, facts in listed.items()}
    except FileNotFoundError as error:
        raise ValueError(f"{path} has no {MANIFEST}: it was not written completely") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path / MANIFEST} is not a list of files ({error})") from error
    for name, (size, crc32) in expected.items():
        file = path / name
        # A name with a slash would point outside the folder.
        if Path(name).name != name or not file.is_file():
            raise ValueError(f"{file} is missing")
        if file.stat().st_size != size or checksum(file) != crc32:
            raise ValueError(
                f"{file} is damaged: it has {file.stat().st_size} bytes instead of {size}, or a different checksum"
            )


def checksum(path: Path) -> int:
    """Return the CRC-32 checksum of a file."""
    value = 0
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def is_sharded(path: Path) -> bool:
    """Return whether a path is the folder of a sharded checkpoint."""
    return path.is_dir() and (path / REST).is_file()


def load_rest(path: Path) -> dict[str, Any]:
    """Read all entries of a sharded checkpoint except its tensors.

    Raises:
        ValueError: if the entries cannot be read without running code.
    """
    try:
        entries = torch.load(path / REST, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, OSError, *BROKEN) as error:
        raise ValueError(f"{path / REST} cannot be read safely ({reason(error)})") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path / REST} holds {type(entries).__name__}, not a checkpoint's entries")
    return entries
