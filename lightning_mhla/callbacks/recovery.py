"""Checkpoints to resume from after a crash, and stopping on a signal without losing a step."""

from __future__ import annotations

import csv
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from lightning_mhla.checkpoints.io import RECOVERY
from lightning_mhla.system.folders import checkpoint_folder, run_folder
from lightning_mhla.system.lightning_private import (
    accumulates_gradients,
    logged_step,
    logger_connector,
    validates_after_this_batch,
)
from lightning_mhla.system.processes import Agreement

log = logging.getLogger(__name__)

ROW = "row_to_log"
"""Entry of a checkpoint: metrics of its last step, and the step's number, which the loggers did not have yet."""

GO_ON = 75
"""Exit status of a run that a signal stopped and that the same command resumes: EX_TEMPFAIL of sysexits.h."""


class RunStopped(SystemExit):  # leaves as SystemExit does, no error is reported
    """A signal has stopped the run, after its state was saved."""

    def __init__(self) -> None:
        super().__init__(GO_ON)


class Recovery(Checkpoint):
    """Saves the whole state every few minutes, at the end of training, and when a signal asks the run to stop.

    Files go to ``checkpoints/recovery`` of the run's folder; ``--run_dir`` finds the newest whole one. A signal only sets
    a flag: at the end of a step all processes agree on it, save together, and leave with status 75. A save waits until
    validation or the end of an epoch is over where one follows, since training would continue after it otherwise.

    Args:
        every_minutes: between two saves, by the clock of the first process; null for none.
        every_n_steps: optimiser steps between two saves; null for none.
        keep: newest files that are kept; two, so that one is left when the newest is damaged.
        signals: names of those that stop the run. Ctrl+C is SIGINT; a second one stops at once, without saving.
    """

    def __init__(
        self,
        every_minutes: float | None = 10.0,
        every_n_steps: int | None = None,
        keep: int = 2,
        signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT"),
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        for name, value in {"every_minutes": every_minutes, "every_n_steps": every_n_steps}.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive, or null for none")
        unknown = [name for name in signals if not hasattr(signal, name)]
        if unknown:
            raise ValueError(f"signals names {unknown[0]!r}, which is no signal here; SIGTERM and SIGUSR1 are")
        self.every_minutes, self.every_n_steps, self.keep = every_minutes, every_n_steps, keep
        self.signals = [signal.Signals[name] for name in signals]
        self.received: str | None = None
        self.leaving = False
        self._active = False
        self._due = self._stopping = False
        self._before: dict[signal.Signals, Any] = {}
        self._row_is_due = False
        self._row: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen for signals from here on."""
        if stage == "fit":
            self._agreement = Agreement()
            self._due = self._stopping = self.leaving = False
            self.received, self._active = None, True
            environment = getattr(trainer.strategy, "cluster_environment", None)
            if isinstance(environment, SLURMEnvironment):
                environment.auto_requeue = False  # Lightning would save inside the signal's handler
            self._listen()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Signals do again what they did before; on the way out they do nothing: srun sends more of them then."""
        self._active = False
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.leaving else handler)
        self._before = {}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the signals; Lightning calls no teardown then."""
        self.teardown(trainer, pl_module, "fit")

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals back from Lightning, whose handlers talk to other processes in the middle of a step."""
        self._listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Likewise; start the clock; tell TensorBoard from where on points come again."""
        self._listen()
        own = run_folder(trainer) / "checkpoints"
        self._folder = (own if trainer.loggers else checkpoint_folder(trainer)) / RECOVERY
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step
        if trainer.global_step:
            self._log_again(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Leave before the step that follows a save, when what was logged of the last one is written."""
        if self.leaving:
            raise RunStopped
        self._row_is_due = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The row of the last step is with the loggers by now."""
        self._row_is_due = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the log as new as any checkpoint: flush what the loggers hold, and save the row that they do not have yet.

        Lightning hands the row of a step over when all callbacks, and so all checkpoints, are done with the step.
        """
        connector = logger_connector(trainer)
        if self._row_is_due and connector.should_update_logs:
            row = {name: float(value) for name, value in connector.metrics["log"].items()}
            checkpoint[ROW] = {"step": logged_step(trainer), "metrics": row}
        for logger in trainer.loggers:
            logger.save()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take back the row that was not logged yet."""
        self._row = checkpoint.get(ROW)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Agree on whether to save or to stop, and do it unless validation or the end of the epoch comes first."""
        stop, due = self._agreement.any(self.received is not None, self._is_due(trainer))
        self._due, self._stopping = self._due or stop or due, self._stopping or stop
        self._due = self._due or (_is_last_step(trainer) and trainer.global_step > self._saved_step)
        if self._due and not validates_after_this_batch(trainer) and not accumulates_gradients(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make up for a save that waited."""
        if self._due and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Likewise; and save the state at the end of training, from which a longer run resumes."""
        self._row_is_due = False
        if self._due or (_is_over(trainer) and trainer.global_step > self._saved_step):
            self._save(trainer)

    def _log_again(self, trainer: Trainer) -> None:
        """Log the row that the checkpoint kept; have TensorBoard show it and later points once, as this start writes them."""
        row = self._row or {"step": trainer.global_step, "metrics": {}}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                start = Event(step=row["step"], session_log=SessionLog(status=1))
                logger.experiment.file_writer.add_event(start)
            if (
                row["metrics"]
                and _resumes_in(logger, trainer)
                and not (isinstance(logger, CSVLogger) and _has_row(logger, row))
            ):
                logger.log_metrics(row["metrics"], row["step"])
        self._row = None

    def _is_due(self, trainer: Trainer) -> bool:
        if trainer.global_step == self._saved_step:
            return False
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            return True
        minutes = (time.monotonic() - self._saved_at) / 60
        return trainer.is_global_zero and self.every_minutes is not None and minutes >= self.every_minutes

    def _save(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set when the trainer is made
            self.leaving = self._stopping
            return
        path = self._folder / f"step={trainer.global_step:08d}.ckpt"
        trainer.save_checkpoint(path)
        self._saved_at, self._saved_step, self._due = time.monotonic(), trainer.global_step, False
        if trainer.is_global_zero:
            saved = sorted(self._folder.glob("step=*.ckpt"), key=lambda each: each.stat().st_mtime_ns)
            for old in saved[: -self.keep]:
                trainer.strategy.remove_checkpoint(old)
        self.leaving = self._stopping
        if self.leaving and trainer.is_global_zero:
            log.warning(
                "stopped on %s after step %d, saved as %s; the same command with --run_dir resumes from there",
                self.received or "a signal to another process",
                trainer.global_step,
                path,
            )

    def _listen(self) -> None:
        for number in self.signals if self._active else []:
            current = signal.getsignal(number)
            if current != self._on_signal and not (
                number == signal.SIGINT and current == signal.SIG_IGN
            ):  # in the background
                self._before.setdefault(number, current)
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: Any) -> None:
        name = signal.Signals(number).name
        if self._active and number == signal.SIGINT and self.received == name:
            raise KeyboardInterrupt
        if self._active:
            if number == signal.SIGINT:
                log.warning("Ctrl+C: saving after this step; press it again to stop at once, without saving")
            self.received = name
        elif not self.leaving:  # Lightning puts handlers back that it found, this one too, when the run is over
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _resumes_in(logger: Logger, trainer: Trainer) -> bool:
    """Whether the log of the run that the checkpoint is of resumes in the same folder."""
    folder, checkpoint = getattr(logger, "log_dir", None), trainer.ckpt_path
    return bool(folder and checkpoint) and Path(str(checkpoint)).resolve().is_relative_to(Path(str(folder)).resolve())


def _has_row(logger: CSVLogger, row: dict[str, Any]) -> bool:
    """Whether the table of an earlier start in the same folder holds the row: that start ended by itself."""
    for path in Path(logger.log_dir).glob("metrics*.csv"):
        with path.open(newline="") as stream:
            for line in csv.DictReader(stream):
                if line.get("step") == str(row["step"]) and any(line.get(name) for name in row["metrics"]):
                    return True
    return False


def _is_last_step(trainer: Trainer) -> bool:
    return 0 <= trainer.max_steps <= trainer.global_step


def _is_over(trainer: Trainer) -> bool:
    epochs = trainer.max_epochs
    last_epoch = epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs
    return last_epoch or _is_last_step(trainer) or trainer.should_stop
