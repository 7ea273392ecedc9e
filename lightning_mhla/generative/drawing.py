"""Callback that generates a grid of sample images during training, for models that generate images from conditions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from lightning import LightningModule, Trainer
from rich.progress import track
from torch import Tensor

from lightning_mhla.callbacks import PeriodicEvaluation
from lightning_mhla.callbacks.averaging import evaluation_weights
from lightning_mhla.data.module import process_share
from lightning_mhla.data.sampling import Ticket, evaluation_batches, kept_random_state
from lightning_mhla.system.figures import log_figure
from lightning_mhla.system.folders import run_folder
from lightning_mhla.system.listing import is_file_name
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range, check_seed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = 10
"""Maximum number of rows, and of columns, in a picture of samples."""


@runtime_checkable
class ImageGenerator(Protocol):
    """Protocol for LightningModules that generate images from numbered conditions, such as classes or prompts.

    If the conditions are not the classes of the data, the module also has an attribute ``condition`` with a noun for them, such
    as ``"prompt"``.

    Attributes:
        device: device of the weights.
        ema_decay: decay of the exponential moving average of the weights; None if there is no average.
        sampling: default sampler options, a dataclass.
    """

    device: Any
    ema_decay: float | None
    sampling: Any

    @property
    def num_conditions(self) -> int:
        """Number of conditions that images can be generated from, such as classes or prompts."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a generated image.

        If a VAE decodes the images, height and width may be fixed placeholders instead of the actual size.
        """

    def check_drawable(self, sampling: Any = None) -> None:
        """Check that images can be generated with the given sampler options.

        Args:
            sampling: sampler options, a dataclass of the same type as the attribute ``sampling``; None for the default options.

        Raises:
            ValueError: if the options are not valid for this model.
            FileNotFoundError: if a VAE or a text encoder that the model needs does not exist.
        """

    def draw_numbered(self, indices: list[int], seed: int, sampling: Any) -> Tensor:
        """Generate the images with the given indices.

        Image i has condition i modulo the number of conditions. Its noise depends only on the seed and on i.

        Args:
            indices: indices of the images.
            seed: seed of the noise.
            sampling: sampler options, a dataclass of the same type as the attribute ``sampling``.

        Returns:
            Images ``[b, C, H, W]`` uint8, one for each of the b indices.
        """

    def describe_sampling(self, sampling: Any) -> dict[str, Any]:
        """Return the sampler options that affect image metrics, at least ``sampler``, ``sampling_steps`` and ``guidance``.

        Args:
            sampling: sampler options, a dataclass of the same type as the attribute ``sampling``.

        Returns:
            Dict from the name of each option to its value.
        """

    def all_gather(self, data: Any) -> Any:
        """Gather tensors from all processes, as Lightning's method of this name does.

        Args:
            data: tensor, or a collection of tensors.

        Returns:
            Tensors with a new first axis for the processes; unchanged if there is only one process.
        """


class SampleGrid(PeriodicEvaluation):
    """Callback that generates sample images during training and shows them in a grid.

    The images are generated with the weights that validation uses, such as averaged weights. The grid is saved as a picture in
    the subfolder ``pictures`` of the log folder, and is written to TensorBoard. Sample i has condition i modulo the number of
    conditions, such as classes. Each sample has its own noise, so the samples do not depend on the number of processes.

    Args:
        samples: number of samples. At most 100 are generated. With ten or fewer conditions, a grid shows at most 10 samples of
            each.
        sampling: sampler options, as an instance of the model's dataclass, or as a mapping with the options that differ from
            the model's defaults; null for the defaults.
        every_n_steps: number of optimizer steps between two grids; null for no grids during training.
        at_end: whether to generate a grid with the final weights.
        batch_size: number of samples that each process generates at once.
        seed: seed of the noise.
        name: name of the pictures; no other callback may have the same name.

    Raises:
        ValueError: if ``samples``, ``batch_size`` or ``every_n_steps`` is less than 1, ``seed`` is negative, or ``name`` is not
            a file name.
    """

    def __init__(
        self,
        samples: int = GRID * GRID,
        sampling: Any = None,
        every_n_steps: int | None = 10_000,
        at_end: bool = True,
        batch_size: int = 64,
        seed: int = 0,
        name: str = "samples",
    ) -> None:
        super().__init__(every_n_steps, at_end)
        check_range(least=1, samples=samples, batch_size=batch_size)
        check_seed(seed=seed)
        if not is_file_name(name):
            raise ValueError(
                f"name={name[:60]!r} is used in file names and must not contain a slash or begin with a dot"
            )
        self.samples, self.sampling = samples, sampling
        self.batch_size, self.seed, self.name = batch_size, seed, name

    @property
    def state_key(self) -> str:
        """Key of this callback's state in checkpoints. It contains the name of the pictures, so that it is unique."""
        return f"{type(self).__qualname__}{{{self.name}}}"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before training that the module can generate images with the sampler options and with its VAE, if it has one.

        Raises:
            ValueError: if the module does not generate images or has no conditions, or if the sampler options are not valid for
                it.
            FileNotFoundError: if a VAE or a text encoder that the module needs does not exist.
        """
        module = self._checked(pl_module)
        if module.num_conditions < 1:
            raise ValueError(f"{type(self).__name__} has no conditions to draw samples for")
        module.check_drawable(self._sampling(module))
        _rest(module)

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate sample images on every process, and write them as a grid on the first process."""
        module, shown = self._checked(pl_module), []
        with self._drawing(trainer, pl_module):
            for tickets, pixels in self._rounds(trainer, module, min(self.samples, GRID * GRID)):
                shown.append(gather_round(module, tickets, pixels)[0].cpu())
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            self._show(trainer, module, folder, torch.cat(shown)[: GRID * GRID])
        trainer.strategy.barrier()

    @contextmanager
    def _drawing(self, trainer: Trainer, module: LightningModule) -> Iterator[None]:
        """Context manager for generating images with the weights and the precision of validation.

        On exit, the random states of the CPU are restored, and text encoders and VAEs are moved to the CPU.
        """
        with (
            kept_random_state(),
            evaluation_weights(trainer, module),
            trainer.precision_plugin.forward_context(),
        ):
            yield
        _rest(module)

    def _rounds(self, trainer: Trainer, module: ImageGenerator, samples: int) -> Iterator[tuple[list[Ticket], Tensor]]:
        """Generate this process's share of the samples, one batch at a time.

        Args:
            trainer: trainer of the module.
            module: module that generates the images.
            samples: number of samples, summed over all processes.

        Yields:
            Batch of b samples: their tickets, which hold the indices of the samples, and their pixels, ``[b, C, H, W]`` uint8.
            Samples whose tickets are not ``valid`` only fill up the batch.
        """
        rank, world = process_share(trainer)
        # Every process draws the same number of rounds, since each round ends with a collective.
        rounds = list(evaluation_batches(samples, self.batch_size * world, rank, world))
        for tickets in track(rounds, f"drawing {samples} samples", disable=not trainer.is_global_zero):
            indices = [ticket.index for ticket in tickets]
            yield tickets, module.draw_numbered(indices, self.seed, self._sampling(module))

    def _show(self, trainer: Trainer, module: ImageGenerator, folder: Path, grid: Tensor) -> None:
        step, guidance = trainer.global_step, module.describe_sampling(self._sampling(module))["guidance"]
        figure = draw_grid(grid, module.num_conditions, f"step {step:,}, guidance {guidance:g}")
        condition = condition_of(module)
        rows = f"Each row is a {condition}. " if module.num_conditions <= GRID else ""
        caption = (
            f"Samples ({self.name}) at step {step:,}, guidance {guidance:g}. {rows}Look for samples that belong to their "
            f"{condition}, and for differences within a {condition}: samples that are all alike mean that the model repeats "
            "itself."
        )
        log_figure(trainer, figure, self.name, folder / "pictures", caption)

    def _sampling(self, module: ImageGenerator) -> Any:
        """Return the sampler options as an instance of the model's dataclass. Missing options have the model's defaults."""
        if isinstance(self.sampling, Mapping):
            return as_dataclass(type(module.sampling), {**vars(module.sampling), **self.sampling})
        return module.sampling if self.sampling is None else as_dataclass(type(module.sampling), self.sampling)

    def _checked(self, module: LightningModule) -> ImageGenerator:
        if not isinstance(module, ImageGenerator):
            raise ValueError(
                f"{type(self).__name__} draws images of conditions, as mhla_tasks.diffusion.ClassToImage does; "
                f"{type(module).__name__} does not"
            )
        return module


