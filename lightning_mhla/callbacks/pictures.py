"""Pictures and statistics of a model's attention during training."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mhla.attention import MHLA, Attention
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.system.figures import make_panels
from lightning_mhla.system.folders import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_rank(weights_HNN: Tensor) -> float:
    """Compute the numerical rank of attention matrices, averaged over heads (MHLA paper, figure 3).

    Args:
        weights_HNN: attention matrices ``[H, N, N]`` of H heads and N tokens.
    """
    return float(torch.linalg.matrix_rank(weights_HNN.float().cpu()).double().mean())


def attention_entropy(weights_HNN: Tensor) -> float:
    """Compute the entropy of attention weights, averaged over heads and queries, in nats.

    Args:
        weights_HNN: attention matrices ``[H, N, N]`` of H heads and N tokens. The weights may be negative. The absolute values
            of each row are normalized to sum to 1.
    """
    share = weights_HNN.float().abs()
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-12)
    return float(torch.special.entr(share).sum(-1).mean())


def fold_mixing(mixing: Tensor, layout: BlockLayout) -> Tensor:
    """Arrange the mixing coefficients of a 2-D grid of blocks as a picture with one tile for each block.

    The tile of block (i, j) is in row i and column j of the picture. It shows row (i, j) of the mixing matrix: the coefficients
    with which this block combines all blocks, with the coefficient of block (k, l) in row k and column l.

    Args:
        mixing: coefficients of the M blocks of the grid, ``[M, M]``. The block of prefix tokens, such as class tokens,
            is not included.
        layout: arrangement of the blocks in a grid.

    Returns:
        Pixels ``[rows, columns]`` with NaN between the tiles. If the grid of blocks is not 2-D, ``mixing`` is returned
        unchanged.
    """
    if len(layout.block_grid) != 2:
        return mixing
    high, wide = layout.block_grid
    tiles = nn.functional.pad(mixing.view(high, wide, high, wide), (0, 1, 0, 1), value=float("nan"))
    return tiles.permute(0, 2, 1, 3).reshape(high * (high + 1), wide * (wide + 1))[:-1, :-1]


def numbered_layers(model: nn.Module) -> dict[str, Attention]:
    """Return the attention layers of a model, keyed by the numeric parts of their module names.

    Only instances of :class:`Attention` are returned. The layer ``blocks.5.attn1`` has the key ``"5"``, even if the attention
    layers of some other blocks are of a different class. The layer ``stages.1.blocks.0`` has the key ``"1.0"``. If a name has
    no number, or if two layers have the same key, all layers are numbered from 0 instead.
    """
    named = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    numbers = [".".join(part for part in name.split(".") if part.isdigit()) for name in named]
    unique = all(numbers) and len(set(numbers)) == len(numbers)
    return dict(zip(numbers if unique else map(str, range(len(named))), named.values(), strict=True))


class AttentionPictures(Callback):
    """Callback that draws mixing coefficients and attention maps, and logs the rank and entropy of attention matrices.

    The callback uses one sample of the first validation batch, with the same model weights as validation. Pictures go to
    ``pictures/`` in the log folder and to TensorBoard. ``attention/rank_layer<i>`` and ``attention/entropy_layer<i>`` are
    logged to every logger, where ``i`` is the number in the module name of the layer.

    Args:
        every_n_epochs: number ``n`` of epochs between pictures. They are drawn at the first validation in every n-th epoch
            or, if that epoch has no validation, at the next one.
        sample: index of the sample in the first validation batch.
        max_tokens: maximum number of tokens of a layer. Layers with more tokens are skipped, because an attention matrix has an
            entry for each pair of tokens.
    """

    def __init__(self, every_n_epochs: int = 1, sample: int = 0, max_tokens: int = 1024) -> None:
        self.every_n_epochs, self.sample, self.max_tokens = every_n_epochs, sample, max_tokens
        self._period = 0
        self._hooks: list[RemovableHandle] = []
        self._weights: dict[str, Tensor] = {}
        self._mixing: dict[str, Tensor] = {}
        self._layouts: dict[str, BlockLayout] = {}
        self._folder = Path()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the output folder, and reset the index of the latest period (``every_n_epochs`` epochs) with pictures.

        Every process must call this method.
        """
        self._folder, self._period = run_folder(trainer) / "pictures", 0

    def state_dict(self) -> dict[str, Any]:
        """Return the index of the latest period with pictures, for the checkpoint.

        A period has ``every_n_epochs`` epochs.
        """
        return {"period": self._period}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the index of the latest period (``every_n_epochs`` epochs) for which pictures were drawn."""
        self._period = int(state_dict["period"])

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Register hooks on the attention layers before the first validation batch, if pictures are to be drawn."""
        period = (trainer.current_epoch + 1) // self.every_n_epochs
        if (
            getattr(pl_module, "sequence_group", None) is not None  # no process has complete sequences
            or batch_idx
            or dataloader_idx
            or trainer.sanity_checking
            or (trainer.state.fn == "fit" and period <= self._period)
        ):
            return
        self._period = period
        self._weights, self._mixing, self._layouts = {}, {}, {}
        self._hooks = [
            layer.register_forward_pre_hook(partial(self._capture, number), with_kwargs=True)
            for number, layer in numbered_layers(pl_module).items()
            if layer.layout.num_tokens <= self.max_tokens
        ]

    @torch.no_grad()
    def _capture(self, number: str, layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0][self.sample : self.sample + 1]
        mask = args[1] if len(args) > 1 else kwargs.get("key_mask")
        layer_arguments = {name: kwargs[name] for name in ("rotary", "projections") if layer.qkv is None}
        weights = layer.attention_matrix(
            x, None if mask is None else mask[self.sample : self.sample + 1], **layer_arguments
        )[0]
        if layer.block_ordered and not layer.layout.is_raster:
            inverse = layer.layout.inverse.to(weights.device)
            weights = weights.index_select(1, inverse).index_select(2, inverse)
        self._layouts[number] = layer.layout
        self._weights[number] = weights.float().cpu()
        if isinstance(layer, MHLA):
            mixing = layer.mixing.matrix().detach().float().cpu().clone()
            hidden = torch.ones(mixing.shape[-2:], dtype=torch.bool).triu(1)
            self._mixing[number] = mixing.masked_fill(hidden, float("nan")) if layer.causal else mixing

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Remove the hooks from the attention layers, log rank and entropy, and draw the pictures.

        Only the first process draws.
        """
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for number, weights in self._weights.items():
            pl_module.log(f"attention/rank_layer{number}", attention_rank(weights), on_epoch=True, batch_size=1)
            pl_module.log(f"attention/entropy_layer{number}", attention_entropy(weights), on_epoch=True, batch_size=1)
        if trainer.is_global_zero and self._weights:
            self._keep(trainer, "attention", self._draw(batch))
            if self._mixing:
                self._keep(trainer, "mixing", draw_mixing(self._mixing, self._layouts))

    def _draw(self, batch: Any) -> Figure:
        layout = next(iter(self._layouts.values()))
        if len(layout.grid) == 1:
            return draw_matrices(self._weights)
        inputs = [batch[name] for name in ("image", "video", "latent") if isinstance(batch, dict) and name in batch]
        sample = inputs[0][self.sample].float().cpu() if inputs else None
        if len(layout.grid) == 2:
            return draw_attention(self._weights, self._layouts, sample)
        return draw_frames(self._weights, layout, sample)

    def _keep(self, trainer: Trainer, name: str, figure: Figure) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(self._folder / f"{name}-step{trainer.global_step:07d}.png", dpi=110)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(name, figure, trainer.global_step)


def draw_mixing(mixing: dict[str, Tensor], layouts: dict[str, BlockLayout]) -> Figure:
    """Draw the mixing coefficients of all layers as a figure with one plot for each layer (MHLA paper, figure 4b).

    Args:
        mixing: coefficients of M blocks by layer number, either ``[M, M]`` or ``[H, M, M]``. The latter are averaged over the H
            heads.
        layouts: arrangement of the tokens in blocks, by layer number.
    """
    figure, axes = make_panels(len(mixing), 4, (3.2, 3.3), (0, 0.5))
    for axis, (number, matrix) in zip(axes, mixing.items(), strict=True):
        layout = layouts[number]
        first = matrix.shape[-1] - math.prod(layout.block_grid)  # 1 if prefix tokens have coefficients, otherwise 0
        matrix = matrix.mean(0) if matrix.dim() == 3 else matrix
        shown = axis.imshow(fold_mixing(matrix[first:, first:], layout), cmap="viridis", vmin=0)
        axis.set(title=f"layer {number}", xticks=[], yticks=[])
        figure.colorbar(shown, ax=axis, shrink=0.8)
    folded = len(next(iter(layouts.values())).block_grid) == 2
    legend = "tile (i, j) = row of query block (i, j), folded to the block grid" if folded else "row = query block"
    figure.suptitle(f"mixing coefficients: {legend}", fontsize=10)
    return figure


def draw_matrices(weights: dict[str, Tensor], least: float = 1e-5) -> Figure:
    """Draw the attention matrices of a model whose tokens form a sequence, with one plot for each layer.

    Rows are queries, and columns are keys. A pixel shows the share of a key in the total absolute attention weight of a query,
    averaged over heads, on a logarithmic scale. Shares of exactly 0 are white.

    Args:
        weights: attention matrices ``[H, N, N]`` of H heads and N tokens, by layer number.
        least: share at the lower end of the color scale.
    """
    from matplotlib.colors import LogNorm  # imported only when a picture is drawn

    columns, scale = 4, LogNorm(least, 1)
    figure, axes = make_panels(len(weights), columns, (3.2, 3.2), (0.6, 0.5))
    for index, (axis, (number, matrix)) in enumerate(zip(axes, weights.items(), strict=True)):
        size = matrix.float().abs()
        share = (size / size.sum(-1, keepdim=True).clamp(min=1e-12)).mean(0)
        shown = torch.where(share > 0, share.clamp(min=least), float("nan"))
        picture = axis.imshow(shown, cmap="magma", norm=scale)
        axis.set(title=f"layer {number}", xlabel="key", ylabel="query" if index % columns == 0 else "")
    figure.colorbar(picture, ax=axes, shrink=0.7, label="share of the query's weight")
    return figure


def draw_attention(
    weights: dict[str, Tensor], layouts: dict[str, BlockLayout], image: Tensor | None, queries: int = 4
) -> Figure:
    """Draw the attention maps of some queries (columns) in every layer (rows), averaged over heads, beside the image.

    Args:
        weights: attention matrices ``[H, N, N]`` of H heads and N tokens, by layer number. Prefix tokens, such as class
            tokens, come first, followed by the other tokens in raster order.
        layouts: arrangement of the tokens in a 2-D grid, by layer number.
        image: image to show in the first column, ``[channels, height, width]`` with values in any range. If it does not have
            three channels, the mean of its channels is shown. None to omit the column.
        queries: number of query tokens, which lie on the diagonal of the grid.
    """
    shift = int(image is not None)
    from matplotlib.figure import Figure  # imported only when a picture is drawn

    figure = Figure(figsize=(1.7 * (queries + shift), 1.75 * len(weights) + 0.6), layout="constrained")
    axes = figure.subplots(len(weights), queries + shift, squeeze=False)
    for row, (number, layer) in enumerate(weights.items()):
        prefix, plane = layouts[number].prefix_tokens, layouts[number].grid
        maps = layer.mean(0)[prefix:, prefix:]
        if image is not None:
            axes[row, 0].imshow(_to_shown(image), cmap="gray")
        axes[row, 0].set_ylabel(f"layer {number}")
        for column, position in enumerate(_spread(plane, queries)):
            axis = axes[row, column + shift]
            axis.imshow(maps[position].view(plane), cmap="magma", vmin=min(0.0, float(maps[position].min())))
            axis.plot(position % plane[1], position // plane[1], "c+", markersize=7)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.suptitle("attention of the query at +, mean over heads", fontsize=10)
    return figure


def _spread(plane: tuple[int, ...], queries: int) -> list[int]:
    """Select query tokens spread over the diagonal of a 2-D token grid.

    Args:
        plane: number of rows and number of columns of the grid.
        queries: number of tokens to select.

    Returns:
        Indices of the tokens in raster order.
    """
    high, wide = plane
    steps = [2 * i + 1 for i in range(queries)]
    return [step * high // (2 * queries) * wide + step * wide // (2 * queries) for step in steps]


def draw_frames(weights: dict[str, Tensor], layout: BlockLayout, clip: Tensor | None, frames: int = 5) -> Figure:
    """Draw how a query in the middle of a video clip attends to several frames (columns) in every layer (rows).

    Args:
        weights: attention matrices ``[H, N, N]`` of H heads and N tokens, by layer number. They are averaged over heads. Prefix
            tokens, such as class tokens, come first, followed by the other tokens in raster order.
        layout: arrangement of the tokens in a grid of frames, rows and columns.
        clip: clip to show above the maps, ``[channels, frames, height, width]``. It may have more frames than the grid. None to
            show only the maps.
        frames: maximum number of columns. They are spread evenly over the clip, and the query lies in the middle one.
    """
    prefix, (length, high, wide) = layout.prefix_tokens, layout.grid
    chosen = torch.linspace(0, length - 1, min(frames, length)).round().int().tolist()
    middle, center = chosen[len(chosen) // 2], (high // 2, wide // 2)
    above = int(clip is not None)
    from matplotlib.figure import Figure  # imported only when a picture is drawn

    figure = Figure(figsize=(1.6 * len(chosen) + 0.4, 1.65 * (len(weights) + above) + 0.7), layout="constrained")
    axes = figure.subplots(len(weights) + above, len(chosen), squeeze=False)
    for column, frame in enumerate(chosen):
        axes[0, column].set_title(f"frame {frame}", fontsize=9)
        if clip is not None:
            at = round(frame * (clip.shape[1] - 1) / max(length - 1, 1))
            axes[0, column].imshow(_to_shown(clip[:, at]), cmap="gray")
    for row, (number, layer) in enumerate(weights.items(), above):
        axes[row, 0].set_ylabel(f"layer {number}")
        query = prefix + (middle * high + center[0]) * wide + center[1]
        maps = layer.mean(0)[query, prefix:].view(length, high, wide)
        for column, frame in enumerate(chosen):
            axes[row, column].imshow(
                maps[frame], cmap="magma", vmin=min(0.0, float(maps.min())), vmax=float(maps.max())
            )
            if frame == middle:
                axes[row, column].plot(center[1], center[0], "c+", markersize=7)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.suptitle("attention of the query at +, mean over heads, one scale for each layer", fontsize=10)
    return figure


def _to_shown(image: Tensor) -> Tensor:
    """Scale the values of an image ``[channels, height, width]`` to the range from 0 to 1, for matplotlib.

    Returns:
        Colors ``[height, width, 3]`` for three channels, otherwise the mean of the channels ``[height, width]``.
    """
    low, high = image.min(), image.max()
    scaled = (image - low) / (high - low).clamp(min=1e-6)
    return scaled.permute(1, 2, 0) if len(image) == 3 else scaled.mean(0)
