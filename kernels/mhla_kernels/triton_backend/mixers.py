"""Launchers of the kernels that mix summaries, by kind of coefficients. A new kind of mixing adds an entry here."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mhla_kernels.mixing import Mixing
from mhla_kernels.triton_backend.call import Call
from mhla_kernels.triton_backend.mix import DenseMixer
from mhla_kernels.triton_backend.scan import ExponentialMixer


class TritonMixer(Protocol):
    """Launchers for one kind of coefficients. ``call.coefficients`` holds the tensors that :meth:`Mixing.fused` returns."""

    def mix(self, call: Call, summary: Tensor, transposed: bool = False) -> Tensor:
        """Mix the summaries of blocks.

        Args:
            call: the call, with the coefficients.
            summary: summaries, ``[B * H, M, W]`` float32.
            transposed: whether to use the transposed coefficients, as for gradients.

        Returns:
            Mixed summaries, ``[B * H, M, W]``.
        """

    def mixing(self, coefficients: list[Tensor]) -> Mixing:
        """Convert the coefficients to the object that the PyTorch forms take."""

    def pairs(self, call: Call) -> tuple[Tensor, int, int, int]:
        """Coefficients of token pairs, and their strides along heads, query blocks and key blocks.

        The parallel form reads m[i, b]. The causal chunked form reads m[i, i].
        """

    def gradients(self, call: Call, d_mixed: Tensor, summary: Tensor) -> list[Tensor]:
        """Gradients of the coefficients through the mixing of summaries.

        Args:
            call: the call, with the coefficients.
            d_mixed: gradient of the mixed summaries, ``[B * H, M, W]`` float32.
            summary: summaries, ``[B * H, M, W]`` float32.

        Returns:
            A gradient ``[B * H, ...]`` for each tensor of coefficients.
        """

    def add_own(self, call: Call, gradients: list[Tensor], own: Tensor) -> None:
        """Add the gradients of m[i, i] through the pairs inside each block to ``gradients``, in place (causal form).

        Args:
            call: the call.
            gradients: result of :meth:`gradients`, changed in place.
            own: gradient of m[i, i] for each block, ``[B * H, M]`` float32.
        """


MIXERS: dict[str, TritonMixer] = {"dense": DenseMixer(), "exponential": ExponentialMixer()}
"""Launchers by the name of their kind, which :meth:`mhla_kernels.mixing.Mixing.fused` returns."""
