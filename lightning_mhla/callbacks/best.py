"""The best checkpoints of a run: other names of states that ``Recovery`` writes, known again after a resume or a move."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import proxy

from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mhla.checkpoints.choice import lies_in
from lightning_mhla.system.files import give_second_name
from lightning_mhla.system.lightning_private import defer_saves, ended_inside_epoch, stop_deferring

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A path that a ModelCheckpoint wants the present state written to."""

    callback: ModelCheckpoint
    path: str


class BestCheckpoints:
    """Collects what ModelCheckpoints want to write and to remove, until every callback of the moment has acted.

    One state is then written, and the paths become other names of it. That state lists the names and removals too: should the
    process die in between, the start that resumes from it completes them.
    """

    def __init__(self) -> None:
        self._callbacks: list[ModelCheckpoint] = []
        self._requests: list[Request] = []
        self._removals: list[str] = []
        self.validated_step = -1
        """Optimiser step of the last validation."""

    def adopt(self, trainer: Trainer) -> None:
        """Take over the writing for all ModelCheckpoints of a trainer."""
        self.release()
        self._callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        for callback in self._callbacks:
            outdated = partial(self._is_outdated, callback)
            defer_saves(callback, partial(self._want, callback), self._removals.append, self._is_pending, outdated)

    def release(self) -> None:
        """Let the ModelCheckpoints write by themselves again."""
        for callback in self._callbacks:
            stop_deferring(callback)
        self._callbacks, self._requests, self._removals = [], [], []

    def _is_pending(self, path: str) -> bool:
        return any(request.path == path for request in self._requests)

    def _is_outdated(self, callback: ModelCheckpoint, trainer: Trainer) -> bool:
        """Training may end inside an epoch, without a validation of its last weights."""
        validates = str(callback.monitor).startswith("val/")
        return validates and ended_inside_epoch(trainer) and self.validated_step != trainer.global_step

    def _want(self, callback: ModelCheckpoint, path: str) -> None:
        self._requests.append(Request(callback, path))

    @property
    def wanted(self) -> bool:
        """Whether a ModelCheckpoint wants the present state."""
        return bool(self._requests)

    def name_last(self, last: Path) -> None:
        """Tell the ModelCheckpoints where the latest state is, before they are saved with it.

        One that writes to a folder of its own and has ``save_last`` gets a name for it there.
        """
        for callback in self._callbacks:
            callback.last_model_path = str(last)
            own = os.path.join(str(callback.dirpath), f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}")
            if callback.save_last and os.path.abspath(own) != os.path.abspath(last):
                callback.last_model_path = own
                self._want(callback, own)

    def plan(self, folder: Path) -> dict[str, list[str]]:
        """Names to give to the present state and files to remove, relative to the folder of checkpoints; plain values."""
        names = [request.path for request in self._requests if _is_second_name(request)]
        return {"names": _inside(names, folder), "removals": _inside(self._removals, folder)}

    def finish(self, trainer: Trainer, state: Path | None) -> None:
        """Give the names to the state that was just written, and remove what is no longer among the best.

        Every process calls it.

        Args:
            trainer: trainer of the run.
            state: where the state is; None to write every path by itself.
        """
        requests, removals = self._requests, list(self._removals)
        self._requests = []
        self._removals.clear()
        for request in requests:
            if state is None or not _is_second_name(request):
                trainer.save_checkpoint(request.path, request.callback.save_weights_only)
            elif trainer.is_global_zero:
                give_second_name(state, Path(request.path))
        for path in removals:
            trainer.strategy.remove_checkpoint(path)
        if trainer.is_global_zero:
            for request in requests:
                for logger in trainer.loggers:
                    logger.after_save_checkpoint(proxy(request.callback))


def _is_second_name(request: Request) -> bool:
    return not request.callback.save_weights_only and "://" not in request.path


