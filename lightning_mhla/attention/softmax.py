"""Softmax attention, a baseline whose cost is quadratic in the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from mhla_kernels.sequence_parallel import gather_shares
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.attention.base import Attention
from lightning_mhla.attention.config import MIXING_OPTIONS
from lightning_mhla.attention.inputs import AttentionInputs, check_state
from lightning_mhla.attention.lepe import hide_rows
from lightning_mhla.attention.order import GivenOrder
from lightning_mhla.attention.sequence import SequenceShare
from lightning_mhla.recurrence.chunks import check_bounds


@dataclass(frozen=True)
class KeyValueState:
    """Generation state of softmax attention: the keys and values of all tokens so far.

    Only the first ``lengths[i]`` entries of row i are in use.

    Attributes:
        lengths: number of tokens so far in each row.
        keys: keys after rotary embedding, ``[B, capacity, Hkv, Dk]`` for Hkv key heads.
        values: values, ``[B, capacity, Hkv, Dv]``.
        recorded: whether a backward pass may need ``keys`` and ``values``, so that they must not be written to.
    """

    kind: ClassVar[str] = "softmax"

    lengths: tuple[int, ...]
    keys: Tensor
    values: Tensor
    recorded: bool = False

    def select(self, rows: Tensor) -> KeyValueState:
        """Return the state of the batch rows whose indices are in ``rows``, a 1-D integer tensor."""
        lengths = tuple(self.lengths[row] for row in rows.tolist())
        index = rows.to(self.keys.device)
        return KeyValueState(lengths, self.keys.index_select(0, index), self.values.index_select(0, index))

    @property
    def bytes(self) -> int:
        """Size of the stored keys and values in bytes, including unused capacity."""
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values))

    def append(self, keys: Tensor, values: Tensor, counts: Sequence[int]) -> KeyValueState:
        """Append new keys and values, and return the new state.

        The new keys and values are written into the tensors of this state, which the new state then shares. Tensors that are
        too small are first copied into new ones of at least twice the size. The tensors are also copied if they must not be
        written to, either because a backward pass may need them, or because they were created in inference mode, which is no
        longer active.

        Args:
            keys: new keys, ``[B, N, Hkv, Dk]``.
            values: new values, ``[B, N, Hkv, Dv]``.
            counts: number of new tokens in each row; the rest of the row is padding, which is not stored.
        """
        after = tuple(length + count for length, count in zip(self.lengths, counts, strict=True))
        room, stored_keys, stored_values = self.keys.shape[1], self.keys, self.values
        if max(after, default=0) > room:
            # Doubled, so that copying takes constant time per token on average. The first buffer is as long as the prompt.
            more = max(max(after), 2 * room if room else 0) - room
            stored_keys, stored_values = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (self.keys, self.values))
        elif self.recorded or (self.keys.is_inference() and not torch.is_inference_mode_enabled()):
            stored_keys, stored_values = self.keys.clone(), self.values.clone()
        if len(set(self.lengths)) == 1 and len(set(counts)) == 1:
            added = slice(self.lengths[0], after[0])
            stored_keys[:, added], stored_values[:, added] = keys[:, : counts[0]], values[:, : counts[0]]
        else:
            for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
                added = slice(length, length + count)
                stored_keys[row, added], stored_values[row, added] = keys[row, :count], values[row, :count]
        return KeyValueState(after, stored_keys, stored_values)


class SoftmaxAttention(Attention, kind="softmax"):
    """Softmax attention ``softmax(q k^T / sqrt(Dk)) v``, computed with PyTorch's fused kernels.

    The constructor takes the arguments of :class:`Attention`.
    """

    Order = GivenOrder
    handles = ("key_mask", "rotary", "cu_seqlens", "share")
    unused = (*MIXING_OPTIONS, "normalize", "feature_map", "output_norm")
    block_causal = True

    @override
    def operator_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        return inputs  # torch's kernels take fewer key heads than query heads

    @override
    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Compute the attention outputs ``[B, N, H, Dv]`` of all tokens.

        Packed sequences are processed one after the other. If ``inputs.cu_seqlens``, which holds their boundaries, is a tensor,
        it is copied to the CPU for this purpose.
        """
        q, k = inputs.turned
        v, key_mask, cu_seqlens = inputs.v, inputs.key_mask, inputs.cu_seqlens
        if inputs.share is not None:
            return self._attend_shared(q, k, v, inputs.share)
        parts = [slice(None)]
        if cu_seqlens is not None:
            bounds = check_bounds(cu_seqlens, q)
            parts = [slice(start, end) for start, end in pairwise(bounds) if end > start] or parts
        outs = [
            self._attend_row(q[:, part], k[:, part], v[:, part], None if key_mask is None else key_mask[:, part])
            for part in parts
        ]
        return hide_rows(outs[0] if len(outs) == 1 else torch.cat(outs, 1), key_mask)

    def _attend_row(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        mask = self._visible(q, key_mask)
        return self._scaled(q, k, v, attn_mask=mask, is_causal=self.causal is True and mask is None)

    def _attend_shared(self, q: Tensor, k: Tensor, v: Tensor, share: SequenceShare) -> Tensor:
        """Compute the outputs of this process's tokens in causal sequences that are distributed over processes.

        The local inputs and outputs are ``[B, n, heads, width]`` for the n tokens of this process. Keys and values are gathered
        from all processes, and their gradients are summed in float32. If PyTorch has no fused kernel for these inputs, it
        builds a mask over all pairs of a local query and a gathered key.
        """
        wide = torch.promote_types(k.dtype, torch.float32)
        k, v = (gather_shares(x, 1, share.lengths, share.group, wide)[:, : share.end].to(x.dtype) for x in (k, v))
        from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler

        # The local queries are the last tokens before share.end, so the mask is aligned with the last key, not with the first.
        return self._scaled(q, k, v, attn_mask=causal_lower_right(q.shape[1], share.end))

    @override
    def continue_from(
        self, inputs: AttentionInputs, state: KeyValueState | None, counts: Sequence[int]
    ) -> tuple[Tensor, KeyValueState]:
        check_state(state, KeyValueState, "softmax")
        (q, k), v = inputs.turned, inputs.v
        batch = len(q)
        if state is None:
            state = KeyValueState(
                (0,) * batch, k.new_empty(batch, 0, *k.shape[2:]), v.new_empty(batch, 0, *v.shape[2:])
            )
        after = state.append(k, v, counts)
        out = self._read_state(q, after, state.lengths)
        return out, replace(after, recorded=out.requires_grad)

    def _read_state(self, q: Tensor, state: KeyValueState, previous_lengths: Sequence[int]) -> Tensor:
        """Compute the outputs ``[B, N, H, Dv]`` of the latest tokens of each row.

        Args:
            q: queries after rotary embedding, ``[B, N, H, Dk]``.
            state: keys and values of all tokens so far.
            previous_lengths: number of tokens before the latest ones in each row.
        """
        tokens = q.shape[1]
        longest = max(state.lengths, default=0)
        keys, values = state.keys[:, :longest], state.values[:, :longest]
        even = len(set(state.lengths)) < 2
        # `is_causal` aligns query 0 with key 0, which is right only without previous tokens. A single new token sees all keys.
        if even and (tokens == 1 or (self.causal is True and not any(previous_lengths))):
            return self._scaled(q, keys, values, is_causal=tokens > 1)
        if even and tokens == self.block_tokens:  # one block, which sees all tokens so far
            return self._scaled(q, keys, values)
        position = torch.arange(longest, device=q.device)
        last = torch.tensor(previous_lengths, device=q.device)[:, None] + torch.arange(tokens, device=q.device)
        # Mask [B, N, longest] of the keys that each query sees.
        visible = self._is_earlier(position, last[..., None])
        return self._scaled(q, keys, values, attn_mask=visible[:, None])

    @override
    def weights(self, inputs: AttentionInputs) -> Tensor:
        (q, k), key_mask = inputs.turned, inputs.key_mask
        k = k.repeat_interleave(self.heads // self.key_value_heads, 2)
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(wide).transpose(1, 2), k.to(wide).transpose(1, 2)
        scores = q @ k.transpose(-1, -2) * self.key_width**-0.5
        mask = self._visible(inputs.q, key_mask)
        if mask is None and self.causal is True:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return hide_rows(scores.softmax(-1).transpose(1, 2), key_mask).transpose(1, 2)

    @override
    def operator_flops(self, tokens: int) -> float:
        """Return the number of floating-point operations of softmax attention on one sequence.

        Only pairs of a query and a visible key are counted.

        Args:
            tokens: number of tokens of the sequence.
        """
        pairs = tokens * (tokens + self.block_tokens) / 2 if self.causal else tokens**2
        return 2.0 * self.heads * pairs * (self.key_width + self.value_width)

    def _scaled(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Compute softmax attention ``[B, N, H, Dv]`` with PyTorch's ``scaled_dot_product_attention``.

        Args:
            q: queries, ``[B, N, H, Dk]``.
            k: keys of M tokens, ``[B, M, Hkv, Dk]``; Hkv divides H.
            v: values, ``[B, M, Hkv, Dv]``.
            **options: keyword arguments of ``scaled_dot_product_attention``, such as ``attn_mask``.
        """
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = self.heads != self.key_value_heads
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options).transpose(1, 2)

    def _visible(self, q: Tensor, key_mask: Tensor | None) -> Tensor | None:
        """Build a bool attention mask, which is True where a query attends to a key.

        Each query attends to its own token even if ``key_mask`` hides it, so that each row has at least one True entry.

        Args:
            q: queries ``[B, N, H, Dk]``.
            key_mask: ``[B, N]`` bool, False for hidden tokens; None if no token is hidden.

        Returns:
            Mask ``[B, 1, N, N]`` if there is a ``key_mask``. Otherwise, ``[N, N]`` for block-causal attention, and None for
            all other attention, which needs no mask or the causal mask of PyTorch's kernels.
        """
        if key_mask is None and self.causal != "block":
            return None
        position = torch.arange(q.shape[1], device=q.device)
        earlier = self._is_earlier(position, position[:, None])
        if key_mask is None:
            return earlier
        visible = key_mask[:, None, None, :] | (position == position[:, None])
        return visible & earlier if self.causal else visible

    @property
    def block_tokens(self) -> int:
        """Number of consecutive tokens that see each other in causal attention: the block size if block-causal, otherwise 1."""
        return int(self.layout.operator_blocks["block_size"]) if self.causal == "block" else 1

    def _is_earlier(self, key: Tensor, query: Tensor) -> Tensor:
        """Return a mask of keys that are in the block of a query or in an earlier block, as causal attention requires.

        In causal attention that is not block-causal, every token counts as a block.

        Args:
            key: positions of keys in the sequence, integers of any shape.
            query: positions of queries, in a shape that can be broadcast with the shape of ``key``.

        Returns:
            Bool tensor in the broadcast shape.
        """
        return key // self.block_tokens <= query // self.block_tokens
