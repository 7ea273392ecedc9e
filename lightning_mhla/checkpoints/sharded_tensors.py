"""Tensors of sharded checkpoints, written and read by ``torch.distributed.checkpoint``.

torch's own reader unpickles ``.metadata``, which can run code. The reader in this module reads ``layout.json`` instead.

The safetensors storage of ``torch.distributed.checkpoint`` (``HuggingFaceStorageWriter`` and ``HuggingFaceStorageReader``) is
not used, for two reasons. It stores tensors only: with the plain values of an optimizer (``param_groups``), it writes files
that it cannot read ("header too large"). It also does not store the paths of values in nested dicts, which :func:`load_whole`
needs to load a checkpoint of several processes in one process. Both were tried with torch 2.14.1.

Import this module only when a sharded checkpoint is written or read, because its imports take half a second.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_mhla.checkpoints.sharded import LAYOUT, MANIFEST, REST, check_sharded, checksum, load_rest
from lightning_mhla.checkpoints.sharded_layout import pack_layout, unpack_layout
from lightning_mhla.system.checkpoint_private import EmptyStateDictLoadPlanner, load_state_dict, set_element
from lightning_mhla.system.files import beside, exchange, flush, remove, write_json
from lightning_mhla.system.untrusted import BROKEN, read_json, reason


def save_sharded(path: Path, tensors: dict[str, Any], other_entries: dict[str, Any]) -> None:
    """Write a sharded checkpoint atomically.

    Every process must call this function with its own shards of the tensors.

    Args:
        path: path of the folder. An existing checkpoint is replaced once the new one is complete.
        tensors: nested dicts of DTensors, tensors and plain values.
        other_entries: other entries of the checkpoint, with plain values that are the same on every process.

    Raises:
        OSError: on every process, if any process cannot write its part. An existing checkpoint stays unchanged.
    """

    def make_folder() -> str:
        folder = beside(path)
        folder.mkdir(parents=True)
        return folder.name

    # All processes write into one temporary folder, whose random name the first process chooses.
    rank, aside = dist.get_rank(), path.with_name(_by_first(path, make_folder))
    failure = None
    try:
        metadata = save(tensors, storage_writer=FileSystemWriter(aside))
        if rank == 0:
            torch.save(other_entries, aside / REST)
            (aside / LAYOUT).write_text(json.dumps(pack_layout(metadata)))
        own_files = [aside / REST, aside / LAYOUT, aside / ".metadata"] if rank == 0 else []
        # torch names the files of a process __RANK_NUMBER.distcp.
        own_files += sorted(aside.glob(f"__{rank}_*"))
        for file in own_files:
            flush(file)
        files = {file.name: {"bytes": file.stat().st_size, "crc32": checksum(file)} for file in own_files}
    except (OSError, RuntimeError, CheckpointException) as error:
        failure, files = f"{type(error).__name__}: {error}", {}
    # Failures are exchanged instead of raised above, so that no process waits for one that has failed.
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (failure, files))
    failures = [failure for failure, _ in parts if failure]
    if failures:
        if rank == 0:
            remove(aside)
        raise OSError(f"checkpoint {path} could not be written: {failures[0]}")

    def complete() -> None:
        listed = {name: facts for _, part in parts for name, facts in part.items()}
        try:
            # Last, because a folder counts as complete once it has a manifest.
            write_json(aside / MANIFEST, listed, indent=1)
            exchange(aside, path)
        except OSError:
            remove(aside)
            raise

    _by_first(path, complete)


def _by_first(path: Path, action: Callable[[], Any]) -> Any:
    """Run a function in the first process only, while the others wait, and return its result in all processes.

    Args:
        path: path of the checkpoint, for the error.
        action: function without arguments.

    Raises:
        OSError: on every process, if the function raised one.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except OSError as error:
            outcome[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise OSError(f"checkpoint {path} could not be written: {outcome[1]}")
    return outcome[0]


class _Reader(FileSystemReader):
    """Storage reader that reads the layout of the tensors from ``layout.json`` instead of torch's pickled ``.metadata``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        layout_file = Path(self.path) / LAYOUT
        files = {file.name: file.stat().st_size for file in layout_file.parent.iterdir()}
        try:
            metadata = unpack_layout(read_json(layout_file), files)
        except (OSError, *BROKEN) as error:
            raise ValueError(f"{layout_file} cannot be read ({reason(error)})") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _PlainValues:
    """Mixin that makes torch's load planners read the non-tensor values of a checkpoint without running code."""

    flatten_state_dict: bool
    original_state_dict: dict[str, Any]
    state_dict: dict[str, Any]
    mappings: dict[str, Any]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class _Planner(_PlainValues, DefaultLoadPlanner):
    pass


class _WholePlanner(_PlainValues, EmptyStateDictLoadPlanner):
    pass


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Context manager that converts torch's exceptions about a damaged checkpoint to a ValueError that names the path."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()] or [error]
        raise ValueError(f"{path} cannot be read safely ({reason(causes[0])})") from error
    except (pickle.UnpicklingError, OSError, *BROKEN) as error:
        raise ValueError(f"{path} cannot be read safely ({reason(error)})") from error


def saved_names(path: Path) -> set[str]:
    """Return the top-level keys under which a sharded checkpoint stores tensors: ``state_dict``, ``optimizer_0`` and so on.

    Raises:
        ValueError: if the layout of the tensors, ``layout.json``, cannot be read.
    """
    return {name.split(".")[0] for name in _Reader(path).read_metadata().state_dict_metadata}


def load_tensors(path: Path, into: dict[str, Any]) -> None:
    """Load a sharded checkpoint into existing tensors, which are overwritten.

    Every process must call this function, and loads its own shards.

    Args:
        path: path of the folder, written by any number of processes.
        into: nested dicts of tensors, with all or some of the keys that were saved.

    Raises:
        ValueError: if the checkpoint cannot be read safely, or does not contain these tensors.
    """
    with _explained(path):
        load(into, storage_reader=_Reader(path), planner=_Planner())


def load_whole(path: Path) -> dict[str, Any]:
    """Load a complete sharded checkpoint in one process, with the same entries as a checkpoint in a single file.

    Raises:
        ValueError: if the checkpoint is damaged or cannot be read safely.
    """
    check_sharded(path)
    tensors: dict[str, Any] = {}
    saved_names(path)  # raises a clear error if the layout is invalid
    with _explained(path):
        load_state_dict(tensors, storage_reader=_Reader(path), planner=_WholePlanner(), no_dist=True)
        optimizers = sorted(name for name in tensors if name.startswith("optimizer_"))
        states = [_numbered(tensors.pop(name)) for name in optimizers]
    return {**tensors, **load_rest(path), "optimizer_states": states}


def _numbered(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Replace parameter names in an optimizer state with the parameter numbers that ``Optimizer.state_dict()`` uses."""
    groups = optimizer["param_groups"]
    names = [name for group in groups for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    return {
        "state": {number[name]: state for name, state in optimizer.get("state", {}).items()},
        "param_groups": [{**group, "params": [number[name] for name in group["params"]]} for group in groups],
    }
