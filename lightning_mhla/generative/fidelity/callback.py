"""Callback that generates images during training and computes FID and related metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning import LightningModule, Trainer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor

from lightning_mhla.data import BrokenSampleError, SampleSource
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.generative.drawing import GRID, ImageGenerator, SampleGrid, condition_of, gather_round
from lightning_mhla.generative.fidelity.features import FeatureNetwork, Features, InceptionFeatures
from lightning_mhla.generative.fidelity.scores import ImageSet, Scores, assemble, extract, image_set, read_set, score
from lightning_mhla.generative.images import to_pixels
from lightning_mhla.system.files import to_json, write_whole
from lightning_mhla.system.folders import run_folder
from lightning_mhla.system.listing import shown
from lightning_mhla.system.numbers import rounded
from lightning_mhla.system.redaction import redacted
from lightning_mhla.system.sharding import fingerprint

log = logging.getLogger(__name__)

MOST_REAL = 50_000
"""Maximum number of real images that samples are compared with."""


@runtime_checkable
class HasRealImages(Protocol):
    """Protocol of data modules that provide real images for comparison with generated images."""

    def real_images(self, part: str) -> SampleSource:
        """Return the real images of the training data or the validation data.

        Args:
            part: ``"train"`` or ``"validate"``.

        Returns:
            Data set whose samples are dicts in which ``image`` is a float tensor ``[C, S, S]`` with values from -1 to 1.
        """


class GenerationMetrics(SampleGrid):
    """Callback that generates images during training and computes FID and related metrics.

    The images are generated with the weights that validation uses, such as averaged weights. The callback logs ``NAME/fid``,
    ``NAME/sfid``, ``NAME/inception_score``, ``NAME/kid``, ``NAME/precision`` and ``NAME/recall``, where NAME is the argument
    ``name``. Standard deviations of the Inception Score and of KID are logged with the ending ``_std``. Metrics for which the
    feature network or the reference lacks features are left out. If the feature network predicts the classes of the data,
    ``NAME/label_accuracy``, the share of samples that it assigns to their class, is also logged. Each evaluation adds a line to
    ``NAME.jsonl`` in the log folder, with the metrics, the options that they depend on, and remarks. A grid of samples is saved
    in the subfolder ``pictures`` and written to TensorBoard.

    Sample i has condition i modulo the number of conditions, such as classes. Each sample has its own noise, so the samples do
    not depend on the number of processes.

    Args:
        samples: number of samples; published results use 50,000.
        reference: real images to compare with. train and validate select at most 50,000 images, evenly spaced, from that part
            of the data. Any other value is the path of a folder of images, or of an .npz file in the format of ADM's evaluator.
        features: network whose features are compared; null for Inception-v3.
        sampling: sampler options, as an instance of the model's dataclass, or as a mapping with the options that differ from
            the model's defaults; null for the defaults.
        every_n_steps: number of optimizer steps between two evaluations; null for no evaluations during training.
        at_end: whether to evaluate the final weights.
        batch_size: number of samples that each process generates at once.
        seed: seed of the noise.
        name: prefix of the metrics; no other callback may have the same name.

    Raises:
        ValueError: if ``samples``, ``batch_size`` or ``every_n_steps`` is less than 1, ``seed`` is negative, or ``name`` is not
            a file name.
    """

    def __init__(
        self,
        samples: int = 50_000,
        reference: str = "train",
        features: FeatureNetwork | None = None,
        sampling: Any = None,
        every_n_steps: int | None = 50_000,
        at_end: bool = True,
        batch_size: int = 64,
        seed: int = 0,
        name: str = "generation",
    ) -> None:
        super().__init__(samples, sampling, every_n_steps, at_end, batch_size, seed, name)
        self.reference = reference
        self.features = features if features is not None else InceptionFeatures()
        self.rows: list[dict[str, Any]] = []
        self._reference: ImageSet | None = None
        self._reference_size: torch.Size | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Discard the metrics and the reference features of an earlier fit when a new fit begins."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.rows, self._reference, self._reference_size = [], None, None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before training that images can be generated and compared with the reference images.

        Raises:
            ValueError: if the module does not generate images, if the sampler options are not valid for it, if the reference
                cannot be used, or if precomputed statistics do not have the feature network's number of features.
            FileNotFoundError: if the VAE, the text encoder, the weights of the feature network or the reference does not exist.
        """
        super().on_fit_start(trainer, pl_module)
        self._find_reference(trainer, self._checked(pl_module))  # the first process downloads the network
        self.features.network()  # built here in every process, because evaluations may change the default dtype

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics of all evaluations so far and the step of the last evaluation, to save them in a checkpoint."""
        return {**super().state_dict(), "rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the metrics of earlier evaluations and the step of the last evaluation from a checkpoint."""
        super().load_state_dict(state_dict)
        self.rows = state_dict["rows"]

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate images and compute their features on every process, then compute and log metrics on the first process."""
        module = self._checked(pl_module)
        self._find_reference(trainer, module)
        with self._drawing(trainer, pl_module):
            generated, grid, right = self._draw(trainer, module)
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            assert self._reference is not None
            scores = score(generated, self._reference)
            if right is not None:
                scores.values["label_accuracy"] = right
            scores.marks.extend(_size_marks(self._reference_size, grid.shape[-2:]))
            self._keep(trainer, module, folder, scores, grid)
        trainer.strategy.barrier()

    def _draw(self, trainer: Trainer, module: ImageGenerator) -> tuple[ImageSet, Tensor, float | None]:
        """Generate all images, divided among the processes, and compute their features.

        Returns:
            Features of all images in order; pixels ``[n, C, H, W]`` uint8 of the first n images, for a grid; and the share of
            images that the feature network assigns to their class. The share is None if the conditions are not classes, or if
            the network does not predict these classes.
        """
        network, classes, grid_size = self.features.network().to(module.device), module.num_conditions, GRID * GRID
        parts: list[Features] = []
        shown: list[Tensor] = []
        right, names_labels = 0, self.features.names_labels and condition_of(module) == "class"
        for tickets, pixels in self._rounds(trainer, module, self.samples):
            features = extract(self.features, network, pixels)
            # Only tensors can be gathered; the absent features get their place back below.
            present = [feature for feature in features if feature is not None]
            pixels, order, *columns = gather_round(module, tickets, pixels, *present)
            gathered = iter(column.cpu() for column in columns)
            part = Features(*(None if feature is None else next(gathered) for feature in features))  # type: ignore[arg-type]
            parts.append(part)
            if sum(map(len, shown)) < grid_size:
                shown.append(pixels.cpu())
            if names_labels and part.logits is not None:
                right += int((part.logits.argmax(1) == order.cpu() % classes).sum())
        network.cpu()
        generated = assemble("the samples", "", parts)
        return generated, torch.cat(shown)[:grid_size], right / self.samples if names_labels else None

    def _find_reference(self, trainer: Trainer, module: ImageGenerator) -> None:
        """Compute the features of the reference images once, on the first process. Errors are raised on all processes."""
        failed: Exception | None = None
        if trainer.is_global_zero and self._reference is None:
            try:
                reference = self._read_reference(trainer, module.device)
                self._check_width(reference, module)
                self._reference = reference
            except (ValueError, FileNotFoundError) as error:
                # An exception of a library may not be picklable, so its text goes into a built-in class.
                failed = (FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError)(str(error))
        failed = trainer.strategy.broadcast(failed)  # else the other processes would wait for the first one forever
        if failed is not None:
            raise failed

    def _read_reference(self, trainer: Trainer, device: torch.device) -> ImageSet:
        if self.reference not in ("train", "validate"):
            return read_set(self.reference, self.features, device, self.batch_size)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        if not isinstance(data, HasRealImages):
            raise ValueError(f"reference={self.reference!r} names a part of {type(data).__name__}, which has no images")
        most_broken = ShardOptions.max_skipped if self.reference == "train" else 0  # as training and validation
        batches = _batches(data.real_images(self.reference), self.batch_size, most_broken)
        return image_set(f"the data's part {self.reference!r}", self._noting_size(batches), self.features, device)

    def _noting_size(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield batches of images ``[b, C, H, W]`` unchanged, and store their height and width in this callback."""
        for batch in batches:
            self._reference_size = batch.shape[-2:]
            yield batch

    def _check_width(self, reference: ImageSet, module: ImageGenerator) -> None:
        """Check that precomputed reference statistics have as many features per image as the feature network computes.

        Args:
            reference: features or statistics of the reference images. Features that were computed from images are not checked.
            module: module that generates the images. Its image size determines the number of features that the network
                computes.

        Raises:
            ValueError: if the numbers of features differ.
        """
        statistics = reference.moments("pooled")
        if statistics is None or reference.pooled is not None:
            return
        image = torch.zeros(1, *module.image_shape, dtype=torch.uint8)
        width = extract(self.features, self.features.network().cpu(), image).pooled.shape[1]
        if len(statistics.mean) != width:
            raise ValueError(
                f"reference {self.reference} has {len(statistics.mean)} features, {type(self.features).__name__} gives "
                f"{width}: they are of different feature networks"
            )

    def _keep(self, trainer: Trainer, module: ImageGenerator, folder: Path, scores: Scores, grid: Tensor) -> None:
        assert self._reference is not None
        drawn, step = module.describe_sampling(self._sampling(module)), trainer.global_step
        if self.samples % module.num_conditions != 0:
            scores.marks.append(f"{self.samples} samples are not the same number of each class")
        row = {
            "step": step,
            **scores.values,
            "marks": scores.marks,
            "samples": self.samples,
            **drawn,
            "seed": self.seed,
            "ema_decay": module.ema_decay,
            "reference": self.reference,
            "reference_images": self._reference.count,
            "reference_sha256": self._reference.digest,
            "features": type(self.features).__name__,
            "features_sha256": fingerprint(self.features.network()),
        }
        # After a resume from an earlier step, this drops the results of steps that are run again.
        self.rows = [*(earlier for earlier in self.rows if earlier["step"] < step), row]
        write_whole(folder / f"{self.name}.jsonl", "".join(to_json(redacted(line)) + "\n" for line in self.rows))
        self.log_values(trainer, self.name, scores.values)
        self._show(trainer, module, folder, grid)
        sampler = f"{drawn['sampler']} {drawn['sampling_steps']} steps, guidance {drawn['guidance']:g}"
        depends = f"{self.samples:,} samples, {sampler}"
        table = Table(
            "metric",
            "value",
            title=escape(shown(f"{self.name}, step {step}: {depends}")),
            caption="\n".join(scores.marks),
        )
        for key, value in scores.values.items():
            table.add_row(escape(shown(key)), rounded(value))
        Console().print(table)


