"""Independent implementations of the definitions of self-attention and cross-attention, head by head in float64, without code
of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    starts: list[list[int]],
    *,
    causal: bool | str,
    normalize: bool,
    eps: float = 1e-6,
    key_mask: Tensor | None = None,
    constant_normalizer: bool = False,
) -> Tensor:
    """Compute the outputs of MHLA by its definition.

    Args:
        q: queries after the feature map, ``[B, N, H, Dk]``.
        k: keys after the feature map, ``[B, N, H, Dk]``.
        v: values, ``[B, N, H, Dv]``.
        mixing: mixing coefficients, ``[M, M]`` or ``[H, M, M]``.
        starts: for each packed sequence, the index of the first token of each block, and the index after the last token.
        causal: whether attention is causal; ``"block"`` if tokens attend to all of their own block and to earlier blocks.
        normalize: whether weights are divided by their sum.
        eps: term added to the normalizer.
        key_mask: ``[B, N]`` bool, False for masked tokens; None masks no token.
        constant_normalizer: whether to ignore the normalizer in the gradient, to measure how much of the gradient it cancels.

    Returns:
        Outputs ``[B, N, H, Dv]`` float64.
    """
    q, k, v, mixing = (x.double() for x in (q, k, v, mixing))
    batch, tokens, heads, width = q.shape
    mixing = mixing if mixing.dim() == 3 else mixing.expand(heads, -1, -1)
    place = {
        t: (s, b)
        for s, bounds in enumerate(starts)
        for b, (first, last) in enumerate(pairwise(bounds))
        for t in range(first, last)
    }
    owner, block = (torch.tensor(each) for each in zip(*(place[t] for t in range(tokens)), strict=True))
    order = torch.arange(tokens)
    if causal == "block":
        order = block
    visible = (owner[:, None] == owner) & ((order <= order[:, None]) | torch.tensor(not causal))
    coefficient = mixing[:, block][:, :, block] * visible
    rows = []
    for b in range(batch):
        for h in range(heads):
            weight = coefficient[h] * (q[b, :, h] @ k[b, :, h].T)
            value = v[b, :, h]
            if key_mask is not None:
                weight = weight.masked_fill(~key_mask[b][None, :], 0).masked_fill(~key_mask[b][:, None], 0)
                value = value.masked_fill(~key_mask[b][:, None], 0)
            total = weight.sum(-1, keepdim=True) + eps
            weight = weight / (total.detach() if constant_normalizer else total) if normalize else weight * width**-0.5
            rows.append(weight @ value)
    return torch.stack(rows).view(batch, heads, tokens, -1).transpose(1, 2)


def equal_starts(tokens: int, block_size: int) -> list[list[int]]:
    """Return the first tokens of blocks of equal size, of which the last may be shorter, and the end."""
    return [[*range(0, tokens, block_size), tokens]]


def packed_starts(bounds: list[int], block_size: int) -> list[list[int]]:
    """Return the first tokens of blocks that are counted from each packed sequence's first token, and the ends."""
    return [[*range(a, b, block_size), b] for a, b in pairwise(bounds)]


