"""Checks of the operator on this device that Triton's interpreter cannot make: real tiles, streams, graphs, large tensors.

    lightning bench native --out runs/benchmarks
    compute-sanitizer lightning bench native --case chunked

Every case of a check is a line of native.json. The exit status is 1 if one fails. On a CPU the PyTorch forms are checked at
small sizes, and checks that need a GPU are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from mhla_kernels import ExponentialMixing, mhla_attention
from mhla_kernels.backend import ChosenForm
from mhla_kernels.mixing import MixingLike
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.machine import describe

FORMS: tuple[ChosenForm, ...] = get_args(ChosenForm)
RUNS = 20
"""Number of runs of the same call whose results must be bit-identical."""
BOUNDS = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (5e-3, 1e-2)}
"""Largest allowed errors of outputs and of gradients by dtype, relative to their norm, for values of zero mean."""
WIDTHS = ((32, 32), (64, 64), (72, 72), (128, 256))


@dataclass(frozen=True)
class Case:
    """Call of the operator that a check makes: form, dtype and sizes."""

    form: ChosenForm
    dtype: torch.dtype
    key_width: int
    value_width: int
    causal: bool
    tokens: int
    block: int
    batch: int = 1
    heads: int = 2

    @property
    def backend(self) -> Any:
        """Backend of the operator for this machine: Triton kernels if there is a GPU, otherwise PyTorch."""
        return "triton" if torch.cuda.is_available() else "torch"

    def make(self, device: torch.device, seed: int = 0) -> list[Tensor]:
        """Draw random q, k, v and mixing coefficients that require gradients.

        Args:
            device: device of the tensors.
            seed: seed of the random numbers.

        Returns:
            q, k and v ``[B, N, H, D]``, and the coefficients: amplitudes and decay rates ``[H, 4]`` for the spanning form, and
            a matrix for each head, ``[H, M, M]`` with M blocks, for the other forms.
        """
        draw = partial(torch.rand, generator=torch.Generator(device).manual_seed(seed), device=device)
        shape, blocks = (self.batch, self.tokens, self.heads), -(-self.tokens // self.block)
        q, k, v = draw(*shape, self.key_width), draw(*shape, self.key_width), draw(*shape, self.value_width) - 0.5
        spans = self.form == "spanning"
        mixing = [draw(self.heads, 4), draw(self.heads, 4)] if spans else [draw(self.heads, blocks, blocks)]
        return [x.to(self.dtype).requires_grad_() for x in (q, k, v)] + [x.requires_grad_() for x in mixing]

    def run(self, *operands: Tensor, form: Any = None, backend: Any = None) -> Tensor:
        """Compute the outputs of the operator for the tensors of :meth:`make`.

        Args:
            operands: q, k, v and mixing coefficients.
            form: form of the operator; None for that of this case.
            backend: backend of the operator; None for that of this case.
        """
        q, k, v, *mixing = operands
        coefficients: MixingLike = ExponentialMixing(mixing[0], mixing[1]) if len(mixing) == 2 else mixing[0]
        return mhla_attention(
            q, k, v, coefficients, block_size=self.block, causal=self.causal, form=form or self.form,
            backend=backend or self.backend,
        )  # fmt: skip

    def both(self, leaves: list[Tensor], cotangent: Tensor, **choice: Any) -> list[Tensor]:
        """Compute the outputs of the operator and the gradients of all its inputs.

        Args:
            leaves: q, k, v and mixing coefficients.
            cotangent: gradient of the outputs.
            choice: form and backend, as for :meth:`run`.
        """
        out = self.run(*leaves, **choice)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]

    def __str__(self) -> str:
        direction = "causal" if self.causal else "both ways"
        return f"{self.form} {str(self.dtype)[6:]} {self.key_width}x{self.value_width} {direction} N={self.tokens}"


def small_case(form: ChosenForm) -> Case:
    """Return a small case whose forward and backward pass launch every kernel of a form."""
    return Case(form, torch.bfloat16, 64, 64, True, 300, 16 if form == "spanning" else 100)


def against_float64(device: torch.device) -> Iterator[tuple[str, str]]:
    """Compare outputs and gradients with the definition of the operator in float64, for inputs larger than a kernel's tile."""
    native = device.type == "cuda"
    widths = WIDTHS if native else WIDTHS[:1]
    for form, dtype, (key, value), causal in product(FORMS, BOUNDS, widths, (False, True)):
        tokens, block = (1500, 16 if form == "spanning" else 300) if native else (150, 8 if form == "spanning" else 60)
        case = Case(form, dtype, key, value, causal, tokens, block)
        leaves = case.make(device)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        # Rounded here, such that both computations get the same numbers.
        cotangent = torch.randn(1, tokens, 2, value, device=device).bfloat16()
        expected = case.both(exact, cotangent, form="reference", backend="torch")
        actual = case.both(leaves, cotangent)
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True)]
        bound, gradient_bound = BOUNDS[dtype]
        worst = max(errors[1:])
        if not (errors[0] <= bound and worst <= gradient_bound):
            raise AssertionError(f"{case}: off by {errors[0]:.1e} (outputs), {worst:.1e} (gradients)")
        yield str(case), f"errors {errors[0]:.1e} (outputs), {worst:.1e} (gradients)"