def _batches(source: SampleSource, batch_size: int, most_broken: int) -> Iterator[Tensor]:
    """Yield up to 50,000 real images, evenly spaced in a data set, in batches. Broken images are left out.

    Args:
        source: data set whose samples are dicts in which ``image`` is a float tensor ``[C, S, S]`` with values from -1 to 1.
        batch_size: number of images in a batch. Batches with broken images, and the last batch, may have fewer images.
        most_broken: maximum number of broken images.

    Yields:
        Batch of b images ``[b, C, S, S]`` uint8.

    Raises:
        BrokenSampleError: if more than ``most_broken`` images are broken.
    """
    count = min(len(source), MOST_REAL)
    indices = [index * len(source) // count for index in range(count)]
    chunks, broken = range(0, count, batch_size), 0
    for start in track(chunks, "features of the reference", disable=len(chunks) < 50):
        images = []
        for index in indices[start : start + batch_size]:
            try:
                images.append(source[index]["image"])
            except BrokenSampleError as error:  # training skips as many by default
                broken += 1
                if broken > most_broken:
                    raise
                log.warning("left out of the reference: %s", error)
        if images:
            yield to_pixels(torch.stack(images))


def _size_marks(reference: torch.Size | None, drawn: torch.Size) -> list[str]:
    """Return a list with a remark if the reference images and the generated images differ in size, otherwise an empty list.

    Args:
        reference: height and width of the reference images; None if unknown, which gives an empty list.
        drawn: height and width of the generated images.
    """
    if reference is None or reference == drawn:
        return []
    sizes = [f"{height} x {width}" for height, width in (reference, drawn)]
    return [
        f"the reference has images of {sizes[0]} pixels, samples have {sizes[1]}: the metrics include this difference"
    ]
