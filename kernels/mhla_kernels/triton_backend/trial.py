"""A trial of a kind of fused kernel: outputs and gradients of a small problem, compared with those of the PyTorch form."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mhla_kernels.forms.spanning import CHUNK, chunk_tokens
from mhla_kernels.triton_backend import fallback
from mhla_kernels.triton_backend.call import Arguments
from mhla_kernels.triton_backend.config import power_of_two
from mhla_kernels.triton_backend.tables import make_tables, rows_in_chunks, token_rows
from mhla_kernels.verdicts import BOUNDS, Verdict, compare

MANY = 32
"""Blocks above which mixing takes other tiles; see :func:`mhla_kernels.triton_backend.config.mix_tiles`."""

LONGEST = 4096
"""Blocks that are longer are tried with so many tokens."""


class Kind(NamedTuple):
    """Everything but alignments and strides that decides which kernels a call compiles.

    Attributes:
        form: ``"parallel"``, ``"chunked"`` or ``"spanning"``.
        mixer: key of ``MIXERS``.
        dtype: ``"float32"`` or ``"bfloat16"``.
        key_width: K.
        value_width: V.
        causal: as of the call, like the next three.
        normalize: see there.
        relu: see there.
        masked: whether there is a key mask.
        layout: ``"equal"`` blocks, ``"uneven"`` ones, or ``"packed"`` sequences.
        block_size: tokens of the largest block, rounded up to a power of two, at most :data:`LONGEST`.
        many: whether there are more than :data:`MANY` blocks.
        terms: terms of exponential coefficients, in the spanning form running sums; 0 for a matrix.
    """

    form: str
    mixer: str
    dtype: str
    key_width: int
    value_width: int
    causal: bool
    normalize: bool
    relu: bool
    masked: bool
    layout: str
    block_size: int
    many: bool
    terms: int

    def __str__(self) -> str:
        flags = [name for name in ("causal", "normalize", "relu", "masked", "many") if getattr(self, name)]
        mixer = f"{self.mixer}{self.terms}" if self.terms else self.mixer
        shape = f"{self.key_width}x{self.value_width}", f"{self.layout}{self.block_size}"
        return "-".join([self.form, mixer, self.dtype, *shape, *flags])


def size_class(block_size: int, form: str) -> int:
    """See :attr:`Kind.block_size`. Kernels that weigh pairs are compiled for the blocks that a tile touches."""
    if form != "chunked" and block_size <= 4:
        return 1 << (block_size - 1).bit_length()
    return min(LONGEST, power_of_two(block_size))


def make_problem(kind: Kind, device: torch.device) -> Arguments:
    """Two heads of random tokens that the kind describes, in three blocks or in two more than :data:`MANY`."""
    generator = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float32)  # whatever the default is

    blocks, size = MANY + 2 if kind.many else 3, kind.block_size
    if kind.form == "spanning":
        blocks = -(-2 * CHUNK["triton"] // size) + 1  # two chunks and a part of a third
    tokens = blocks * size - size // 3
    offsets = bounds = None
    if kind.layout == "uneven":
        offsets = (0, *(size - size // 4 + i * size for i in range(blocks - 1)), tokens)
        size = max(last - first for first, last in pairwise(offsets))
    if kind.layout == "packed":
        bounds = torch.tensor([0, tokens, 2 * tokens - 1], device=device)
        tokens = 2 * tokens - 1
    dtype = getattr(torch, kind.dtype)
    q, k = ((rand(1, tokens, 2, kind.key_width) - (0.5 if kind.relu else 0.0)).to(dtype) for _ in range(2))
    v = (rand(1, tokens, 2, kind.value_width) - 0.5).to(dtype)
    shapes: list[tuple[int, ...]] = [(2, kind.terms)] * 2 if kind.terms else [(2, blocks, blocks)]
    chunk = size
    if kind.form == "spanning":
        chunk = chunk_tokens(tokens, size, "triton")
        count = -(-chunk // size)
        shapes = [(2, count, count), (2, kind.terms, count), (2, kind.terms, count), (2, kind.terms)]
    tables = make_tables(tokens, device, None if offsets else chunk, offsets, bounds)
    token_row = token_rows(tables) if kind.form == "parallel" else None
    if kind.form == "spanning":
        token_row = rows_in_chunks(tokens, device, size, chunk, bounds)
    return Arguments(
        q, k, v, [rand(*shape) for shape in shapes], rand(1, tokens) < 0.8 if kind.masked else None, bounds,
        tables.table, tables.sequences, token_row, tables.largest, size, None if offsets is None else list(offsets),
        kind.causal, kind.normalize, kind.relu, 1e-6, kind.form, kind.mixer, "",
    )  # fmt: skip


def try_kernels(kind: Kind, device: torch.device) -> Verdict:
    """Run the fused kernels of a kind forward and backward on a small problem, and judge them by the PyTorch form."""
    start = time.perf_counter()
    given = make_problem(kind, device)
    want, wanted_gradients = _run(given, fused=False)
    got, found_gradients = _run(given, fused=True)
    bound, gradient_bound = BOUNDS[given.q.dtype]
    found = [compare("the output", got, want, bound)]
    names = ("q", "k", "v", *(f"coefficients {i}" for i in range(len(given.coefficients))))
    for name, one, two in zip(names, found_gradients, wanted_gradients, strict=True):
        found.append(compare(f"the gradient of {name}", one, two, gradient_bound))
    wrong = [text for _, text in found if text]
    errors = f"errors {found[0][0]:.1e} (output), {max(error for error, _ in found[1:]):.1e} (gradients)"
    return Verdict(not wrong, "; ".join(wrong) or errors, time.perf_counter() - start)


def _run(given: Arguments, fused: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    dtype = given.q.dtype if fused else torch.float64  # float32 products may be TF32 ones
    leaves = [x.to(dtype).requires_grad_() for x in given[:3]]
    kept = torch.float32 if fused else torch.float64
    coefficients = [x.detach().to(kept, copy=True).requires_grad_() for x in given.coefficients]
    given = given._replace(q=leaves[0], k=leaves[1], v=leaves[2], coefficients=coefficients)
    out = torch.ops.mhla.attention(*given) if fused else fallback.outputs(given, torch.float64)
    generator = torch.Generator(out.device).manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32)
    cotangent = cotangent.to(torch.bfloat16).to(out.dtype)  # the same in either dtype
    return out.detach(), torch.autograd.grad(out, [*leaves, *coefficients], cotangent)
