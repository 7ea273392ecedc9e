"""Functions that log the metrics of each step exactly once, even if the run is stopped at that step and resumed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from lightning_mhla.system.lightning_private import logged_step, logger_connector

ROW = "row_to_log"
"""Key of the checkpoint entry with the number and metrics of a step that was saved before it was logged."""


def keep_row(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Store the metrics of the current step in a checkpoint, because the loggers do not have them yet.

    A callback writes the checkpoint, but Lightning passes the metrics of a step to the loggers only after all callbacks of the
    step have run. Nothing is stored if the metrics of the step are not to be logged.

    Args:
        trainer: trainer of the run.
        checkpoint: entries of the checkpoint, changed in place: ``row_to_log`` is added, a dict with the entries ``step`` and
            ``metrics``.
    """
    connector = logger_connector(trainer)
    if connector.should_update_logs:
        row = {name: float(value) for name, value in connector.metrics["log"].items()}
        checkpoint[ROW] = {"step": logged_step(trainer), "metrics": row}


def log_again(trainer: Trainer, row: dict[str, Any] | None) -> None:
    """Log the metrics that :func:`keep_row` stored to each logger that continues in the folder of the resumed run.

    A CSV file that already contains the metrics is left unchanged. The TensorBoard log also gets an event that makes
    TensorBoard discard the values that the stopped run logged at this step and later.

    Args:
        trainer: trainer of the resumed run.
        row: dict with ``step`` and ``metrics`` that :func:`keep_row` stored; None if the checkpoint has none.
    """
    row = row or {"step": trainer.global_step, "metrics": {}}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
            # SessionLog.START: TensorBoard discards the points from this step on that the stopped run had logged.
            start = Event(step=row["step"], session_log=SessionLog(status=1))
            logger.experiment.file_writer.add_event(start)
        logged = isinstance(logger, CSVLogger) and _has_row(logger, row)
        if row["metrics"] and _resumes_in(logger, trainer) and not logged:
            logger.log_metrics(row["metrics"], row["step"])


def _resumes_in(logger: Logger, trainer: Trainer) -> bool:
    """Return whether a logger writes to the folder of the resumed run, that is, the folder with the loaded checkpoint."""
    folder, checkpoint = getattr(logger, "log_dir", None), trainer.ckpt_path
    return bool(folder and checkpoint) and Path(str(checkpoint)).resolve().is_relative_to(Path(str(folder)).resolve())


def _has_row(logger: CSVLogger, row: dict[str, Any]) -> bool:
    """Return whether a CSV file in the logger's folder already has a line with the step and any metric of ``row``."""
    for path in Path(logger.log_dir).glob("metrics*.csv"):
        with path.open(newline="") as stream:
            for line in csv.DictReader(stream):
                if line.get("step") == str(row["step"]) and any(line.get(name) for name in row["metrics"]):
                    return True
    return False
