"""Attention kind of a user: linear attention with a gate for each key, computed from its token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mhla.attention import Attention, AttentionInputs


@dataclass
class ToyOptions:
    """Options of the attention kind.

    Args:
        sharpness: factor on the gate's logits.
    """

    sharpness: float = 1.0


@dataclass(frozen=True)
class ToyState:
    """State for generation: running sums over the keys and values so far."""

    lengths: tuple[int, ...]
    sums: Tensor

    @property
    def bytes(self) -> int:
        return self.sums.numel() * self.sums.element_size()

    def select(self, rows: Tensor) -> ToyState:
        return ToyState(tuple(self.lengths[row] for row in rows.tolist()), self.sums[rows.to(self.sums.device)])


class Toy(Attention, kind="toy"):
    """Attention ``o_t = sum_j w_tj v_j / sum_j w_tj`` with ``w_tj = relu(q_t) . relu(k_j) sigmoid(gate(x_j))``."""

    Options = ToyOptions
    handles = ("key_mask", "cu_seqlens")

    def __init__(self, dim: int, heads: int, *args: Any, **options: Any) -> None:
        super().__init__(dim, heads, *args, **options)
        self.forget = nn.Linear(dim, heads)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        q, k, v = self._operands(inputs)
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
        if inputs.cu_seqlens is not None:
            bounds = torch.as_tensor(inputs.cu_seqlens, device=q.device)
            document = torch.searchsorted(bounds, torch.arange(q.shape[1], device=q.device), right=True)
            scores = scores * (document[:, None] == document)
        if self.causal:
            scores = scores.tril()
        return self._divided(torch.einsum("bhij,bjhd->bihd", scores, v))

    def continue_from(
        self, inputs: AttentionInputs, state: ToyState | None, counts: Sequence[int]
    ) -> tuple[Tensor, ToyState]:
        q, k, v = self._operands(inputs)
        real = torch.arange(q.shape[1], device=q.device) < torch.tensor(counts, device=q.device)[:, None]
        added = torch.einsum("bnhk,bnhv->bnhkv", k * real[..., None, None], v)
        sums = added.cumsum(1) if state is None else state.sums[:, None] + added.cumsum(1)
        lengths = (0,) * len(counts) if state is None else state.lengths
        after = ToyState(tuple(a + b for a, b in zip(lengths, counts, strict=True)), sums[:, -1])
        return self._divided(torch.einsum("bnhk,bnhkv->bnhv", q, sums)), after

    def _operands(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
        gate = torch.sigmoid(self.options.sharpness * self.forget(inputs.x))[..., None]
        if inputs.key_mask is not None:
            gate = gate * inputs.key_mask[..., None, None]
        v = torch.cat([inputs.v, torch.ones_like(inputs.v[..., :1])], -1)
        return inputs.q.relu() + 1e-3, (inputs.k.relu() + 1e-3) * gate, v

    def _divided(self, out: Tensor) -> Tensor:
        return out[..., :-1] / (out[..., -1:] + 1e-6)
