"""Mixing coefficients between blocks: the interface :class:`Mixing`, and one file for each class that implements it."""

from torch import Tensor

from mhla_kernels.mixing.base import BlockShares, Mixing, Rows
from mhla_kernels.mixing.dense import DenseMixing
from mhla_kernels.mixing.exponential import ExponentialMixing
from mhla_kernels.mixing.pairs import BlockPairs
from mhla_kernels.mixing.resizing import extend_mixing, resize_mixing

MixingLike = Tensor | Mixing
"""Coefficients that the public functions accept: a tensor of dense coefficients, or a :class:`Mixing`."""


def as_mixing(mixing: MixingLike) -> Mixing:
    """Convert a tensor of mixing coefficients to :class:`DenseMixing`; return a :class:`Mixing` unchanged.

    Raises:
        TypeError: if ``mixing`` is neither a tensor nor a :class:`Mixing`.
    """
    if isinstance(mixing, Mixing):
        return mixing
    if isinstance(mixing, Tensor):
        return DenseMixing(mixing)
    raise TypeError(f"mixing is {type(mixing).__name__}; give a tensor [M, M] or [H, M, M], or a kind of Mixing")


__all__ = [
    "BlockPairs",
    "BlockShares",
    "DenseMixing",
    "ExponentialMixing",
    "Mixing",
    "MixingLike",
    "Rows",
    "as_mixing",
    "extend_mixing",
    "resize_mixing",
]
