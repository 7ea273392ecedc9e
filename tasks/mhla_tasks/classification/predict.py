"""Predictions as a table: one row of class probabilities for each image."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_mhla.system.folders import gather_rows, run_folder
from lightning_mhla.system.listing import shown

log = logging.getLogger(__name__)


class PredictionTable(Callback):
    r"""Writes ``predictions.csv`` into the log folder: path (or index), predicted class, and the probability of every class.

    Rows are in the order of the files, each once, on any number of processes. Files that are not images have a row without a
    class. The table is UTF-8; bytes of a path that are not are written as ``\xe9``.
    """

    def __init__(self) -> None:
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
        source = getattr(loader, "source", None)
        probabilities = dict(rows)
        images: dict[int, Any] = dict(enumerate(getattr(source, "paths", ()))) or {i: i for i in sorted(probabilities)}
        names: list[str] = pl_module.class_names  # type: ignore[assignment]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(["path", "predicted", *names])
            for index, file in images.items():
                image = shown(file) if isinstance(file, Path) else file
                probability = probabilities.get(index)
                if probability is None:
                    writer.writerow([image, "", *("" for _ in names)])
                    continue
                best = names[max(range(len(probability)), key=probability.__getitem__)]
                writer.writerow([image, best, *(f"{p:.6f}" for p in probability)])
        log.info("%d predictions written to %s", len(rows), path)
        if len(rows) < len(images):
            log.warning(
                "%d files are not images that can be decoded, see above; their rows are empty", len(images) - len(rows)
            )
