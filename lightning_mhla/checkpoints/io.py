"""Checkpoint files: atomic writing, checks before reading, and the search for the latest complete checkpoint of a run."""

# Longer than other modules because writing, checks and the search for a checkpoint rely on the same marks of a complete file.

from __future__ import annotations

import logging
import math
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from lightning_mhla.checkpoints.sharded import check_sharded, is_sharded, load_rest
from lightning_mhla.checkpoints.weights import LIVE
from lightning_mhla.system.files import written_whole
from lightning_mhla.system.redaction import redacted
from lightning_mhla.system.untrusted import BROKEN, reason

log = logging.getLogger(__name__)

CHECKPOINTS, RECOVERY, LAST = "checkpoints", "recovery", "last.ckpt"
"""Names of a run's checkpoint folder, of its subfolder with recovery checkpoints, and of the latest checkpoint."""

READ_FROM = "read_from"
"""Name of the entry with the path of a checkpoint. The entry is added when the checkpoint is read."""


OPTIONS = ("hyper_parameters", "datamodule_hyper_parameters", "callbacks")
"""Names of the checkpoint entries that hold the user's options."""


def remove_secrets(checkpoint: dict[str, Any]) -> None:
    """Replace secrets, such as passwords in URLs, with ``***`` in the options that a checkpoint stores, in place.

    Args:
        checkpoint: entries of the checkpoint.
    """
    for name in OPTIONS:
        if name in checkpoint:
            checkpoint[name] = redacted(checkpoint[name])


PASSED_WEIGHTS = ".temp.ckpt"
"""Name of the file in which Lightning passes trained weights from a forked or spawned process to the main process.

The file holds the weights alone, so it is not checked as a training checkpoint.
"""


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning checkpoint plugin that writes local files atomically, and verifies a checkpoint before reading it.

    It also reads sharded checkpoints, which are folders. For the folder of a run, it reads the latest complete checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint atomically: write a temporary file, flush it to disk and rename it.

        Args:
            checkpoint: entries of the checkpoint. Secrets in its options are redacted in place.
            path: path or URL of the file. For a URL, Lightning's own writer is used, which is not atomic.
            storage_options: options for Lightning's own writer, which is used if they are given; None for the atomic write.

        Raises:
            OSError: if the checkpoint cannot be written; the message says what to do. Earlier checkpoints stay unchanged.
        """
        remove_secrets(checkpoint)
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(target) as aside, aside.open("wb") as stream:
                torch.save(checkpoint, stream)
        except (OSError, RuntimeError) as error:
            raise _explained(error, target) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the entries of a checkpoint.

        A local checkpoint is verified first. Its tensors are read onto the CPU, and its path is added as the entry
        ``read_from``. Lightning's own reader is used for a checkpoint at a URL, and for ``.temp.ckpt``, the temporary file in
        which Lightning passes weights between processes.

        Args:
            path: path or URL of a checkpoint, or path of a run folder, which stands for its latest complete checkpoint.
            map_location: device of the tensors, for Lightning's own reader; ignored for local paths.
            weights_only: ignored; code in a checkpoint never runs.

        Returns:
            Entries of the checkpoint by name.

        Raises:
            FileNotFoundError: if there is no checkpoint at the path.
            ValueError: if the checkpoint is damaged, or cannot be read without running code.
        """
        if "://" in str(path):
            with _told(path):
                return super().load_checkpoint(path, map_location, weights_only=True)  # whatever the caller asked for
        if Path(path).name == PASSED_WEIGHTS:
            return super().load_checkpoint(path, map_location, weights_only=True)
        resolved = resolve_checkpoint(Path(path))
        if resolved.is_dir():
            from lightning_mhla.checkpoints.sharded_tensors import load_whole  # slow to import

            content = load_whole(resolved)
            check_entries(resolved, content)
        else:
            content = read_file(resolved)
        return {**content, READ_FROM: str(resolved)}


def replace_checkpoint_io(strategy: Strategy) -> None:
    """Replace Lightning's default checkpoint plugin in a strategy with :class:`WholeCheckpointIO`, but keep custom plugins.

    Raises:
        ValueError: if the strategy or its plugin belongs to Lightning and reads checkpoints in a way that can run code.
    """
    reading = type(strategy).load_checkpoint
    if reading is not Strategy.load_checkpoint and reading.__module__.startswith("lightning."):
        raise ValueError(
            f"{type(strategy).__name__} reads sharded checkpoints in a way that can run code from them; shard with "
            "--trainer.strategy=lightning_mhla.strategies.FullyShardedStrategy"
        )
    plugin = type(strategy.checkpoint_io)
    if plugin is TorchCheckpointIO:
        strategy.checkpoint_io = WholeCheckpointIO()
    elif plugin.__module__.startswith("lightning."):  # the strategy puts Lightning's own into a wrapper at each access
        raise ValueError(f"{plugin.__name__} reads checkpoints in a way that can run code from them; leave it out")