def _inside(paths: Iterable[str], folder: Path) -> list[str]:
    """Paths relative to a folder, of those that lie below it once links are followed."""
    inside = [path for path in paths if "://" not in path and lies_in(Path(path).parent, folder)]
    relative = [os.path.relpath(path, folder) for path in inside]
    return [path for path in relative if not path.startswith("..")]


def complete(plan: dict[str, list[str]], state: Path, folder: Path) -> None:
    """Carry out what :meth:`BestCheckpoints.plan` said, where the process that wrote the state could not.

    Nothing outside the folder is touched, whatever a checkpoint lists.

    Args:
        plan: the plan.
        state: path of the checkpoint that holds it.
        folder: folder of the run's checkpoints.
    """
    names, removals = (_inside([str(folder / path) for path in plan[key]], folder) for key in ("names", "removals"))
    for name in names:
        if not (folder / name).exists():
            give_second_name(state, folder / name)
    for path in set(removals) - set(names):
        if path.endswith(".ckpt") and (folder / path).is_file():
            (folder / path).unlink()


def _is_written_by(callback: ModelCheckpoint, path: str) -> bool:
    """Whether a ModelCheckpoint can have written a path: a checkpoint below its folder, links and ``..`` followed."""
    folder = str(callback.dirpath)
    if "://" in path or "://" in folder:
        return path.startswith(folder) and ".." not in path.split("/")
    return path.endswith(callback.FILE_EXTENSION) and lies_in(Path(path).parent, Path(folder))


def relocate(state: dict[str, Any], callback: ModelCheckpoint, gone: Iterable[str] = ()) -> dict[str, Any]:
    """The state of a ModelCheckpoint with its paths in the present folder, and without files that are gone or lie elsewhere.

    Lightning drops the state where the text of the folder differs: a relative path, a moved run, a new version of a logger.
    A ModelCheckpoint removes what is no longer among its best, so files that it cannot have written do not count either.

    Args:
        state: state from a checkpoint.
        callback: takes the state.
        gone: paths in the present folder that do not exist.
    """
    before, now, gone = str(state["dirpath"]), str(callback.dirpath), set(gone)

    def moved(path: str) -> str:
        inside = path and "://" not in path and not os.path.relpath(path, before).startswith("..")
        return os.path.join(now, os.path.relpath(path, before)) if inside else path

    scores = {moved(path): score for path, score in state["best_k_models"].items()}
    best, kth = moved(state["best_model_path"]), moved(state["kth_best_model_path"])
    gone |= {path for path in (best, kth, *scores) if path and not _is_written_by(callback, path)}
    scores = {path: score for path, score in scores.items() if path not in gone}
    changed: dict[str, Any] = {"dirpath": callback.dirpath, "best_k_models": scores}
    changed |= {"last_model_path": moved(state["last_model_path"]), "kth_best_model_path": kth, "best_model_path": best}
    if best in gone or kth in gone:
        better, worse = (min, max) if callback.mode == "min" else (max, min)
        best = better(scores, key=lambda path: float(scores[path])) if scores else ""
        kth = worse(scores, key=lambda path: float(scores[path])) if len(scores) == callback.save_top_k else ""
        changed |= {"best_model_path": best, "best_model_score": scores.get(best), "kth_best_model_path": kth}
    return {**state, **changed}


def relocate_all(trainer: Trainer, states: dict[str, Any]) -> None:
    """Relocate the states of all ModelCheckpoints in a checkpoint, in place; every process calls it."""
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        if not isinstance(callback, ModelCheckpoint) or not isinstance(state, dict) or "best_k_models" not in state:
            continue
        here = relocate(state, callback)
        paths = {here["best_model_path"], *here["best_k_models"]} - {""}
        gone = [path for path in sorted(paths) if "://" not in path and not Path(path).exists()]
        gone = trainer.strategy.broadcast(gone)
        if gone and trainer.is_global_zero:
            log.info("no longer there, so they do not count among the best checkpoints: %s", ", ".join(gone))
        states[callback.state_key] = relocate(state, callback, gone)
