"""Checks of ``lightning doctor`` for the MHLA operator: numerical errors, determinism and speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from statistics import median
from typing import Any, get_args

import torch
from mhla_kernels import ExponentialMixing, mhla_attention
from mhla_kernels.backend import AUTOMATIC, ChosenForm
from mhla_kernels.mixing import MixingLike
from mhla_kernels.verdicts import cache_folder, judge
from torch import Tensor
from torch.nn import functional as F

from lightning_mhla.system.numbers import rounded
from mhla_tasks.tools.doctor.report import Finding, Status

BOUNDS = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (5e-3, 1e-2)}
"""Maximum errors of outputs and of gradients relative to their norms, for values with zero mean, by dtype."""
WIDTHS = ((16, 16), (64, 64), (72, 72), (128, 256))
"""Widths of keys and values to check, one pair for each class of widths for which kernels are compiled."""
SHAPES = {
    "cpu": {"1,024 tokens": (1, 6, 1024, 64, 64, 64, False), "4,096 tokens, causal": (1, 6, 4096, 64, 64, 64, True)},
    "cuda": {
        "DiT-S/2, 256 px": (256, 6, 256, 16, 64, 64, False),
        "DiT-XL/2, 512 px": (32, 16, 1024, 64, 72, 72, False),
        "Wan 1.3B, 81 frames": (1, 12, 31500, 210, 128, 128, False),
        "LM 340M, 2,048 tokens": (16, 4, 2048, 64, 128, 256, True),
    },
}
"""Shapes of models to measure: batch size, heads, tokens, tokens per block, key width, value width, and causality."""
CALLS_TIMED = 5
"""Number of calls that are timed, after two warm-up calls. Their median is reported."""
NORMALIZED = ("DiT-S/2, 256 px", "DiT-XL/2, 512 px")
"""Names of the shapes whose kernels are tested with a normalizer and with the ReLU feature map inside the kernels.

The other models have no normalizer, and apply the feature map outside the kernels, before a rotary embedding.
"""


def forms() -> Iterator[Finding]:
    """Compare all implementations of the MHLA operator with a float64 reference, and check that they are deterministic.

    The implementations are the operator's algorithms (forms) in PyTorch and, on a GPU, in Triton. Each is run with several
    dtypes and head widths, causal and bidirectional.

    Yields:
        A finding for each combination of implementation, dtype and causality. On a GPU, the findings of :func:`kernels` follow.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends = ("torch", "triton") if device.type == "cuda" and AUTOMATIC != "torch" else ("torch",)
    for backend, form, dtype, causal in product(backends, get_args(ChosenForm), BOUNDS, (False, True)):
        errors, wrong = [0.0, 0.0], []
        for widths in WIDTHS:
            try:
                problem = _problem(widths, device, form == "spanning")
                expected = _run(problem, torch.float64, causal, form="reference", backend="torch")
                actual, again = (_run(problem, dtype, causal, form=form, backend=backend) for _ in range(2))
            except Exception as error:  # for example a kernel that does not compile
                wrong.append(f"{widths[0]} x {widths[1]}: {type(error).__name__}: {str(error).strip()[:200]}")
                continue
            pair_errors = [max(_error(a, b) for a, b in zip(actual[i], expected[i], strict=True)) for i in (0, 1)]
            errors = [max(pair) for pair in zip(errors, pair_errors, strict=True)]
            # `not error <= bound` instead of `error > bound`, so that NaN counts as wrong.
            if any(not error <= bound for error, bound in zip(pair_errors, BOUNDS[dtype], strict=True)):
                output_error, gradient_error = map(rounded, pair_errors)
                wrong.append(
                    f"{widths[0]} x {widths[1]}: off by {output_error} (outputs), {gradient_error} (gradients)"
                )
            if not all(torch.equal(a, b) for i in (0, 1) for a, b in zip(actual[i], again[i], strict=True)):
                wrong.append(f"{widths[0]} x {widths[1]}: two runs differ")
        name = f"{backend} {form}, {str(dtype)[6:]}, {'causal' if causal else 'bidirectional'}"
        text = (
            "; ".join(wrong) or f"errors {rounded(errors[0])} (outputs), {rounded(errors[1])} (gradients), equal bits"
        )
        advice = ""
        if wrong and backend == "triton":
            advice = (
                f"delete {cache_folder() / 'verdicts'}, so that backend='auto' tries each kernel again before it uses it, or "
                "set MHLA_BACKEND=torch; please report this with the complete output of this command"
            )
        elif wrong:
            advice = "this torch computes wrong here: try another version of it"
        status: Status = "ok" if not wrong else "wrong" if backend == "torch" else "note"
        yield Finding("operator", name, status, text, advice, {"output_error": errors[0], "gradient_error": errors[1]})
    if device.type == "cuda":
        yield from kernels(device)


