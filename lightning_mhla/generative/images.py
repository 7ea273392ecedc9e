"""Conversion of images to pixels, and the output of predict: a folder of PNGs, or an npz for ADM's evaluator."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from numpy.lib.format import open_memmap, read_array_header_1_0, read_magic
from PIL import Image
from torch import Tensor

from lightning_mhla.system.files import written_whole
from lightning_mhla.system.folders import run_folder

log = logging.getLogger(__name__)

OutputFormat = Literal["png", "npz"]

NAME = re.compile(r"\d{6,}-class-?\d+\.png")
"""Pattern of the file names that :class:`SampleWriter` writes."""


def to_pixels(images: Tensor) -> Tensor:
    """Convert images with values in -1 .. 1 to pixels in 0 .. 255, uint8, of the same shape."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


class SampleWriter(Callback):
    """Callback that writes the images that ``Trainer.predict`` generates to files.

    ``png`` writes a file for each sample, such as ``samples/000017-class3.png``. ``npz`` writes ``samples.npz`` with images
    ``arr_0`` ``[N, S, S, 3]`` uint8 and labels ``arr_1`` ``[N]`` int64, in the order of the sample indices. Each process writes
    its own samples; with ``npz``, all processes write into the same files, so they must share the folder. Samples of an
    earlier call in the same folder are recognized by their names and removed; other files stay.

    Args:
        output: output format, ``"png"`` or ``"npz"``.
    """

    def __init__(self, output: OutputFormat) -> None:
        if output not in ("png", "npz"):
            raise ValueError(f"output={output!r} is not one of 'png', 'npz'")
        self.output = output
        self._folder, self._count = Path(), 0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine the output folder on every process, and remove samples of an earlier call on the first process."""
        self._folder = run_folder(trainer)
        loaders: Any = trainer.predict_dataloaders
        self._count = len(loaders.source)
        if trainer.is_global_zero:
            (self._folder / "samples").mkdir(parents=True, exist_ok=True)
            earlier = [path for path in (self._folder / "samples").iterdir() if NAME.fullmatch(path.name)]
            for path in (*earlier, *self._arrays()):
                path.unlink(missing_ok=True)
        trainer.strategy.barrier()

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Tensor], *_: Any
    ) -> None:
        """Write this process's samples of a batch to PNG files, or to the temporary files for ``samples.npz``."""
        pixels = outputs["pixels"].permute(0, 2, 3, 1).cpu().numpy()
        indices, labels = outputs["index"].tolist(), outputs["label"].cpu().numpy()
        if self.output == "png":
            for index, label, image in zip(indices, labels, pixels, strict=True):
                name = f"{index:06d}-class{label}.png"
                Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(self._folder / "samples" / name)
            return
        self._make(trainer, pixels.shape[1])
        for path, values in zip(self._arrays(), (np.broadcast_to(pixels, (*pixels.shape[:3], 3)), labels), strict=True):
            _write_rows(path, indices, np.ascontiguousarray(values))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for all processes, and on the first one, complete the output and log the number of samples.

        With ``npz``, the temporary files with the images and labels of all processes are combined into ``samples.npz``.
        """
        trainer.strategy.barrier()
        if not trainer.is_global_zero:
            return
        if self.output == "png":
            log.info("%d samples written to %s", self._count, self._folder / "samples")
            return
        target = self._folder / "samples.npz"
        with written_whole(target) as aside, ZipFile(aside, "w", ZIP_STORED) as archive:
            for name, path in zip(("arr_0", "arr_1"), self._arrays(), strict=True):
                archive.write(path, f"{name}.npy")
                path.unlink()
        with suppress(OSError):  # the folder may hold files of the user
            (self._folder / "samples").rmdir()
        log.info("%d samples written to %s", self._count, target)

    def _arrays(self) -> tuple[Path, Path]:
        return self._folder / "samples" / "images.npy.mhla-part", self._folder / "samples" / "labels.npy.mhla-part"

    def _make(self, trainer: Trainer, side: int) -> None:
        """Create the temporary files for images and labels on the first process, while the other processes wait.

        All processes then write their samples into these files.

        Args:
            trainer: trainer of the prediction.
            side: height and width of an image in pixels.
        """
        shapes = ((self._count, side, side, 3), np.uint8), ((self._count,), np.int64)
        if trainer.is_global_zero:
            for path, (shape, dtype) in zip(self._arrays(), shapes, strict=True):
                if not path.exists():
                    open_memmap(path, mode="w+", dtype=dtype, shape=shape).flush()
        trainer.strategy.barrier()


def _write_rows(path: Path, indices: list[int], rows: np.ndarray) -> None:
    """Write rows of an array into an existing ``.npy`` file that several processes fill.

    Memory mapping is not used, because it would write complete pages, including rows of other processes.

    Args:
        path: path of the file.
        indices: positions of the rows in the file.
        rows: rows to write, ``[n, ...]``.
    """
    with path.open("r+b") as stream:
        version = read_magic(stream)
        assert version == (1, 0)
        read_array_header_1_0(stream)
        start = stream.tell()
        for index, row in zip(indices, rows, strict=True):
            os.pwrite(stream.fileno(), row.tobytes(), start + index * row.nbytes)
