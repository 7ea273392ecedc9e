"""Cross-attention: every form of both backends against the definition, and the promises of its arguments."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from cross_cases import CrossCall, CrossCase, build_cross, cross_cases
from fuzzing import fuzz
from hypothesis import given
from implementations import TORCH, TRITON, attend, small_tiles
from oracle import gradient_scales, gradients, relative_error

DTYPES = torch.float32, torch.float32, torch.float64, torch.bfloat16
LIMITS = {torch.float32: (1e-5, 1e-5), torch.float64: (1e-12, 1e-12), torch.bfloat16: (5e-3, 1e-2)}
"""Allowed errors of outputs and of gradients, by dtype of q, k and v."""

NAMES = ("q", "k", "v", "mixing or amplitude", "decay")


def check_against_definition(implementations: tuple[str, ...], call: CrossCall) -> None:
    """Compare outputs and all gradients with those of the definition in float64."""
    q, _, v = call.tensors[:3]
    cotangent = torch.randn(*q.shape[:3], v.shape[-1]).to(q.dtype)
    exact = tuple(x.double() for x in call.tensors)
    want_out, want_grads = gradients(call.definition, exact, cotangent)
    scales = gradient_scales(call.definition, exact, cotangent, want_grads)
    limit, gradient_limit = LIMITS[q.dtype]
    for implementation in implementations:
        got, grads = gradients(
            lambda *x, name=implementation: attend(name, *x, **call.options), call.tensors, cotangent
        )
        assert got.dtype == v.dtype
        assert relative_error(f"{implementation}: output", got, want_out) < limit
        for name, grad, want, scale in zip(NAMES, grads, want_grads, scales, strict=False):
            error = float((grad.double() - want).norm()) / max(scale, 1e-12)
            assert error < gradient_limit, f"{implementation}: gradient of {name} is off by {error:.1e}"


@fuzz(250)
@given(case=cross_cases(tokens=30, heads=4, dtypes=DTYPES))
def test_torch_forms_agree_with_the_definition(case: CrossCase) -> None:
    torch.manual_seed(case.seed)
    check_against_definition(TORCH, build_cross(case))


@fuzz(30)
@given(case=cross_cases(tokens=36, heads=2, dtypes=(torch.float32,)))
def test_triton_forms_agree_with_the_definition(case: CrossCase) -> None:
    torch.manual_seed(case.seed)
    # in a thread: at hypothesis' depth of calls CPython 3.11 maps and unmaps a piece of its stack at every call
    with small_tiles(), ThreadPoolExecutor(1) as pool:
        pool.submit(check_against_definition, TRITON, build_cross(case)).result()
