"""Trials of the Triton kernels in cross-attention, which compare a small problem with PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mhla_kernels.cross.layout import CrossLayout
from mhla_kernels.triton_backend.call import chip_of
from mhla_kernels.triton_backend.cross import (
    fallback,
    ops,  # noqa: F401  registers the operator
)
from mhla_kernels.triton_backend.cross.call import CrossArguments
from mhla_kernels.triton_backend.cross.tables import cross_tables
from mhla_kernels.triton_backend.trial import block_counts, compare_problem, random_numbers, trial_layout


class CrossKind(NamedTuple):
    """Properties of a cross-attention call that decide which Triton kernels it compiles, except for alignments and strides.

    Attributes:
        form: algorithm: ``"parallel"`` (weights of all token pairs) or ``"chunked"`` (a summary of each block of keys).
        dtype: ``"float32"`` or ``"bfloat16"``.
        key_width: width of a key, K.
        value_width: width of a value, V.
        normalize: whether outputs are divided by the normalizer.
        relu: whether the kernels apply the feature map ``relu(x) + 1e-6``.
        queries_masked: whether there is a query mask.
        keys_masked: whether there is a key mask.
        layout: ``"equal"`` or ``"uneven"`` blocks of queries, or ``"packed"`` sequences.
        key_layout: ``"equal"`` or ``"uneven"`` blocks of keys, or ``"packed"`` sequences.
        block_size: queries in the largest block. It is rounded by :func:`mhla_kernels.triton_backend.trial.size_class` before
            the kernels are compared with PyTorch.
        key_block_size: keys in the largest block, rounded in the same way.
        many: whether the form is chunked and at least one side has more than 32 blocks, for which kernels use larger tiles.
    """

    form: str
    dtype: str
    key_width: int
    value_width: int
    normalize: bool
    relu: bool
    queries_masked: bool
    keys_masked: bool
    layout: str
    key_layout: str
    block_size: int
    key_block_size: int
    many: bool

    def __str__(self) -> str:
        names = ("normalize", "relu", "queries_masked", "keys_masked", "many")
        flags = [name for name in names if getattr(self, name)]
        blocks = f"{self.layout}{self.block_size}", f"{self.key_layout}{self.key_block_size}"
        return "-".join(["cross", self.form, self.dtype, f"{self.key_width}x{self.value_width}", *blocks, *flags])


def make_cross_problem(kind: CrossKind, device: torch.device, query_blocks: int = 3) -> CrossArguments:
    """Create the arguments of a small cross-attention call with random tokens in two heads.

    There are two key blocks; if sequences are packed, each sequence has two. If the block size of the queries (or of the keys)
    is at least 3, some of their blocks contain fewer tokens than the block size.

    Args:
        kind: properties of the call.
        device: device of the tensors.
        query_blocks: number of query blocks, or of those of each sequence if sequences are packed.
    """
    rand = random_numbers(device)
    blocks = query_blocks, 2
    queries = trial_layout(blocks[0], kind.block_size, kind.layout, device)
    keys = trial_layout(blocks[1], kind.key_block_size, kind.key_layout, device)
    dtype = getattr(torch, kind.dtype)
    shift = 0.5 if kind.relu else 0.0
    q, k = ((rand(1, x.tokens, 2, kind.key_width) - shift).to(dtype) for x in (queries, keys))
    v = (rand(1, keys.tokens, 2, kind.value_width) - 0.5).to(dtype)
    return CrossArguments(
        q,
        k,
        v,
        [rand(2, *blocks)],
        *cross_tables(CrossLayout(queries, keys), kind.form, True, device),
        query_mask=rand(1, queries.tokens) < 0.8 if kind.queries_masked else None,
        key_mask=rand(1, keys.tokens) < 0.8 if kind.keys_masked else None,
        cu_seqlens=queries.cu_seqlens,
        key_cu_seqlens=keys.cu_seqlens,
        block_size=queries.block_size,
        key_block_size=keys.block_size,
        block_offsets=None if queries.block_offsets is None else list(queries.block_offsets),
        key_block_offsets=None if keys.block_offsets is None else list(keys.block_offsets),
        relu=kind.relu,
        eps=1e-6 if kind.normalize else None,
        form=kind.form,
        guard="",
    )


def try_cross_kernels(kind: CrossKind, device: torch.device) -> str:
    """Compare the Triton kernels for one kind of cross-attention with PyTorch in float64, on small random problems.

    Args:
        kind: properties of the calls that use these kernels.
        device: device to run on.

    Returns:
        Text with the relative errors of outputs and gradients, all of them within the limits for the dtype.

    Raises:
        WrongNumbersError: if a numerical error is larger than allowed for the dtype.
    """
    counts = block_counts(kind.form, kind.dtype, kind.many, chip_of(device))
    return "; ".join(
        compare_problem(make_cross_problem(kind, device, blocks), torch.ops.mhla.cross_attention, fallback.outputs)
        for blocks in counts
    )
