"""Projections from tokens to queries, keys and values, and from the outputs of the heads to tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Projections(NamedTuple):
    """Input and output projections of an attention layer.

    They belong to the layer itself, or to an attention module that the layer replaces in a pretrained model (see
    :mod:`lightning_mhla.swap`).

    Attributes:
        split: function from tokens ``[B, N, dim]`` to queries ``[B, N, H, Dk]``, keys ``[B, N, Hkv, Dk]`` and values
            ``[B, N, Hkv, Dv]``.
        merge: function from outputs of the heads, ``[B, N, H * Dv]``, to tokens ``[B, N, dim]``.
        in_raster: whether ``split`` needs the tokens in raster order, for example because it adds position embeddings. If
            not, it takes them in any order.
    """

    split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    merge: Callable[[Tensor], Tensor]
    in_raster: bool = False

    def heads(self, x: Tensor, raster: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values, in the order in which attention processes the tokens.

        Args:
            x: tokens ``[B, S, dim]`` in the order in which attention processes them. S is larger than N if blocks are padded.
            raster: tokens ``[B, N, dim]`` in the order of the layer's input.
            order: ``[S]``, index in ``raster`` of each token of ``x``; None if the orders are equal.

        Returns:
            Queries ``[B, S, H, Dk]``, keys ``[B, S, Hkv, Dk]`` and values ``[B, S, Hkv, Dv]``.
        """
        if order is None or not self.in_raster:
            return self.split(x)
        # the surrounding module may treat tokens by position, so it projects them in its own order; permute the results
        q, k, v = (heads.index_select(1, order) for heads in self.split(raster))
        return q, k, v


def check_heads(
    dim: int, heads: int, key_value_heads: int, key_width: int | None = None, value_width: int | None = None
) -> None:
    """Check that the numbers of heads are compatible with each other and with the width of the tokens.

    Args:
        dim: width of the tokens.
        heads: number of query heads.
        key_value_heads: number of key heads and of value heads.
        key_width: width of a key; None for ``dim // heads``.
        value_width: width of a value; None for ``dim // heads``.

    Raises:
        ValueError: if a number of heads or a width is not positive, ``key_value_heads`` does not divide ``heads``, or a width
            is None and ``heads`` does not divide ``dim``.
    """
    for name, width in (("key_width", key_width), ("value_width", value_width)):
        if width is not None and width < 1:
            raise ValueError(f"{name}={width} must be positive, or None for dim // heads")
    if heads < 1 or key_value_heads < 1:
        raise ValueError(f"heads={heads} and key_value_heads={key_value_heads} must be positive")
    if heads % key_value_heads:
        raise ValueError(f"key_value_heads={key_value_heads} must divide heads={heads}")
    if (key_width is None or value_width is None) and dim % heads:
        raise ValueError(f"dim={dim} is not divisible by heads={heads}; give key_width and value_width")
