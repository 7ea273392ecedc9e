"""Callback that records validation results of each class, for the report of a run."""

from __future__ import annotations

import base64
import heapq
import io
from collections import Counter
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lightning_mhla.callbacks.class_tables import CLASSES
from lightning_mhla.data.images import LabelledFolder, ShardImages
from lightning_mhla.system.files import write_json
from lightning_mhla.system.folders import gather_rows, is_run_folder, run_folder
from lightning_mhla.system.listing import shown
from lightning_mhla.vision.preprocessing import Preprocessing

MISTAKES = 12
"""Maximum number of wrongly classified images to store."""
SIDE = 112
"""Maximum length of the longer side of a stored image, in pixels."""


class ClassResults(Callback):
    """Callback that writes the confusion matrix and the worst mistakes of each validation during training to ``classes.json``.

    The file is in the folder of the run, and ``report.html`` shows its content. Each validation replaces the file. Each image
    is counted once, regardless of the number of processes. The worst mistakes are the wrongly classified images, at most
    12, whose true class got the lowest probability.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()
        self._mistakes: list[tuple[float, int, int, float, str, str]] = []

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the results of the previous validation."""
        self._clear()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the pairs of true and predicted class in a batch, and keep the worst mistakes of the validation so far.

        Args:
            trainer: trainer of the run.
            pl_module: classifier.
            outputs: dict with the entry ``scores``, the class scores of all images in the batch, ``[B, classes]``.
            batch: batch with ``image`` ``[B, channels, image_size, image_size]``, ``label`` ``[B]`` int64, and ``valid``
                ``[B]`` bool, False for padding and images that cannot be decoded. The entry ``index`` ``[B]`` is needed for the
                names of the images.
            batch_idx: index of the batch.
            dataloader_idx: index of the validation loader.
        """
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if not isinstance(outputs, dict) or "scores" not in outputs:  # a subclass may return something else
            return
        probabilities = outputs["scores"].float().softmax(-1).cpu()
        labels, valid = batch["label"].cpu(), batch["valid"].cpu()
        predicted = probabilities.argmax(-1)
        self._counts.update(zip(labels[valid].tolist(), predicted[valid].tolist(), strict=True))
        for index in ((predicted != labels) & valid).nonzero()[:, 0].tolist():
            label, guess = int(labels[index]), int(predicted[index])
            label_probability = float(probabilities[index, label])
            if len(self._mistakes) >= MISTAKES and label_probability >= -self._mistakes[0][0]:
                continue  # encoding a picture takes longer than this comparison
            picture = encoded_picture(batch["image"][index], getattr(trainer, "datamodule", None))
            name = _sample_name(trainer, int(batch["index"][index])) if "index" in batch else ""
            entry = (-label_probability, label, guess, float(probabilities[index, guess]), picture, name)
            # The first entry of the heap is the mildest mistake, with the highest probability of the true class; it makes room.
            (heapq.heappushpop if len(self._mistakes) >= MISTAKES else heapq.heappush)(self._mistakes, entry)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the results of all processes, and write ``classes.json`` on the first process."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        counts, mistakes = Counter[tuple[int, int]](), sorted(gather_rows(trainer, self._mistakes), reverse=True)
        for pair, count in gather_rows(trainer, list(self._counts.items())):
            counts[pair] += count
        path = run_folder(trainer) / CLASSES
        self._clear()
        if not trainer.is_global_zero or not counts or not is_run_folder(trainer, path.parent):
            return
        content = {
            "step": trainer.global_step,
            "names": list(pl_module.class_names),  # type: ignore[arg-type]  # a list of the classifier
            "confusion": [[label, predicted, count] for (label, predicted), count in sorted(counts.items())],
            "mistakes": [
                {
                    "label": label,
                    "predicted": predicted,
                    "probability": round(probability, 4),
                    "label_probability": round(-negative, 4),
                    "picture": picture,
                    "name": name,
                }
                for negative, label, predicted, probability, picture, name in mistakes[:MISTAKES]
            ],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)


def _sample_name(trainer: Trainer, index: int) -> str:
    """Return the file name of a validation image, or the shard and key of its sample; an empty string if unknown."""
    source = getattr(trainer.val_dataloaders, "source", None)
    if isinstance(source, ShardImages):  # not the URL of the shard, which may hold a secret
        return source.reader.name(index)
    return shown(source.labelled[index][0].name) if isinstance(source, LabelledFolder) else ""


def encoded_picture(image: Tensor, data: Any) -> str:
    """Convert the input of a classifier back to a picture of at most 112 x 112 pixels, and encode it as PNG in base64.

    Args:
        image: input ``[C, H, W]``. One channel gives a gray picture, and three channels give a color picture; with any other
            number, the mean of the channels is shown.
        data: data module. If its attribute ``preprocessing`` has one mean, or one for each channel shown, the normalization by
            mean and standard deviation is undone; otherwise the values of the image are stretched to the full range.
    """
    image = image.detach().float().cpu()
    if len(image) not in (1, 3):
        image = image.mean(0, keepdim=True)
    preprocessing = getattr(data, "preprocessing", None)
    if isinstance(preprocessing, Preprocessing) and len(preprocessing.mean) in (1, len(image)):
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
        image = image * std + mean
    else:
        low, high = image.min(), image.max()
        image = (image - low) / (high - low).clamp(min=1e-6)
    if max(image.shape[1:]) > SIDE:
        scale = SIDE / max(image.shape[1:])
        size = [max(1, round(side * scale)) for side in image.shape[1:]]
        image = F.interpolate(image[None], size, mode="area")[0]
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()