def kernels(device: torch.device) -> Iterator[Finding]:
    """Test the Triton kernels at the shapes of typical models, and store whether ``backend="auto"`` may use each of them.

    Args:
        device: GPU to test the kernels on.

    Yields:
        A finding for each combination of shape and algorithm; a single one if the environment variable
        ``MHLA_BACKEND=torch`` turns the kernels off.
    """
    if AUTOMATIC == "torch":
        yield Finding(
            "operator", "kernels of models", "note", "MHLA_BACKEND=torch turns them off", "unset it to try them"
        )
        return
    from mhla_kernels.triton_backend.trial import Kind, size_class, try_kernels

    for name, (_, _, tokens, block, key, value, causal) in SHAPES["cuda"].items():
        for form in ("parallel", "chunked"):
            many = form == "chunked" and tokens // block > 32
            kind = Kind(
                form, "dense", "bfloat16", key, value, causal, name in NORMALIZED, name in NORMALIZED, False, "equal",
                size_class(block, form), many, 0,
            )  # fmt: skip
            start = time.perf_counter()
            verdict = judge(str(kind), f"cuda:{device.index or 0}", partial(try_kernels, kind, device))
            yield Finding(
                "operator", f"kernels of {name}, {form}", "ok" if verdict.agrees else "note",
                f"{verdict.reason} ({rounded(time.perf_counter() - start)} s)",
                "" if verdict.agrees else "backend='auto' uses the PyTorch form",
            )  # fmt: skip


def speed() -> Iterator[Finding]:
    """Measure the time of the MHLA operator and of torch's softmax attention, forward and backward, at typical shapes.

    Yields:
        A finding for each shape, with the times in milliseconds.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, (batch, heads, tokens, block, key, value, causal) in SHAPES[device.type].items():
        shapes = ((batch, tokens, heads, width) for width in (key, key, value))
        q, k, v = (torch.rand(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)
        blocks = -(-tokens // block)
        mixing = torch.rand(blocks, blocks, device=device).requires_grad_()
        mhla = partial(mhla_attention, q, k, v, mixing, block_size=block, causal=causal, normalize=not causal)
        heads_first = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        # The values are cut to the width of the keys, because flash attention requires equal widths.
        softmax = partial(
            F.scaled_dot_product_attention, heads_first[0], heads_first[1], heads_first[2][..., :key], is_causal=causal
        )
        mhla_ms, softmax_ms = (_milliseconds(call, device) for call in (mhla, softmax))
        yield Finding(
            "speed", name, "ok",
            f"{rounded(mhla_ms)} ms forward and backward; softmax {rounded(softmax_ms)} ms ({rounded(softmax_ms / mhla_ms)} x)",
            values={"mhla_ms": mhla_ms, "softmax_ms": softmax_ms},
        )  # fmt: skip


def _problem(widths: tuple[int, int], device: torch.device, spans: bool) -> list[Tensor]:
    """Create random queries, keys, values and mixing coefficients for blocks of 32 tokens.

    Args:
        widths: width Dk of queries and keys, and width Dv of values.
        device: device of the tensors.
        spans: whether to create N = 300 tokens and exponential mixing coefficients, which the algorithm ``spanning`` requires.
            If false, there are N = 83 tokens in three blocks, the last one not full, and dense mixing coefficients.

    Returns:
        Float32 tensors: queries and keys ``[2, N, 2, Dk]``, values ``[2, N, 2, Dv]``, and the mixing coefficients of two heads.
        Exponential coefficients are two tensors, amplitude and decay, both ``[2, 3]``. Dense ones are a tensor ``[2, 3, 3]``.
    """
    generator = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    tokens = 300 if spans else 83
    q, k, v = rand(2, tokens, 2, widths[0]), rand(2, tokens, 2, widths[0]), rand(2, tokens, 2, widths[1]) - 0.5
    rounded = [x.bfloat16().float() for x in (q, k, v)]  # exactly representable in every dtype
    return [*rounded, *((rand(2, 3), rand(2, 3)) if spans else (rand(2, 3, 3),))]


def _run(tensors: list[Tensor], dtype: torch.dtype, causal: bool, **choice: Any) -> tuple[list[Tensor], list[Tensor]]:
    learned = torch.float64 if dtype is torch.float64 else torch.float32
    leaves = [x.to(dtype if i < 3 else learned).requires_grad_() for i, x in enumerate(tensors)]
    q, k, v, *coefficients = leaves
    mixing: MixingLike = (
        coefficients[0] if len(coefficients) == 1 else ExponentialMixing(coefficients[0], coefficients[1])
    )
    out = mhla_attention(q, k, v, mixing, block_size=32, causal=causal, **choice)
    generator = torch.Generator(out.device).manual_seed(1)
    # Like the inputs, the gradients of the outputs are exact in every dtype.
    cotangent = torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(dtype)
    return [out.detach()], list(torch.autograd.grad(out, leaves, cotangent))


def _error(actual: Tensor, expected: Tensor) -> float:
    error = float((actual.double() - expected).norm() / expected.norm())
    # NaN, the only number that differs from itself, could get lost in `max`.
    return error if error == error else float("inf")


def _milliseconds(call: Any, device: torch.device) -> float:
    times = []
    for number in range(CALLS_TIMED + 2):
        start = time.perf_counter()
        call().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            times.append((time.perf_counter() - start) * 1e3)
    return median(times)
