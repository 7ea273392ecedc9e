"""Callback that writes predicted classes to a CSV table, with one row of class probabilities for each image."""

from __future__ import annotations

import csv
import io
import logging
import re
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_mhla.system.files import write_whole
from lightning_mhla.system.folders import gather_rows, run_folder, shown_place
from lightning_mhla.system.listing import distinct_names, shown, without_controls

log = logging.getLogger(__name__)

COLUMNS = ("path", "predicted")
"""Headings of the columns before those of the classes."""


class PredictionTable(Callback):
    r"""Callback that writes predicted classes and class probabilities to ``predictions.csv`` in the log folder.

    The table has one row for each image file, in the order of the files, regardless of the number of processes. Its columns are
    ``path``, ``predicted`` (the most probable class), and the probability of each class under the name of the class. The row of
    a file that cannot be read or decoded has no class and no probabilities. The table is encoded in UTF-8. In file names, line
    breaks are written as ``\n``, and bytes that are not valid UTF-8 as escapes such as ``\xe9``. A name that a spreadsheet
    would interpret as a formula, such as ``=1+1.jpg``, gets an apostrophe as prefix. Classes with the same name, such as
    the two cranes of ImageNet, have their labels after their names, as in ``crane (134)``.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, list[float]]] = []

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Tensor], *_: Any
    ) -> None:
        """Store the image indices and the class probabilities that this process predicted for one batch.

        Args:
            trainer: trainer that runs the predict command.
            pl_module: classifier.
            outputs: dict with ``index`` ``[n]`` and ``probability`` ``[n, classes]`` of the n images that were classified.
        """
        self._rows += zip(outputs["index"].tolist(), outputs["probability"].float().tolist(), strict=True)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the predictions of all processes, and write ``predictions.csv`` on the first process."""
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
        stream = io.StringIO()
        writer = csv.writer(stream)
        names = distinct_names([_cell(name) for name in names], COLUMNS)
        writer.writerow([*COLUMNS, *names])
        for index, file in images.items():
            image = _cell(shown(file)) if isinstance(file, Path) else file
            probability = probabilities.get(index)
            if probability is None:
                writer.writerow([image, "", *("" for _ in names)])
                continue
            best = names[max(range(len(probability)), key=probability.__getitem__)]
            writer.writerow([image, best, *(f"{p:.6f}" for p in probability)])
        write_whole(path, stream.getvalue())
        log.info("%d predictions written to %s", len(rows), shown_place(trainer, path))
        if len(rows) < len(images):
            limited = sum(trainer.num_predict_batches) < len(loader)
            broken = "are not images that can be read, see above"
            cause = "were not read (trainer.limit_predict_batches)" if limited else broken
            log.warning("%d files %s; their rows are empty", len(images) - len(rows), cause)


def _cell(name: str) -> str:
    """Escape a name for a CSV cell, so that it fits on one line and spreadsheets do not evaluate it as a formula."""
    line = without_controls(name)
    number = re.fullmatch(r"[+-]?\d+(\.\d+)?", line)
    return f"'{line}" if line[:1] in tuple("=+-@") and not number else line
