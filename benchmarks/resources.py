"""Registers, spills and shared memory of the Triton kernels, compiled ahead of time without a GPU.

    lightning bench resources

Every kernel is compiled as the operator launches it, for each dtype and pair of widths, forward and backward. The exit code
is 1 if a kernel exceeds its limits. In bfloat16 at the widths of models, a kernel must not spill (on Hopper, at most 128 bytes
per thread). Otherwise, it may spill 1 KB per thread. The other limit is the shared memory of a thread block on the chip.
"""

# Longer than other modules because launches, compilation and limits depend on each other.

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels do not compile
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default at a launch, without the warning

import torch
import triton
from mhla_kernels.problem import Causal
from mhla_kernels.triton_backend.config import HOPPER
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.machine import describe

if TYPE_CHECKING:  # imported by the functions that need it, after this module has set the environment
    from mhla_kernels.triton_backend.call import Arguments
    from mhla_kernels.triton_backend.cross.call import CrossArguments

CHIPS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Shared memory in bytes that a thread block may have, by compute capability (CUDA C++ Programming Guide, table 27)."""

MODEL_WIDTHS = ((32, 32), (64, 64), (72, 72), (128, 128), (128, 256))
"""Pairs of key and value width at which spills in bfloat16 are not allowed."""

OTHER_WIDTHS = ((16, 16), (80, 96), (256, 256))
SPILL_LIMIT = 1024
COMMON_SPILL_LIMIT = 128
"""Maximum number of bytes that a thread may spill: in rare variants, and in common ones on Hopper.

