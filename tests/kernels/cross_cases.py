"""Random calls of cross-attention, and their outputs and gradients by the definition."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from implementations import DEVICE
from mhla_kernels import ExponentialMixing
from oracle import cross_oracle, equal_starts, exponential_cross_matrix
from torch import Tensor

WIDTHS = st.integers(1, 9) if DEVICE == "cpu" else st.sampled_from([5, 8])  # a kernel is compiled for each


@dataclass(frozen=True)
class CrossCase:
    """Options of one random call.

    Attributes:
        batch: number of batch rows; packed calls have one.
        queries: number of queries; an upper bound for packed calls.
        keys: number of keys; an upper bound for packed calls.
        heads: number of query heads.
        shared: query heads per key head, if it divides the number of heads.
        key_width: width of a key.
        value_width: width of a value.
        block_size: queries in a block.
        key_block_size: keys in a block.
        query_layout: ``"equal"`` or ``"uneven"`` blocks.
        key_layout: ``"equal"``, ``"uneven"``, or ``"default"`` for the block size of the queries.
        packed: number of packed sequences; 0 for none.
        masks: masks of the call, as a set of the letters q and k.
        normalize: whether weights are divided by their sum.
        relu: whether the feature map is applied.
        exponential: whether mixing is exponential.
        per_head: whether every head has its own mixing.
        dtype: dtype of q, k and v.
        seed: seed of the tensors.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    shared: int
    key_width: int
    value_width: int
    block_size: int
    key_block_size: int
    query_layout: str
    key_layout: str
    packed: int
    masks: str
    normalize: bool
    relu: bool
    exponential: bool
    per_head: bool
    dtype: torch.dtype
    seed: int


def cross_cases(tokens: int, heads: int, dtypes: tuple[torch.dtype, ...]) -> st.SearchStrategy[CrossCase]:
    """Return a strategy that draws calls with at most ``tokens`` queries and keys."""
    return st.builds(
        CrossCase,
        batch=st.integers(1, 2),
        queries=st.integers(0, tokens),
        keys=st.integers(0, tokens),
        heads=st.integers(1, heads),
        shared=st.integers(1, 3),
        key_width=WIDTHS,
        value_width=WIDTHS,
        block_size=st.integers(1, tokens + 5),
        key_block_size=st.integers(1, tokens + 5),
        query_layout=st.sampled_from(["equal", "equal", "uneven"]),
        key_layout=st.sampled_from(["equal", "equal", "uneven", "default"]),
        packed=st.sampled_from([0, 0, 0, 1, 2, 4]),
        masks=st.sampled_from(["", "", "q", "k", "qk"]),
        normalize=st.booleans(),
        relu=st.booleans(),
        exponential=st.booleans(),
        per_head=st.booleans(),
        dtype=st.sampled_from(dtypes),
        seed=st.integers(0, 2**16),
    )


@dataclass
class CrossCall:
    """One call of cross-attention, and its definition.

    Attributes:
        tensors: q, k, v and the mixing tensors: a matrix, or amplitude and decay.
        options: keyword arguments of :func:`mhla_kernels.mhla_attention`.
        starts: first tokens of the blocks of every sequence, and its end: of the queries and of the keys.
        check: keyword arguments of the oracle.
    """

    tensors: tuple[Tensor, ...]
    options: dict[str, Any]
    starts: tuple[list[list[int]], list[list[int]]]
    check: dict[str, Any]

    def definition(self, *tensors: Tensor, **options: Any) -> Tensor:
        """Compute the outputs in float64 by the definition, from tensors of any dtype."""
        q, k, v, *mixing = (x.double() for x in tensors)
        if "feature_map" in self.options:
            q, k = q.relu() + 1e-6, k.relu() + 1e-6
        heads = q.shape[2]

        def coefficients(rows: int, columns: int) -> Tensor:
            matrix = mixing[0] if len(mixing) == 1 else exponential_cross_matrix(*mixing, rows, columns)
            return matrix if matrix.dim() == 3 else matrix.expand(heads, -1, -1)

        return cross_oracle(q, k, v, coefficients, *self.starts, **self.check, **options)

    @property
    def mixing(self) -> Any:
        """Mixing coefficients as an argument of the operator."""
        return self.tensors[3] if len(self.tensors) == 4 else ExponentialMixing(*self.tensors[3:])


