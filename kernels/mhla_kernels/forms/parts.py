"""Computation of a few batch rows at a time on a CPU, so that intermediate results fit into its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mhla_kernels.torch_private import is_traced

PART = 2 * 2**20
"""Bytes of intermediate results that :func:`in_parts` holds at once, unless one batch row needs more: about a core's cache."""


def in_parts(run: Callable[..., Tensor], tensors: Sequence[Tensor], numbers: int) -> Tensor:
    """Call a function for a few batch rows at a time on a CPU, and concatenate the results.

    The number of rows is chosen so that their intermediate values fit into the cache of a core. On other devices, and while a
    graph is recorded, the function is called once for the complete batch.

    Args:
        run: function of the tensors, whose result has the batch as axis 0.
        tensors: tensors ``[B, ...]``; the first one gives the dtype in which ``run`` computes.
        numbers: number of intermediate values that ``run`` holds for one batch row, which determines the size of a part.
    """
    first = tensors[0]
    if first.device.type != "cpu" or is_traced() or torch.jit.is_tracing() or len(first) == 1:  # type: ignore[attr-defined]
        return run(*tensors)
    count = rows_in_part(first, numbers)
    return torch.cat([run(*part) for part in zip(*(x.split(count) for x in tensors), strict=True)])


def rows_in_part(x: Tensor, numbers: int) -> int:
    """Return the number of batch rows whose intermediate values fit into 2 MiB (about a core's cache), at least 1.

    Args:
        x: tensor with the dtype of the intermediate values.
        numbers: number of intermediate values of one batch row.
    """
    return max(1, PART // max(1, numbers * x.element_size()))
