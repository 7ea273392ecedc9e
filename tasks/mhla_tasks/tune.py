"""Measure what is fastest here, at your shapes, and keep it: forms of the operator, on a GPU also launches of its kernels.

    lightning tune --config configs/language/stdlib.yaml          # the shapes that this run trains and validates with
    lightning tune --shape 8,6,1024,64,64,64 --shape 1,4,4096,64,128,256,causal

Every shape is run forward and backward in every form that takes it. The fastest one is kept in the user's cache
(~/.cache/mhla, or $MHLA_CACHE), by device and version of torch, and is taken from then on by every process; remove the file
to go back to the shipped choice. On a GPU --launches measures warps and stages of every kernel of the chosen form too, a
few minutes a shape.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Literal, get_args

import torch
from mhla_kernels import ExponentialMixing, mhla_attention, tuned
from mhla_kernels.backend import INTERPRETED, Backend, ChosenForm, choose_backend
from mhla_kernels.forms.cost import cheapest_form
from mhla_kernels.mixing import Mixing, as_mixing
from mhla_kernels.tuned import Launch, Setting

FORMS: tuple[ChosenForm, ...] = get_args(ChosenForm)
LEAST_GAIN = 1.03
"""A form is changed for so much: below it lies what two measurements differ by."""
WARPS, STAGES = (4, 8), (1, 2, 3, 4)
"""That kernels are tried with."""
LARGEST = 2**28
"""Scores of token pairs that the parallel form is tried with."""


def main(words: Sequence[str]) -> int:
    """Measure what the words ask for, keep it, and print a table; the exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", action="append", default=[], metavar="B,H,N,C,Dk,Dv[,causal]",
        help="batch, heads, tokens, tokens of a block, widths of keys and values; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="shapes of a run; may be repeated"
    )
    parser.add_argument(
        "--exponential", type=int, metavar="R", help="coefficients are sums of R exponentials (for --shape)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=None, help="dtype for --shape (default on a CPU: float32)"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds for each form of a shape, roughly (default: 2)"
    )
    parser.add_argument("--launches", action="store_true", help="also measure warps and stages of the Triton kernels")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print the table, keep nothing")
    asked, others = parser.parse_known_args(words)
    if others and not asked.config:
        parser.error(f"unknown: {' '.join(others)} (options of a run need --config)")
    if not asked.shape and not asked.config:
        parser.error("give --shape or --config")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked.launches and device.type == "cpu" and not INTERPRETED:
        parser.error("--launches needs a GPU: on a CPU there are no kernels to launch")
    settings: list[Setting] = []
    for text in asked.shape:
        try:
            settings.append(_read_shape(text, asked.exponential, asked.dtype, device))
        except ValueError as error:
            parser.error(str(error))
    if asked.config:
        settings += settings_of_run([word for file in asked.config for word in ("--config", file)] + others)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # a process that Lightning started for the run
    if not settings:
        parser.error("the run calls the operator nowhere with form='auto', or is compiled: leave compile out")
    rows = []
    for setting in dict.fromkeys(settings):
        times = {form: measure(setting, form, device, asked.seconds) for form in forms_of(setting)}
        shipped = shipped_form(setting)
        best = min(times, key=lambda form: times[form])
        chosen = best if times[shipped] / times[best] >= LEAST_GAIN else shipped
        rows.append((setting, times, shipped, chosen))
        sys.stderr.write(f"{setting}: {', '.join(f'{form} {time:.2f} ms' for form, time in times.items())}\n")
    _print(rows)
    if asked.launches:
        for setting, _, _, chosen in rows:
            found, before, after = launches_of(setting, chosen, device, asked.seconds)
            gains = ", ".join(
                f"{kernel}: {launch.warps} warps, {launch.stages} stages" for kernel, launch in found.items()
            )
            sys.stdout.write(f"{setting}: {before:.3f} to {after:.3f} ms; {gains or 'as shipped'}\n")
            if found and not asked.dry_run:
                sys.stdout.write(f"kept in {tuned.keep_launches(name_of_device(device), found)}\n")
    if not asked.dry_run and rows:
        path = tuned.keep_forms(device.type, {setting: chosen for setting, _, _, chosen in rows})
        sys.stdout.write(f"kept in {path}\n")
    return 0


