"""Retention: linear attention whose weights decay with distance, at a fixed rate per head."""

from __future__ import annotations

import torch
from typing_extensions import override

from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.attention.recurrent import Operands, RecurrentAttention
from lightning_mhla.recurrence import state_space_dual


class Retention(RecurrentAttention, kind="retention"):
    """Multi-scale retention (RetNet, arXiv 2307.08621, equations 5 to 8).

    The weight of token j for token t is ``gamma^(t - j) q_t . k_j / sqrt(Dk)``, with ``gamma = 1 - 2^(-5 - h)`` in head h,
    counted from 0. The output of each head is normalized by an RMSNorm with a learned scale and multiplied by a SiLU gate.
    RetNet itself also rotates queries and keys by their positions (``rotary: true``) and has values twice as wide as keys
    (``value_width``). The constructor takes the arguments of :class:`Attention`.
    """

    recurrence = staticmethod(state_space_dual)
    unused = tuple(name for name in RecurrentAttention.unused if name != "rotary")

    @override
    def operands(self, inputs: AttentionInputs) -> Operands:
        """Return queries, keys, values and the constant log-decay of each head.

        The log-decay is repeated for each token, ``[B, N, H]``, so that it can be set to 0 for padding.
        """
        wide = torch.promote_types(inputs.x.dtype, torch.float32)
        head = torch.arange(self.heads, device=inputs.x.device, dtype=wide)
        # log1p, because 1 - 2^(-5 - h) rounds to 1 in float32 for large h.
        rates = torch.log1p(-(2.0 ** (-5 - head)))
        return Operands(inputs.q, inputs.k, inputs.v, {"log_decay": rates.expand(*inputs.x.shape[:2], -1)})
