"""The parallel form in PyTorch: scores of all token pairs, scaled by the mixing coefficient of their two blocks.

Arithmetic grows with N squared; two large GEMMs, which is the fastest way while N is at most some hundreds.
Shape letters: B batch, H heads, M blocks, C slots of a block, K key width, V value width.
"""

from __future__ import annotations

from torch import Tensor

from mhla_kernels.normalizer import divide


def parallel(
    q_BHMCK: Tensor,
    k_BHMCK: Tensor,
    v_BHMCV: Tensor,
    mixing: Tensor,
    *,
    causal: bool,
    scale: float | None,
    eps: float,
) -> Tensor:
    """Outputs ``[B, H, M, C, V]``; ``mixing`` is ``[M, M]`` or ``[H, M, M]``; ``scale`` None asks for the normaliser."""
    q, k, v = q_BHMCK.flatten(2, 3), k_BHMCK.flatten(2, 3), v_BHMCV.flatten(2, 3)
    batch, heads, blocks, slots, _ = v_BHMCV.shape
    scores = (q @ k.transpose(-1, -2)).view(batch, heads, blocks, slots, blocks, slots)
    scores = (scores * mixing[..., :, None, :, None]).view(batch, heads, blocks * slots, blocks * slots)
    if causal:
        scores = scores.tril()
    out = scores @ v
    out = out * scale if scale is not None else divide(out, scores.sum(-1, keepdim=True), eps)
    return out.view(v_BHMCV.shape)
