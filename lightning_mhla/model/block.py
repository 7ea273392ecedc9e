"""A layer of the backbone: attention and an MLP, each behind a norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from timm.layers import DropPath, Mlp, SwiGLU
from torch import Tensor, nn

from lightning_mhla.attention import AttentionConfig, build_attention
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.positions import Rotary
from lightning_mhla.attention.sequence import SequenceShare

NormKind = Literal["layernorm", "rmsnorm"]
MlpKind = Literal["gelu", "gelu_tanh", "swiglu"]

MLPS: dict[MlpKind, Callable[..., nn.Module]] = {
    "gelu": Mlp,
    "gelu_tanh": partial(Mlp, act_layer=partial(nn.GELU, approximate="tanh")),
    "swiglu": SwiGLU,
}


def make_norm(kind: NormKind, dim: int, affine: bool = True, eps: float = 1e-6) -> nn.Module:
    """Normalisation over the last axis of width ``dim``."""
    if kind == "layernorm":
        return nn.LayerNorm(dim, eps=eps, elementwise_affine=affine)
    if kind == "rmsnorm":
        return nn.RMSNorm(dim, eps=eps, elementwise_affine=affine)
    raise ValueError(f"norm={kind!r} is not one of 'layernorm', 'rmsnorm'")


def _keep(kept: tuple[Tensor, ...] | None, branch: int, x: Tensor) -> Tensor:
    return x if kept is None else x * kept[branch]


class Block(nn.Module):
    """Self-attention, optional cross-attention, and an MLP, each behind a norm and added to the stream.

    Args:
        dim: width of the tokens.
        heads: attention heads.
        layout: token grid and blocks.
        attention: the self-attention.
        mlp_ratio: inner width of the MLP over ``dim``.
        mlp: ``"gelu"``, ``"gelu_tanh"`` (its approximation) or ``"swiglu"``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        mlp_norm_eps: epsilon of the norm before the MLP.
        drop_path: probability that a sample skips a branch while training (stochastic depth).
        condition_dim: width of a conditioning vector that shifts, scales and gates the branches (adaLN-Zero, DiT,
            arXiv 2212.09748); None for none. The branches start switched off.
        context_dim: width of the tokens that cross-attention attends to; None for no cross-attention.
        causal: whether the self-attention is causal.
        bias: whether the linear layers of attention and MLP have a bias.
        key_value_heads: see :class:`lightning_mhla.attention.Attention`, like the two that follow.
        key_width: see there.
        value_width: see there.
        block_ordered: see there.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        layout: BlockLayout,
        attention: AttentionConfig,
        *,
        mlp_ratio: float = 4.0,
        mlp: MlpKind = "gelu",
        norm: NormKind = "layernorm",
        mlp_norm_eps: float = 1e-6,
        drop_path: float = 0.0,
        condition_dim: int | None = None,
        context_dim: int | None = None,
        causal: bool = False,
        bias: bool = True,
        key_value_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        block_ordered: bool = True,
    ) -> None:
        super().__init__()
        affine = condition_dim is None
        self.norm1 = make_norm(norm, dim, affine)
        self.attn = build_attention(
            attention,
            dim,
            heads,
            layout,
            causal=causal,
            bias=bias,
            block_ordered=block_ordered,
            key_value_heads=key_value_heads,
            key_width=key_width,
            value_width=value_width,
        )
        self.norm2 = make_norm(norm, dim, affine, mlp_norm_eps)
        self.mlp = MLPS[mlp](dim, round(dim * mlp_ratio), bias=bias)
        self.drop_path = DropPath(drop_path)
        self.drops = drop_path > 0
        self.norm_context: nn.Module | None = None
        self.cross: nn.MultiheadAttention | None = None
        if context_dim is not None:
            self.norm_context = make_norm(norm, dim)
            self.cross = nn.MultiheadAttention(dim, heads, kdim=context_dim, vdim=context_dim, batch_first=True)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(condition_dim, 6 * dim)) if condition_dim else None

    def forward(
        self,
        x: Tensor,
        condition: Tensor | None = None,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary: Rotary | None = None,
        cu_seqlens: Sequence[int] | None = None,
        share: SequenceShare | None = None,
        kept: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """Tokens ``[B, N, dim]`` to the same shape, in block order where ``block_ordered``.

        Args:
            x: tokens.
            condition: ``[B, condition_dim]``, with ``condition_dim``.
            context: ``[B, L, context_dim]``, with ``context_dim``.
            key_mask: ``[B, N]`` bool, False tokens are not attended to.
            context_mask: ``[B, L]`` bool, False tokens of the context are not attended to.
            rotary: see :meth:`lightning_mhla.attention.Attention.forward`.
            cu_seqlens: see there.
            share: see there.
            kept: what :meth:`draw_kept` gave, where that is called outside of what is compiled or recomputed.
        """
        if kept is None:
            kept = self.draw_kept(x)
        options = {"rotary": rotary, "cu_seqlens": cu_seqlens, "share": share}
        if self.modulation is None:
            x = x + _keep(kept, 0, self.attn(self.norm1(x), key_mask, **options))
            x = self._look_at(x, context, context_mask, kept)
            return x + _keep(kept, -1, self.mlp(self.norm2(x)))
        assert condition is not None, "a block with condition_dim needs a condition"
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + _keep(kept, 0, gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1, key_mask, **options))
        x = self._look_at(x, context, context_mask, kept)
        return x + _keep(kept, -1, gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2))

    def draw_kept(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Factors ``[B, 1, 1]`` of the branches, 0 for the samples that skip one; None where none does."""
        if not (self.training and self.drops):
            return None
        ones = x.new_ones(len(x), 1, 1)
        return tuple(self.drop_path(ones) for _ in range(2 if self.cross is None else 3))

    def next_tokens(self, x: Tensor, state: Any, counts: Sequence[int], rotary: Rotary | None) -> tuple[Tensor, Any]:
        """The next tokens ``[B, N, dim]`` of every row, and the state after them; see :meth:`Attention.next_tokens`."""
        assert self.modulation is None
        assert self.cross is None
        out, state = self.attn.next_tokens(self.norm1(x), state, counts, rotary)
        x = x + out
        return x + self.mlp(self.norm2(x)), state

    def _look_at(
        self, x: Tensor, context: Tensor | None, context_mask: Tensor | None, kept: tuple[Tensor, ...] | None
    ) -> Tensor:
        if self.cross is None or self.norm_context is None:
            return x
        assert context is not None, "a block with context_dim needs a context"
        hidden = None if context_mask is None else ~context_mask
        seen, _ = self.cross(self.norm_context(x), context, context, key_padding_mask=hidden, need_weights=False)
        return x + _keep(kept, 1, seen)
