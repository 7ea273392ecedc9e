"""What the attention of a model looks like, drawn and measured while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mhla.attention import MHLA, Attention
from lightning_mhla.callbacks.folder import run_folder
from lightning_mhla.layout import BlockLayout


def attention_rank(weights_HNN: Tensor) -> float:
    """Numerical rank of the attention matrix, mean over heads (MHLA paper, figure 3)."""
    return float(torch.linalg.matrix_rank(weights_HNN.float().cpu()).double().mean())


def attention_entropy(weights_HNN: Tensor) -> float:
    """Entropy of a row of the attention matrix in nats, mean over heads and queries; rows count by absolute weight."""
    share = weights_HNN.float().abs()
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-12)
    return float(torch.special.entr(share).sum(-1).mean())


def fold_mixing(mixing: Tensor, layout: BlockLayout) -> Tensor:
    """Mixing coefficients as one picture: for 2-D block grids the row of each block folded back to the grid.

    Args:
        mixing: ``[M, M]``, prefix block left out.
        layout: the blocks.

    Returns:
        ``[rows, columns]`` with NaN between the tiles; other grids give ``[M, M]`` as it is.
    """
    if len(layout.block_grid) != 2:
        return mixing
    high, wide = layout.block_grid
    tiles = nn.functional.pad(mixing.view(high, wide, high, wide), (0, 1, 0, 1), value=float("nan"))
    return tiles.permute(0, 2, 1, 3).reshape(high * (high + 1), wide * (wide + 1))[:-1, :-1]


class AttentionPictures(Callback):
    """Draws mixing coefficients and attention maps of a sample, and logs rank and entropy of the attention matrix.

    Runs on the first validation batch, under the weights that validation uses. Pictures go to ``pictures/`` in the log
    folder and to TensorBoard; ``attention/rank_layer<i>`` and ``attention/entropy_layer<i>`` to every logger.

    Args:
        every_n_epochs: epochs between two pictures, which the first validation after them draws.
        sample: index of the sample in the first validation batch.
        max_tokens: longer inputs are passed over (an attention matrix is N x N).
    """

    def __init__(self, every_n_epochs: int = 1, sample: int = 0, max_tokens: int = 1024) -> None:
        self.every_n_epochs, self.sample, self.max_tokens = every_n_epochs, sample, max_tokens
        self._period = 0
        self._hooks: list[RemovableHandle] = []
        self._weights: list[Tensor] = []
        self._mixing: list[Tensor] = []
        self._layout: BlockLayout | None = None
        self._folder = Path()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the folder, on every rank."""
        self._folder = run_folder(trainer) / "pictures"

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Listen to every attention layer during the first batch."""
        period = (trainer.current_epoch + 1) // self.every_n_epochs
        if (
            getattr(pl_module, "sequence_group", None) is not None  # no process sees whole sequences
            or batch_idx
            or dataloader_idx
            or trainer.sanity_checking
            or (trainer.state.fn == "fit" and period <= self._period)
        ):
            return
        self._period = period
        layers = [module for module in pl_module.modules() if isinstance(module, Attention)]
        if layers and layers[0].layout.num_tokens <= self.max_tokens:
            self._weights, self._mixing = [], []
            self._hooks = [layer.register_forward_pre_hook(self._capture, with_kwargs=True) for layer in layers]

    @torch.no_grad()
    def _capture(self, layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0][self.sample : self.sample + 1]
        mask = args[1] if len(args) > 1 else kwargs.get("key_mask")
        given = {name: kwargs[name] for name in ("rotary", "projections") if layer.qkv is None}
        weights = layer.attention_matrix(x, None if mask is None else mask[self.sample : self.sample + 1], **given)[0]
        if layer.block_ordered:
            inverse = layer.layout.inverse.to(weights.device)
            weights = weights.index_select(1, inverse).index_select(2, inverse)
        self._layout = layer.layout
        self._weights.append(weights.float().cpu())
        if isinstance(layer, MHLA):
            mixing = layer.mixing.matrix().detach().float().cpu().clone()
            hidden = torch.ones(mixing.shape[-2:], dtype=torch.bool).triu(1)
            self._mixing.append(mixing.masked_fill(hidden, float("nan")) if layer.causal else mixing)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Measure on every rank, draw on the first."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for index, weights in enumerate(self._weights):
            pl_module.log(f"attention/rank_layer{index}", attention_rank(weights), on_epoch=True, batch_size=1)
            pl_module.log(f"attention/entropy_layer{index}", attention_entropy(weights), on_epoch=True, batch_size=1)
        if trainer.is_global_zero and self._layout is not None:
            image = batch["image"][self.sample].float().cpu() if isinstance(batch, dict) and "image" in batch else None
            sequence = len(self._layout.grid) == 1
            figure = draw_matrices(self._weights) if sequence else draw_attention(self._weights, self._layout, image)
            self._keep(trainer, "attention", figure)
            if self._mixing:
                self._keep(trainer, "mixing", draw_mixing(self._mixing, self._layout))

    def _keep(self, trainer: Trainer, name: str, figure: Figure) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(self._folder / f"{name}-step{trainer.global_step:07d}.png", dpi=110)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(name, figure, trainer.global_step)


def draw_mixing(mixing: list[Tensor], layout: BlockLayout) -> Figure:
    """One panel for each layer; matrices per head are shown as their mean (MHLA paper, figure 4b)."""
    columns = min(4, len(mixing))
    rows = -(-len(mixing) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.3 * rows + 0.5), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    first = int(layout.prefix_tokens > 0)
    for index, axis in enumerate(axes):
        if index >= len(mixing):
            axis.remove()
            continue
        matrix = mixing[index].mean(0) if mixing[index].dim() == 3 else mixing[index]
        shown = axis.imshow(fold_mixing(matrix[first:, first:], layout), cmap="viridis", vmin=0)
        axis.set(title=f"layer {index}", xticks=[], yticks=[])
        figure.colorbar(shown, ax=axis, shrink=0.8)
    folded = len(layout.block_grid) == 2
    what = "tile (i, j) = row of query block (i, j), folded to the block grid" if folded else "row = query block"
    figure.suptitle(f"mixing coefficients: {what}", fontsize=10)
    return figure


def draw_matrices(weights: list[Tensor], least: float = 1e-5) -> Figure:
    """The whole attention matrix of every layer, for sequences: share of each query's weight on each key.

    Shares are of absolute weights, mean over heads, on a logarithmic scale; weights of exactly 0 are left white.

    Args:
        weights: ``[H, N, N]`` of each layer.
        least: share at the lower end of the scale.
    """
    columns = min(4, len(weights))
    rows = -(-len(weights) // columns)
    figure = Figure(figsize=(3.2 * columns + 0.6, 3.2 * rows + 0.5), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    scale = LogNorm(least, 1)
    for index, axis in enumerate(axes):
        if index >= len(weights):
            axis.remove()
            continue
        size = weights[index].float().abs()
        share = (size / size.sum(-1, keepdim=True).clamp(min=1e-12)).mean(0)
        shown = torch.where(share > 0, share.clamp(min=least), float("nan"))
        picture = axis.imshow(shown, cmap="magma", norm=scale)
        axis.set(title=f"layer {index}", xlabel="key", ylabel="query" if index % columns == 0 else "")
    figure.colorbar(picture, ax=axes[: len(weights)], shrink=0.7, label="share of the query's weight")
    return figure


def draw_attention(weights: list[Tensor], layout: BlockLayout, image: Tensor | None, queries: int = 4) -> Figure:
    """Maps of some queries (columns) in every layer (rows), mean over heads, beside the image if there is one.

    Args:
        weights: ``[H, N, N]`` of each layer, tokens in raster order, prefix first.
        layout: the token grid, of two axes or three (of which the first frame is shown).
        image: ``[channels, height, width]``, any scale.
        queries: number of query tokens, spread over the grid.
    """
    prefix, plane = layout.prefix_tokens, layout.grid[-2:]
    tokens = plane[0] * plane[1]
    places = [(2 * i + 1) * tokens // (2 * queries) for i in range(queries)]
    places = [min(p - p % plane[1] + (2 * i + 1) * plane[1] // (2 * queries), tokens - 1) for i, p in enumerate(places)]
    shift = int(image is not None)
    figure = Figure(figsize=(1.7 * (queries + shift), 1.75 * len(weights) + 0.6), layout="constrained")
    axes = figure.subplots(len(weights), queries + shift, squeeze=False)
    for row, layer in enumerate(weights):
        maps = layer.mean(0)[prefix : prefix + tokens, prefix : prefix + tokens]
        if image is not None:
            low, high = image.min(), image.max()
            shown = ((image - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0)
            axes[row, 0].imshow(shown.squeeze(-1), cmap="gray")
            axes[row, 0].set_ylabel(f"layer {row}")
        for column, place in enumerate(places):
            axis = axes[row, column + shift]
            axis.imshow(maps[place].view(plane), cmap="magma", vmin=min(0.0, float(maps[place].min())))
            axis.plot(place % plane[1], place // plane[1], "c+", markersize=7)
            if not shift and not column:
                axis.set_ylabel(f"layer {row}")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.suptitle("attention of the query at +, mean over heads", fontsize=10)
    return figure
