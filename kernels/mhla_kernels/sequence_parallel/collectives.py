"""Collective operation that gives every process the tensors of all processes, for sequence parallelism.

The backward pass returns the gradient of each tensor to the process that sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def gather_shares(
    share: Tensor, dim: int, lengths: Sequence[int], group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> Tensor:
    """Gather the tensors of all processes of a group and concatenate them, with support for autograd.

    In the backward pass, gradients are summed over the processes, and each process receives the gradient of its tensor.

    Args:
        share: tensor of this process, of any shape; it is sent in its own dtype.
        dim: axis to concatenate along, the only one whose length may differ between processes.
        lengths: length of this axis in the tensor of each process.
        group: process group.
        dtype: dtype of the result, in which gradients are summed too; None for the dtype of ``share``.

    Returns:
        Tensors of all processes, concatenated in the order of their ranks.
    """
    longest = max(lengths)
    share = share.movedim(dim, 0)
    # all_gather_into_tensor and reduce_scatter_tensor need shares of equal length on all processes
    padded = F.pad(share, (0, 0) * (share.dim() - 1) + (0, longest - len(share)))
    parts = _Gather.apply(padded, group, dtype or share.dtype)
    if min(lengths) != longest:
        parts = torch.cat([part[:length] for part, length in zip(parts.split(longest), lengths, strict=True)])
    return parts.movedim(0, dim)


class _Gather(torch.autograd.Function):
    """Autograd function that gathers tensors of the same shape from all processes of a group, concatenated along axis 0."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dtype = group, share.dtype
        every = share.new_empty(dist.get_world_size(group) * share.shape[0], *share.shape[1:])
        dist.all_gather_into_tensor(every, share.contiguous(), group=group)
        return every.to(dtype)  # after the exchange, so that bfloat16 shares are sent as bfloat16

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (every,) = gradients  # of all shares; this process needs the sum, over the processes, of its own
        share = every.new_empty(every.shape[0] // dist.get_world_size(ctx.group), *every.shape[1:])
        dist.reduce_scatter_tensor(share, every.contiguous(), group=ctx.group)
        return share.to(ctx.dtype), None, None