def equal_bits(device: torch.device) -> Iterator[tuple[str, str]]:
    """Check that 20 runs of the same call give bit-identical results.

    Yields:
        Name and result of each case.

    Raises:
        AssertionError: if a run differs from the first one.
    """
    for form, causal in product(FORMS, (False, True)):
        case = Case(form, torch.bfloat16, 64, 64, causal, 1000 if device.type == "cuda" else 100, 16, 2)
        leaves = case.make(device)
        cotangent = torch.randn(2, case.tokens, 2, 64, device=device)
        first = case.both(leaves, cotangent)
        for number in range(RUNS - 1):
            if not all(torch.equal(a, b) for a, b in zip(case.both(leaves, cotangent), first, strict=True)):
                raise AssertionError(f"{case}: run {number + 2} differs from the first")
        yield str(case), f"{RUNS} runs, equal bits"


def side_streams(device: torch.device) -> Iterator[tuple[str, str]]:
    """Check that a stream does not read a cached table before a different stream has written it.

    Yields:
        Name and result of each case.

    Raises:
        AssertionError: if two streams compute different outputs.
    """
    for form in FORMS:
        for number in range(5):
            # sizes for which there is no cached table yet
            case = Case(form, torch.bfloat16, 64, 64, True, 1024 + number, 16)
            leaves = case.make(device)
            streams = torch.cuda.Stream(), torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(50_000_000)  # delays the writing of the table until the second stream has started
                first = case.run(*leaves)
            with torch.cuda.stream(streams[1]):
                second = case.run(*leaves)
            torch.cuda.synchronize()
            if not torch.equal(first, second):
                raise AssertionError(f"{case}: a side stream computes different values")
        yield form, "5 sizes on two streams"


def capture_and_replay(device: torch.device) -> Iterator[tuple[str, str]]:
    """Check that a CUDA graph of a forward and backward pass still gives the correct results when it is replayed later.

    Between capture and replay, the inputs get new values, and other calls of the operator replace the cached tables.
    """
    for form, causal in product(FORMS, (False, True)):
        case = Case(form, torch.bfloat16, 64, 64, causal, 777, 16)
        leaves, new_leaves = case.make(device), case.make(device, seed=1)
        cotangent = torch.randn(1, 777, 2, 64, device=device)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                case.both(leaves, cotangent)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = case.both(leaves, cotangent)
        for size in range(100):  # more tables than the cache keeps
            tokens = torch.rand(1, 900 + size, 1, 64, device=device, dtype=torch.bfloat16)
            mhla_attention(tokens, tokens, tokens, torch.rand(64, 64, device=device), block_size=16, causal=True)
        expected = case.both(new_leaves, cotangent)
        with torch.no_grad():
            for a, b in zip(leaves, new_leaves, strict=True):
                a.copy_(b)
        graph.replay()
        torch.cuda.synchronize()
        if not all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True)):
            raise AssertionError(f"{case}: a replayed graph computes different values")
        yield str(case), "replayed"