def condition_of(module: ImageGenerator) -> str:
    """Return a noun for the conditions of a module: ``class`` unless its attribute ``condition`` says otherwise."""
    return str(getattr(module, "condition", "class"))


def _rest(module: Any) -> None:
    if hasattr(module, "rest"):
        module.rest()


def gather_round(module: ImageGenerator, tickets: list[Ticket], pixels: Tensor, *columns: Tensor) -> list[Tensor]:
    """Gather the samples that all processes have generated in one batch, and sort them by index.

    Samples that only fill up the batch are left out. Every process must call this function, because it is a collective
    operation.

    Args:
        module: module whose ``all_gather`` gathers the tensors.
        tickets: tickets of this process. Each has the index of a sample, and is not ``valid`` if it only fills up the batch.
        pixels: pixels ``[b, C, H, W]`` of this process's b samples.
        columns: further tensors ``[b, ...]`` with a row for each of this process's samples.

    Returns:
        List of tensors with a row for each of the n samples of all processes: pixels ``[n, C, H, W]``, sample indices ``[n]``
        int64, and each of ``columns``, ``[n, ...]``.
    """
    valid = torch.tensor([ticket.valid for ticket in tickets], device=module.device)
    indices = torch.tensor([ticket.index for ticket in tickets], device=module.device)

    def everyone(values: Tensor) -> Tensor:
        gathered: Any = module.all_gather(values)
        # all_gather adds an axis of processes, but only if there are several.
        return gathered.reshape(-1, *values.shape[1:])

    order = everyone(valid).nonzero()[:, 0]
    order = order[everyone(indices)[order].argsort()]
    return [everyone(column)[order] for column in (pixels, indices, *columns)]


