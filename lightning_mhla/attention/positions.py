"""Rotary position embedding: token positions, rotary angles, and the objects that compute the angles of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from mhla_kernels import rotary_features
from mhla_kernels.blocks import is_dynamic, on_device
from mhla_kernels.checks import as_integers, check_integers
from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention.layout import BlockLayout, LayoutTables, Placement
from lightning_mhla.attention.sequence import SequenceShare


class Rotary(NamedTuple):
    """Cosines and sines of the angles by which rotary position embedding rotates queries and keys.

    Attributes:
        cos: cosines, ``[N, D / 2]`` or ``[B, N, D / 2]``, for N tokens and D features of a head.
        sin: sines, in the same shape.
        interleaved: whether features 2i and 2i + 1 are rotated as a pair; otherwise, features i and i + D / 2 are.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def turn(self, x: Tensor, feature_map: Literal["identity", "relu"] = "identity") -> Tensor:
        """Apply a feature map to queries or keys ``[B, N, H, D]``, rotate them by the angles, and return the result.

        The feature map ``"relu"`` is ``relu(x) + 1e-6``.
        """
        return rotary_features(x, self.cos, self.sin, feature_map=feature_map, interleaved=self.interleaved)

    def select(self, order: Tensor) -> Rotary:
        """Return the angles of the tokens with indices ``order``, ``[N]``, in that order."""
        return Rotary(self.cos.index_select(-2, order), self.sin.index_select(-2, order), self.interleaved)


def rotary_frequencies(width: int, base: float, device: torch.device | str = "cpu") -> Tensor:
    """Return the angle in radians by which each pair of a head's features is rotated per token.

    The angle of pair i is ``base^(-2 i / width)``.

    Args:
        width: number of features of a head, even.
        base: base of the geometric series of frequencies.
        device: device of the result.

    Returns:
        Angles, ``[width / 2]`` float64.
    """
    return base ** -(torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)


def rotary_angles(positions: Tensor, width: int, base: float = 10_000.0) -> Rotary:
    """Compute the rotary angles of tokens from their positions (RoFormer, arXiv 2104.09864, equation 15).

    Features i and i + D / 2 of a head are rotated as a pair, by ``position * base^(-2 i / D)`` radians.

    Args:
        positions: positions of the tokens, ``[N]`` or ``[B, N]`` integers.
        width: number of features of a head, D, even.
        base: base of the geometric series of frequencies.

    Returns:
        Cosines and sines, ``[..., N, D / 2]`` float32.
    """
    device = positions.device
    if device.type == "mps":  # has no float64, which far positions need
        positions = positions.cpu()
    angles = positions.double()[..., None] * rotary_frequencies(width, base, positions.device)
    return Rotary(angles.cos().float().to(device), angles.sin().float().to(device))


