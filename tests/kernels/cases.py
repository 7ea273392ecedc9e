"""Random problems for the operator, and the comparison of its implementations with the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from implementations import DEVICE, attend
from oracle import (
    equal_starts,
    exponential_matrix,
    gradients,
    oracle,
    packed_starts,
    relative_error,
    sums_of_magnitudes,
)  # fmt: skip
from toeplitz import toeplitz_matrix
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A random problem."""

    batch: int
    tokens: int
    heads: int
    key_width: int
    value_width: int
    block_size: int
    causal: Any
    normalize: bool
    per_head: bool
    masked: bool
    layout: str
    relu: bool
    mixing: str
    seed: int
    groups: int = 1
    dtype: str = "float32"


def random_cases(tokens: int, heads: int, least: int = 1, **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Case]:
    """Draw cases with ``least`` to ``tokens`` tokens and up to ``heads`` key heads. ``fixed`` replaces strategies by name."""
    widths = st.integers(1, 9) if DEVICE == "cpu" else st.sampled_from([5, 8])  # a kernel is compiled for each
    draws: dict[str, st.SearchStrategy[Any]] = {
        "batch": st.integers(1, 2),
        "tokens": st.integers(least, tokens),
        "heads": st.integers(1, heads),
        "key_width": widths,
        "value_width": widths,
        "block_size": st.integers(1, 45),
        "causal": st.booleans(),
        "normalize": st.booleans(),
        "per_head": st.booleans(),
        "masked": st.booleans(),
        "layout": st.sampled_from(["equal", "equal", "uneven", "packed"]),
        "relu": st.booleans(),
        "mixing": st.sampled_from(["dense", "dense", "exponential", "toeplitz"]),
        "seed": st.integers(0, 2**16),
    }
    return st.builds(Case, **draws | fixed)


def spans(case: Case) -> bool:
    """Return whether the spanning form supports a case."""
    return case.mixing == "exponential" and (case.layout != "uneven" or case.causal is True or not case.tokens)


