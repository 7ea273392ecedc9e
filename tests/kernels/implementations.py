"""All implementations of the operator, on the GPU if there is one. Otherwise Triton's kernels are interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from mhla_kernels import ExponentialMixing, mhla_attention
from mhla_kernels.forms import spanning
from mhla_kernels.triton_backend import config
from toeplitz import Toeplitz
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH = ("torch reference", "torch parallel", "torch chunked", "torch auto")
TRITON = ("triton parallel", "triton chunked")
IMPLEMENTATIONS = (*TORCH, *TRITON)
SPANNING = ("torch spanning", "triton spanning")
"""Implementations for exponential mixing over a sequence of equal blocks."""


def attend(implementation: str, *tensors: Tensor, **options: Any) -> Tensor:
    """Call :func:`mhla_attention` with a backend and form, and return the outputs on the device of the tensors.

    The fourth tensor holds the mixing coefficients. If there is a fifth tensor, the two are amplitude and decay of exponential
    mixing. With ``toeplitz``, the fourth tensor holds the weights of a kind of mixing from outside the package.
    """
    backend, form = implementation.split()
    q, k, v, mixing, *decay = (x.to(DEVICE) for x in tensors)
    moved = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    grid = moved.pop("grid", None)
    coefficients: Any = ExponentialMixing(mixing, decay[0], grid) if decay else mixing
    if moved.pop("toeplitz", False):
        coefficients = Toeplitz(mixing)
    return mhla_attention(q, k, v, coefficients, form=form, backend=backend, **moved).cpu()


SHORT_CHUNKS = {"torch": 24, "triton": 24}
"""Small values for :data:`mhla_kernels.forms.spanning.CHUNK`."""


@contextmanager
def small_tiles() -> Iterator[None]:
    """Use tiles of 16 and pieces of 40 tokens inside a ``with`` block, so that small problems have many of them."""
    tokens = {"rows": 16, "columns": 16, "slice": 16}
    patches = {
        "attend_tiles": lambda dtype, x_width, out_width, whole, chip, **others: config.AttendTiles(
            **tokens, outputs=config.power_of_two(out_width) if whole else 16
        ),
        "pair_tiles": lambda dtype, chip: config.AttendTiles(**tokens),
        "summary_tiles": lambda dtype, key_width, value_width, chip: config.SummaryTiles(tokens=16, keys=16, values=16),
        "mix_tiles": lambda dtype, blocks, chip: config.MixTiles(rows=16, terms=16, columns=32),
        "mixing_gradient_tiles": lambda dtype, blocks, chip: config.MixingGradientTiles(rows=16, columns=32),
        "scan_tiles": lambda terms, sums=1: config.ScanTiles(terms=1 << (terms - 1).bit_length(), columns=32),
        "PIECE": 40,
        "SPLIT": 40,
    }
    with mock.patch.multiple(config, **patches), mock.patch.dict(spanning.CHUNK, SHORT_CHUNKS):
        yield