def _read_shape(text: str, terms: int | None, dtype: str | None, device: torch.device) -> Setting:
    words = text.split(",")
    causal = words[-1] == "causal"
    try:
        batch, heads, tokens, block, key, value = map(int, words[:6])
        if len(words) != 6 + causal or min(batch, heads, tokens, block, key, value) < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"--shape={text} is not B,H,N,C,Dk,Dv or B,H,N,C,Dk,Dv,causal") from None
    kind = "DenseMixing" if terms is None else "ExponentialMixing"
    dtype = dtype or ("bfloat16" if device.type == "cuda" else "float32")
    q, v = (torch.empty(1, 1, 1, width, device=device, dtype=getattr(torch, dtype)) for width in (key, value))
    backend = choose_backend("auto", q, q, v, "auto")
    return Setting(backend, dtype, batch * heads, tokens, -(-tokens // block), key, value, causal, not causal, kind)


def settings_of_run(words: Sequence[str]) -> list[Setting]:
    """The problems that a run gives the operator, found by one batch of training and one of validation."""
    from mhla_tasks import cli

    before = os.getcwd()
    tuned.recorded = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            cli.main(["fit", *words, "--trainer.fast_dev_run=1", f"--trainer.default_root_dir={folder}"])
        finally:
            found, tuned.recorded = tuned.recorded, None
            os.chdir(before)
    return found or []


def shipped_form(setting: Setting) -> ChosenForm:
    """The form by the shipped costs."""
    mixing = _mixing(setting, torch.device("cpu"))
    work = mixing.work(setting.blocks, setting.causal, setting.backend == "triton")
    backend: Literal["torch", "triton"] = "triton" if setting.backend == "triton" else "torch"
    shape = setting.tokens, setting.blocks, setting.key_width, setting.value_width, setting.causal
    return cheapest_form(*shape, work=work, terms=mixing.span_terms(setting.causal), backend=backend)


def _mixing(setting: Setting, device: torch.device) -> Mixing:
    if setting.mixing == "ExponentialMixing":
        return ExponentialMixing(torch.rand(4, device=device), torch.rand(4, device=device))
    return as_mixing(torch.rand(setting.blocks, setting.blocks, device=device))


def forms_of(setting: Setting) -> list[ChosenForm]:
    """The forms that take such a call."""
    spans = _mixing(setting, torch.device("cpu")).span_terms(setting.causal) is not None
    return [form for form in FORMS if form != "spanning" or spans]


def name_of_device(device: torch.device) -> str:
    """As tensors on it say it."""
    return str(torch.empty(0, device=device).device)


def launches_of(
    setting: Setting, form: ChosenForm, device: torch.device, seconds: float
) -> tuple[dict[str, Launch], float, float]:
    """Kernels that another launch makes faster, and milliseconds before and after: one kernel after the other."""
    measured = partial(measure, setting, form, device, seconds, backend="triton")
    tuned.trying = {}
    try:
        before = best = measured()
        shipped = dict(tuned.trying)
        found: dict[str, Launch] = {}
        for kernel, launch in shipped.items():
            for other in (Launch(warps, stages) for warps in WARPS for stages in STAGES):
                if other == launch:
                    continue
                tuned.trying = {**shipped, **found, kernel: other}
                try:
                    spent = measured()
                except Exception:  # more shared memory than there is, say
                    continue
                if best / spent >= LEAST_GAIN:
                    best, found[kernel] = spent, other
    finally:
        tuned.trying = None
    return found, before, best


def measure(
    setting: Setting, form: ChosenForm, device: torch.device, seconds: float, backend: Backend | None = None
) -> float:
    """Milliseconds of a pass forward and backward, the median of at least five; infinite where it does not fit."""
    if form == "parallel" and setting.backend == "torch" and setting.rows * setting.tokens**2 > LARGEST:
        return float("inf")
    block = -(-setting.tokens // setting.blocks)
    setting = setting._replace(blocks=-(-setting.tokens // block))  # uneven blocks are measured as equal ones
    dtype, mixing = getattr(torch, setting.dtype), _mixing(setting, device)
    shapes = (
        (1, setting.tokens, setting.rows, width)
        for width in (setting.key_width, setting.key_width, setting.value_width)
    )
    q, k, v = (torch.rand(shape, device=device).to(dtype).requires_grad_() for shape in shapes)
    for learned in mixing.tensors.values():
        learned.requires_grad_()
    call = partial(
        mhla_attention, q, k, v, mixing, block_size=block, causal=setting.causal, normalize=setting.normalize, form=form,
        backend=backend or ("torch" if setting.backend == "torch" else "auto"),
    )  # fmt: skip
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 7 or time.perf_counter() < end:
        start = time.perf_counter()
        try:
            call().sum().backward()
        except torch.OutOfMemoryError:
            return float("inf")
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times[2:])


def _print(rows: list[tuple[Setting, dict[ChosenForm, float], ChosenForm, ChosenForm]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for title in ("call (B*H x N / M, Dk x Dv)", *(f"{form} ms" for form in FORMS), "shipped", "tuned", "gain"):
        table.add_column(title, justify="left" if title[0] in "cst" else "right")
    for setting, times, shipped, chosen in rows:
        gain = f"{times[shipped] / times[chosen]:.2f} x" if chosen != shipped else ""
        table.add_row(
            str(setting), *(f"{times[form]:.2f}" if form in times else "" for form in FORMS), shipped, chosen, gain
        )
    Console(highlight=False, width=max(140, Console().width)).print(table)
