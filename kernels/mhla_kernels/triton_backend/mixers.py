"""Launchers of the kernels that mix summaries, by kind of coefficients. A new kind of mixing adds an entry here."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mhla_kernels.mixing import Mixing
from mhla_kernels.triton_backend.call import Call
from mhla_kernels.triton_backend.mix import DenseMixer
from mhla_kernels.triton_backend.scan import ExponentialMixer


class TritonMixer(Protocol):
    """Interface to the Triton kernels for one kind of mixing coefficients.

    ``call.coefficients`` holds the tensors that :meth:`mhla_kernels.mixing.Mixing.fused` returns.
    """

    def mix(self, call: Call, summary: Tensor, transposed: bool = False) -> Tensor:
        """Mix block summaries by the coefficients of a call.

        Args:
            call: arguments and tables of the operator's call, including the coefficients.
            summary: summaries of M blocks with W numbers each, ``[B * H, M, W]`` float32.
            transposed: whether to use the transposed coefficients, as the backward pass does.

        Returns:
            Mixed summaries, ``[B * H, M, W]``.
        """

    def mixing(self, coefficients: list[Tensor]) -> Mixing:
        """Convert the coefficient tensors to the subclass of :class:`Mixing` that the PyTorch forms take."""

    def pairs(self, call: Call) -> tuple[Tensor, int, int, int]:
        """Return the coefficients that kernels apply to pairs of tokens, and their strides.

        The three strides are those along heads, query blocks and key blocks.

        The parallel form reads m[i, b] for all pairs of blocks. The causal chunked form reads m[i, i] only.
        """

    def gradients(self, call: Call, d_mixed: Tensor, summary: Tensor) -> list[Tensor]:
        """Compute the gradients of the coefficients through the mixing of summaries.

        Args:
            call: arguments and tables of the operator's call, including the coefficients.
            d_mixed: gradient of the mixed summaries, ``[B * H, M, W]`` float32.
            summary: summaries of the blocks, ``[B * H, M, W]`` float32.

        Returns:
            Gradient of each tensor of coefficients, ``[B * H, ...]``.
        """

    def add_own(self, call: Call, gradients: list[Tensor], diagonal_gradient: Tensor) -> None:
        """Add gradients of the diagonal coefficients m[i, i] to the gradients of the coefficient tensors, in place.

        Causal attention applies m[i, i] to pairs of tokens in block i, so these gradients do not arise from mixed summaries.

        Args:
            call: arguments and tables of the operator's call.
            gradients: result of :meth:`gradients`, changed in place.
            diagonal_gradient: gradient of m[i, i] for each block i from pairs of tokens, ``[B * H, M]`` float32.
        """


MIXERS: dict[str, TritonMixer] = {"dense": DenseMixer(), "exponential": ExponentialMixer()}
"""Launchers by the name of their kind, which :meth:`mhla_kernels.mixing.Mixing.fused` returns."""
