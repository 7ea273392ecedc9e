"""Launchers of the Triton kernels that mix block summaries, by kind of mixing coefficients.

To support a new kind of coefficients, add an entry to ``MIXERS``.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mhla_kernels.mixing import Mixing
from mhla_kernels.triton_backend.call import Call
from mhla_kernels.triton_backend.mix import DenseMixer
from mhla_kernels.triton_backend.scan import ExponentialMixer


class TritonMixer(Protocol):
    """Interface to the Triton kernels for one kind of mixing coefficients, the weights in sums of block summaries.

    A block summary is a sum over the tokens of the block, for example of key-value products. Methods with an argument
    ``call`` read the coefficients from its attribute ``coefficients``, a list of tensors that
    :meth:`mhla_kernels.mixing.Mixing.fused` returns.
    """

    def mix(self, call: Call, summary: Tensor, transposed: bool = False) -> Tensor:
        """Compute weighted sums of block summaries, with the mixing coefficients as weights.

        Args:
            call: arguments of the attention operator, which include the coefficients.
            summary: W sums over the tokens of each of M blocks, ``[B * H, M, W]`` float32.
            transposed: whether to use the transposed coefficients, as the backward pass does.

        Returns:
            Mixed summaries, ``[B * H, M, W]`` float32.
        """

    def mixing(self, coefficients: list[Tensor]) -> Mixing:
        """Convert coefficient tensors, as :meth:`Mixing.fused` returns them, to a :class:`Mixing` for PyTorch algorithms."""

    def pairs(self, call: Call) -> tuple[Tensor, int, int, int]:
        """Return a tensor with the coefficients of pairs of blocks, and its strides along heads, query blocks and key blocks.

        A kernel weights the product of a query in block i and a key in block b by the coefficient of (i, b). The parallel form
        of attention does so for all pairs of blocks, the causal chunked form only for ``b = i``.
        """

    def gradients(self, call: Call, d_mixed: Tensor, summary: Tensor) -> list[Tensor]:
        """Compute the gradients of the coefficients with which block summaries are mixed.

        Args:
            call: arguments of the attention operator, which include the coefficients.
            d_mixed: gradient of the mixed summaries, ``[B * H, M, W]`` float32.
            summary: W sums over the tokens of each of M blocks, ``[B * H, M, W]`` float32.

        Returns:
            A list with the gradient of each coefficient tensor, for each batch row and head, ``[B * H, ...]``.
        """

    def add_own(self, call: Call, gradients: list[Tensor], diagonal_gradient: Tensor) -> None:
        """Add gradients of the diagonal coefficients m[i, i] to the gradients of the coefficient tensors, in place.

        Here, m[i, b] is the coefficient of query block i and key block b. Causal attention applies m[i, i] to pairs of tokens
        in block i. The gradients from these pairs are not part of the result of :meth:`gradients`.

        Args:
            call: arguments of the attention operator.
            gradients: result of :meth:`gradients`, changed in place.
            diagonal_gradient: for each block i, the gradient of m[i, i] that comes from these pairs, ``[B * H, M]`` float32.
        """


MIXERS: dict[str, TritonMixer] = {"dense": DenseMixer(), "exponential": ExponentialMixer()}
"""Launchers by the name of their kind, which :meth:`mhla_kernels.mixing.Mixing.fused` returns."""
