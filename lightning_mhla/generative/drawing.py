"""Sample images during training, from any module that draws images of numbered conditions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.progress import track
from torch import Tensor

from lightning_mhla.callbacks import PeriodicEvaluation
from lightning_mhla.callbacks.averaging import evaluation_weights
from lightning_mhla.data.module import process_share
from lightning_mhla.data.sampling import Ticket, evaluation_batches, kept_random_state
from lightning_mhla.system.folders import run_folder
from lightning_mhla.system.listing import is_file_name
from lightning_mhla.system.options import as_dataclass

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = 10
"""Number of rows and columns in a picture of samples."""


@runtime_checkable
class ImageGenerator(Protocol):
    """LightningModule that draws images for numbered conditions.

    Attributes:
        device: device of the weights.
        ema_decay: decay of the moving average of the weights, or None.
        sampling: sampler options, a dataclass.
    """

    device: Any
    ema_decay: float | None
    sampling: Any

    @property
    def num_conditions(self) -> int:
        """Number of conditions: classes, or prompts of a list."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image. For latents, whose image size only the VAE knows, the size is arbitrary."""

    def check_drawable(self, sampling: Any = None) -> None:
        """Check that images can be drawn with these options; raise ValueError or FileNotFoundError if not."""

    def draw_numbered(self, indices: list[int], seed: int, sampling: Any) -> Tensor:
        """Draw images ``[b, C, H, W]`` uint8. Sample i has condition i modulo their number, and its own noise."""

    def describe_sampling(self, sampling: Any) -> dict[str, Any]:
        """Return the options that metrics depend on, such as ``sampler``, ``sampling_steps`` and ``guidance``."""

    def all_gather(self, data: Any) -> Any:
        """See LightningModule."""


class SampleGrid(PeriodicEvaluation):
    """Draw a grid of samples, balanced over the conditions, with the weights that validation uses.

    The grid goes to ``pictures/`` in the log folder and to TensorBoard. Sample i has condition i modulo their number (a
    class, say) and noise of its own, so any number of processes draws the same.

    Args:
        samples: number of samples; a hundred at most, ten of each class where there are ten classes or fewer.
        sampling: options of the model's sampling, a mapping or its dataclass; None for the model's own.
        every_n_steps: optimiser steps between two grids; null for none on the way.
        at_end: whether the last weights draw one.
        batch_size: samples that each process draws together.
        seed: seed of the noise.
        name: name of the pictures; two callbacks need two names.
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
        if samples < 1 or batch_size < 1:
            raise ValueError(f"samples={samples} and batch_size={batch_size} must be at least 1")
        if not is_file_name(name):
            raise ValueError(f"name={name[:60]!r} is the name of files and cannot have a slash or begin with a dot")
        self.samples, self.sampling = samples, sampling
        self.batch_size, self.seed, self.name = batch_size, seed, name

    @property
    def state_key(self) -> str:
        """Key of this callback's state in checkpoints."""
        return f"{type(self).__qualname__}{{{self.name}}}"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before training that samples can be drawn with this VAE and sampler.

        Raises:
            ValueError: for what does not fit together.
            FileNotFoundError: for what is not there.
        """
        module = self._checked(pl_module)
        if module.num_conditions < 1:
            raise ValueError(f"{type(self).__name__} has no conditions to draw samples of")
        module.check_drawable(self._sampling(module))
        _rest(module)

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw on every process, write on the first."""
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
        """Context with the weights and the precision of validation, which restores the random state of training."""
        with (
            kept_random_state(),
            evaluation_weights(trainer, module),
            trainer.precision_plugin.forward_context(),
        ):
            yield
        _rest(module)

    def _rounds(self, trainer: Trainer, module: ImageGenerator, samples: int) -> Iterator[tuple[list[Ticket], Tensor]]:
        """Yield the tickets that this process draws in each round, and their pixels ``[b, C, S, S]``."""
        rank, world = process_share(trainer)
        rounds = list(evaluation_batches(samples, self.batch_size * world, rank, world))
        for tickets in track(rounds, f"drawing {samples} samples", disable=not trainer.is_global_zero):
            indices = [ticket.index for ticket in tickets]
            yield tickets, module.draw_numbered(indices, self.seed, self._sampling(module))

    def _show(self, trainer: Trainer, module: ImageGenerator, folder: Path, grid: Tensor) -> None:
        step, guidance = trainer.global_step, module.describe_sampling(self._sampling(module))["guidance"]
        figure = draw_grid(grid, module.num_conditions, f"step {step:,}, guidance {guidance:g}")
        (folder / "pictures").mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "pictures" / f"{self.name}-step{step:07d}.png", dpi=110)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(self.name, figure, step)

    def _sampling(self, module: ImageGenerator) -> Any:
        return module.sampling if self.sampling is None else as_dataclass(type(module.sampling), self.sampling)

    def _checked(self, module: LightningModule) -> ImageGenerator:
        if not isinstance(module, ImageGenerator):
            raise ValueError(
                f"{type(self).__name__} draws images of conditions, as mhla_tasks.diffusion.ClassToImage does; "
                f"{type(module).__name__} does not"
            )
        return module


def _rest(module: Any) -> None:
    """Move the text encoders and VAEs of a module off the GPU."""
    if hasattr(module, "rest"):
        module.rest()


def gather_round(module: ImageGenerator, tickets: list[Ticket], pixels: Tensor, *columns: Tensor) -> list[Tensor]:
    """Gather one round of all processes: pixels, indices and further columns, sorted by index, without repeated samples."""
    valid = torch.tensor([ticket.valid for ticket in tickets], device=module.device)
    indices = torch.tensor([ticket.index for ticket in tickets], device=module.device)

    def everyone(values: Tensor) -> Tensor:
        gathered: Any = module.all_gather(values)
        return gathered.reshape(-1, *values.shape[1:])

    kept = everyone(valid).nonzero()[:, 0]
    kept = kept[everyone(indices)[kept].argsort()]
    return [everyone(column)[kept] for column in (pixels, indices, *columns)]


def draw_grid(images: Tensor, num_classes: int, title: str) -> Figure:
    """Arrange images ``[n, C, S, S]`` uint8, image i of class i modulo ``num_classes``, in a grid.

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
    from matplotlib.figure import Figure  # not before there is something to draw

    figure = Figure(figsize=(wide * size + 0.6, len(rows) * size + 0.4), layout="constrained")
    axis = figure.subplots()
    axis.imshow(canvas.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    labels = range(len(rows)) if labelled else []
    axis.set_yticks([step * label + step / 2 - 1 for label in labels], [str(label) for label in labels])
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.set_title(title, fontsize=9, parse_math=False)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return figure