def _explained(error: Exception, path: Path) -> OSError:
    """Return an OSError with the path, cause and free disk space, for an error that occurred while writing a checkpoint."""
    # torch's zip writer raises a RuntimeError of its own for a full disk; the OSError behind it names the cause.
    behind = error.__cause__ or error.__context__
    cause = behind if isinstance(behind, OSError) and not isinstance(error, OSError) else error
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
    return OSError(
        f"checkpoint {path} could not be written ({reason(cause)}; {free / 2**30:.1f} GiB are free there). Earlier checkpoints "
        "are unchanged: make room and start the same command again, with --run_dir it resumes from the newest"
    )


@contextmanager
def _told(path: str | Path) -> Iterator[None]:
    """Context manager that converts errors of ``torch.load`` to a ValueError that names the checkpoint's path."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is not a checkpoint that can be read safely: it holds more than plain data"
        ) from error
    except (OSError, *BROKEN) as error:
        raise ValueError(f"{path} is not a checkpoint that can be read safely ({reason(error)})") from error


def check_checkpoint(path: Path) -> None:
    """Verify the checksums of a checkpoint, which are in its zip file or, if it is sharded, in its ``manifest.json``.

    Raises:
        ValueError: if the checkpoint is damaged, or if the path is not a checkpoint. The message names the reason.
    """
    if path.is_dir():
        check_sharded(path)
        return
    try:
        with zipfile.ZipFile(path) as records:
            compressed = any(record.compress_type != zipfile.ZIP_STORED for record in records.infolist())
            # torch never compresses records. A small file could unpack to an enormous size, so it is not unpacked.
            damaged = None if compressed else records.testzip()
            names = records.namelist()
    except (zipfile.BadZipFile, OSError, *BROKEN) as error:
        raise ValueError(f"{path} is not a complete checkpoint ({reason(error)})") from error
    if compressed:
        raise ValueError(f"{path} holds compressed records, unlike checkpoints of torch")
    if damaged is not None or not any(name.endswith("/data.pkl") for name in names):
        raise ValueError(
            f"{path} is damaged: " + (f"{damaged} does not match its checksum" if damaged else "no data.pkl in it")
        )


def read_file(path: Path) -> dict[str, Any]:
    """Read the entries of a checkpoint file onto the CPU, without running code.

    Raises:
        ValueError: if the file is truncated, has no ``state_dict``, or contains anything but tensors and plain values.
    """
    with _told(path):
        # Memory-mapped: a header is read from a checkpoint of many gigabytes without reading its tensors.
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{path} holds no state_dict: it is not a training checkpoint")
    check_entries(path, content)
    return content


def check_entries(path: Path, content: dict[str, Any]) -> None:
    """Check that each entry of a checkpoint has the type that Lightning writes.

    Args:
        path: path of the checkpoint, for messages.
        content: entries of the checkpoint.

    Raises:
        ValueError: if an entry has a different type, or weights are not dense tensors; the message names the entry.
    """
    kinds: dict[str, type] = {
        "hyper_parameters": dict, "datamodule_hyper_parameters": dict, "loops": dict, "callbacks": dict,
        "optimizer_states": list, "lr_schedulers": list, "epoch": int, "global_step": int,
        "pytorch-lightning_version": str, "state_dict": dict, LIVE: dict,
    }  # fmt: skip
    for name, kind in kinds.items():
        if name in content and not isinstance(content[name], kind):
            raise ValueError(f"{path}: its {name} is a {type(content[name]).__name__}, not a {kind.__name__}")
    for name in ("state_dict", LIVE):
        for key, value in content.get(name, {}).items():
            plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta
            if not isinstance(key, str) or not plain:
                raise ValueError(f"{path}: {str(key)[:80]!r} in its {name} is not a plain tensor")


def read_header(path: Path) -> dict[str, Any]:
    """Read the entries of a checkpoint without loading tensors into memory.

    Args:
        path: path of a checkpoint file, whose tensors are memory-mapped, or of a sharded checkpoint, whose tensors are left
            out.

    Raises:
        ValueError: if the entries cannot be read without running code, or the path is not a checkpoint.
    """
    return load_rest(path) if path.is_dir() else read_file(path)


def find_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run, latest first.

    Checkpoints of the callback ``Recovery`` come before all others, because only they hold the state of every callback at their
    step. Both groups are sorted by step, not by file time, which copies do not preserve. Unreadable files come first in their
    group, so that a search for a complete checkpoint reports them.

    Args:
        folder: folder of a run, or of its checkpoints. Folders of other runs in it are not searched.
    """
    checkpoint_folder = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    states, others = _checkpoints_in(checkpoint_folder / RECOVERY), _checkpoints_in(checkpoint_folder)
    if states:
        # `last.ckpt` is a second name of the latest of these states, so it belongs to their group.
        states += [path for path in others if path.name == LAST]
        others = [path for path in others if path.name != LAST]
    return [*sorted(states, key=_rank, reverse=True), *sorted(others, key=_rank, reverse=True)]