def relative_error(name: str, got: Tensor, want: Tensor, terms: Tensor | None = None) -> float:
    """Return ``||got - want|| / ||want||``, and check that ``got`` is finite and has the shape of ``want``.

    The divisor is a thirtieth of the norm of ``terms`` if that is larger. ``terms`` are the same sums of absolute values: where
    they cancel almost completely, float32 cannot give five correct digits. (For example, a normalized row that sees a single
    block or key does not depend on its weights, so its gradient is nearly zero.)
    """
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} for {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{name} is not finite"
    scale = max(float(want.norm()), 0.0 if terms is None else float(terms.norm()) / 30, 1e-12)
    return float((got.double() - want).norm()) / scale


def exponential_matrix(amplitude: Tensor, decay: Tensor, size: int) -> Tensor:
    """Compute the coefficients of exponential mixing, ``[size, size]`` or ``[H, size, size]``, term by term."""
    distance = torch.tensor([[abs(i - j) for j in range(size)] for i in range(size)], dtype=amplitude.dtype)
    total = torch.zeros((), dtype=amplitude.dtype)
    for a, rate in zip(amplitude.unbind(-1), decay.unbind(-1), strict=True):
        total = total + a[..., None, None] * torch.exp(-rate[..., None, None] * distance)
    return total


def cross_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Callable[[int, int], Tensor],
    query_starts: Sequence[Sequence[int]],
    key_starts: Sequence[Sequence[int]],
    *,
    scale: float | None,
    eps: float = 1e-6,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    constant_normalizer: bool = False,
) -> Tensor:
    """Compute the outputs of cross-attention by its definition, sequence by sequence, block by block.

    Args:
        q: queries after the feature map, ``[B, Nq, H, Dk]``.
        k: keys after the feature map, ``[B, Nk, Hkv, Dk]``.
        v: values, ``[B, Nk, Hkv, Dv]``.
        coefficients: function that returns the coefficients ``[H, Mq, Mk]`` of a sequence with Mq and Mk blocks.
        query_starts: for each packed sequence, the first query of each block, and the end.
        key_starts: for each packed sequence, the first key of each block, and the end.
        scale: factor on the outputs; None if weights are divided by their sum.
        eps: term added to the normalizer.
        query_mask: ``[B, Nq]`` bool, False for masked queries; None masks no query.
        key_mask: ``[B, Nk]`` bool, False for masked keys; None masks no key.
        constant_normalizer: whether to ignore the normalizer in the gradient, to measure how much of the gradient it cancels.

    Returns:
        Outputs ``[B, Nq, H, Dv]`` float64.
    """
    q, k, v = (x.double() for x in (q, k, v))
    heads, shared = q.shape[2], k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    # adds zero, so that a call whose sequences have no keys still depends on its tensors
    out = out + 0 * (q.sum() + k.sum() + v.sum() + coefficients(1, 1).sum())
    rows = []
    for b in range(q.shape[0]):
        for h in range(heads):
            head = out[b, :, h].clone()
            for queries, keys in zip(query_starts, key_starts, strict=True):
                if len(queries) < 2 or len(keys) < 2:
                    continue
                m = coefficients(len(queries) - 1, len(keys) - 1)[h].double()
                here = slice(keys[0], keys[-1])
                key, value = k[b, here, h * shared // heads], v[b, here, h * shared // heads]
                columns = torch.cat([m[:, i : i + 1].expand(-1, d - c) for i, (c, d) in enumerate(pairwise(keys))], 1)
                if key_mask is not None:
                    shown = key_mask[b, here]
                    columns, value = columns * shown, value.masked_fill(~shown[:, None], 0)
                    key = key.masked_fill(~shown[:, None], 0)
                for i, (first, last) in enumerate(pairwise(queries)):
                    weight = columns[i] * (q[b, first:last, h] @ key.T)
                    total = weight.sum(-1, keepdim=True) + eps
                    factor = scale if scale is not None else 1 / (total.detach() if constant_normalizer else total)
                    head[first:last] = (weight * factor) @ value
            rows.append(head if query_mask is None else head.masked_fill(~query_mask[b, :, None], 0))
    return torch.stack(rows).view(q.shape[0], heads, *rows[0].shape).transpose(1, 2) if rows else out


def exponential_cross_matrix(amplitude: Tensor, decay: Tensor, rows: int, columns: int) -> Tensor:
    """Compute the coefficients between the blocks of two sequences on one axis, one by one, ``[H, rows, columns]``.

    The distance is that between the centers of the blocks, in blocks of the keys.
    """
    total = []
    for i in range(rows):
        for j in range(columns):
            distance = abs((i + 0.5) * columns / rows - (j + 0.5))
            total.append((amplitude * torch.exp(-decay * distance)).sum(-1))
    return torch.stack(total, -1).view(*amplitude.shape[:-1], rows, columns)


def gradients(run: Any, tensors: tuple[Tensor, ...], cotangent: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of ``run`` and the gradients of its tensors."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = run(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, cotangent.to(out.dtype))


def sums_of_magnitudes(want: Any, tensors: tuple[Tensor, ...], cotangent: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs and gradients of ``want`` with all terms positive, divided by the same normalizers."""
    magnitudes = tuple(x.abs() for x in tensors)
    out, terms = gradients(lambda *x: want(*x, constant_normalizer=True), magnitudes, cotangent.abs())
    return out, *terms