def grid_angles(grid: tuple[int, int], width: int, base: float = 10_000.0) -> Rotary:
    """Compute the rotary angles of the tokens of an image.

    The first half of a head's features encodes the row, the second half the column. Each half has n = D / 4 pairs of
    features. Pair i is rotated by ``position * base^(-i / (n - 1))`` radians, as in the code of RAVLT (arXiv 2411.07635). The
    frequencies range from 1 to ``1 / base``, both included. Features 2i and 2i + 1 form a pair.

    Args:
        grid: number of rows and number of columns of tokens.
        width: number of features of a head, D, a multiple of 4.
        base: base of the geometric series of frequencies.

    Returns:
        Cosines and sines, ``[N, D / 2]`` float32 on the CPU, with tokens in raster order.

    Raises:
        ValueError: if the width is not a multiple of 4.
    """
    if width % 4:
        raise ValueError(f"rotary positions in images need a head width divisible by 4, not {width}")
    frequencies = base ** -torch.linspace(0, 1, width // 4, dtype=torch.float64, device="cpu")
    rows, columns = (torch.arange(length, dtype=torch.float64, device="cpu") for length in grid)
    by_row, by_column = (torch.outer(places, frequencies) for places in (rows, columns))
    # [N, D / 2] in raster order, in which the row changes slowest.
    angles = torch.cat([by_row.repeat_interleave(grid[1], 0), by_column.repeat(grid[0], 1)], -1)
    return Rotary(angles.cos().float(), angles.sin().float(), interleaved=True)


def sequence_positions(x: Tensor, cu_seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
    """Compute the position of each token in its sequence, counted from 0.

    Args:
        x: tokens ``[B, N, ...]``.
        cu_seqlens: ``[S + 1]``, index of the first token of each of the S sequences packed into a row, followed by N; None for
            one sequence in each row.

    Returns:
        Positions, ``[N]`` int64.

    Raises:
        ValueError: if ``cu_seqlens`` is neither a 1-D integer tensor nor a sequence of at least two integers. The values of a
            tensor are not checked.
    """
    position = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return position
    if not isinstance(cu_seqlens, Tensor):
        cu_seqlens = torch.tensor(as_integers(cu_seqlens, "cu_seqlens"))
    check_integers(cu_seqlens, "cu_seqlens")
    bounds = cu_seqlens.to(x.device)
    # With `right`, a token at a bound belongs to the sequence that begins there.
    return position - bounds[torch.searchsorted(bounds, position, right=True) - 1]


def next_positions(lengths: Sequence[int], x: Tensor) -> Tensor:
    """Compute the positions of new tokens that follow the previous tokens of each row.

    Args:
        lengths: number of previous tokens in each row; empty if there are none.
        x: new tokens ``[B, N, dim]``.

    Returns:
        Positions, int64: ``[N]`` if all rows have the same number of previous tokens, otherwise ``[B, N]``.
    """
    position = torch.arange(x.shape[1], device=x.device)
    if len(set(lengths)) < 2:
        return position + max(lengths, default=0)
    return position + torch.tensor(lengths, device=x.device)[:, None]


@dataclass(frozen=True)
class PositionLimit:
    """Limit on rotary positions, beyond which queries and keys are rotated back to the last position within the limit.

    A model that was trained on texts of up to L tokens has never seen a query or key at a later position, or a token at a
    larger distance. StreamingLLM (arXiv 2309.17453, section 3.2) counts positions within its cache for the same reason.

    Attributes:
        frequencies: function that returns the angle in radians by which each pair of features is rotated per token,
            ``[D' / 2]``, where D' is the number of rotated features of a head. Features i and i + D' / 2 are a pair; features
            from D' on are not rotated.
        tokens: the limit L, in tokens. The last position is L - 1.
    """

    frequencies: Callable[[], Tensor]
    tokens: int

    def apply(
        self, *tensors: Tensor, lengths: Sequence[int] = (), cu_seqlens: Tensor | Sequence[int] | None = None
    ) -> tuple[Tensor, ...]:
        """Rotate queries or keys at positions beyond the limit back to the last position within it.

        Args:
            *tensors: queries or keys after rotary embedding, ``[B, N, H, D]`` each.
            lengths: number of previous tokens in each row; empty if there are none.
            cu_seqlens: index of the first token of each sequence packed into a row, followed by N; None for one sequence in
                each row.

        Returns:
            The rotated tensors; the given tensors themselves if no token is beyond the limit.
        """
        x = tensors[0]
        ends = [length + x.shape[1] for length in lengths or (0,)]
        if not any(is_dynamic(end) or end > self.tokens for end in ends):
            return tensors
        positions = sequence_positions(x, cu_seqlens)
        if lengths:  # not by their largest, or as a set: a compiled step would be compiled again for each length
            positions = positions + on_device(lengths, x.device)[:, None]
        # 0 within the limit and negative beyond it. Rotations add up, so the result is that of position `tokens - 1`.
        back = (self.tokens - 1 - positions).clamp(max=0)
        angles = back.to(torch.float32)[..., None] * self.frequencies().float().to(x.device)
        rotary, width = Rotary(angles.cos(), angles.sin()), 2 * angles.shape[-1]
        return tuple(torch.cat([rotary.turn(x[..., :width]), x[..., width:]], -1) for x in tensors)


@dataclass(frozen=True)
class SequenceRotary:
    """Source of a layer's rotary angles for sequences.

    Angles that the caller provides take precedence. Without them, angles are computed from the positions of the tokens.

    Attributes:
        width: width of a key.
        base: base of the geometric series of frequencies.
    """

    width: int
    base: float

    def angles(self, positions: Tensor) -> Rotary:
        """Compute the rotary angles of tokens from their positions, ``[N]`` or ``[B, N]``."""
        return rotary_angles(positions, self.width, self.base)

    def frequencies(self) -> Tensor:
        """Return the angle per token of each pair of features, ``[width / 2]`` float64 on the CPU, in radians."""
        return rotary_frequencies(self.width, self.base)

    def of_tokens(
        self,
        x: Tensor,
        rotary: Rotary | None,
        order: Tensor | None,
        cu_seqlens: Sequence[int] | None = None,
        share: SequenceShare | None = None,
    ) -> Rotary:
        """Return the rotary angles of the tokens ``x``, in the order of ``x``.

        Args:
            x: tokens ``[B, N, dim]``, in the order in which attention processes them.
            rotary: angles from the caller, in the order of the layer's input; None to compute them from positions counted from
                0.
            order: ``[N]``, index in the layer's input of each token of ``x``; None if the orders are equal.
            cu_seqlens: index of the first token of each packed sequence, followed by N; None for one sequence in each row.
            share: part of each sequence that this process holds; None for complete sequences.
        """
        if rotary is not None:
            return rotary if order is None else rotary.select(order)
        start = 0 if share is None else share.start
        return self.angles(start + sequence_positions(x, cu_seqlens))


class GridRotary(LayoutTables):
    """Source of a layer's rotary angles for images, in which the angles of a token depend on its row and column.

    Call :meth:`fit` before the first use.

    Args:
        width: width of a key, a multiple of 4.
        base: base of the geometric series of frequencies.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.width, self.base = width, base
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)

    def fit(self, layout: BlockLayout, device: torch.device | None = None) -> None:
        """Compute and store the rotary angles of all tokens of a 2-D layout, in the block order of this layout.

        Args:
            layout: token grid and its partition into blocks.
            device: device of the angles; None for the CPU.
        """
        self.layout = layout
        for name, values in self.tables().items():
            setattr(self, name, values.to(device))

    @override
    def tables(self) -> dict[str, Tensor]:
        height, width = self.layout.grid
        angles = grid_angles((height, width), self.width, self.base).select(self.layout.order)
        return {"cos": angles.cos, "sin": angles.sin}

    def of_tokens(self, x: Tensor, *others: Any) -> Rotary:
        """Return the rotary angles of all tokens of the layout, in its block order.

        Args:
            x: tokens; the angles are moved to their device.
            *others: ignored; accepted so that callers can pass the arguments of :meth:`SequenceRotary.of_tokens`.
        """
        cos, sin = self.cos.to(x.device), self.sin.to(x.device)  # the tables of a model on the meta device are real
        return Rotary(cos, sin, interleaved=True)

    def of_placement(self, placement: Placement, device: torch.device) -> Rotary:
        """Compute the rotary angles of a 2-D layout that is used for one call only, with tokens in the order of ``placement``.

        Args:
            placement: the layout, and the permutation of its tokens into the order in which attention processes them.
            device: device of the angles.
        """
        height, width = placement.layout.grid
        angles = grid_angles((height, width), self.width, self.base)
        angles = angles._replace(cos=angles.cos.to(device), sin=angles.sin.to(device))
        return angles if placement.order is None else angles.select(placement.order)


def build_rotary(layout: BlockLayout, width: int, base: float, projections: bool = True) -> SequenceRotary | GridRotary:
    """Build the object that computes a layer's rotary angles, for a sequence or an image.

    Args:
        layout: token grid of the layer.
        width: width of a key.
        base: base of the geometric series of frequencies.
        projections: whether the layer has its own projections to queries, keys and values. If not, the module that provides
            them also provides the angles.

    Returns:
        :class:`SequenceRotary` for a 1-D grid or a layer without its own projections; otherwise, :class:`GridRotary`.

    Raises:
        ValueError: if a layer with its own projections has keys of odd width, prefix tokens, or a grid with three axes.
    """
    if not projections:
        return SequenceRotary(width, base)
    if width % 2:
        raise ValueError(f"rotary positions need an even head width, not {width}; set key_width, or rotary: false")
    if len(layout.grid) > 2 or layout.prefix_tokens:
        raise ValueError(f"rotary positions are those of a 1-D or 2-D grid without prefix tokens, not of {layout}")
    return SequenceRotary(width, base) if len(layout.grid) == 1 else GridRotary(width, base)
