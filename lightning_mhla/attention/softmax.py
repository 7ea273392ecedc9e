"""Softmax attention: the baseline of quadratic cost."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mhla.attention.base import Attention, hide_rows


class SoftmaxAttention(Attention, kind="softmax"):
    """``softmax(q k^T / sqrt(Dk)) v`` through torch's fused kernels; arguments as for :class:`Attention`."""

    uses_linear_options = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """See :meth:`Attention.attend`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = self._visible(q, key_mask)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        return hide_rows(out.transpose(1, 2), key_mask)

    def weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        """See :meth:`Attention.weights`."""
        q, k = q.float().transpose(1, 2), k.float().transpose(1, 2)
        scores = q @ k.transpose(-1, -2) * self.key_width**-0.5
        mask = self._visible(q, key_mask)
        if mask is None and self.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return hide_rows(scores.softmax(-1).transpose(1, 2), key_mask).transpose(1, 2)

    def _visible(self, q: Tensor, key_mask: Tensor | None) -> Tensor | None:
        """``[B, 1, N, N]`` mask when keys are hidden; hidden queries see themselves, so that no row is empty."""
        if key_mask is None:
            return None
        tokens = q.shape[-2]
        own = torch.eye(tokens, dtype=torch.bool, device=q.device)
        visible = key_mask[:, None, None, :] | own
        return visible.tril() if self.causal else visible
