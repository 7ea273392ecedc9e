"""Dense mixing coefficients: one number for each pair of blocks, applied as a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor
from typing_extensions import override

from mhla_kernels.mixing.base import Mixing
from mhla_kernels.mixing.pairs import BlockPairs


@dataclass(frozen=True)
class DenseMixing(Mixing):
    """Mixing coefficients as a matrix, with one number for each pair of blocks.

    The attention functions convert a plain tensor of coefficients to this class.

    Args:
        mixing: floating-point matrix ``[M, M]`` for M blocks, which all heads share, or ``[H, M, M]`` for H heads. In
            cross-attention between Mq query blocks and Mk key blocks, ``[Mq, Mk]`` or ``[H, Mq, Mk]``.
    """

    learned = ("mixing",)
    mixing: Tensor

    def __str__(self) -> str:
        return "dense mixing"

    @property
    @override
    def heads(self) -> int | None:
        return len(self.mixing) if self.mixing.dim() == 3 else None

    @override
    def of_heads(self, heads: slice) -> Self:
        return self._of_first_axis(heads)

    @property
    @override
    def blocks(self) -> int:
        return self.mixing.shape[-1]

    @override
    def check(self, heads: int, causal: bool) -> None:
        matrix = self.mixing
        is_square = matrix.dim() > 1 and matrix.shape[-1] == matrix.shape[-2]
        self._check_shape(heads, is_square, "[M, M] or [H, M, M]")

    def _check_shape(self, heads: int, fits: bool, required: str) -> None:
        matrix = self.mixing
        if not matrix.is_floating_point():
            raise TypeError(f"mixing is {matrix.dtype}; it must be floating point, preferably float32")
        if not fits or matrix.dim() not in (2, 3) or matrix.numel() == 0 or self.heads not in (None, heads):
            raise ValueError(f"mixing has shape {list(matrix.shape)}; it must be {required} with H = {heads}")

    @property
    @override
    def cross_blocks(self) -> tuple[int, int]:
        return self.mixing.shape[-2], self.mixing.shape[-1]

    @override
    def check_cross(self, heads: int) -> None:
        self._check_shape(heads, True, "[Mq, Mk] or [H, Mq, Mk] (query blocks, key blocks)")

    @override
    def cross_matrix(self, pairs: BlockPairs) -> Tensor:
        matrix = self.mixing
        if pairs.query_index is None or pairs.key_index is None:
            return matrix
        rows, columns = (
            index.clamp(max=size - 1)
            for index, size in zip((pairs.query_index, pairs.key_index), self.cross_blocks, strict=True)
        )
        return matrix[..., rows[:, None], columns]

    def matrix(self, blocks: int) -> Tensor:
        """Return the matrix of mixing coefficients, ``[M, M]`` for all heads, or ``[H, M, M]`` for H heads.

        ``blocks`` is ignored, because the matrix has a fixed number of blocks M.
        """
        return self.mixing
