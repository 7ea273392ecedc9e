"""Projections of tokens to queries, keys and values, and of the heads' outputs to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class Projections(NamedTuple):
    """Projections before and after an operator: a layer's own, or those of a different module (see :mod:`lightning_mhla.swap`).

    Attributes:
        split: function from tokens ``[B, N, dim]`` to q ``[B, N, H, Dk]``, k ``[B, N, Hkv, Dk]`` and v ``[B, N, Hkv, Dv]``.
        merge: function from ``[B, N, H * Dv]`` to tokens.
        in_raster: whether ``split`` expects tokens in raster order, the order of the surrounding module, or in block order.
    """

    split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    merge: Callable[[Tensor], Tensor]
    in_raster: bool = False

    def heads(self, x: Tensor, raster: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values in the operator's order.

        Args:
            x: tokens ``[B, S, dim]`` in the operator's order.
            raster: the same tokens ``[B, N, dim]`` in the order in which they entered.
            order: index ``[S]`` in ``raster`` of each token of ``x``; None if the orders are the same.
        """
        if order is None or not self.in_raster:
            return self.split(x)
        # the surrounding module may treat tokens by position, so it projects them in its own order; permute the results
        q, k, v = (heads.index_select(1, order) for heads in self.split(raster))
        return q, k, v


def check_heads(
    dim: int, heads: int, key_value_heads: int, key_width: int | None = None, value_width: int | None = None
) -> None:
    """Check that the numbers of heads fit each other and the width of the tokens.

    Raises:
        ValueError: if ``key_value_heads`` does not divide ``heads``, or ``heads`` does not divide ``dim`` and a width is None.
    """
    if heads % key_value_heads:
        raise ValueError(f"key_value_heads={key_value_heads} must divide heads={heads}")
    if (key_width is None or value_width is None) and dim % heads:
        raise ValueError(f"dim={dim} is not divisible by heads={heads}; give key_width and value_width")


def split_heads(
    projected: Tensor, sections: Sequence[int], key_width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a joint projection into queries and keys ``[B, N, heads, Dk]`` and values ``[B, N, heads, Dv]``.

    Args:
        projected: joint projection, ``[B, N, sum(sections)]``.
        sections: total widths of all queries, all keys and all values.
        key_width: width of a query or key, Dk.
        value_width: width of a value, Dv.
    """
    q, k, v = projected.split(list(sections), dim=-1)
    return q.unflatten(-1, (-1, key_width)), k.unflatten(-1, (-1, key_width)), v.unflatten(-1, (-1, value_width))
