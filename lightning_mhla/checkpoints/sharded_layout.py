"""Conversion between JSON and torch's metadata of a sharded checkpoint, which records where each tensor is stored.

torch stores the metadata as a pickle, ``.metadata``, which can run code when it is read. JSON cannot run code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_mhla.system.checkpoint_private import StorageInfo


def pack_layout(metadata: Metadata) -> dict[str, Any]:
    """Convert torch's metadata of a sharded checkpoint to a dict that can be written as JSON.

    Returns:
        Dict with three entries:

        - ``entries``: dict from each stored name to a dict with ``dtype``, ``size`` and ``chunks`` (offsets and sizes of the
          stored parts of the tensor), or to None if the value is not a tensor.
        - ``paths``: dict from each stored name to the list of keys that lead to its value in nested dicts and lists.
        - ``places``: list with one item for each stored part of a tensor and each value that is not a tensor. An item is a list
          of five values: stored name, offsets of the part in the tensor (None for other values), file name, offset in the file
          and length of the data, the last two in bytes.
    """
    entries = {
        name: {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "size": list(entry.size),
            "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
        }
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    pieces = [
        [index.fqn, None if index.offset is None else list(index.offset), info.relative_path, info.offset, info.length]
        for index, info in metadata.storage_data.items()
    ]
    paths = {name: list(path) for name, path in metadata.planner_data.items()}
    return {"entries": entries, "paths": paths, "places": pieces}


def unpack_layout(listed: dict[str, Any], files: dict[str, int]) -> Metadata:
    """Check the result of :func:`pack_layout`, read from an untrusted file, and convert it to torch's metadata.

    Args:
        listed: result of :func:`pack_layout`, read from a file.
        files: size in bytes of each file in the checkpoint's folder, by name.

    Raises:
        ValueError: if an entry is invalid, a tensor is larger than all files together, or a file is not in the folder. Values
            of wrong types may raise other errors, such as TypeError or KeyError.
    """
    room = sum(files.values())
    entries = {name: _entry(name, entry, room) for name, entry in listed["entries"].items()}
    paths = {name: tuple(path) for name, path in listed["paths"].items()}
    for name, path in paths.items():
        # An index becomes a position in a list, and a huge one would make torch fill the list up to it.
        if name not in entries or not all(isinstance(key, str) or 0 <= key < len(paths) for key in path):
            raise ValueError(f"{name[:80]!r} is kept under {str(path)[:80]}")
    pieces = {}
    for name, offset, file, start, length in listed["places"]:
        if file not in files:
            raise ValueError(f"it names a file outside its folder: {str(file)[:80]}")
        start, length = _number(start), _number(length)
        index = MetadataIndex(str(name), None if offset is None else _shape(offset))
        pieces[index] = StorageInfo(file, start, length)
    return Metadata(entries, paths, pieces)


def _entry(name: str, entry: dict[str, Any] | None, room: int) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry is None:
        return BytesStorageMetadata()
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name[:80]!r} has an unknown dtype: {str(entry['dtype'])[:80]}")
    size = _shape(entry["size"])
    chunks = [ChunkStorageMetadata(_shape(offsets), _shape(sizes)) for offsets, sizes in entry["chunks"]]
    # Checked before memory is allocated: a hostile file may claim any size.
    if math.prod(size) * dtype.itemsize > room:
        raise ValueError(f"{name[:80]!r} is {list(size)} {dtype}, more than all {room} bytes of the checkpoint")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _shape(values: list[int]) -> torch.Size:
    return torch.Size(_number(value) for value in values)


def _number(value: Any) -> int:
    # Not isinstance, which accepts True.
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:80]!r} is not a number of elements or bytes")
    return value
