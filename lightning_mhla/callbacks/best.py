"""Best checkpoints of a run: ModelCheckpoint callbacks choose them, and the ``Recovery`` callback writes them.

A best checkpoint is a hard link to a checkpoint that ``Recovery`` has saved, or a separate file if it contains only weights or
is at a URL. When a run resumes, the saved lists of best checkpoints are adapted to the current folders, so that a run can be
moved.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import proxy

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mhla.checkpoints.choice import lies_in
from lightning_mhla.system.files import give_second_name
from lightning_mhla.system.lightning_private import defer_saves, ended_inside_epoch, stop_deferring

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """Request by a ModelCheckpoint callback to save the current state of training.

    Attributes:
        callback: ModelCheckpoint that makes the request.
        path: path or URL of the requested checkpoint.
    """

    callback: ModelCheckpoint
    path: str


class BestCheckpoints:
    """Collector of the checkpoints that ModelCheckpoint callbacks want to write and remove during a training step.

    After all callbacks of the step have run, the :class:`Recovery` callback writes one checkpoint, and hard links to it are
    created at the requested paths. The checkpoint itself lists these links and the files to remove. If the process dies before
    all links are created and all files are removed, the run that resumes from the checkpoint finishes this work.
    """

    def __init__(self) -> None:
        self._callbacks: list[ModelCheckpoint] = []
        self._requests: list[Request] = []
        self._removals: list[str] = []
        self.validated_step = -1
        """Optimizer step of the last validation; -1 before the first validation."""
        self.validation_metrics: set[str] = set()
        """Names of the metrics that validation has logged."""

    def adopt(self, trainer: Trainer) -> None:
        """Take over the writing and removal of checkpoints from a trainer's ModelCheckpoint callbacks.

        From then on, the callbacks do not write or remove files. This object collects the paths of the checkpoints that they
        want to save or remove, and :meth:`finish` does the work.
        """
        # An earlier fit may have ended without `teardown`, so that its wrappers and requests are still there.
        self.release()
        self._callbacks = [item for item in trainer.checkpoint_callbacks if isinstance(item, ModelCheckpoint)]
        for callback in self._callbacks:
            outdated = partial(self._is_outdated, callback)
            defer_saves(callback, partial(self._want, callback), self._removals.append, self._is_pending, outdated)

    def release(self) -> None:
        """Let the ModelCheckpoints write and remove files themselves again, and discard pending requests."""
        for callback in self._callbacks:
            stop_deferring(callback)
        self._callbacks, self._requests, self._removals = [], [], []

    def _is_pending(self, path: str) -> bool:
        return any(request.path == path for request in self._requests)

    def _is_outdated(self, callback: ModelCheckpoint, trainer: Trainer) -> bool:
        """Return whether the metric that a callback monitors comes from a validation of earlier weights.

        This happens if training ends inside an epoch, without a validation of its last weights.
        """
        name = str(callback.monitor)
        validates = name.startswith("val/") or name in self.validation_metrics
        return validates and ended_inside_epoch(trainer) and self.validated_step != trainer.global_step

    def _want(self, callback: ModelCheckpoint, path: str) -> None:
        self._requests.append(Request(callback, path))

    @property
    def wanted(self) -> bool:
        """Whether a ModelCheckpoint has requested that the current state be saved."""
        return bool(self._requests)

    def name_last(self, last: Path) -> None:
        """Set ``last_model_path`` of all ModelCheckpoints before the next checkpoint is written.

        The paths are set first, because the checkpoint contains the states of the ModelCheckpoints. A ModelCheckpoint with
        ``save_last`` whose own ``last.ckpt`` has a different path keeps that path, and :meth:`finish` also saves the
        checkpoint there, as a hard link where possible. All others get the path ``last``.

        Args:
            last: path of the run's latest checkpoint, ``last.ckpt``.
        """
        for callback in self._callbacks:
            callback.last_model_path = str(last)
            last_in_folder = os.path.join(
                str(callback.dirpath), f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
            )
            if callback.save_last and os.path.abspath(last_in_folder) != os.path.abspath(last):
                callback.last_model_path = last_in_folder
                self._want(callback, last_in_folder)

    def plan(self, folder: Path) -> dict[str, list[str]]:
        """Return the hard links to create once the next checkpoint is written, and the files to remove afterwards.

        The links point to that checkpoint, which also stores the returned dict.

        Args:
            folder: folder of the run's checkpoints.

        Returns:
            Dict with the links under ``names`` and the files to remove under ``removals``, both as lists of paths relative to
            ``folder``. Paths outside the folder are left out.
        """
        names = [request.path for request in self._requests if _is_second_name(request)]
        return {"names": _inside(names, folder), "removals": _inside(self._removals, folder)}

    def finish(self, trainer: Trainer, state: Path | None) -> None:
        """Create the requested links to the latest checkpoint, and remove checkpoints that are no longer among the best.

        Every process must call this method.

        Args:
            trainer: trainer of the run.
            state: path of the latest checkpoint; None to write a separate checkpoint to each requested path. Requests for
                weights only and for URLs always get a separate checkpoint.
        """
        requests, removals = self._requests, list(self._removals)
        self._requests = []
        # Cleared in place, because the ModelCheckpoints hold its `append` (see `adopt`).
        self._removals.clear()
        for request in requests:
            if state is None or not _is_second_name(request):
                trainer.save_checkpoint(request.path, request.callback.save_weights_only)
            elif trainer.is_global_zero:
                give_second_name(state, Path(request.path))
        # After the links exist, so that a crash in between leaves too many files rather than too few.
        for path in removals:
            trainer.strategy.remove_checkpoint(path)
        if trainer.is_global_zero:
            for request in requests:
                for logger in trainer.loggers:
                    logger.after_save_checkpoint(proxy(request.callback))


def monitored_metrics(trainer: Trainer) -> dict[str, Any]:
    """Return the latest values of the metrics that the trainer's ModelCheckpoint callbacks monitor.

    A ModelCheckpoint that saves between validations ranks checkpoints by the metrics of the latest validation. The values are
    stored in checkpoints, because a resumed run needs them until its first validation.

    Returns:
        Dict from metric name to a tensor on the CPU. Metrics that have no value yet are left out.
    """
    names = {item.monitor for item in trainer.checkpoint_callbacks if isinstance(item, ModelCheckpoint)}
    return {
        name: torch.as_tensor(value).detach().cpu()  # a callback may set a number
        for name, value in trainer.callback_metrics.items()
        if name in names
    }


def _is_second_name(request: Request) -> bool:
    # A file of weights alone differs from the saved state, and a URL cannot be a hard link.
    return not request.callback.save_weights_only and "://" not in request.path


def _inside(paths: Iterable[str], folder: Path) -> list[str]:
    """Select the paths that lie in a folder once symbolic links are resolved, and return them relative to that folder."""
    inside = [path for path in paths if "://" not in path and lies_in(Path(path).parent, folder)]
    relative = [os.path.relpath(path, folder) for path in inside]
    return [path for path in relative if not path.startswith("..")]


def complete(plan: dict[str, list[str]], state: Path, folder: Path) -> None:
    """Create the links and remove the files that a checkpoint lists, if the process that wrote it died too early to do so.

    Files outside the folder are never touched, even if the checkpoint lists them.

    Args:
        plan: result of :meth:`BestCheckpoints.plan`, read from the checkpoint.
        state: path of the checkpoint that contains the plan.
        folder: folder of the run's checkpoints.
    """
    # The plan comes from a file that may have been edited, so its paths are checked here again.
    names, removals = (_inside([str(folder / path) for path in plan[key]], folder) for key in ("names", "removals"))
    for name in names:
        if not (folder / name).exists():
            give_second_name(state, folder / name)
    # A path that was removed and written again in the same step stays.
    for path in set(removals) - set(names):
        if path.endswith(".ckpt") and (folder / path).is_file():
            (folder / path).unlink()


def _is_written_by(callback: ModelCheckpoint, path: str) -> bool:
    """Return whether a ModelCheckpoint may have written a file, judged by the folder and the extension of the file."""
    folder = str(callback.dirpath)
    if "://" in path or "://" in folder:
        return path.startswith(folder) and ".." not in path.split("/")
    return path.endswith(callback.FILE_EXTENSION) and lies_in(Path(path).parent, Path(folder))


def relocate(state: dict[str, Any], callback: ModelCheckpoint, gone: Iterable[str] = ()) -> dict[str, Any]:
    """Adapt the saved state of a ModelCheckpoint to its current folder, and drop best checkpoints that cannot be used.

    Lightning ignores a saved state whose folder differs from the current one. The folder can differ if it is a relative
    path, if the run was moved, or if the logger has a new version number. Best checkpoints listed in ``gone`` are dropped.
    Best checkpoints outside the callback's folder are also dropped, because the ModelCheckpoint would delete these files once
    they are no longer among its best.

    Args:
        state: state of the callback from a checkpoint.
        callback: ModelCheckpoint that will load the state.
        gone: paths, in the current folder, of checkpoints that no longer exist.

    Returns:
        Changed copy of the state.
    """
    old_folder, new_folder, gone = str(state["dirpath"]), str(callback.dirpath), set(gone)

    def moved(path: str) -> str:
        inside = path and "://" not in path and not os.path.relpath(path, old_folder).startswith("..")
        return os.path.join(new_folder, os.path.relpath(path, old_folder)) if inside else path

    scores = {moved(path): score for path, score in state["best_k_models"].items()}
    best, kth = moved(state["best_model_path"]), moved(state["kth_best_model_path"])
    gone |= {path for path in (best, kth, *scores) if path and not _is_written_by(callback, path)}
    scores = {path: score for path, score in scores.items() if path not in gone}
    changed: dict[str, Any] = {"dirpath": callback.dirpath, "best_k_models": scores}
    changed |= {"last_model_path": moved(state["last_model_path"]), "kth_best_model_path": kth, "best_model_path": best}
    # With fewer than save_top_k files left there is no k-th best: the next checkpoint is then saved whatever its score.
    if best in gone or kth in gone:
        better, worse = (min, max) if callback.mode == "min" else (max, min)
        best = better(scores, key=lambda path: float(scores[path])) if scores else ""
        kth = worse(scores, key=lambda path: float(scores[path])) if len(scores) == callback.save_top_k else ""
        changed |= {"best_model_path": best, "best_model_score": scores.get(best), "kth_best_model_path": kth}
    return {**state, **changed}


def relocate_all(trainer: Trainer, states: dict[str, Any]) -> None:
    """Adapt the saved states of all ModelCheckpoints, in place, to their current folders and to the files that still exist.

    Every process must call this function.

    Args:
        trainer: trainer of the run.
        states: saved states of all callbacks, by their state keys.
    """
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        if not isinstance(callback, ModelCheckpoint) or not isinstance(state, dict) or "best_k_models" not in state:
            continue
        relocated = relocate(state, callback)
        paths = {relocated["best_model_path"], *relocated["best_k_models"]} - {""}
        gone = [path for path in sorted(paths) if "://" not in path and not Path(path).exists()]
        gone = trainer.strategy.broadcast(gone)  # a network file system may show different files to different machines
        if gone and trainer.is_global_zero:
            log.info("these files no longer exist and are removed from the best checkpoints: %s", ", ".join(gone))
        states[callback.state_key] = relocate(state, callback, gone)
