"""Drawings of attention maps and mixing coefficients as matplotlib figures, and their captions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.system.figures import hide_ticks, make_panels, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = 2.3
"""Width and height of the plot of one matrix, in inches."""


def fold_mixing(mixing: Tensor, layout: BlockLayout) -> Tensor:
    """Arrange the mixing coefficients of a 2-D grid of blocks as a picture with one tile for each block.

    The tile of block (i, j) is in row i and column j of the picture. It shows row (i, j) of the mixing matrix: the coefficients
    with which this block combines the summaries of all blocks. In the tile, the coefficient of block (k, l) is in row k and
    column l.

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
    # [high, wide, high + 1, wide + 1]: reading block (i, j), read block (k, l), with a row and a column of NaN after each tile.
    tiles = nn.functional.pad(mixing.view(high, wide, high, wide), (0, 1, 0, 1), value=float("nan"))
    # Rows of pixels are (i, k), columns (j, l). The last padding is cut off.
    return tiles.permute(0, 2, 1, 3).reshape(high * (high + 1), wide * (wide + 1))[:-1, :-1]


def draw_mixing(mixing: dict[str, Tensor], layouts: dict[str, BlockLayout], step: int) -> tuple[Figure, str]:
    """Draw the mixing coefficients of all layers as a figure with one plot for each layer (MHLA paper, figure 4b).

    Args:
        mixing: coefficients of M blocks by layer number, either ``[M, M]`` or ``[H, M, M]``. Rows are blocks of queries, and
            columns are the blocks whose summaries are mixed. ``[H, M, M]`` is averaged over the H heads.
        layouts: arrangement of the tokens in blocks, by layer number.
        step: optimizer step after which the coefficients were taken.

    Returns:
        The figure, and a caption that says what to look for.
    """
    figure, axes = make_panels(len(mixing), _columns(len(mixing)), (PANEL, PANEL), (0, 0.6))
    folded = len(next(iter(layouts.values())).block_grid) == 2
    for axis, (number, matrix) in zip(axes, mixing.items(), strict=True):
        layout = layouts[number]
        first = matrix.shape[-1] - math.prod(layout.block_grid)  # 1 if prefix tokens have coefficients, otherwise 0
        heads = f"mean of {len(matrix)} heads" if matrix.dim() == 3 else "all heads"
        matrix = matrix.mean(0) if matrix.dim() == 3 else matrix
        shown = axis.imshow(fold_mixing(matrix[first:, first:], layout), cmap="viridis", vmin=0)
        axis.set_title(f"layer {number}\n{heads}", fontsize=10)
        if not folded:
            axis.set_xlabel("block that is read")
            axis.set_ylabel("block that reads")
        hide_ticks(axis)
        figure.colorbar(shown, ax=axis, shrink=0.8)
    set_title(figure, f"Mixing coefficients at step {step:,}")
    where = (
        "The tile in row i and column j belongs to the block at that place of the image, and shows how strongly that block "
        "reads each block of the image."
        if folded
        else "Each row is a block of tokens, and shows how strongly that block reads the summaries of all blocks."
    )
    look = (
        "Equal colors mean that a layer mixes like plain linear attention. Bright spots at a block's own place mean that it "
        "reads nearby blocks; patterns that differ between blocks mean that it has learned which blocks to read."
    )
    return figure, f"Mixing coefficients at step {step:,}, by layer. {where} {look}"


def _columns(count: int) -> int:
    """Return the number of plots in a row: two, which are readable on a phone, or four for more than eight plots."""
    return 2 if count <= 8 else 4


