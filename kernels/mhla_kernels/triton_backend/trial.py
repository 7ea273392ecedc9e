"""Trials of Triton kernels, which compare their outputs and gradients on small problems with those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhla_kernels.blocks import TokenLayout
from mhla_kernels.forms.spanning import CHUNK, chunk_tokens
from mhla_kernels.triton_backend import fallback
from mhla_kernels.triton_backend.call import Arguments, chip_of
from mhla_kernels.triton_backend.config import MANY, mix_tiles, mixing_gradient_tiles, power_of_two
from mhla_kernels.triton_backend.tables import kernel_tables
from mhla_kernels.verdicts import WrongNumbersError

LONGEST = 4096
"""Largest number of tokens in a block of a trial; it also stands for longer blocks."""


BOUNDS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 4e-2)}
"""Allowed errors of outputs and of gradients, relative to their norm: a few times the errors of a correct kernel."""


class Kind(NamedTuple):
    """Properties of an attention call that decide which Triton kernels it compiles, except for alignments and strides.

    Attributes:
        form: algorithm: ``"parallel"`` (all token pairs), ``"chunked"`` (one summary per block) or ``"spanning"`` (chunks of
            several blocks, connected by running sums).
        mixer: name of the kernels that mix summaries: ``"dense"`` or ``"exponential"``.
        dtype: ``"float32"`` or ``"bfloat16"``.
        key_width: width of a key, K.
        value_width: width of a value, V.
        causal: whether later tokens are hidden or, with ``block_causal``, later blocks.
        normalize: whether outputs are divided by the normalizer.
        relu: whether the kernels apply the feature map ``relu(x) + 1e-6``.
        masked: whether there is a key mask.
        layout: ``"equal"`` or ``"uneven"`` blocks, or ``"packed"`` sequences.
        block_size: tokens in the largest block. It is rounded by :func:`size_class` before the kernels are compared with
            PyTorch.
        many: whether the form is chunked and there are more than 32 blocks, for which the kernels use larger tiles.
        terms: number of exponential terms, or of running sums in the spanning form; 0 if the coefficients are a matrix.
        block_causal: whether a causal call hides later blocks only, instead of all later tokens.
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
    block_causal: bool = False

    def __str__(self) -> str:
        flags = [
            name for name in ("causal", "block_causal", "normalize", "relu", "masked", "many") if getattr(self, name)
        ]
        mixer = f"{self.mixer}{self.terms}" if self.terms else self.mixer
        shape = f"{self.key_width}x{self.value_width}", f"{self.layout}{self.block_size}"
        return "-".join([self.form, mixer, self.dtype, *shape, *flags])


def size_class(block_size: int, form: str) -> int:
    """Round a block size to one of the sizes for which Triton kernels are compared with PyTorch.

    Sizes are rounded up to a power of two from 16 to 4096, and larger sizes down to 4096. In the parallel and the spanning
    form, kernels are compiled for the number of blocks that a tile of tokens overlaps, so sizes up to 4 are rounded up to 1, 2
    or 4 instead.

    Args:
        block_size: tokens in the largest block.
        form: algorithm: ``"parallel"`` (all token pairs), ``"chunked"`` (one summary per block) or ``"spanning"`` (chunks of
            several blocks).
    """
    if form != "chunked" and block_size <= 4:
        return 1 << (block_size - 1).bit_length()
    return min(LONGEST, power_of_two(block_size))