def _checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoints directly in a folder, except those whose names begin with a dot."""
    candidates = folder.glob("*.ckpt") if folder.is_dir() else ()
    return [path for path in candidates if path.name[0] != "." and (path.is_file() or is_sharded(path))]


def _rank(path: Path) -> tuple[float, bool]:
    """Return the sort key of a checkpoint: step (infinite if unreadable), and whether the callback ``Recovery`` wrote it."""
    try:
        step = float(read_header(path)["global_step"])
    except (ValueError, KeyError, TypeError):
        step = math.inf
    return step, path.parent.name == RECOVERY


def resolve_checkpoint(path: Path) -> Path:
    """Resolve a path to a complete checkpoint: the checkpoint itself, or the latest complete one of a run.

    Damaged checkpoints of a run are skipped. If a folder has no checkpoints, but exactly one run lies below it, that run is
    used. Every process must call this function. Rank 0 searches, and all ranks return its result.

    Args:
        path: path of a checkpoint file, a sharded checkpoint or the folder of a run.

    Returns:
        Path of a complete checkpoint.

    Raises:
        FileNotFoundError: if no checkpoint exists at the path, or several runs lie below a folder without checkpoints.
        ValueError: if the checkpoint is damaged, or the folder has no complete one.
    """
    return _first_process(lambda: _checked(path))


def consolidate(source: Path, target: Path) -> Path:
    """Convert a sharded checkpoint to a single file.

    Args:
        source: path of a sharded checkpoint, or of a run folder, whose latest complete checkpoint is converted.
        target: path of the file to write, which must not exist.

    Returns:
        Path of the checkpoint that was read.

    Raises:
        FileNotFoundError: if no checkpoint exists at ``source``.
        ValueError: if the checkpoint is damaged, or ``target`` exists already.
    """
    if target.exists():
        raise ValueError(f"{target} exists already; choose another name")
    reading = WholeCheckpointIO()
    content = reading.load_checkpoint(source)
    checkpoint = Path(content.pop(READ_FROM))
    reading.save_checkpoint(content, target)
    return checkpoint


def _checked(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    if path.is_dir() and not is_sharded(path):
        return _latest_complete(path)
    check_checkpoint(path)
    return path


def _latest_complete(folder: Path) -> Path:
    candidates = find_checkpoints(folder) or find_checkpoints(_only_run_below(folder))
    for path in candidates:
        try:
            check_checkpoint(path)
        except ValueError as error:
            log.warning("Skipped a damaged checkpoint: %s", error)
        else:
            return path
    raise ValueError(
        f"none of the {len(candidates)} checkpoints in {folder} is complete; move the folder away to train from the start"
    )


def _only_run_below(folder: Path) -> Path:
    """Find the folder of the only run below a folder, at any depth.

    Raises:
        FileNotFoundError: if the number of runs below the folder is not one. The message names up to three of them.
    """
    places = {path.parent for path in folder.rglob("*.ckpt") if path.name[0] != "."}
    # Checkpoints lie in RUN/checkpoints/recovery, in RUN/checkpoints, or directly in RUN.
    runs = {place.parent if place.name == RECOVERY else place for place in places}
    runs = {place.parent if place.name == CHECKPOINTS else place for place in runs}
    if len(runs) == 1:
        return runs.pop()
    names = ", ".join(str(run) for run in sorted(runs)[:3]) + (", .." if len(runs) > 3 else "")
    hint = f"; name one of the runs below it: {names}" if runs else ""
    raise FileNotFoundError(f"{folder} holds no checkpoint{hint}")


def _first_process(find: Callable[[], Path]) -> Path:
    """Call a function on rank 0 only, and return its result or raise its error on every rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return find()
    # Processes that looked for themselves could find different checkpoints on a network file system.
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [find()]
        except (FileNotFoundError, ValueError) as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]