def build(case: Case) -> tuple[tuple[Tensor, ...], dict[str, Any], list[list[int]], dict[str, Any]]:
    """Return the tensors of a case, the operator's options, the first tokens of the blocks, and the oracle's options."""
    draw = torch.Generator().manual_seed(case.seed)
    packed = case.layout == "packed"
    batch, n, c = 1 if packed else case.batch, case.tokens, case.block_size
    options: dict[str, Any] = {"causal": case.causal, "normalize": case.normalize}
    if case.layout == "uneven" and case.causal is not True and n:
        cuts = torch.randperm(max(n - 1, 1), generator=draw)[: torch.randint(0, n, (1,), generator=draw)] + 1
        starts = [sorted({0, n, *(int(cut) for cut in cuts if cut < n)})]
        options["block_offsets"] = starts[0]
        blocks = len(starts[0]) - 1
    elif packed and case.causal:
        bounds = sorted([0, n, *torch.randint(0, n + 1, (3,), generator=draw).tolist()])
        starts = packed_starts(bounds, c)
        options |= {"block_size": c, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
        blocks = max(len(s) - 1 for s in starts)
    elif packed:
        blocks = max(1, min(3, n // 2))
        c = max(1, n // (2 * blocks))
        short = (blocks - 1) * c + 1
        n = blocks * c + short
        starts = packed_starts([0, blocks * c, n], c)
        options |= {"block_size": c, "cu_seqlens": [0, blocks * c, n]}
    else:
        starts = equal_starts(n, c)
        options["block_size"] = c
        blocks = len(starts[0]) - 1
    size, heads = blocks + bool(case.causal) * 2, case.heads * case.groups
    per_head = [heads] if case.per_head else []
    check = {"causal": case.causal, "normalize": case.normalize, "toeplitz": case.mixing == "toeplitz"}
    options["toeplitz"] = case.mixing == "toeplitz"
    if case.mixing == "exponential":
        terms = 1 + case.seed % 3
        mixing = [torch.rand(*per_head, terms, generator=draw) + 0.05 for _ in range(2)]
    elif case.mixing == "toeplitz":
        mixing = [torch.rand(*per_head, 1 + case.seed % (size + 2), generator=draw) + 0.05]
    else:
        mixing = [torch.rand(*per_head, size, size, generator=draw) + 0.05]
    q, k = (torch.rand(batch, n, number, case.key_width, generator=draw) + 0.05 for number in (heads, case.heads))
    v = torch.randn(batch, n, case.heads, case.value_width, generator=draw)
    if case.relu:
        shift = torch.tensor(
            [0.0] + [0.3] * (case.key_width - 1)
        )  # one feature stays, or rows would see next to nothing
        q, k = q - shift, k - shift
        options["feature_map"] = "relu"
    if case.masked:
        mask = torch.rand(batch, n, generator=draw) > 0.3
        mask[:, :1] = True
        options["key_mask"] = check["key_mask"] = mask
    dtype = getattr(torch, case.dtype)
    wide = [x.double() if dtype == torch.float64 else x for x in mixing]
    return (*(x.to(dtype) for x in (q, k, v)), *wide), options, starts, check


def definition(*tensors: Tensor, starts: list[list[int]], relu: bool, toeplitz: bool = False, **check: Any) -> Tensor:
    """Compute the oracle's outputs after the feature map, with exponential mixing if there is a fifth tensor."""
    q, k, v, mixing, *decay = tensors
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    if relu:
        q, k = q.relu() + 1e-6, k.relu() + 1e-6
    if decay:
        mixing = exponential_matrix(mixing, decay[0], max(len(s) - 1 for s in starts))
    if toeplitz:
        mixing = toeplitz_matrix(mixing, max(len(s) - 1 for s in starts))
    return oracle(q, k, v, mixing, starts, **check)


BOUNDS = {torch.float32: (1e-5, 1e-5), torch.float64: (1e-12, 1e-12), torch.bfloat16: (5e-3, 1e-2)}
"""Largest relative errors of outputs and of gradients."""


def check_against_definition(
    implementations: tuple[str, ...],
    tensors: tuple[Tensor, ...],
    options: dict[str, Any],
    starts: list[list[int]],
    check: dict[str, Any],
) -> None:
    """Compare values and all gradients of self-attention, within the bounds of the dtype."""
    want = partial(definition, starts=starts, relu=options.get("feature_map") == "relu", **check)
    check_passes(implementations, tensors, options, want)


def check_passes(
    implementations: tuple[str, ...], tensors: tuple[Tensor, ...], options: dict[str, Any], want: Callable[..., Tensor]
) -> None:
    """Compare the outputs and all gradients of a call with those of ``want`` in float64, within the bounds of the dtype."""
    dtype = tensors[0].dtype
    bound, gradient_bound = BOUNDS[dtype]
    cotangent = torch.randn(*tensors[0].shape[:3], tensors[2].shape[-1]).to(dtype).to(torch.float32)
    exact = tuple(x.double() for x in tensors)
    want_out, want_grads = gradients(want, exact, cotangent)
    # the same features are zero in the sum of magnitudes, which divides by the same normalizers
    seen = tuple(x.relu() for x in exact[:2]) if "feature_map" in options else exact[:2]
    sums = sums_of_magnitudes(want, (*seen, *exact[2:]), cotangent)
    names = (
        "output",
        "gradient of q",
        "gradient of k",
        "gradient of v",
        "gradient of mixing or amplitude",
        "gradient of decay",
    )
    for implementation in implementations:
        got, grads = gradients(partial(attend, implementation, **options), tensors, cotangent)
        assert got.dtype == tensors[2].dtype
        results = zip(names, (got, *grads), (want_out, *want_grads), sums, strict=False)
        for name, result, exact_result, terms in results:
            error = relative_error(f"{implementation}: {name}", result, exact_result, terms)
            limit = gradient_bound if name != "output" and result.dtype == dtype else bound
            assert error < limit, f"{implementation}: {name} is off by {error:.1e}"
