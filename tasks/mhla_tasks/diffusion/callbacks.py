"""Samples and their metrics during training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from lightning_mhla.callbacks import PeriodicEvaluation
from lightning_mhla.callbacks.averaging import evaluation_weights
from lightning_mhla.data import SampleSource
from lightning_mhla.data.module import process_share
from lightning_mhla.data.sampling import Ticket, evaluation_batches, kept_random_state
from lightning_mhla.system.files import write_whole
from lightning_mhla.system.folders import run_folder
from mhla_tasks.diffusion.data import ClassImages
from mhla_tasks.diffusion.features import FeatureNetwork, Features, InceptionFeatures, fingerprint
from mhla_tasks.diffusion.fidelity import ImageSet, Scores, assemble, extract, image_set, read_set, score
from mhla_tasks.diffusion.module import ClassToImage
from mhla_tasks.diffusion.sampling import SamplingConfig, check_sampling, to_pixels

MOST_REAL = 50_000
"""Images of the data that samples are compared with, at most."""

GRID = 10
"""Rows and columns of a picture of samples."""


class SampleGrid(PeriodicEvaluation):
    """Draws a grid of samples, balanced over the classes, from the weights that validation uses; it needs no features.

    The grid goes to ``pictures/`` in the log folder and to TensorBoard. Sample i has label i modulo the number of classes
    and noise of its own, so any number of processes draws the same.

    Args:
        samples: number of samples; a hundred at most, ten of each class where there are ten classes or fewer.
        sampling: how samples are drawn; null for the model's own.
        every_n_steps: optimiser steps between two grids; null for none on the way.
        at_end: whether the last weights draw one.
        batch_size: samples that each process draws together.
        seed: of the noise.
        name: of the pictures; two callbacks need two names.
    """

    def __init__(
        self,
        samples: int = GRID * GRID,
        sampling: SamplingConfig | None = None,
        every_n_steps: int | None = 10_000,
        at_end: bool = True,
        batch_size: int = 64,
        seed: int = 0,
        name: str = "samples",
    ) -> None:
        super().__init__(every_n_steps, at_end)
        if samples < 1 or batch_size < 1:
            raise ValueError(f"samples={samples} and batch_size={batch_size} must be at least 1")
        self.samples, self.sampling = samples, sampling
        self.batch_size, self.seed, self.name = batch_size, seed, name

    @property
    def state_key(self) -> str:
        """Under which the checkpoint keeps this callback."""
        return f"{type(self).__qualname__}{{{self.name}}}"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out now, not hours later, whether samples can be drawn: VAE and sampler.

        Raises:
            ValueError: for what does not fit together.
            FileNotFoundError: for what is not there.
        """
        module = self._checked(pl_module)
        module.check_drawable()
        check_sampling(module.process, self._sampling(module))

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw on every process, write on the first."""
        module, shown = self._checked(pl_module), []
        with self._drawing(trainer, module):
            for tickets, pixels in self._rounds(trainer, module, min(self.samples, GRID * GRID)):
                shown.append(_gathered(module, tickets, pixels)[0].cpu())
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            self._show(trainer, module, folder, torch.cat(shown)[: GRID * GRID])
        trainer.strategy.barrier()

    @contextmanager
    def _drawing(self, trainer: Trainer, module: ClassToImage) -> Iterator[None]:
        """The weights that validation uses, its precision, and random numbers of training left alone."""
        with (
            kept_random_state(),
            evaluation_weights(trainer, module),
            trainer.precision_plugin.forward_context(),
        ):
            yield

    def _rounds(self, trainer: Trainer, module: ClassToImage, samples: int) -> Iterator[tuple[list[Ticket], Tensor]]:
        """Tickets that this process draws in each round, and their pixels ``[b, C, S, S]``."""
        rank, world = process_share(trainer)
        rounds = list(evaluation_batches(samples, self.batch_size * world, rank, world))
        for tickets in track(rounds, f"drawing {samples} samples", disable=not trainer.is_global_zero):
            indices = torch.tensor([ticket.index for ticket in tickets], device=module.device)
            labels = indices % module.network.num_classes
            yield tickets, module.draw(labels, indices.tolist(), self.seed, self._sampling(module))

    def _show(self, trainer: Trainer, module: ClassToImage, folder: Path, grid: Tensor) -> None:
        step, guidance = trainer.global_step, self._sampling(module).guidance
        figure = draw_grid(grid, module.network.num_classes, f"step {step:,}, guidance {guidance:g}")
        (folder / "pictures").mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "pictures" / f"{self.name}-step{step:07d}.png", dpi=110)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(self.name, figure, step)

    def _sampling(self, module: ClassToImage) -> SamplingConfig:
        return self.sampling or module.sampling

    def _checked(self, module: LightningModule) -> ClassToImage:
        if not isinstance(module, ClassToImage):
            raise ValueError(f"{type(self).__name__} draws from a ClassToImage, not from a {type(module).__name__}")
        return module


class GenerationMetrics(SampleGrid):
    """Draws samples, balanced over the classes, from the weights that validation uses, and scores them.

    Logs ``NAME/fid``, ``sfid``, ``inception_score``, ``kid``, ``precision`` and ``recall``, as far as features and
    reference allow; ``NAME/label_accuracy`` where the feature network knows the classes. ``NAME.jsonl`` in the log folder
    gets a line for each evaluation, with everything that the values depend on and what is to be said of them; a grid of
    samples goes to ``pictures/`` and TensorBoard.

    Sample i has label i modulo the number of classes and noise of its own, so any number of processes draws the same.

    Args:
        samples: number of samples; published figures use 50,000.
        reference: train or validate, for that part of the data (50,000 images of it at most, spread evenly); a folder of
            images; or an .npz of ADM's evaluator.
        features: network whose features are compared.
        sampling: how samples are drawn; null for the model's own.
        every_n_steps: optimiser steps between two evaluations; null for none on the way.
        at_end: whether the last weights are scored.
        batch_size: samples that each process draws together.
        seed: of the noise.
        name: of the metrics; two callbacks need two names.
    """

    def __init__(
        self,
        samples: int = 50_000,
        reference: str = "train",
        features: FeatureNetwork | None = None,
        sampling: SamplingConfig | None = None,
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

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out now, not hours later, whether samples can be drawn and compared: VAE, features, reference, sampler.

        Raises:
            ValueError: for what does not fit together.
            FileNotFoundError: for what is not there.
        """
        super().on_fit_start(trainer, pl_module)
        self._find_reference(trainer, self._checked(pl_module))

    def state_dict(self) -> dict[str, Any]:
        """Also the rows so far."""
        return {**super().state_dict(), "rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Rows so far, and the step of the last."""
        super().load_state_dict(state_dict)
        self.rows = state_dict["rows"]

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw and score, on every process; log and draw on the first."""
        module = self._checked(pl_module)
        self._find_reference(trainer, module)
        with self._drawing(trainer, module):
            generated, grid, right = self._draw(trainer, module)
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            assert self._reference is not None
            scores = score(generated, self._reference)
            if right is not None:
                scores.values["label_accuracy"] = right
            self._keep(trainer, module, folder, scores, grid)
        trainer.strategy.barrier()

    def _draw(self, trainer: Trainer, module: ClassToImage) -> tuple[ImageSet, Tensor, float | None]:
        """All samples' features in order, pixels of the first ones, and the share that shows its class."""
        network, classes, wanted = self.features.network().to(module.device), module.network.num_classes, GRID * GRID
        parts: list[Features] = []
        shown: list[Tensor] = []
        right = 0
        for tickets, pixels in self._rounds(trainer, module, self.samples):
            features = extract(self.features, network, pixels)
            present = [each for each in features if each is not None]
            pixels, order, *columns = _gathered(module, tickets, pixels, *present)
            gathered = iter(each.cpu() for each in columns)
            part = Features(*(None if each is None else next(gathered) for each in features))  # type: ignore[arg-type]
            parts.append(part)
            if sum(map(len, shown)) < wanted:
                shown.append(pixels.cpu())
            if self.features.names_labels and part.logits is not None:
                right += int((part.logits.argmax(1) == order.cpu() % classes).sum())
        network.cpu()
        generated = assemble("the samples", "", parts)
        share = right / self.samples if self.features.names_labels else None
        return generated, torch.cat(shown)[:wanted], share

    def _find_reference(self, trainer: Trainer, module: ClassToImage) -> None:
        """Features of the reference, computed on the first process when first needed; all processes meet its errors."""
        failed: Exception | None = None
        if trainer.is_global_zero and self._reference is None:
            try:
                reference = self._read_reference(trainer, module.device)
                self._check_width(reference, module)
                self._reference = reference
            except (ValueError, FileNotFoundError) as error:
                failed = (FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError)(str(error))
        failed = trainer.strategy.broadcast(failed)
        if failed is not None:
            raise failed

    def _read_reference(self, trainer: Trainer, device: torch.device) -> ImageSet:
        if self.reference not in ("train", "validate"):
            return read_set(self.reference, self.features, device, self.batch_size)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        if not isinstance(data, ClassImages):
            raise ValueError(f"reference={self.reference!r} names a part of {type(data).__name__}, which has no images")
        batches = _batches(data.real_images(self.reference), self.batch_size)
        return image_set(f"the data's part {self.reference!r}", batches, self.features, device)

    def _check_width(self, reference: ImageSet, module: ClassToImage) -> None:
        """Find out before samples are drawn whether reference and samples have the same features."""
        known = reference.moments("pooled")
        if known is None or reference.pooled is not None:
            return
        latent = module.codec is not None
        channels, side = (3, 64) if latent else (module.network.channels, module.network.sample_size)
        image = torch.zeros(1, channels, side, side, dtype=torch.uint8)
        width = extract(self.features, self.features.network().cpu(), image).pooled.shape[1]
        if len(known.mean) != width:
            raise ValueError(
                f"reference {self.reference} has {len(known.mean)} features, {type(self.features).__name__} gives {width}: "
                "they are of different feature networks"
            )

    def _keep(self, trainer: Trainer, module: ClassToImage, folder: Path, scores: Scores, grid: Tensor) -> None:
        assert self._reference is not None
        sampling, step = self._sampling(module), trainer.global_step
        balanced = self.samples % module.network.num_classes == 0
        if not balanced:
            scores.marks.append(f"{self.samples} samples are not the same number of each class")
        row = {
            "step": step,
            **scores.values,
            "marks": scores.marks,
            "samples": self.samples,
            "sampler": sampling.sampler or module.process.samplers[0],
            "sampling_steps": sampling.steps,
            "guidance": sampling.guidance,
            "seed": self.seed,
            "ema_decay": module.ema_decay,
            "reference": self.reference,
            "reference_images": self._reference.count,
            "reference_sha256": self._reference.digest,
            "features": type(self.features).__name__,
            "features_sha256": fingerprint(self.features.network()),
        }
        self.rows = [*(each for each in self.rows if each["step"] < step), row]
        write_whole(folder / f"{self.name}.jsonl", "".join(json.dumps(each) + "\n" for each in self.rows))
        self.log_values(trainer, self.name, scores.values)
        self._show(trainer, module, folder, grid)
        depends = f"{self.samples:,} samples, {row['sampler']} {sampling.steps} steps, guidance {sampling.guidance:g}"
        table = Table("metric", "value", title=f"{self.name}, step {step}: {depends}", caption="\n".join(scores.marks))
        for key, value in scores.values.items():
            table.add_row(key, f"{value:.4f}")
        Console().print(table)


def _gathered(module: ClassToImage, tickets: list[Ticket], pixels: Tensor, *columns: Tensor) -> list[Tensor]:
    """Pixels, indices and further columns of one round over all processes, in order of the index, each sample once."""
    valid = torch.tensor([ticket.valid for ticket in tickets], device=module.device)
    indices = torch.tensor([ticket.index for ticket in tickets], device=module.device)

    def everyone(values: Tensor) -> Tensor:
        gathered: Any = module.all_gather(values)
        return gathered.reshape(-1, *values.shape[1:])

    kept = everyone(valid).nonzero()[:, 0]
    kept = kept[everyone(indices)[kept].argsort()]
    return [everyone(each)[kept] for each in (pixels, indices, *columns)]


def _batches(source: SampleSource, batch_size: int) -> Iterator[Tensor]:
    """Images of a source, at most ``MOST_REAL`` spread evenly over it, in batches ``[b, C, S, S]`` uint8."""
    count = min(len(source), MOST_REAL)
    chosen = [index * len(source) // count for index in range(count)]
    chunks = range(0, count, batch_size)
    for start in track(chunks, "features of the reference", disable=len(chunks) < 50):
        yield to_pixels(torch.stack([source[index]["image"] for index in chosen[start : start + batch_size]]))


def draw_grid(images: Tensor, num_classes: int, title: str) -> Figure:
    """Images ``[n, C, S, S]`` uint8, image i of class i modulo ``num_classes``.

    With ten classes at most, a row for each, with its label; else in order.
    """
    labelled = num_classes <= GRID
    rows = [images[label::num_classes][:GRID] for label in range(num_classes)] if labelled else images.split(GRID)
    rows = [row for row in rows if len(row)]
    wide, step = max(map(len, rows)), images.shape[-1] + 1
    canvas = torch.full((images.shape[1], len(rows) * step - 1, wide * step - 1), 96, dtype=torch.uint8)
    for down, row in enumerate(rows):
        for across, image in enumerate(row):
            canvas[:, down * step : (down + 1) * step - 1, across * step : (across + 1) * step - 1] = image
    size = 0.55 if images.shape[-1] < 64 else 1.2
    figure = Figure(figsize=(wide * size + 0.6, len(rows) * size + 0.4), layout="constrained")
    axis = figure.subplots()
    axis.imshow(canvas.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    labels = range(len(rows)) if labelled else []
    axis.set_yticks([step * label + step / 2 - 1 for label in labels], [str(label) for label in labels])
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.set_title(title, fontsize=9)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return figure
