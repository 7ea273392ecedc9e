"""Transformer block of the backbone, which consists of attention and an MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from timm.layers import DropPath, Mlp, SwiGLU
from torch import Tensor, nn

from lightning_mhla.attention import AttentionConfig, build_attention
from lightning_mhla.attention.config import Causal
from lightning_mhla.attention.inputs import check_mask
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.attention.lepe import hide_rows
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
    """Create a normalization layer over the last axis, of width ``dim``.

    Args:
        kind: ``"layernorm"`` or ``"rmsnorm"``.
        dim: width of the axis.
        affine: whether the layer has learned factors and, for LayerNorm, learned offsets.
        eps: number added to the variance (LayerNorm) or to the mean square (RMSNorm).

    Raises:
        ValueError: if ``kind`` is unknown.
    """
    if kind == "layernorm":
        return nn.LayerNorm(dim, eps=eps, elementwise_affine=affine)
    if kind == "rmsnorm":
        return nn.RMSNorm(dim, eps=eps, elementwise_affine=affine)
    raise ValueError(f"norm={kind!r} is not one of 'layernorm', 'rmsnorm'")


def _keep(factors: tuple[Tensor, ...] | None, branch: int, x: Tensor) -> Tensor:
    return x if factors is None else x * factors[branch]


class Block(nn.Module):
    """Transformer block with self-attention, optional cross-attention and an MLP, each with a norm and a residual connection.

    Args:
        dim: width of the tokens.
        heads: number of attention heads.
        layout: token grid and its partition into attention blocks, which are groups of tokens.
        attention: configuration of the self-attention.
        mlp_ratio: inner width of the MLP divided by ``dim``.
        mlp: ``"gelu"``, ``"gelu_tanh"`` (its tanh approximation) or ``"swiglu"``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        mlp_norm_eps: epsilon of the norm before the MLP.
        drop_path: probability that a sample skips a residual branch while training (stochastic depth).
        condition_dim: width of a conditioning vector that shifts, scales and gates attention and MLP (adaLN-Zero, DiT,
            arXiv 2212.09748); None for no conditioning. The gates start at zero.
        context_dim: width of the tokens that cross-attention attends to; None for no cross-attention.
        causal: True if the self-attention is causal; ``"block"`` if each token attends to all tokens of its own attention
            block and of earlier ones; False if each token attends to all tokens.
        bias: whether the linear layers of attention and MLP have a bias.
        key_value_heads: number of key and value heads, a divisor of ``heads``; None for ``heads``.
        key_width: width of a key; None for ``dim // heads``.
        value_width: width of a value; None for ``dim // heads``.
        block_ordered: whether tokens come in block order, in which the tokens of each attention block are contiguous, instead
            of raster order.

    Raises:
        ValueError: if ``mlp`` or ``norm`` is unknown, or if the attention does not support the layout or the widths.
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
        causal: Causal = False,
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
        if mlp not in MLPS:
            raise ValueError(f"mlp={mlp!r} is not one of {', '.join(map(repr, MLPS))}")
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
        branch_factors: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """Apply self-attention, cross-attention (if the block has it) and the MLP to a batch of tokens.

        Args:
            x: tokens, ``[B, N, dim]``, in block order if ``block_ordered``.
            condition: conditioning vectors, ``[B, condition_dim]``; required with ``condition_dim``.
            context: tokens for cross-attention, ``[B, L, context_dim]``; required with ``context_dim``.
            key_mask: ``[B, N]`` bool, True for tokens that may be attended to; None if all may be.
            context_mask: ``[B, L]`` bool, True for context tokens that may be attended to; None if all may be.
            rotary: rotary angles of the tokens; None to let the attention compute them if its configuration uses a rotary
                embedding.
            cu_seqlens: index of the first token of each sequence packed into the row (B = 1), followed by N; causal attention
                only. None if each row is one sequence.
            share: part of each sequence that this process holds, if sequences are distributed over processes; None for complete
                sequences.
            branch_factors: stochastic-depth factors from :meth:`draw_kept`, if the caller draws them outside of a compiled or
                recomputed block; None to draw them here.

        Returns:
            Output tokens, ``[B, N, dim]``, in the order of ``x``.

        Raises:
            ValueError: if ``condition`` is missing in a block with ``condition_dim``, or is passed to a block without it. The
                same holds for ``context`` and ``context_dim``.
        """
        for name, value, part in (("condition", condition, self.modulation), ("context", context, self.cross)):
            if (value is None) != (part is None):
                problem = "is missing" if value is None else "has no effect without this option"
                raise ValueError(f"{name} is for blocks that are built with {name}_dim, and {problem}")
        if context is not None:
            check_mask("context_mask", context_mask, context)
            context = hide_rows(context, context_mask)  # 0 * NaN of a hidden token would be NaN
        if branch_factors is None:
            branch_factors = self.draw_kept(x)
        options = {"rotary": rotary, "cu_seqlens": cu_seqlens, "share": share}
        if self.modulation is None:
            x = x + _keep(branch_factors, 0, self.attn(self.norm1(x), key_mask, **options))
            x = self._look_at(x, context, context_mask, branch_factors)
            # The MLP's factor is the last of two, or of three with cross-attention.
            return x + _keep(branch_factors, -1, self.mlp(self.norm2(x)))
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + _keep(branch_factors, 0, gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1, key_mask, **options))
        x = self._look_at(x, context, context_mask, branch_factors)
        return x + _keep(branch_factors, -1, gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2))

    def draw_kept(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Draw random factors for stochastic depth, by which the outputs of residual branches are multiplied.

        With a drop probability p, the factor is 0 for a sample that skips the branch, and ``1 / (1 - p)`` for any other sample.

        Args:
            x: tokens, ``[B, N, dim]``.

        Returns:
            Tuple with one tensor of factors, ``[B, 1, 1]``, for each residual branch; None in evaluation mode or if the drop
            probability is 0, because no sample then skips a branch.
        """
        if not (self.training and self.drops):
            return None
        ones = x.new_ones(len(x), 1, 1)
        return tuple(self.drop_path(ones) for _ in range(2 if self.cross is None else 3))

    def next_tokens(self, x: Tensor, state: Any, counts: Sequence[int], rotary: Rotary | None) -> tuple[Tensor, Any]:
        """Process the next tokens of every row during generation; see :meth:`lightning_mhla.attention.Attention.next_tokens`.

        Args:
            x: next tokens, ``[B, N, dim]``.
            state: state of the attention after the earlier tokens; None before the first token.
            counts: number of tokens in each row that are not padding.
            rotary: rotary angles of the tokens; None to continue the positions of the earlier tokens.

        Returns:
            Output tokens, ``[B, N, dim]``, and the state of the attention after these tokens.

        Raises:
            ValueError: if the block has conditioning or cross-attention, or if its attention does not support generation.
        """
        if self.modulation is not None or self.cross is not None:
            raise ValueError("generation token by token is for blocks without condition_dim and context_dim")
        out, state = self.attn.next_tokens(self.norm1(x), state, counts, rotary)
        x = x + out
        return x + self.mlp(self.norm2(x)), state

    def _look_at(
        self, x: Tensor, context: Tensor | None, context_mask: Tensor | None, branch_factors: tuple[Tensor, ...] | None
    ) -> Tensor:
        if self.cross is None or self.norm_context is None:
            return x
        hidden = None if context_mask is None else ~context_mask  # torch's mask is True for tokens to ignore
        out, _ = self.cross(self.norm_context(x), context, context, key_padding_mask=hidden, need_weights=False)
        return x + _keep(branch_factors, 1, out)