def uneven_starts(tokens: int, draw: torch.Generator) -> list[int]:
    """Cut ``tokens`` tokens into blocks of random sizes, and return the first token of each and the end."""
    count = int(torch.randint(0, tokens, (1,), generator=draw))
    cuts = torch.randperm(max(tokens - 1, 1), generator=draw)[:count] + 1
    return sorted({0, tokens, *(int(cut) for cut in cuts if cut < tokens)})


def packed_side(sequences: int, blocks: int, size: int, fixed: bool, draw: torch.Generator) -> list[int]:
    """Return bounds of packed sequences, some of which are empty: of exactly ``blocks`` blocks if ``fixed``, else of up to it."""
    bounds = [0]
    for _ in range(sequences):
        count = blocks if fixed else int(torch.randint(1, blocks + 1, (1,), generator=draw))
        length = (count - 1) * size + int(torch.randint(1, size + 1, (1,), generator=draw))
        bounds.append(bounds[-1] + length * int(torch.rand(1, generator=draw) > 0.25))
    return bounds


def build_cross(case: CrossCase) -> CrossCall:
    """Draw the tensors of a call."""
    draw = torch.Generator().manual_seed(case.seed)
    options: dict[str, Any] = {"normalize": case.normalize}
    nq, nk, batch = case.queries, case.keys, case.batch
    starts: list[list[list[int]]] = []
    if case.packed:
        batch = 1
        for name, size, tokens in (("", case.block_size, nq), ("key_", case.key_block_size, nk)):
            size = min(size, 6)
            blocks = max(1, min(3, tokens // size))
            bounds = packed_side(case.packed, blocks, size, not case.exponential, draw)
            options |= {f"{name}block_size": size, f"{name}cu_seqlens": bounds}
            starts.append([[*range(a, b, size), b] if b > a else [a] for a, b in pairwise(bounds)])
        nq, nk = options["cu_seqlens"][-1], options["key_cu_seqlens"][-1]
    else:
        for name, layout, size, tokens in (
            ("", case.query_layout, case.block_size, nq),
            ("key_", case.key_layout, case.key_block_size, nk),
        ):
            if layout == "uneven" and tokens:
                starts.append([uneven_starts(tokens, draw)])
                options[f"{name}block_offsets"] = starts[-1][0]
            elif layout == "default" and "block_size" in options and nq != nk and not case.masks:
                starts.append(equal_starts(tokens, case.block_size))
            else:
                starts.append(equal_starts(tokens, size))
                options[f"{name}block_size"] = size
    per_head = [case.heads] if case.per_head else []
    sizes = [max(1, *(len(s) - 1 for s in side)) if len(side) > 1 else max(1, len(side[0]) - 1) for side in starts]
    shapes = [[*per_head, 1 + case.seed % 3]] * 2 if case.exponential else [[*per_head, *sizes]]
    mixing = [torch.rand(*shape, generator=draw) + 0.05 for shape in shapes]
    key_heads = case.heads // case.shared if case.heads % case.shared == 0 else case.heads
    q = torch.rand(batch, nq, case.heads, case.key_width, generator=draw) + 0.05
    k = torch.rand(batch, nk, key_heads, case.key_width, generator=draw) + 0.05
    v = torch.randn(batch, nk, key_heads, case.value_width, generator=draw)
    if case.relu:
        shift = torch.tensor(
            [0.0] + [0.3] * (case.key_width - 1)
        )  # one feature stays, or rows would see next to nothing
        q, k = q - shift, k - shift
        options["feature_map"] = "relu"
    elif not case.normalize:
        q = q - 0.5
    check: dict[str, Any] = {"scale": None if case.normalize else case.key_width**-0.5}
    if case.normalize and case.seed % 4 == 0:
        options["eps"] = check["eps"] = 0.1
    if not case.normalize and case.seed % 4 == 0:
        options["scale"] = check["scale"] = 0.7
    for letter, name, tokens in (("q", "query_mask", nq), ("k", "key_mask", nk)):
        if letter in case.masks:
            options[name] = check[name] = torch.rand(batch, tokens, generator=draw) > 0.3
    q, k, v = (x.to(case.dtype) for x in (q, k, v))
    if case.dtype == torch.float64:
        mixing = [x.double() for x in mixing]
    return CrossCall((q, k, v, *mixing), options, (starts[0], starts[1]), check)
