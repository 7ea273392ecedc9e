"""Kernels that mix summaries, by the kind of coefficients: a new kind of mixing adds an entry here."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mhla_kernels.mixing import Mixing
from mhla_kernels.triton_backend.call import Call
from mhla_kernels.triton_backend.mix import DenseMixer
from mhla_kernels.triton_backend.scan import ExponentialMixer


class TritonMixer(Protocol):
    """Launchers for one kind of coefficients; ``call.coefficients`` are the tensors of :meth:`Mixing.fused`."""

    def mix(self, call: Call, summary: Tensor, transposed: bool = False) -> Tensor:
        """Mixed summaries, of the shape ``[B * H, M, W]`` of ``summary``; with the transposed coefficients if asked."""

    def mixing(self, coefficients: list[Tensor]) -> Mixing:
        """The coefficients as the PyTorch forms take them."""

    def pairs(self, call: Call) -> tuple[Tensor, int, int, int]:
        """Coefficients for token pairs, with strides along heads, query blocks and key blocks.

        The parallel form reads m[i, b], the causal chunked form m[i, i].
        """

    def gradients(self, call: Call, d_mixed: Tensor, summary: Tensor) -> list[Tensor]:
        """Gradients of the coefficients, ``[B * H, ...]`` each, by the mixing of summaries.

        Args:
            call: with the coefficients.
            d_mixed: gradient of the mixed summaries.
            summary: summaries.
        """

    def add_own(self, call: Call, gradients: list[Tensor], own: Tensor) -> None:
        """Add the gradients of m[i, i] of every block ``[B * H, M]``, by the pairs inside it, in place: causal."""


MIXERS: dict[str, TritonMixer] = {"dense": DenseMixer(), "exponential": ExponentialMixer()}
"""By the name that :meth:`mhla_kernels.mixing.Mixing.fused` gives."""