def draw_matrices(weights: dict[str, Tensor], step: int, least: float = 1e-5) -> tuple[Figure, str]:
    """Draw the attention matrices of a model whose tokens form a sequence, with one plot for each layer.

    Rows are queries, and columns are keys. A pixel shows the share of a key in the total absolute attention weight of a query,
    averaged over heads, on a logarithmic scale. Shares of exactly 0 have the color of the background.

    Args:
        weights: attention matrices ``[H, N, N]`` of H heads and N tokens, by layer number.
        step: optimizer step after which the matrices were computed.
        least: share, as a fraction of 1, at the lower end of the color scale.

    Returns:
        The figure, and a caption that says what to look for.
    """
    from matplotlib.colors import LogNorm  # imported only when a picture is drawn

    columns, scale = _columns(len(weights)), LogNorm(least, 1)
    figure, axes = make_panels(len(weights), columns, (PANEL, PANEL), (0.8, 0.6))
    for index, (axis, (number, matrix)) in enumerate(zip(axes, weights.items(), strict=True)):
        size = matrix.float().abs()
        # [H, N, N] to [N, N]
        share = (size / size.sum(-1, keepdim=True).clamp(min=1e-12)).mean(0)
        shown = torch.where(share > 0, share.clamp(min=least), float("nan"))
        picture = axis.imshow(shown, cmap="magma", norm=scale)
        axis.set(xlabel="key", ylabel="query" if index % columns == 0 else "")
        axis.set_title(f"layer {number}\n{_heads(matrix)}", fontsize=10)
    # Plain numbers, because powers of ten would be typeset as formulas, which takes longer than all the rest.
    bar = figure.colorbar(picture, ax=axes, shrink=0.7, label="share of the query's weight", format="{x:g}")
    bar.minorticks_off()
    set_title(figure, f"Attention at step {step:,}, one validation sample")
    return figure, (
        f"Attention of one validation sample at step {step:,}, by layer. A row shows which earlier tokens (columns) a token "
        "reads. A bright diagonal means nearby tokens, a bright column a token that all later ones read, and an even row a "
        "layer that averages over everything. In layers of MHLA, steps at block borders come from "
        "the mixing coefficients."
    )


def _heads(matrix: Tensor) -> str:
    return "1 head" if len(matrix) == 1 else f"mean of {len(matrix)} heads"


