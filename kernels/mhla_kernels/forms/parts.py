"""Computation of a few batch rows or heads at a time on a CPU, so that intermediate results fit into its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mhla_kernels.features import FEATURE_MAP_FLOOR
from mhla_kernels.torch_private import has_values, is_traced, relu_gradient

PART = 2 * 2**20
"""Bytes of intermediate results that :func:`in_parts` holds at once, unless one batch row needs more: about a core's cache."""


def in_parts(run: Callable[..., Tensor], tensors: Sequence[Tensor], numbers: int) -> Tensor:
    """Call a function for one part of the batch after another on a CPU, and concatenate the results.

    Parts are chosen such that the intermediate values of one part fit into the cache of a core.

    On other devices, and while a graph is recorded, the function is called once for the complete batch.

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
    """Return the number of batch rows that fit into a part, at least 1.

    Args:
        x: tensor with the dtype of the intermediate values.
        numbers: number of intermediate values of one batch row.
    """
    return max(1, PART // max(1, numbers * x.element_size()))


class RowsAndHeads(NamedTuple):
    """Part of the attention that is computed at once: batch rows with all heads, or some of the heads of one row.

    Attributes:
        rows: slice of the batch.
        heads: slice of the heads.
    """

    rows: slice
    heads: slice

    def of(self, x: Tensor) -> Tensor:
        """Return this part of a tensor ``[B, tokens, H, D]`` as a view ``[heads, rows, tokens, D]``."""
        return x[self.rows, :, self.heads].permute(2, 0, 1, 3)

    def of_heads(self, x: Tensor) -> Tensor:
        """Select the heads of this part from coefficients ``[H, ...]`` with three axes; return others unchanged."""
        return x if x.dim() == 2 else x[self.heads]


def divide_attention(batch: int, heads: int, most: int) -> list[RowsAndHeads]:
    """Divide the batch rows and heads of an attention call into parts. The first part is the largest.

    Args:
        batch: number of batch rows.
        heads: number of heads.
        most: largest number of heads in a part, summed over its batch rows.
    """
    in_part, rows = max(1, min(heads, most)), max(1, min(batch, most // max(1, heads)))
    in_part = -(-heads // max(1, -(-heads // in_part)))  # parts of nearly equal size
    return [
        RowsAndHeads(slice(row, row + rows), slice(head, head + in_part))
        for head in range(0, heads, in_part)
        for row in range(0, batch, rows)
    ]


class Workspace:
    """Memory that all parts of a computation share.

    On a CPU, the first access to newly allocated memory can take longer than a product of matrices that fills it.

    Args:
        like: tensor with the dtype and the device of the memory.
    """

    def __init__(self, like: Tensor) -> None:
        self._like, self._memory = like, dict[str, Tensor]()

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return an uninitialized tensor. It is overwritten by the next one that is taken with this name.

        Args:
            name: name of the memory.
            shape: shape of the tensor.
        """
        size, memory = prod(shape), self._memory.get(name)
        if memory is None or len(memory) < size:
            memory = self._memory[name] = self._like.new_empty(size)
        return memory[:size].view(*shape)

    def features(self, name: str, x: Tensor, relu: bool) -> Tensor:
        """Copy queries or keys, and apply the feature map.

        Args:
            name: name of the memory for the copy.
            x: queries or keys.
            relu: whether the feature map is ``relu(x) + 1e-6``; otherwise, ``x`` has been mapped.
        """
        space = self.take(name, x.shape)
        return torch.clamp_min(x, 0, out=space).add_(FEATURE_MAP_FLOOR) if relu else space.copy_(x)


def write_gradient(target: Tensor, result: Tensor, source: Tensor | None) -> None:
    """Write the gradient of queries, keys or values to a view, after the backward pass of the feature map, if there is one.

    Args:
        target: view that is overwritten.
        result: gradient of the mapped features, or of the values, in the shape of ``target``.
        source: queries or keys before the feature map ``relu(x) + 1e-6``. The gradient is zero where they are at most zero, as
            that of torch's relu; at NaN, it is ``result``. None if there is no feature map.
    """
    if source is None:
        target.copy_(result)
    else:
        relu_gradient(result, source, 0, grad_input=target)


def suits_parts(*tensors: Tensor) -> bool:
    """Return whether attention of these tensors can be computed in parts.

    They must be on a CPU. Tensors inside transformations of ``torch.func``, tensors with tangents of forward-mode
    differentiation and traced tensors are not supported.
    """
    return (
        tensors[0].device.type == "cpu"
        and has_values(*tensors)
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and not any(map(has_tangent, tensors))
    )


def has_tangent(x: Tensor) -> bool:
    """Return whether a tensor carries a tangent of forward-mode differentiation."""
    return forward_ad.unpack_dual(x).tangent is not None