On Hopper, kernels with four warps that spill are faster than kernels with eight warps (``benchmarks.tiles``).
"""
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.uint8: "*u8"}


@dataclass(frozen=True)
class Variant:
    """Call of the operator to compile: form, options and sizes.

    Attributes:
        form: form of the operator.
        causal: whether attention is causal; ``"block"`` for block-causal attention.
        normalize: whether weights are divided by their sum.
        dtype: name of the dtype of q, k and v.
        key_width: width of a key.
        value_width: width of a value.
        terms: number of terms of exponential mixing; 0 for dense coefficients.
        unusual: whether to combine features that models rarely use: tensors with contiguous tokens instead of contiguous
            features, one head, a key mask, packed sequences, and no feature map.
        block_size: number of tokens in a block.
        blocks: number of blocks.
        cross: whether the call is cross-attention, to half as many keys with a mask. With ``unusual``, queries are masked, too.
    """

    form: str
    causal: Causal
    normalize: bool
    dtype: str
    key_width: int
    value_width: int
    terms: int = 0
    unusual: bool = False
    block_size: int = 64
    blocks: int = 4
    cross: bool = False

    def spills_allowed(self, chip: int) -> int:
        """Return the number of bytes that a thread may spill on a chip.

        Common variants use bfloat16 at the widths of models. Their limit is :data:`COMMON_SPILL_LIMIT` on Hopper and 0 on other
        chips. The limit of all other variants is :data:`SPILL_LIMIT`.

        Args:
            chip: compute capability of the chip, such as 90.
        """
        if self.unusual or self.block_size < 8:  # models rarely use either
            return SPILL_LIMIT
        is_common = self.dtype == "bfloat16" and (self.key_width, self.value_width) in MODEL_WIDTHS
        if not is_common:
            return SPILL_LIMIT
        return COMMON_SPILL_LIMIT if chip == HOPPER else 0


@dataclass(frozen=True)
class Launch:
    """Recorded launch of a Triton kernel, with all data that its compilation needs.

    Attributes:
        kernel: name of the kernel.
        module: name of the module that defines it.
        signature: pairs of parameter and Triton type.
        constants: pairs of constant parameter and value.
        divisible: names of parameters that are divisible by 16.
        options: pairs of launch option and value, such as ``num_warps``.
        chip: compute capability, such as 90.
        spills_allowed: number of bytes that a thread may spill.
        dtype: name of the dtype of q, k and v.
        widths: key and value width, as ``64/64``.
        unusual: whether the variant combines rarely used features, see :class:`Variant`.
        label: description of the variant for tables.
    """

    kernel: str
    module: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    options: tuple[tuple[str, int], ...]
    chip: int
    spills_allowed: int
    dtype: str
    widths: str
    unusual: bool
    label: str


@dataclass(frozen=True)
class Usage:
    """Registers, spills and shared memory of a compiled kernel.

    Attributes:
        kernel: name of the kernel.
        dtype: name of the dtype of q, k and v.
        widths: key and value width, as ``64/64``.
        unusual: see :class:`Variant`.
        label: description of the variant for tables.
        chip: compute capability, such as 90.
        registers: number of registers of a thread.
        spill_bytes: number of bytes that a thread spills.
        shared_bytes: shared memory of a thread block in bytes.
        spills_allowed: number of bytes that a thread may spill.
    """

    kernel: str
    dtype: str
    widths: str
    unusual: bool
    label: str
    chip: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    spills_allowed: int

    @property
    def fits(self) -> bool:
        """Whether the kernel stays within its limits of spills and shared memory."""
        return self.spill_bytes <= self.spills_allowed and self.shared_bytes <= CHIPS[self.chip]


@contextmanager
def recording() -> Iterator[list[tuple[JITFunction, dict[str, Any], dict[str, int]]]]:
    """Context manager in which launches of Triton kernels are recorded instead of run.

    Yields:
        List to which each launch adds the kernel, its arguments and its launch options.
    """
    launches: list[tuple[JITFunction, dict[str, Any], dict[str, int]]] = []

    def take_down(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options: dict[str, int] = {
            name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs
        }
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        launches.append((self, dict(bound.arguments), options))

    run = JITFunction.run
    JITFunction.run = take_down
    try:
        yield launches
    finally:
        JITFunction.run = run


def launches_of(variant: Variant, chip: int) -> list[Launch]:
    """Record the kernel launches of a forward and a backward pass, with arguments specialized as Triton does at a launch.

    Args:
        variant: call of the operator.
        chip: compute capability to launch for, such as 90.
    """
    from mhla_kernels.blocks import TokenLayout
    from mhla_kernels.forms.spanning import chunk_tokens
    from mhla_kernels.triton_backend import call
    from mhla_kernels.triton_backend.cross.call import sides
    from mhla_kernels.triton_backend.launch import backward, forward
    from mhla_kernels.triton_backend.rotary import launch_rotary
    from mhla_kernels.triton_backend.tables import kernel_tables

    tokens, heads, dtype = (
        variant.blocks * variant.block_size,
        1 if variant.unusual else 2,
        getattr(torch, variant.dtype),
    )
    widths = (variant.key_width, variant.key_width, variant.value_width)
    q, k, v = torch.zeros(2, tokens, heads, sum(widths), dtype=dtype).split(widths, -1)
    mask = bounds = None
    if variant.unusual:
        q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3)[:1] for x in (q, k, v))
        mask, bounds = torch.ones(1, tokens, dtype=torch.bool), torch.tensor([0, tokens])
    coefficients = (
        [torch.zeros(1, variant.terms)] * 2 if variant.terms else [torch.zeros(1, variant.blocks, variant.blocks)]
    )
    if variant.form == "spanning":
        count = -(-chunk_tokens(tokens, variant.block_size, "triton") // variant.block_size)
        by_block = torch.zeros(1, variant.terms, count)
        coefficients = [torch.zeros(1, count, count), by_block, by_block, by_block[..., 0].contiguous()]
    layout = TokenLayout(tokens, variant.block_size, cu_seqlens=bounds)
    checked = call.Arguments(
        q,
        k,
        v,
        coefficients=coefficients,
        tables=kernel_tables(layout, variant.form, coefficients[0].shape[-1], q.device),
        key_mask=mask,
        cu_seqlens=bounds,
        block_size=variant.block_size,
        block_offsets=None,
        causal=bool(variant.causal),
        relu=not variant.unusual,
        eps=1e-6 if variant.normalize else None,
        form=variant.form,
        mixer="exponential" if variant.terms else "dense",
        guard="",
        block_causal=variant.causal == "block",
    )
    with recording() as recorded, mock.patch.object(call, "chip_of", return_value=chip):
        alone = call.Call(checked)
        both: tuple[call.Call, call.Call] = (
            sides(_cross_arguments(checked, variant)) if variant.cross else (alone, alone)
        )
        forward(*both)
        backward(*both, q.new_zeros(*q.shape[:3], v.shape[-1]), (True,) * 4)
        angles = torch.zeros(tokens, variant.key_width // 2)
        for back in (False, True):
            launch_rotary(q, q, angles, angles, True, False, back)
    launches = []
    for function, arguments, options in recorded:
        names = [parameter.name for parameter in function.params if not parameter.is_constexpr]
        unspecialized = {parameter.name: parameter.do_not_specialize for parameter in function.params}
        constants = {name: value for name, value in arguments.items() if name not in names}
        signature, divisible = {}, []
        for name in names:
            value = arguments[name]
            if isinstance(value, Tensor):
                signature[name] = TYPES[value.dtype]
                divisible.append(name)
            elif isinstance(value, float):
                signature[name] = "fp32"
            # As at a call, Triton makes a constant of an integer 1 and notes which other integers are divisible by 16.
            elif value == 1 and not unspecialized[name]:
                signature[name], constants[name] = "constexpr", 1
            else:
                signature[name] = "i32"
                divisible += [name] if value % 16 == 0 and not unspecialized[name] else []
        signature |= dict.fromkeys((name for name in arguments if name not in names), "constexpr")
        directions = {False: "bidirectional", True: "causal", "block": "block-causal"}
        mode = ("out", "dq", "dv", "dk")[constants["MODE"]] if "MODE" in constants else ""
        direction = "cross" if variant.cross else directions[variant.causal]
        label = (
            f"{variant.form} {direction} "
            f"{'normalized' if variant.normalize else 'plain'} {'unusual ' if variant.unusual else ''}{mode}"
        )
        launches.append(
            Launch(
                function.fn.__name__,
                function.fn.__module__,
                tuple(signature.items()),
                tuple(constants.items()),
                tuple(divisible),
                tuple(options.items()),
                chip,
                variant.spills_allowed(chip),
                variant.dtype,
                f"{variant.key_width}/{variant.value_width}",
                variant.unusual,
                label.strip(),
            )
        )
    return launches


def _cross_arguments(checked: Arguments, variant: Variant) -> CrossArguments:
    """Return the arguments of a cross-attention call with the queries of a self-attention call and half of its keys."""
    from mhla_kernels.blocks import TokenLayout
    from mhla_kernels.cross.layout import CrossLayout
    from mhla_kernels.triton_backend.cross.call import CrossArguments
    from mhla_kernels.triton_backend.cross.tables import cross_tables

    count = variant.blocks // 2
    keys = count * variant.block_size
    key_bounds = None if checked.cu_seqlens is None else torch.tensor([0, keys])
    layout = CrossLayout(checked.layout, TokenLayout(keys, variant.block_size, cu_seqlens=key_bounds))
    return CrossArguments(
        checked.q,
        checked.k[:, :keys],
        checked.v[:, :keys],
        [torch.zeros(1, variant.blocks, count)],
        *cross_tables(layout, variant.form, True, checked.q.device),
        query_mask=checked.key_mask,
        key_mask=torch.ones(len(checked.k), keys, dtype=torch.bool),
        cu_seqlens=checked.cu_seqlens,
        key_cu_seqlens=key_bounds,
        block_size=variant.block_size,
        key_block_size=variant.block_size,
        block_offsets=None,
        key_block_offsets=None,
        relu=checked.relu,
        eps=checked.eps,
        form=variant.form,
        guard="",
    )


def compile_launch(launch: Launch) -> Usage:
    """Compile a kernel for a recorded launch, and read its resources from the machine code."""
    kernel = getattr(sys.modules.get(launch.module) or __import__(launch.module, fromlist=["x"]), launch.kernel)
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible}
    source = ASTSource(kernel, dict(launch.signature), dict(launch.constants), attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", launch.chip, 32), options=dict(launch.options))
    registers, spills = _read_cubin(compiled.asm["cubin"])
    return Usage(
        kernel=launch.kernel,
        dtype=launch.dtype,
        widths=launch.widths,
        unusual=launch.unusual,
        label=launch.label,
        chip=launch.chip,
        registers=registers,
        spill_bytes=spills,
        shared_bytes=compiled.metadata.shared,
        spills_allowed=launch.spills_allowed,
    )


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    """Read resources from the machine code of a kernel.

    Returns:
        The number of registers of a thread, and the size of its stack in bytes, which holds the spills.
    """
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    if registers is None or stack is None:
        raise RuntimeError(f"cuobjdump printed no number of registers: {text}")
    return int(registers[1]), int(stack[1])


def variants(widths: tuple[tuple[int, int], ...]) -> list[Variant]:
    """List all variants to compile: the combinations of form, options and dtype, and some unusual variants.

    Args:
        widths: pairs of key and value width.
    """
    dense = [
        Variant(form, causal, normalize, dtype, *pair)
        for pair in widths
        for dtype in ("bfloat16", "float32")
        for form in ("parallel", "chunked")
        for causal in (False, True)
        for normalize in (False, True)
    ]
    unusual = [
        Variant(form, True, True, dtype, *pair, unusual=True)
        for pair in widths
        for dtype in ("bfloat16", "float32")
        for form in ("parallel", "chunked")
    ]
    cross = [
        Variant(form, False, normalize, dtype, *pair, unusual=unusual, cross=True)
        for pair in widths
        for dtype in ("bfloat16", "float32")
        for form in ("parallel", "chunked")
        for normalize, unusual in ((False, False), (True, False), (True, True))
    ]
    return (
        dense
        + unusual
        + block_causal(widths)
        + cross
        + layouts(widths)
        + [
            Variant("chunked", True, False, dtype, *pair, terms)
            for pair in widths
            for dtype in ("bfloat16", "float32")
            for terms in (4, 16)
        ]
        + [
            Variant("spanning", causal, normalize, dtype, *pair, terms=8, block_size=16, blocks=40)
            for pair in widths
            for dtype in ("bfloat16", "float32")
            for causal, normalize in ((True, False), (True, True), (False, True))
        ]
        + [
            Variant("spanning", True, True, dtype, *pair, terms=8, block_size=size, blocks=600 // size)
            for pair in widths
            for dtype in ("bfloat16", "float32")
            for size in (2, 4)
        ]
    )


def block_causal(widths: tuple[tuple[int, int], ...]) -> list[Variant]:
    """List the variants of block-causal attention: all forms, dense and exponential mixing, few blocks and many.

    Args:
        widths: pairs of key and value width.
    """
    return [
        Variant(form, "block", normalize, dtype, *pair, terms, block_size=block_size, blocks=blocks)
        for pair in widths
        for dtype in ("bfloat16", "float32")
        for form, normalize, terms, block_size, blocks in (
            ("parallel", True, 0, 64, 8),
            ("parallel", False, 0, 2, 64),
            ("chunked", True, 0, 64, 8),
            ("chunked", False, 0, 210, 40),
            ("chunked", False, 4, 64, 8),
            ("spanning", True, 8, 16, 40),
        )
    ]


def layouts(widths: tuple[tuple[int, int], ...]) -> list[Variant]:
    """List variants whose blocks take different code paths: long blocks, many blocks, and very short blocks.

    A tile contains more than 16 of the very short blocks.

    Args:
        widths: pairs of key and value width.
    """
    return [
        Variant(form, causal, not causal, dtype, *pair, block_size=block_size, blocks=blocks)
        for pair in widths
        for dtype in ("bfloat16", "float32")
        for causal in (False, True)
        for form, block_size, blocks in (
            ("chunked", 2100, 2),
            ("chunked", 210, 40),
            ("chunked", 16, 40),
            ("parallel", 2, 64),
        )
    ]


def measure(chosen: list[Variant], chips: list[int], console: Console, sample: int | None = None) -> list[Usage]:
    """Compile the kernels of variants on all cores, identical launches only once.

    Args:
        chosen: variants of the operator.
        chips: compute capabilities to compile for.
        console: console for the progress bar.
        sample: number of kernels to compile, evenly chosen; None for all.
    """
    distinct: dict[tuple[object, ...], Launch] = {}
    for chip, variant in product(chips, chosen):
        for launch in launches_of(variant, chip):
            key = (chip, launch.kernel, launch.signature, launch.constants, launch.divisible, launch.options)
            # The strictest of the limits on spills holds for launches that compile to the same kernel.
            if key not in distinct or launch.spills_allowed < distinct[key].spills_allowed:
                distinct[key] = launch
    launches = list(distinct.values())
    if sample is not None:
        launches = [launches[index * len(launches) // sample] for index in range(min(sample, len(launches)))]
    with ProcessPoolExecutor() as pool, Progress(console=console, transient=True) as progress:
        futures = [pool.submit(compile_launch, launch) for launch in launches]
        return [future.result() for future in progress.track(futures, description="compiling")]


def worst_of(usages: list[Usage]) -> list[dict[str, Any]]:
    """Return the maximum of registers, spills and shared memory over the launches of each kernel.

    Launches with the same kernel, dtype, widths and chip form a group. Unusual launches form separate groups.
    """
    groups: dict[tuple[str, str, str, bool, int], list[Usage]] = {}
    for usage in usages:
        groups.setdefault((usage.kernel, usage.dtype, usage.widths, usage.unusual, usage.chip), []).append(usage)
    return [
        {
            **dict(zip(("kernel", "dtype", "widths", "unusual", "chip"), key, strict=True)),
            "launches": len(group),
            "registers": max(usage.registers for usage in group),
            "spill_bytes": max(usage.spill_bytes for usage in group),
            "shared_bytes": max(usage.shared_bytes for usage in group),
        }
        for key, group in sorted(groups.items())
    ]


def print_table(usages: list[Usage], console: Console) -> None:
    """Print the resources of all kernels, and every launch that exceeds its limits.

    The table has a row for each kernel, dtype and pair of widths, and a column for each chip.
    """
    chips = sorted({usage.chip for usage in usages})
    table = Table(title="registers a thread / spilled bytes / shared KB, the worst over all ways a kernel is launched")
    for title in ("kernel", "dtype", "widths K/V", *(f"sm_{chip}" for chip in chips)):
        table.add_column(title, justify="right" if title.startswith("sm_") else "left", no_wrap=True)
    rows: dict[tuple[str, str, str], dict[int, str]] = {}
    for worst in worst_of(usages):
        text = f"{worst['registers']} / {worst['spill_bytes']} / {worst['shared_bytes'] / 1024:.0f}"
        widths = worst["widths"] + (" unusual" if worst["unusual"] else "")
        rows.setdefault((worst["kernel"], worst["dtype"], widths), {})[worst["chip"]] = text
    for key, by_chip in rows.items():
        table.add_row(*key, *(by_chip.get(chip, "") for chip in chips))
    console.print(table)
    for usage in usages:
        if not usage.fits:
            console.print(f"over its limits: {usage}")


def main() -> None:
    """Compile the kernels, print and write their resources, and exit with status 1 if a kernel exceeds its limits."""
    parser = argparse.ArgumentParser(prog="lightning bench resources", description=__doc__.splitlines()[0])
    parser.add_argument("--chips", type=int, nargs="+", choices=list(CHIPS), default=list(CHIPS))
    parser.add_argument("--widths", nargs="+", metavar="K/V", help="pairs such as 64/64; all by default")
    parser.add_argument("--sample", type=int, metavar="N", help="compile only N of the kernels, evenly chosen")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder for resources.json")
    args = parser.parse_args()
    console = Console(width=150)
    widths: tuple[tuple[int, int], ...] = MODEL_WIDTHS + OTHER_WIDTHS
    if args.widths:
        widths = tuple((int(k), int(v)) for k, v in (pair.split("/") for pair in args.widths))
    usages = measure(variants(widths), args.chips, console, args.sample)
    print_table(usages, console)
    args.out.mkdir(parents=True, exist_ok=True)
    result = args.out / "resources.json"
    machine = {**describe(torch.device("cpu")), "triton": triton.__version__}
    lines = ",\n".join(f" {json.dumps(worst)}" for worst in worst_of(usages))
    result.write_text(f'{{"machine": {json.dumps(machine)}, "kernels": [\n{lines}\n]}}\n')
    over = [usage for usage in usages if not usage.fits]
    console.print(f"{len(usages)} kernels, {len(over)} over their limits; written: {result}")
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