def block_counts(form: str, dtype: str, many: bool, chip: int) -> tuple[int, ...]:
    """Return the numbers of blocks with which kernels for a matrix of coefficients are tried, in increasing order.

    In the chunked form, there is one number for each set of tile sizes that these kernels use for up to 32 blocks or, with
    ``many``, for more than 32. In the other forms, there is a single number.

    Args:
        form: ``"parallel"``, ``"chunked"`` or ``"spanning"``. Only the chunked form mixes block summaries.
        dtype: ``"float32"`` or ``"bfloat16"``.
        many: whether there are more than 32 blocks.
        chip: compute capability of the GPU times ten.
    """
    counts = (MANY + 2, 2 * MANY + 2) if many else (3, MANY // 2 + 2)
    if form != "chunked":
        return counts[:1]
    type_ = getattr(torch, dtype)
    by_tiles = {(mix_tiles(type_, n, chip), mixing_gradient_tiles(type_, n, chip)): n for n in reversed(counts)}
    return tuple(sorted(by_tiles.values()))


def make_problem(kind: Kind, device: torch.device, blocks: int = 3) -> Arguments:
    """Create the arguments of a small attention call with random tokens in two heads, for the trial of its Triton kernels.

    In the spanning form, which processes chunks of several blocks, the blocks fill two chunks and a part of a third.

    Args:
        kind: properties of the call.
        device: device of the tensors.
        blocks: number of blocks; ignored in the spanning form.
    """
    rand = random_numbers(device)
    size = kind.block_size
    if kind.form == "spanning":
        blocks = -(-2 * CHUNK["triton"] // size) + 1  # the sums of the first chunk reach the third through the second
    layout = trial_layout(blocks, size, kind.layout, device)
    tokens = layout.tokens
    dtype = getattr(torch, kind.dtype)
    # With the feature map, about half of the features are negative, so that the rectifier matters.
    q, k = ((rand(1, tokens, 2, kind.key_width) - (0.5 if kind.relu else 0.0)).to(dtype) for _ in range(2))
    v = (rand(1, tokens, 2, kind.value_width) - 0.5).to(dtype)
    shapes: list[tuple[int, ...]] = [(2, kind.terms)] * 2 if kind.terms else [(2, blocks, blocks)]
    if kind.form == "spanning":
        count = -(-chunk_tokens(tokens, size, "triton") // size)
        shapes = [(2, count, count), (2, kind.terms, count), (2, kind.terms, count), (2, kind.terms)]
    return Arguments(
        q,
        k,
        v,
        coefficients=[rand(*shape) for shape in shapes],
        tables=kernel_tables(layout, kind.form, shapes[0][-1], device),
        key_mask=rand(1, tokens) < 0.8 if kind.masked else None,
        cu_seqlens=layout.cu_seqlens,
        block_size=layout.block_size,
        block_offsets=None if layout.block_offsets is None else list(layout.block_offsets),
        causal=kind.causal,
        relu=kind.relu,
        eps=1e-6 if kind.normalize else None,
        form=kind.form,
        mixer=kind.mixer,
        guard="",
        block_causal=kind.block_causal,
    )


def try_kernels(kind: Kind, device: torch.device) -> str:
    """Compare the Triton kernels for one kind of attention call with PyTorch in float64, on small random problems.

    If the coefficients are a matrix, there is one problem for each number of blocks in :func:`block_counts`, otherwise a single
    problem. Outputs and all gradients are compared (see :func:`compare_passes`).

    Args:
        kind: properties of the calls that use these kernels.
        device: device to run on.

    Returns:
        Text with the relative errors of outputs and gradients, which are within the bounds.

    Raises:
        WrongNumbersError: if a numerical error is larger than allowed for the dtype.
    """
    counts = block_counts(kind.form, kind.dtype, kind.many, chip_of(device))
    return "; ".join(
        compare_problem(make_problem(kind, device, blocks), torch.ops.mhla.attention, fallback.outputs)
        for blocks in (counts if kind.mixer == "dense" else counts[:1])
    )


def compare_problem(problem: Any, operator: Callable[..., Tensor], reference: Callable[..., Tensor]) -> str:
    """Compare the outputs and gradients of a registered attention operator with PyTorch in float64.

    Args:
        problem: arguments of the operator, a named tuple such as :class:`Arguments`.
        operator: registered operator that runs the kernels. It takes the fields of the named tuple as arguments.
        reference: function that computes the same outputs in PyTorch, from the named tuple and a dtype for the computation.

    Returns:
        Text with the relative errors of outputs and gradients, which are within the bounds.

    Raises:
        WrongNumbersError: if a numerical error is larger than allowed for the dtype.
    """

    def replaced(q: Tensor, k: Tensor, v: Tensor, *coefficients: Tensor) -> Any:
        return problem._replace(q=q, k=k, v=v, coefficients=list(coefficients))

    coefficients = {f"coefficients {i}": x for i, x in enumerate(problem.coefficients)}
    return compare_passes(
        {"q": problem.q, "k": problem.k, "v": problem.v, **coefficients},
        lambda *tensors: operator(*replaced(*tensors)),
        lambda *tensors: reference(replaced(*tensors), torch.float64),
    )


def random_numbers(device: torch.device) -> Callable[..., Tensor]:
    """Return a function that creates float32 tensors of uniform random numbers between 0 and 1, from a fixed seed.

    The function takes the lengths of the axes as arguments. The tensors are on ``device``.
    """
    generator = torch.Generator(device).manual_seed(0)
    # not torch's default dtype
    return lambda *shape: torch.rand(shape, generator=generator, device=device, dtype=torch.float32)


def trial_layout(blocks: int, size: int, name: str, device: torch.device) -> TokenLayout:
    """Create the partition of a trial's tokens into blocks of at most ``size`` tokens.

    If ``size`` is at least 3, at least one block has fewer tokens, so that kernels are also tried on such a block.

    Args:
        blocks: number of blocks in a sequence.
        size: tokens in the largest block.
        name: ``"equal"`` for a partition that one block size describes, in which only the last block may be short; ``"uneven"``
            for one that block bounds describe, in which the first and the last block may be short; ``"packed"`` for two packed
            sequences with one block size, the second sequence one token shorter than the first.
        device: device of the bounds of packed sequences.
    """
    tokens = blocks * size - size // 3
    if name == "uneven":
        return TokenLayout(tokens, 0, (0, *(size - size // 4 + i * size for i in range(blocks - 1)), tokens))
    if name == "packed":
        bounds = torch.tensor([0, tokens, 2 * tokens - 1], device=device)
        return TokenLayout(2 * tokens - 1, size, cu_seqlens=bounds)
    return TokenLayout(tokens, size)


def compare_passes(tensors: dict[str, Tensor], kernel: Callable[..., Tensor], reference: Callable[..., Tensor]) -> str:
    """Compare the outputs and all gradients of Triton kernels with results of PyTorch in float64.

    Args:
        tensors: inputs, by the names that error messages use for them. The dtype of the first one decides the allowed errors.
        kernel: function of the inputs that runs the kernels.
        reference: function that computes the same outputs in PyTorch, from the inputs in float64.

    Returns:
        Text with the error of the outputs and the largest error of a gradient, relative to their norms.

    Raises:
        WrongNumbersError: if a numerical error is larger than allowed for the dtype.
    """
    # float64, not float32, whose products PyTorch may compute in TF32
    expected = _differentiate(reference, [x.double() for x in tensors.values()])
    actual = _differentiate(kernel, list(tensors.values()))
    names = ["the output", *(f"the gradient of {name}" for name in tensors)]
    output_bound, gradient_bound = BOUNDS[next(iter(tensors.values())).dtype]
    errors: list[float] = []
    wrong: list[str] = []
    for name, result, wanted in zip(names, actual, expected, strict=True):
        error = float((result.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
        bound = gradient_bound if errors else output_bound
        errors.append(error)
        if not error <= bound:  # not `error > bound`: NaN must not pass
            wrong.append(f"{name} is off by {error:.2g} of its norm (allowed: {bound:g})")
    if wrong:
        raise WrongNumbersError("; ".join(wrong))
    return f"errors {errors[0]:.1e} (output), {max(errors[1:]):.1e} (gradients)"


def _differentiate(run: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return the output of a function, followed by the gradients of its inputs for a random but fixed output gradient."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = run(*leaves)
    generator = torch.Generator(out.device).manual_seed(1)
    cotangent = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32)
    cotangent = cotangent.to(torch.bfloat16).to(out.dtype)  # rounded first, so that both runs get equal values
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]
