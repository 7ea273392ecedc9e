"""Checks of the arguments of a cross-attention call. :func:`check_cross` returns the checked arguments as one object."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.checks import (
    NEGATIVE_FEATURES,
    as_integers,
    check_block_size,
    check_features,
    check_integers,
    check_is_tensor,
    check_mask,
    check_offsets,
    check_one_device,
    check_packed,
    check_types,
    check_weighting,
    sdpa_order,
)
from mhla_kernels.cross.layout import CrossLayout
from mhla_kernels.cross.problem import CrossProblem
from mhla_kernels.features import FeatureMap
from mhla_kernels.mixing import Mixing, MixingLike, as_mixing
from mhla_kernels.problem import Causal

Bounds = Tensor | Sequence[int]


def is_cross(q: Tensor, k: Tensor, *only_cross: object) -> bool:
    """Return whether an attention call is cross-attention.

    A call is cross-attention if q and k differ in length, or if an argument that exists only for cross-attention is given.

    Args:
        q: queries, not checked yet.
        k: keys, not checked yet.
        only_cross: arguments that exist only for cross-attention; None for each one that is not given.

    Raises:
        TypeError: if q or k is not a tensor. This is not checked if one of ``only_cross`` is not None.
    """
    for argument in only_cross:
        if argument is not None:
            return True
    check_is_tensor("q", q)
    check_is_tensor("k", k)
    # last, because comparing symbolic lengths adds a condition to the graph
    return q.dim() == 4 and k.dim() == 4 and q.shape[1] != k.shape[1]


def check_cross(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: MixingLike,
    *,
    block_size: int | None,
    block_offsets: Bounds | None,
    key_block_size: int | None,
    key_block_offsets: Bounds | None,
    causal: Causal,
    normalize: bool,
    scale: float | None,
    eps: float,
    feature_map: FeatureMap,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Bounds | None,
    key_cu_seqlens: Bounds | None,
) -> CrossProblem:
    """Check the arguments of a cross-attention call, and return them as one object.

    :func:`mhla_kernels.mhla_attention` documents the arguments and the errors.
    """
    mixing = as_mixing(mixing)
    _check_tensors(q, k, v)
    if causal != 0:  # 0 and NumPy's False are False, as in self-attention
        raise ValueError(
            f"causal={causal!r} is for self-attention, but this call is cross-attention from Nq={q.shape[1]} queries to "
            f"Nk={k.shape[1]} keys of a different sequence, where no key is later than a query. Pass causal=False, or give q "
            "and k the same length and none of key_block_size, key_block_offsets, query_mask, key_cu_seqlens"
        )
    mixing.check_cross(q.shape[2])
    weighting = check_weighting(q, False, normalize, scale, eps, feature_map)
    explicit = key_block_size, key_block_offsets, query_mask, key_cu_seqlens
    if key_mask is not None and all(x is None for x in explicit):
        raise ValueError(
            f"key_mask with Nq={q.shape[1]} queries and Nk={k.shape[1]} keys: pass key_block_size (or key_block_offsets), so "
            "that the call is cross-attention at any length; with equal lengths, key_mask alone would also mask queries"
        )
    if query_mask is not None:
        check_mask("query_mask", query_mask, q, "Nq")
    if key_mask is not None:
        check_mask("key_mask", key_mask, k, "Nk")
    layout = _check_layouts(q, k, block_size, block_offsets, key_block_size, key_block_offsets)
    if cu_seqlens is None and key_cu_seqlens is None:
        for side, sizes in enumerate(("block_size, block_offsets", "key_block_size, key_block_offsets")):
            _check_blocks(mixing, layout[side], side, sizes)
    else:
        layout = _check_packed(layout, q.shape[0], mixing, cu_seqlens, key_cu_seqlens)
    check_one_device(q.device, {"k": k, "v": v, **mixing.tensors, "query_mask": query_mask, "key_mask": key_mask})
    if normalize and feature_map == "identity":
        check_features({"q": (q, query_mask), "k": (k, key_mask)}, NEGATIVE_FEATURES)
    return CrossProblem(q, k, v, mixing, layout, weighting, feature_map, query_mask, key_mask)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_types(q, k, v)
    heads, shared = q.shape[2], k.shape[2]
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or (heads != shared and (not shared or heads % shared)):
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} must be [B, Nq, H, Dk] and [B, Nk, Hkv, Dk], Hkv a divisor of H"
            + sdpa_order(q)
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v {list(v.shape)} must share B, Nk and heads with k {list(k.shape)}{sdpa_order(k)}")


def _check_layouts(
    q: Tensor,
    k: Tensor,
    block_size: int | None,
    block_offsets: Bounds | None,
    key_block_size: int | None,
    key_block_offsets: Bounds | None,
) -> CrossLayout:
    """Check the block sizes or offsets of queries and keys, and return the layouts of both.

    If neither ``key_block_size`` nor ``key_block_offsets`` is given, the keys get the block size or offsets of the queries.

    Raises:
        ValueError: if the queries or the keys have both a block size and offsets, if the queries have neither, or if a value is
            invalid or does not fit the number of tokens.
    """
    if (block_size is None) == (block_offsets is None):
        raise ValueError("give exactly one of block_size (equal blocks) and block_offsets (uneven blocks)")
    if key_block_size is not None and key_block_offsets is not None:
        raise ValueError("give only one of key_block_size (equal blocks) and key_block_offsets (uneven blocks)")
    queries = _check_side("block", q.shape[1], block_size, block_offsets)
    if key_block_size is not None or key_block_offsets is not None:
        return CrossLayout(queries, _check_side("key_block", k.shape[1], key_block_size, key_block_offsets))
    if queries.block_offsets is not None and k.shape[1] != q.shape[1]:
        raise ValueError(
            f"block_offsets end at Nq={q.shape[1]}, so they cannot divide Nk={k.shape[1]} keys, too; give key_block_size "
            "or key_block_offsets"
        )
    return CrossLayout(queries, queries._replace(tokens=k.shape[1]))


def _check_side(name: str, tokens: int, size: int | None, offsets: Bounds | None) -> TokenLayout:
    """Check the blocks of the queries or of the keys, and return the layout.

    Args:
        name: prefix of the argument names in error messages, ``"block"`` or ``"key_block"``.
        tokens: number of queries or of keys.
        size: tokens in a block; required if ``offsets`` is None, otherwise ignored.
        offsets: index of the first token of each uneven block, followed by the number of tokens; None for equal blocks.
    """
    if offsets is not None:
        return TokenLayout(tokens, 0, check_offsets(offsets, tokens, f"{name}_offsets"))
    assert size is not None
    return TokenLayout(tokens, check_block_size(size, f"{name}_size"))


SIDES = (("Nq", "queries", "Mq"), ("Nk", "keys", "Mk"))


def _check_blocks(mixing: Mixing, layout: TokenLayout, side: int, arguments: str) -> None:
    """Check that the mixing has coefficients for each block of the queries or of the keys.

    Args:
        mixing: mixing coefficients between query blocks and key blocks.
        layout: partition of the queries or of the keys into blocks.
        side: 0 for queries, 1 for keys.
        arguments: names of the arguments that set the blocks, for the error message.

    Raises:
        ValueError: if the coefficients are for a different number of blocks.
    """
    sizes = mixing.cross_blocks
    blocks = layout.blocks
    if sizes is None or blocks == 0 or blocks == sizes[side]:
        return
    letter, name, count = SIDES[side]
    source = f"block_size={layout.block_size}" if layout.block_size else "uneven blocks"
    raise ValueError(
        f"{letter}={layout.tokens} {name} with {source} make {blocks} blocks, but mixing is for {count}={sizes[side]} blocks "
        f"of {name} ([Mq, Mk] = {list(sizes)}); change {arguments} or the mixing"
    )


def _check_packed(
    layout: CrossLayout, batch: int, mixing: Mixing, cu_seqlens: Bounds | None, key_cu_seqlens: Bounds | None
) -> CrossLayout:
    if cu_seqlens is None or key_cu_seqlens is None:
        missing = "cu_seqlens" if cu_seqlens is None else "key_cu_seqlens"
        raise ValueError(
            f"packed cross-attention needs the bounds of both sides; {missing} is missing (it may hold empty sequences)"
        )
    if layout.queries.block_offsets is not None or layout.keys.block_offsets is not None:
        raise ValueError(
            "uneven blocks cannot be combined with packed sequences; give block_size and key_block_size instead of "
            "block_offsets and key_block_offsets"
        )
    for name, bounds in (("cu_seqlens", cu_seqlens), ("key_cu_seqlens", key_cu_seqlens)):
        if isinstance(bounds, Tensor):
            check_integers(bounds, name)
        else:
            as_integers(bounds, name)
    if len(cu_seqlens) != len(key_cu_seqlens):
        raise ValueError(
            f"cu_seqlens bounds {len(cu_seqlens) - 1} sequences and key_cu_seqlens {len(key_cu_seqlens) - 1}. Sequence s of "
            "the queries reads sequence s of the keys, so both need the same number (a sequence may be empty)"
        )
    sizes = mixing.cross_blocks

    def packed(side: int, name: str, bounds: Bounds) -> TokenLayout:
        def check_sequence(tokens: int) -> None:
            _check_blocks(mixing, layout[side]._replace(tokens=tokens), side, f"{name}, the block size")

        size = None if sizes is None else sizes[side]
        return check_packed(layout[side], bounds, batch, size, False, check_sequence, name)

    return CrossLayout(packed(0, "cu_seqlens", cu_seqlens), packed(1, "key_cu_seqlens", key_cu_seqlens))
