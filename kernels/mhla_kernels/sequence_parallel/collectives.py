"""The one collective of sequence parallelism: every process gets the shares of all, and gives their gradients back."""

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
    """The shares of all processes one after the other along ``dim``; gradients are summed and scattered back.

    Args:
        share: this process's; it travels in its own dtype.
        dim: along which shares differ in length.
        lengths: lengths of every process's share.
        group: the processes.
        dtype: dtype of what is given back, and in which gradients are summed; None for the share's own.
    """
    longest = max(lengths)
    share = share.movedim(dim, 0)
    padded = F.pad(share, (0, 0) * (share.dim() - 1) + (0, longest - len(share)))
    parts = _Gather.apply(padded, group, dtype or share.dtype)
    if min(lengths) != longest:
        parts = torch.cat([part[:length] for part, length in zip(parts.split(longest), lengths, strict=True)])
    return parts.movedim(0, dim)


class _Gather(torch.autograd.Function):
    """Equal shares of all processes along the first axis."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dtype = group, share.dtype
        every = share.new_empty(dist.get_world_size(group) * share.shape[0], *share.shape[1:])
        dist.all_gather_into_tensor(every, share.contiguous(), group=group)
        return every.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (every,) = gradients
        share = every.new_empty(every.shape[0] // dist.get_world_size(ctx.group), *every.shape[1:])
        dist.reduce_scatter_tensor(share, every.contiguous(), group=ctx.group)
        return share.to(ctx.dtype), None, None
