"""Masking of the scores of token pairs in causal and block-causal attention."""

from __future__ import annotations

from torch import Tensor

from mhla_kernels.problem import Causal


def hide_later(scores_TT: Tensor, causal: Causal, block: Tensor | None = None) -> Tensor:
    """Replace the scores of keys that a query must not attend to by zeros.

    Hidden scores get gradients of zero. They may hold any value, infinity and NaN included.

    Args:
        scores_TT: scores of T queries (rows) and T keys, ``[..., T, T]``.
        causal: whether a query attends to keys up to itself only; ``"block"`` if it attends to all keys of its own block and of
            the blocks before it. False hides nothing.
        block: index of each token's block, ``[T]`` integers that do not decrease; required for ``"block"`` only.
    """
    if causal == "block":
        assert block is not None
        return scores_TT.masked_fill(block[:, None] < block, 0)
    return scores_TT.tril() if causal else scores_TT