def large_tensors(device: torch.device) -> Iterator[tuple[str, str]]:
    """Check tensors that are too large for 32-bit indices.

    The outputs of the last head of the last sample must be those of the same head computed alone. On a CPU, the tensors are
    smaller.
    """
    least = 2**31 if device.type == "cuda" else 2**16
    for form, by_batch in product(FORMS, (True, False)):
        if form == "parallel" and not by_batch:
            continue
        heads, tokens = (16, 2048) if by_batch else (64, least // (64 * 128) + 65)
        if device.type != "cuda":
            heads, tokens = (2, 64) if by_batch else (4, least // (4 * 128) + 65)
        batch = least // (heads * tokens * 128) + 1 if by_batch else 1
        block = 64 if form == "spanning" else max(16, tokens // 32)
        case = Case(form, torch.bfloat16, 128, 128, True, tokens, block, batch, heads)
        q, k, v, *mixing = (x.detach() for x in case.make(device))
        assert q.numel() > least
        out = case.run(q, k, v, *mixing)
        some = slice(batch - 1, batch), slice(None), slice(heads - 1, heads)
        alone = case.run(*(x[some].contiguous() for x in (q, k, v)), *(x[-1:] for x in mixing))
        error = float((out[some].float() - alone.float()).norm() / alone.float().norm())
        if not error < 1e-3 or not bool(torch.isfinite(out[some]).all()):
            raise AssertionError(f"{case}: the last row is off by {error:.1e}")
        yield f"{form}, {'batch' if by_batch else 'tokens'}", f"{q.numel():,} numbers"
        # Frees the memory before the next case makes tensors of the same size.
        del q, k, v, out


CHECKS: dict[str, tuple[Callable[[torch.device], Iterator[tuple[str, str]]], bool]] = {
    "against float64": (against_float64, False),
    "equal bits": (equal_bits, False),
    "side streams": (side_streams, True),
    "capture and replay": (capture_and_replay, True),
    "large tensors": (large_tensors, False),
}
"""Checks by name, each with whether it needs a GPU. A check yields the name and the result of each case, or raises an error."""


def check(device: torch.device, console: Console) -> list[dict[str, Any]]:
    """Run all checks on a device, and print a table.

    Args:
        device: device to check.
        console: console to print to.

    Returns:
        A row for each case of a check, and for each check that raises an error.
    """
    rows: list[dict[str, Any]] = []
    table = Table("check", "case", "", "found")
    for name, (function, needs_gpu) in CHECKS.items():
        if needs_gpu and device.type != "cuda":
            continue
        start = time.perf_counter()
        try:
            for case, result in function(device):
                rows.append({"check": name, "case": case, "passed": True, "found": result})
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            rows.append({"check": name, "case": "", "passed": False, "found": text})
        rows[-1]["seconds"] = round(time.perf_counter() - start, 1)
    for row in rows:
        table.add_row(row["check"], row["case"], "ok" if row["passed"] else "wrong", row["found"])
    console.print(table)
    return rows


def main() -> None:
    """Run all checks, or one small case, and exit with status 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="lightning bench native", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", choices=FORMS, help="run one small case, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder for native.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.case:
        case = small_case(args.case)
        leaves = case.make(device)
        tensors = case.both(leaves, torch.ones(1, case.tokens, 2, 64, device=device))
        sys.exit(0 if all(bool(torch.isfinite(x).all()) for x in tensors) else 1)
    rows = check(device, Console(width=150))
    args.out.mkdir(parents=True, exist_ok=True)
    content = {"machine": describe(device), "rows": rows}
    (args.out / "native.json").write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


if __name__ == "__main__":
    main()
