"""Callback that reports on a run: its results, its duration, and the paths of its files."""

from __future__ import annotations

import math
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from lightning_mhla.callbacks.curves import LearningCurves
from lightning_mhla.callbacks.facts import never_validated, run_facts, skipped_parts
from lightning_mhla.callbacks.next_steps import NextStep, next_steps
from lightning_mhla.callbacks.originals import RECORD, original_scores, pretrained_weights
from lightning_mhla.callbacks.page import PAGE, write_page
from lightning_mhla.callbacks.points import MetricPoints, as_lists, matching_steps
from lightning_mhla.system.files import write_json
from lightning_mhla.system.folders import checkpoint_folder, is_run_folder, is_trial, run_folder
from lightning_mhla.system.listing import shown
from lightning_mhla.system.numbers import metric_text
from lightning_mhla.system.untrusted import read_json

__all__ = ["RECORD", "RunReport", "versions"]


class RunReport(Callback):
    """Callback that prints the last validation metrics, the training time and the paths of output files after a run.

    After every validation, at the end of training, and when a signal stops the run, the callback also writes two files to the
    folder of the run:

    - ``run.json`` holds the validation metrics by step, the best value of the metric that selects checkpoints, the numbers of
      steps and parameters, and the total training time in seconds, including the time before a resume. It also says what was
      trained, on which machine, with which versions of libraries, and what the run skipped. ``lightning compare`` reads it.
    - ``report.html`` is a web page. It says what was trained, how good it is, and which command resumes the run or, if the run
      is finished, uses its model. Samples, results by class, curves and pictures follow.

    Attributes:
        points: recorded values of each metric with their optimizer steps. If the trainer has a :class:`LearningCurves`
            callback, both share this record.
    """

    def __init__(self) -> None:
        self.points = MetricPoints()
        self._before = 0.0
        self._start: float | None = None  # None while no fit is running
        self._validated_step: int | None = None  # optimizer step of the last validation of this fit
        self._skipped: list[str] = []
        self._next: list[NextStep] = []
        self._folder: Path | None = None
        self._checkpoints = Path()
        self._goes_on = False  # whether this fit has trained a batch
        self._restored = False  # whether a checkpoint supplied the path of the weights that the run started from
        self._pretrained: str | None = None
        self._training = (
            False  # whether a fit is running whose training has begun, with the state of a checkpoint restored
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Discard the metrics of an earlier fit. If there is a :class:`LearningCurves` callback, share its metric record."""
        self._training = False
        if stage == "fit":
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # the trainer's own list
            shared = [callback.points for callback in callbacks if isinstance(callback, LearningCurves)]
            self.points, self._before = shared[0] if shared else MetricPoints(), 0.0
            self._restored, self._pretrained, self._validated_step = False, None, None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring the training time, and set the folder of the run. Every process must call this method."""
        self._start = time.monotonic()
        self._folder, self._checkpoints = run_folder(trainer), checkpoint_folder(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record that training has begun, so that :meth:`on_exception` may write files."""
        self._training, self._goes_on = True, False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Mark ``run.json`` and ``report.html`` as unfinished after the first batch of a fit that continues a finished run."""
        if self._goes_on or not trainer.is_global_zero or self._folder is None:
            return
        self._goes_on = True
        try:
            record = read_json(self._folder / RECORD)
        except (FileNotFoundError, ValueError):  # there is no earlier part, or its record is replaced anyway
            return
        if record.get("finished") is True and is_run_folder(trainer, self._folder):
            record["finished"] = False
            write_json(self._folder / RECORD, record, indent=1)
            training = {name: points for name, points in self.points.items() if name not in record["metrics"]}
            write_page(self._folder, self._checkpoints, record, training)

    def state_dict(self) -> dict[str, Any]:
        """Return the parts of the report that checkpoints and model cards contain.

        Returns:
            Dict with ``points`` (steps and values of each validation metric), ``seconds`` (training time so far), ``versions``
            (result of :func:`versions`) and ``pretrained`` (path or name of the weights that the run started from, or None).
        """
        return {
            "points": as_lists(self.points.of_validation()),
            "seconds": self._seconds(),
            "versions": versions(),
            "pretrained": self._weights(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the validation metrics, the training time and the origin of the weights from a checkpoint."""
        self.points.restore(state_dict["points"])
        self.points.validation.update(state_dict["points"])
        self._before = state_dict["seconds"]
        self._restored, self._pretrained = True, state_dict.get("pretrained")  # absent in older checkpoints

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the validation metrics, and write ``run.json`` and ``report.html``."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self.points.note_validation(trainer)
        self._validated_step = trainer.global_step
        self._write(trainer, pl_module, finished=False)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write ``run.json`` and ``report.html`` if a signal stops the run, or if Ctrl+C stops a run of a single process.

        Before training begins, nothing is written, so that files of an earlier part of the run remain. After an error, nothing
        is written, because a full disk, for example, would only lead to a second error.
        """
        # `run_folder` needs all processes. `RunStopped`, a SystemExit, is raised on all of them; Ctrl+C may reach only some.
        all_stop = isinstance(exception, SystemExit) or (
            isinstance(exception, KeyboardInterrupt) and trainer.world_size == 1
        )
        self._stop_timer()
        if all_stop and self._training:
            self._write(trainer, pl_module, finished=False)

    def _weights(self) -> str | None:
        """Return the path or name of the pretrained weights that the run started from; None if there are no such weights.

        In a resumed run, the path comes from the checkpoint, because its configuration no longer names the weights.
        """
        if self._restored or self._folder is None:
            return self._pretrained
        return pretrained_weights(self._folder)

    def _seconds(self) -> float:
        return self._before + (0.0 if self._start is None else time.monotonic() - self._start)

    def _stop_timer(self) -> None:
        self._before, self._start = self._seconds(), None

    def _write(self, trainer: Trainer, pl_module: LightningModule, finished: bool) -> None:
        folder, checkpoints = run_folder(trainer), checkpoint_folder(trainer)
        if not trainer.is_global_zero or not is_run_folder(trainer, folder):
            return
        metrics = self.points.of_validation()
        best: dict[str, Any] = {}
        for callback in trainer.checkpoint_callbacks:
            points = metrics.get(getattr(callback, "monitor", None) or "", [])
            finite = [point for point in points if math.isfinite(point[1])]
            if isinstance(callback, ModelCheckpoint) and finite:
                choose = min if callback.mode == "min" else max
                step, value = choose(finite, key=lambda point: point[1])
                best = {"metric": callback.monitor, "mode": callback.mode, "value": float(value), "step": step}
                score = callback.best_model_score
                # The best value has a file only if a ModelCheckpoint saved at that validation.
                if callback.best_model_path and score is not None and float(score) == value:
                    best["file"] = os.path.relpath(callback.best_model_path, checkpoints)
        parameters = list(pl_module.parameters())
        # Before its end, a run can still draw its pictures and validate, unless it never validates.
        self._skipped = skipped_parts(trainer, metrics, self._validated_step) if finished else never_validated(trainer)
        record = {
            "finished": finished,
            "steps": trainer.global_step,
            "seconds": round(self._seconds(), 1),
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trained_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "processes": trainer.world_size,
            **run_facts(trainer, pl_module),
            "pretrained": self._weights(),
            "matching_steps": matching_steps(pl_module),
            "original": original_scores(folder),
            "skipped": self._skipped,
            "best": best,
            "metrics": {name: [[step, _number(value)] for step, value in points] for name, points in metrics.items()},
            "versions": versions(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RECORD, record, indent=1)
        training = {name: points for name, points in self.points.items() if name not in metrics}
        write_page(folder, checkpoints, record, training)
        self._next = next_steps(folder, checkpoints, record)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write ``run.json`` and ``report.html``, and print metrics, training time and file paths, on the first process."""
        self._stop_timer()
        self._write(trainer, pl_module, finished=True)
        folder, checkpoints = run_folder(trainer), checkpoint_folder(trainer)
        if not trainer.is_global_zero:
            return
        validated = self.points.of_validation()
        lines = [
            (name, metric_text(name, float(value)))
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val/") or name in validated
        ]
        lines.append(("training time", f"{self._seconds():.0f} s, {trainer.global_step} steps"))
        lines += (
            [("trial", "fast_dev_run keeps no file")]
            if is_trial(trainer)
            else self._paths(trainer, folder, checkpoints)
        )
        if (bar := trainer.progress_bar_callback) is not None:
            bar.teardown(trainer, pl_module, "fit")  # otherwise the bar would stay below the report
        console = Console(soft_wrap=True, highlight=False)
        console.rule("result")
        for name, value in lines:
            console.print(f"{name:<18} {value}", markup=False)

    def _paths(self, trainer: Trainer, folder: Path, checkpoints: Path) -> list[tuple[str, str]]:
        """Return the lines of the printed report about files, skipped parts and the next command, as (heading, text) pairs.

        Args:
            trainer: trainer of the finished run.
            folder: folder of the run.
            checkpoints: folder of its checkpoints.
        """
        lines: list[tuple[str, str]] = []
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                best, last = callback.best_model_path, callback.last_model_path
                if not callback.monitor:  # without a monitor, Lightning's best checkpoint is the newest
                    best, last = "", last or best
                checkpoint_paths = {"best checkpoint": best, "last checkpoint": last}
                lines += [(name, _short(path)) for name, path in checkpoint_paths.items() if path]
        lines.append(("log folder", _short(folder)))
        if (folder / PAGE).exists():
            lines.append(("page of the run", _short(folder / PAGE)))
        drawn = sorted(path for path in (folder / "pictures").glob("*") if path.suffix in (".png", ".gif"))
        pictures = [*checkpoints.glob("*.png"), *drawn]
        lines += [("picture", _short(picture)) for picture in pictures]
        lines += [("skipped", part) for part in self._skipped]
        lines += [("next", shown(step.command)) for step in self._next[:1]]
        return lines


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and Lightning, by name."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "lightning": version("lightning")}


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _short(path: str | Path) -> str:
    path = Path(path)
    return shown(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
