"""Rows of the log across a stop: none is lost, and none comes twice."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from lightning_mhla.system.lightning_private import logged_step, logger_connector

ROW = "row_to_log"
"""Entry of a checkpoint: metrics of its last step, and the step's number, which the loggers did not have yet."""


def keep_row(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Put the row of the present step into a checkpoint.

    Lightning hands a row to the loggers once all callbacks, and so all checkpoints, are done with the step.
    """
    connector = logger_connector(trainer)
    if connector.should_update_logs:
        row = {name: float(value) for name, value in connector.metrics["log"].items()}
        checkpoint[ROW] = {"step": logged_step(trainer), "metrics": row}


def log_again(trainer: Trainer, row: dict[str, Any] | None) -> None:
    """Log the row that the checkpoint of a resumed run kept; have TensorBoard show it and later points once."""
    row = row or {"step": trainer.global_step, "metrics": {}}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
            start = Event(step=row["step"], session_log=SessionLog(status=1))
            logger.experiment.file_writer.add_event(start)
        logged = isinstance(logger, CSVLogger) and _has_row(logger, row)
        if row["metrics"] and _resumes_in(logger, trainer) and not logged:
            logger.log_metrics(row["metrics"], row["step"])


def _resumes_in(logger: Logger, trainer: Trainer) -> bool:
    """Whether the log of the run that the checkpoint is from continues in the same folder."""
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
