"""Run folders: detection of existing runs, a lock against concurrent use, and cleanup after a killed process.

The file ``lock``, which every start writes, marks a folder as the folder of a run. Cleanup removes only unfinished files of a
killed process, which have temporary names (:data:`lightning_mhla.system.files.UNFINISHED`).
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import platform
import re
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_mhla.checkpoints.io import CHECKPOINTS, RECOVERY
from lightning_mhla.checkpoints.sharded import MANIFEST, is_sharded
from lightning_mhla.system.files import REPLACED, UNFINISHED, remove
from lightning_mhla.system.listing import shown
from lightning_mhla.system.processes import process_ranks

log = logging.getLogger(__name__)

LOCK, CONFIG = "lock", "config.yaml"
"""Names of files in a run folder: the lock, which also marks it as a run folder, and the configuration of the first start."""

WRITTEN_BY_LIGHTNING = "# lightning"
"""Prefix of the first line of a configuration that Lightning's command line wrote."""

LOGS = re.compile(r"config\.yaml|hparams\.yaml|metrics\.csv|events\.out\.tfevents\..+")
"""Pattern of the names of files that Lightning and its loggers write before the first step."""

BEFORE = re.compile(
    r"""
    [^.].*\.ya?ml | events\.out\.tfevents\..+ | metrics(-\d+)?\.csv  # configurations, and what Lightning's loggers write
    # written by the suite and train.sbatch
    | run\.json | report\.html | runs\.json | sweep\.json | slurm-job\.txt | compared\.(html|png) | crashes
    | \.(scale_batch_size|lr_find)_.+\.ckpt  # Lightning's tuners
    | (.+[-_.])?(log|out|err|output|stdout|stderr)([-_.]\d+)?(\.txt)?  # logs of a shell, of SLURM
    | .+\.p?[eo]\d+ | screenlog\.\d+  # logs of other schedulers, and of screen
    | \.gitignore | \.gitkeep | \.DS_Store | \.nfs\w+
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Pattern of the names of files that a folder may contain before a run starts in it."""

WAIT_AFTER_REQUEUE = 120.0
"""Seconds that a requeued job waits for the lock, because file servers release the locks of a dead node after 90 s."""


class RunFolder:
    """Folder of a training run. The first process of the run locks it until that process ends, so that no other run uses it.

    Args:
        path: path of the folder; created if it does not exist.

    Raises:
        ValueError: if another process trains in the folder, or the folder holds files that do not belong to a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None
        path.mkdir(parents=True, exist_ok=True)
        # Only rank 0: the lock excludes other runs, not other processes of this run.
        if is_first_process():
            check_folder(path)
            self._take(WAIT_AFTER_REQUEUE if int(os.environ.get("SLURM_RESTART_COUNT", "0")) else 0.0)

    def _take(self, patience: float) -> None:
        is_new = not _is_marked(self.path)
        stream = (self.path / LOCK).open("a+")  # not "w": that would erase the name of the owner
        until = time.monotonic() + patience
        while True:
            try:
                # Workers do not inherit this kind of lock, so one that survives a killed process does not keep it.
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() < until:
                    time.sleep(1)
                    continue
                stream.seek(0)
                raise ValueError(
                    f"{self.path} is in use by {_owner(stream.read())}; stop that process, or give another --run_dir"
                ) from error
            except OSError as error:
                log.warning("%s does not support locks (%s): make sure that no two jobs use it", self.path, error)
                break
        stream.truncate(0)
        owner = {"host": platform.node(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID")}
        stream.write(json.dumps(owner))
        stream.flush()
        self._lock = stream  # locked until the process ends, or closes any other descriptor of the file
        if is_new:
            self._keep_configuration()
        self._tidy()

    def _keep_configuration(self) -> None:
        """Copy the user's ``config.yaml`` to an unused name before the run overwrites the file with a list of all options."""
        config = self.path / CONFIG
        if config.is_file() and not _head(config).startswith(WRITTEN_BY_LIGHTNING):
            numbered(config).write_bytes(config.read_bytes())

    def _tidy(self) -> None:
        """Clean up after a killed process: remove unfinished files, and restore a checkpoint that was being replaced."""
        for folder in (self.path, *_folders_of_checkpoints(self.path)):
            for path in list(folder.iterdir()):
                replaced = REPLACED.fullmatch(path.name)
                if replaced and not os.path.lexists(folder / replaced[1]):
                    path.rename(folder / replaced[1])
                # Here the new version of a replaced folder has its name already.
                elif replaced or UNFINISHED.fullmatch(path.name):
                    remove(path)
                elif path.name.endswith(".ckpt.old") and _is_lost(path):
                    path.rename(path.with_suffix(""))


def _folders_of_checkpoints(run: Path) -> list[Path]:
    """List a run's ``checkpoints`` folder and the folders below it, except sharded checkpoints and folders of other runs."""
    result = []
    for parent, folders, _ in os.walk(run / CHECKPOINTS):
        result.append(Path(parent))
        folders[:] = [name for name in folders if not _is_unit(Path(parent, name))]
    return result


def _is_unit(folder: Path) -> bool:
    is_temporary = UNFINISHED.fullmatch(folder.name) or REPLACED.fullmatch(folder.name)
    return bool(is_temporary) or is_sharded(folder) or os.path.lexists(folder / LOCK)


def _is_lost(old: Path) -> bool:
    """Return whether a folder ``NAME.ckpt.old``, left by an interrupted replacement, is the only copy of a checkpoint."""
    return is_sharded(old) and (old / MANIFEST).is_file() and not os.path.lexists(old.with_suffix(""))


def check_folder(path: Path) -> None:
    """Check that a folder belongs to a run, or contains only files that may exist before a run starts, such as configurations.

    Raises:
        ValueError: if the folder contains anything else. The message names one such path.
    """
    foreign = None if is_run(path) else next(_foreign(path), None)
    if foreign is not None:
        raise ValueError(
            f"--run_dir={shown(path)}: the folder is not that of a run, and holds {shown(foreign.relative_to(path))}; "
            "give a new or empty folder, or the folder of a run"
        )


def is_run(path: Path) -> bool:
    """Return whether a folder belongs to a run: it has a run's lock file, or checkpoints written before lock files existed."""
    if _is_marked(path):
        return True
    if os.path.lexists(path / LOCK) and not _is_blank(path / LOCK):
        return False
    if any(step_of(file) is not None for file in (path / CHECKPOINTS / RECOVERY).glob("*.ckpt")):
        return True
    # Runs of versions without lock files and without the folder `recovery`.
    config = _head(path / CONFIG)
    is_config = config.startswith(WRITTEN_BY_LIGHTNING) or (
        re.search(r"^model:", config, re.MULTILINE) and re.search(r"^(trainer|data):", config, re.MULTILINE)
    )
    return bool(is_config) and any((path / CHECKPOINTS).glob("*.ckpt"))


def step_of(path: Path) -> int | None:
    """Parse the optimizer step from a file name such as ``step=00000123.ckpt``. Return None for any other name."""
    match = re.fullmatch(r"step=(\d{8,})\.ckpt", path.name)
    return int(match[1]) if match else None


def _is_marked(run: Path) -> bool:
    """Return whether a folder contains a lock file that a run wrote."""
    with suppress(ValueError):
        owner = json.loads(_head(run / LOCK))
        return isinstance(owner, dict) and {"host", "pid", "job"} <= set(owner)
    return False


def _is_blank(lock: Path) -> bool:
    """Return whether a lock file is empty, which happens if the process that created it was killed before writing to it."""
    return stat.S_ISREG(lock.lstat().st_mode) and not _head(lock).strip(" \n\0")


def _head(file: Path) -> str:
    """Return the first 65,536 characters of a text file, or an empty string if the file does not exist or is a link."""
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return ""
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(1 << 16)
    except OSError:
        return ""


def _foreign(folder: Path) -> Iterator[Path]:
    """Yield the paths below a folder that are neither configurations nor outputs of a run, a shell or a job scheduler.

    Run folders are skipped.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from [] if is_run(path) else _foreign_in(path)
        elif not (path.is_file() and (BEFORE.fullmatch(path.name) or _is_our_output(path) or _is_lock(path))):
            yield path


def _foreign_in(folder: Path) -> Iterator[Path]:
    try:
        entries = list(folder.iterdir())
    except OSError:
        yield folder
        return
    if folder.name == CHECKPOINTS:
        yield from (path for path in entries if path.name != RECOVERY and path.suffix != ".ckpt")
    elif folder.is_symlink() and entries:
        yield folder
    elif entries:
        yield from _foreign(folder)


def _is_lock(path: Path) -> bool:
    return path.name == LOCK and (_is_marked(path.parent) or _is_blank(path))


def _is_our_output(path: Path) -> bool:
    """Return whether standard output or standard error of this process is redirected to a path."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return True
    return False


class LogFiles:
    """Record of the files that loggers write when a run starts, so that they can be removed if the start fails.

    A ``CSVLogger`` with a fixed version would delete the ``metrics.csv`` of an earlier start. The constructor therefore renames
    this file with the first unused number, for example to ``metrics-1.csv``.

    Args:
        trainer: trainer that has not started yet. Only the first process of its run renames and removes files.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._earlier: dict[Path, set[str] | None] = {}
        self._renamed: dict[Path, Path] = {}
        self._replaced: dict[Path, bytes] = {}
        for logger in trainer.loggers if is_first_process() else ():
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                folder = Path(logger.log_dir)
                self._earlier[folder] = {path.name for path in folder.iterdir()} if folder.is_dir() else None
                options = folder / "hparams.yaml"  # CSVLogger replaces the file at each save
                if options.is_file():
                    self._replaced[options] = options.read_bytes()
                table = folder / "metrics.csv"
                if isinstance(logger, CSVLogger) and table.is_file():
                    self._renamed[table] = table.rename(numbered(table))

    def remove(self, configuration: bool) -> None:
        """Remove the files that the loggers have written, and restore earlier files that were renamed or replaced.

        A log folder that did not exist before the start is also removed if it contains no other files, so that its version
        number can be used again.

        Args:
            configuration: whether such a folder is removed even if it contains ``config.yaml``.
        """
        for folder, names in self._earlier.items():
            for path in list(folder.iterdir()) if folder.is_dir() else ():
                if path.name not in (names or ()) and path.name != CONFIG and LOGS.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            if names is None:
                _remove_without_files(folder, (CONFIG,) if configuration else ())
        for table, renamed in self._renamed.items():
            with suppress(FileNotFoundError):  # somebody has deleted it, which must not hide the error of the start
                renamed.rename(table)
        for options, content in self._replaced.items():
            options.write_bytes(content)


def numbered(path: Path) -> Path:
    """Return the first unused numbered variant of a path, such as ``metrics-1.csv`` for ``metrics.csv``."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    # Not `exists`, which is False for a broken link.
    return next(name for name in names if not os.path.lexists(name))


def _remove_without_files(folder: Path, ignored: Collection[str]) -> None:
    """Remove a folder and its subfolders unless they contain files.

    Files in the folder itself whose names are in ``ignored`` do not count, and are removed with it.
    """
    entries = list(folder.rglob("*")) if folder.is_dir() else []
    files = [path for path in entries if path.is_symlink() or not path.is_dir()]
    if folder.is_dir() and all(path.parent == folder and path.name in ignored for path in files):
        for path in files:
            path.unlink(missing_ok=True)
        # In reverse order, so that inner folders are removed before those that contain them.
        for path in sorted((*(path for path in entries if path not in files), folder), reverse=True):
            with suppress(OSError):  # a logger has written again, which must not hide the error of the start
                path.rmdir()


def in_use(path: Path) -> bool:
    """Return whether another process is training in a run folder.

    Do not call this function for a folder that this process has locked. The call closes the lock file, which would release the
    lock.
    """
    try:
        with (path / LOCK).open("r+") as stream:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_first_process() -> bool:
    """Return whether this process has rank 0 in its run, even before the process group is initialized."""
    return process_ranks()[0] == 0 and not int(os.environ.get("LOCAL_RANK", "0")) + int(
        os.environ.get("NODE_RANK", "0")
    )


def _owner(text: str) -> str:
    try:
        owner: dict[str, Any] = json.loads(text)
    except ValueError:
        return "another process"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('pid')} on {owner.get('host')}{job}"