def draw_grid(images: Tensor, num_classes: int, title: str) -> Figure:
    """Draw images in a grid with gray lines between them.

    Args:
        images: images ``[n, C, H, W]`` uint8 with 1 or 3 channels. Image i belongs to class i modulo ``num_classes``.
        num_classes: number of classes. Up to ten classes get one labeled row each, with at most ten images. With more classes,
            all images are shown in order, ten in a row.
        title: title of the figure.

    Returns:
        Matplotlib figure.
    """
    labelled = num_classes <= GRID
    rows = [images[label::num_classes][:GRID] for label in range(num_classes)] if labelled else images.split(GRID)
    rows = [row for row in rows if len(row)]
    height, width = images.shape[-2:]
    columns, down, across = max(map(len, rows)), height + 1, width + 1
    # Lines of one pixel between the images, so one line fewer than images.
    canvas = torch.full((images.shape[1], len(rows) * down - 1, columns * across - 1), 96, dtype=torch.uint8)
    for i, row in enumerate(rows):
        for k, image in enumerate(row):
            canvas[:, i * down : i * down + height, k * across : k * across + width] = image
    size, aspect = 0.55 if max(height, width) < 64 else 1.2, math.sqrt(width / height)
    from matplotlib.figure import Figure  # slow to import, and only needed here

    figure = Figure(figsize=(columns * size * aspect + 0.6, len(rows) * size / aspect + 0.4), layout="constrained")
    axis = figure.subplots()
    axis.imshow(canvas.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    labels = range(len(rows)) if labelled else []
    axis.set_yticks([down * label + down / 2 - 1 for label in labels], [str(label) for label in labels])
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.set_title(title, fontsize=9, parse_math=False)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return figure
