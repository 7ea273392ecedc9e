"""Choice of the checkpoint that a command loads: the latest or best one of a run, or one given by path."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from lightning_mhla.checkpoints.io import CHECKPOINTS, find_checkpoints, read_header

log = logging.getLogger(__name__)

BEST, NEWEST = "best", "last"
"""Keywords that name a checkpoint of a run."""


def choose_checkpoint(run: Path | None, requested: str | None, training: bool) -> str | None:
    """Choose the checkpoint that a command loads.

    Args:
        run: path of the run folder; None if the command does not name one.
        requested: path of a checkpoint; ``"best"`` for the run's checkpoint with the best monitored value; ``"last"`` or None
            for the run's latest checkpoint. Without a run, ``"last"`` is returned unchanged.
        training: whether the command trains in the run folder. Other commands only read from it.

    Returns:
        Path of the checkpoint to load, or None to start from scratch. If the latest complete checkpoint of the run is to be
        loaded, the path of the run folder is returned. This is also the case if a training command is repeated, that is, if the
        run started from ``requested`` and already has checkpoints.

    Raises:
        FileNotFoundError: if ``requested`` is ``"best"``, and the run has no best checkpoint.
        ValueError: if ``requested`` is ``"best"``, and ``run`` is None. Also if ``training`` is True, the run already has
            checkpoints, and ``requested`` is a checkpoint outside its folder from which the run did not start: loading it would
            discard the progress of the run.
    """
    checkpoints = find_checkpoints(run) if run is not None else []
    if requested == BEST:
        if run is None:
            raise ValueError("--ckpt_path=best needs a run: add --run_dir=FOLDER, or give a path")
        requested = str(best_checkpoint(run))
    elif (
        run is not None
        and requested is not None
        and (requested == NEWEST or Path(requested).resolve() == run.resolve())
    ):
        requested = None
    if requested is None:
        return str(run) if checkpoints or (run is not None and not training) else None
    if not training or run is None or not checkpoints:
        return requested
    # The run has checkpoints, and a start from a different one would lose their progress. A repeated command (a requeued job,
    # for example) names the checkpoint that the run started from, and is to resume.
    path, inside = Path(requested), lies_in(Path(requested), run)
    saved = _recovery_state(checkpoints)
    if saved.get("started_from") == name_of_start(path, run) and not (inside and saved.get("finished")):
        log.info("%s started from %s already, and continues from its latest checkpoint", run, requested)
        return str(run)
    if path.exists() and not inside:
        raise ValueError(
            f"--ckpt_path={requested}: {run} has checkpoints of its own, which did not start from there; choose another "
            "--run_dir, or leave --ckpt_path out to continue the run"
        )
    return requested


def best_checkpoint(run: Path) -> Path:
    """Return the path of a run's best checkpoint, judged by the metric that its ``ModelCheckpoint`` monitors.

    Raises:
        FileNotFoundError: if the run has no best checkpoint, or its file no longer exists.
    """
    # The latest readable checkpoint has the current list of best checkpoints; older ones may name removed files.
    for state in find_checkpoints(run):
        callbacks = _callbacks(state)
        for saved in callbacks.values():
            if isinstance(saved, dict) and saved.get("best_model_path") and saved.get("monitor"):
                best, folder = Path(str(saved["best_model_path"])), Path(str(saved.get("dirpath")))
                relative = os.path.relpath(best, folder)
                # The run may have been moved since; the path stays as saved if the user chose a different folder.
                path = run / CHECKPOINTS / relative if folder.name == CHECKPOINTS else best
                if path.exists():
                    return path
                raise FileNotFoundError(f"{run}: its best checkpoint, {relative}, no longer exists")
        if callbacks:
            break
    raise FileNotFoundError(f"{run} has no best checkpoint: no ModelCheckpoint with a monitor has saved one")


def _recovery_state(checkpoints: list[Path]) -> dict[str, Any]:
    """Return the Recovery callback's saved state from the first readable checkpoint, or an empty dict if there is none."""
    for path in checkpoints:
        if callbacks := _callbacks(path):
            saved = callbacks.get("Recovery")
            return saved if isinstance(saved, dict) else {}
    return {}


def name_of_start(path: Path, run: Path) -> str:
    """Return the absolute path of a checkpoint, or its path relative to the run folder if it lies inside that folder."""
    target, folder = path.resolve(), run.resolve()
    return os.path.relpath(target, folder) if target.is_relative_to(folder) else str(target)


def lies_in(path: Path, folder: Path) -> bool:
    """Return whether a path lies in a folder, after symbolic links are resolved."""
    return path.resolve().is_relative_to(folder.resolve())


def _callbacks(path: Path) -> dict[str, Any]:
    try:
        callbacks = read_header(path).get("callbacks")
    except (ValueError, OSError):
        return {}
    return callbacks if isinstance(callbacks, dict) else {}