def draw_attention(
    weights: dict[str, Tensor], layouts: dict[str, BlockLayout], image: Tensor | None, step: int, queries: int = 3
) -> tuple[Figure, str]:
    """Draw the attention maps of a few queries (columns) in every layer (rows), averaged over heads.

    Args:
        weights: attention matrices ``[H, N, N]`` of H heads and N tokens, by layer number. The second axis is the query, and
            the third is the key. Prefix tokens, such as class tokens, come first, followed by the other tokens in raster
            order.
        layouts: arrangement of the tokens in a 2-D grid, by layer number.
        image: image to show in the first column, ``[channels, height, width]`` with values in any range. If it does not have
            three channels, the mean of its channels is shown. None to omit the column.
        step: optimizer step after which the maps were computed.
        queries: number of query tokens, which lie on the diagonal of the grid.

    Returns:
        The figure, and a caption that says what to look for.
    """
    shift = int(image is not None)
    from matplotlib.figure import Figure  # imported only when a picture is drawn

    figure = Figure(figsize=(1.15 * (queries + shift) + 0.6, 1.2 * len(weights) + 0.6), layout="constrained")
    axes = figure.subplots(len(weights), queries + shift, squeeze=False)
    for row, (number, layer) in enumerate(weights.items()):
        prefix, plane = layouts[number].prefix_tokens, layouts[number].grid
        maps = layer.mean(0)[prefix:, prefix:]
        positions = _spread(plane, queries)
        # One scale for all maps of a layer. It includes 0, because weights may be negative.
        low, high = min(0.0, float(maps[positions].min())), float(maps[positions].max())
        if image is not None:
            axes[row, 0].imshow(_to_shown(image), cmap="gray")
        axes[row, 0].set_ylabel(f"layer {number}")
        for column, position in enumerate(positions):
            axis = axes[row, column + shift]
            picture = axis.imshow(maps[position].view(plane), cmap="magma", vmin=low, vmax=high)
            axis.plot(position % plane[1], position // plane[1], "c+", markersize=7)
        figure.colorbar(picture, ax=list(axes[row]), shrink=0.8)
    for axis in axes.flat:
        hide_ticks(axis)
    heads = _heads(next(iter(weights.values())))
    set_title(figure, f"Attention of the query at + at step {step:,}, {heads}")
    return figure, (
        f"Attention of one validation sample at step {step:,}, {heads}. A row is a layer with one color scale, a column a "
        "query at the place of the cross; bright places are those that it reads. Maps that are equal for all queries mean that "
        "the layer averages over the image; a bright area around the cross means that it reads nearby places; an area with the "
        "shape of the object means that it reads by content."
    )


def _spread(plane: tuple[int, ...], queries: int) -> list[int]:
    """Select query tokens spread over the diagonal of a 2-D token grid.

    Args:
        plane: number of rows and number of columns of the grid.
        queries: number of tokens to select.

    Returns:
        Indices of the tokens in raster order.
    """
    high, wide = plane
    # Centers of equal parts of each side, (2 i + 1) / (2 queries).
    steps = [2 * i + 1 for i in range(queries)]
    return [step * high // (2 * queries) * wide + step * wide // (2 * queries) for step in steps]


def draw_frames(
    weights: dict[str, Tensor], layout: BlockLayout, clip: Tensor | None, step: int, frames: int = 5
) -> tuple[Figure, str]:
    """Draw how a query in the middle of a video clip attends to several frames (columns) in every layer (rows).

    Args:
        weights: attention matrices ``[H, N, N]`` of H heads and N tokens, by layer number. The second axis is the query, and
            the third is the key. The matrices are averaged over heads. Prefix tokens, such as class tokens, come first,
            followed by the other tokens in raster order.
        layout: arrangement of the tokens in a grid of frames, rows and columns.
        clip: clip to show above the maps, ``[channels, frames, height, width]``. It may have more frames than the grid. None to
            show only the maps.
        step: optimizer step after which the maps were computed.
        frames: maximum number of frames to draw. They are spread evenly over the clip, and the query lies in the middle one.

    Returns:
        The figure, and a caption that says what to look for.
    """
    prefix, (length, high, wide) = layout.prefix_tokens, layout.grid
    chosen = torch.linspace(0, length - 1, min(frames, length)).round().int().tolist()
    middle, center = chosen[len(chosen) // 2], (high // 2, wide // 2)
    above = int(clip is not None)
    from matplotlib.figure import Figure  # imported only when a picture is drawn

    figure = Figure(figsize=(1.0 * len(chosen) + 0.7, 1.05 * (len(weights) + above) + 0.7), layout="constrained")
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
            picture = axes[row, column].imshow(
                maps[frame], cmap="magma", vmin=min(0.0, float(maps.min())), vmax=float(maps.max())
            )
            if frame == middle:
                axes[row, column].plot(center[1], center[0], "c+", markersize=7)
        figure.colorbar(picture, ax=list(axes[row]), shrink=0.8)
    for axis in axes.flat:
        hide_ticks(axis)
    heads = _heads(next(iter(weights.values())))
    set_title(figure, f"Attention of the query at + at step {step:,}, {heads}")
    return figure, (
        f"Attention of one validation clip at step {step:,}, {heads}. A row is a layer with one color scale; the query is the "
        "cross in the middle frame, and bright places are those that it reads. Bright places in other frames mean that the "
        "layer follows motion; equal frames mean that it averages over time."
    )


def _to_shown(image: Tensor) -> Tensor:
    """Scale the values of an image ``[channels, height, width]`` to the range from 0 to 1, for matplotlib.

    Returns:
        Colors ``[height, width, 3]`` for three channels, otherwise the mean of the channels ``[height, width]``.
    """
    low, high = image.min(), image.max()
    scaled = (image - low) / (high - low).clamp(min=1e-6)
    return scaled.permute(1, 2, 0) if len(image) == 3 else scaled.mean(0)
