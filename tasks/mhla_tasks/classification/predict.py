"""Predictions as a table: one row of class probabilities for each image."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_mhla.callbacks.folder import gather_rows, run_folder

log = logging.getLogger(__name__)


class PredictionTable(Callback):
    """Writes ``predictions.csv`` into the log folder: path, predicted class, and the probability of every class.

    Rows are in the order of the images, each image once, on any number of processes.

    Args:
        class_names: heads of the probability columns.
    """

    def __init__(self, class_names: list[str]) -> None:
        self.class_names = class_names
        self._rows: list[tuple[int, list[float]]] = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Tensor], *_: Any
    ) -> None:
        """Keep the rows of this process."""
        self._rows += zip(outputs["index"].tolist(), outputs["probability"].float().tolist(), strict=True)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the rows of all processes and write them on the first."""
        rows, path = gather_rows(trainer, self._rows), run_folder(trainer) / "predictions.csv"
        self._rows = []
        if not trainer.is_global_zero:
            return
        loader = trainer.predict_dataloaders
        assert loader is not None
        paths: list[Path] = loader.source.paths
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["path", "predicted", *self.class_names])
            for index, probability in sorted(rows):
                best = self.class_names[max(range(len(probability)), key=probability.__getitem__)]
                writer.writerow([paths[index], best, *(f"{p:.6f}" for p in probability)])
        log.info("%d predictions written to %s", len(rows), path)
