"""Cross-entropy of a linear head without the logits of the whole batch: a slice of the tokens at a time.

torch 2.15 has ``torch.nn.functional.linear_cross_entropy``. It is not used here, since its loss of bfloat16 inputs is rounded
to bfloat16 (off by 0.16 nats in slices and 0.02 without, where this one is off by 1e-5: 512 tokens of width 128, 8,192
words, torch 2.15.0 on a CPU), and it is NaN where no target counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""Target that does not count, as in torch and transformers."""

LOGITS = 1 << 25
"""Logits that are held at a time: 128 MiB in float32."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of ``-log softmax(hidden weight^T)[target]`` over the targets that count.

    The gradients are computed together with the loss, so that no logits have to be kept or computed twice (the idea of
    Liger Kernel's fused linear cross-entropy, arXiv 2410.10989). Products are in the dtype of ``hidden`` (or of autocast),
    the softmax and the sums in float32.

    Args:
        hidden: ``[T, D]``.
        weight: ``[V, D]``.
        targets: ``[T]`` int64; :data:`IGNORED` does not count.

    Returns:
        A float32 scalar; 0 when no target counts.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, *_working_dtype(hidden))


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """``-log softmax(hidden weight^T)[target]`` of each token, 0 where it does not count; no gradient.

    Args:
        hidden: ``[T, D]``.
        weight: ``[V, D]``.
        targets: ``[T]`` int64.

    Returns:
        ``[T]`` float32.
    """
    dtype, device = _working_dtype(hidden)
    losses = torch.zeros(len(targets), dtype=torch.float32, device=hidden.device)
    with torch.autocast(device, enabled=False):
        weight = weight.to(dtype)
        for part in _slices(len(targets), len(weight)):
            logits = (hidden[part].to(dtype) @ weight.T).float()
            losses[part] = torch.nn.functional.cross_entropy(
                logits, targets[part], ignore_index=IGNORED, reduction="none"
            )
    return losses


def _working_dtype(hidden: Tensor) -> tuple[torch.dtype, str]:
    device = hidden.device.type
    return (torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype), device


def _slices(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, LOGITS // vocabulary)
    return [slice(start, start + size) for start in range(0, tokens, size)]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, device: str) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        counted = (targets != IGNORED).sum().clamp(min=1).float()
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        with torch.autocast(device, enabled=False):
            matrix = weight.to(dtype)
            for part in _slices(len(targets), len(weight)):
                x, target = hidden[part].to(dtype), targets[part]
                counts = target != IGNORED
                chosen = torch.where(counts, target, 0)[:, None]
                logits = (x @ matrix.T).float()
                losses = logits.logsumexp(-1) - logits.gather(1, chosen)[:, 0]
                total += torch.where(counts, losses, 0).sum()
                if to_hidden is None and to_weight is None:
                    continue
                slope = logits.softmax(-1)
                slope.scatter_add_(1, chosen, slope.new_full(chosen.shape, -1.0))
                slope = (slope * counts[:, None]).to(
                    dtype
                )  # divided by the number later, where half precision has room
                if to_hidden is not None:
                    to_hidden[part] = slope @ matrix
                if to_weight is not None:
                    to_weight += slope.T @ x
        ctx.save_for_backward(to_hidden, to_weight, counted)
        ctx.weight_dtype = weight.dtype
        return total / counted

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        to_hidden, to_weight, counted = ctx.saved_tensors
        factor = grad[0].float() / counted
        hidden = None if to_hidden is None else (to_hidden * factor).to(to_hidden.dtype)
        weight = None if to_weight is None else (to_weight * factor).to(ctx.weight_dtype)
        return hidden, weight, None, None, None
