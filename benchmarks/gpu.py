"""All programs that need a GPU, in one resumable run: checks, benchmarks with their peers, full models.

    make gpu                                    # or lightning bench gpu
    lightning bench gpu --authors ../MHLA  # the authors' code is measured too
    lightning bench gpu --only attention --again

Results are files under benchmarks/results/CHIP/. A part that succeeded is not run again, so a stopped run resumes. A part that
exceeds its time limit is stopped. At the end, a table compares the operator's times with their floors. On a CPU the same parts
run at small sizes, as a test.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from lightning_mhla.system.files import write_json

ROOT = Path(__file__).parents[1]
GOAL = 2.0
"""Largest acceptable ratio of the time of a pass of the operator to its floor."""


@dataclass(frozen=True)
class Part:
    """Program that needs a GPU: a check, a benchmark or a test.

    Attributes:
        command: arguments for ``python`` if the first one is an option, otherwise a complete command.
        minutes: time limit in minutes.
        keeps: name of the file in the folder of results that receives the standard output; None for no file.
        environment: additional environment variables, as pairs of name and value.
    """

    command: tuple[str, ...]
    minutes: float
    keeps: str | None = None
    environment: tuple[tuple[str, str], ...] = ()


def parts(out: Path, gpu: bool, authors: Path | None) -> dict[str, Part]:
    """Return the programs to run, by name and in order of execution.

    Args:
        out: folder of the results.
        gpu: whether there is a GPU; without one, sizes are small.
        authors: path of a checkout of the authors' code; None without one.
    """
    to = ("--out", str(out))
    doctor = ("-m", "mhla_tasks", "doctor", "--json")
    if not gpu:
        small = ("--device", "cpu", "--seconds", "0")
        return {
            "doctor": Part((*doctor, "--only", "versions", "devices"), 3, "doctor.json"),
            "native": Part(("-m", "benchmarks.native", *to), 5),
            "forms": Part(("-m", "benchmarks.forms", *small, "--longest", "64"), 3, "forms.txt"),
            "attention": Part(("-m", "benchmarks.attention", *small, "--longest", "64", *to), 5),
            "short blocks": Part(
                ("-m", "benchmarks.short_blocks", *small, "--tokens", "64", "--runs", "1", *to), 5
            ),
            "tiles": Part(("-m", "benchmarks.tiles", "--seconds", "0", *to), 3),
            "generation": Part(
                ("-m", "benchmarks.generation", "--device", "cpu", "--contexts", "64", "--steps", "2", *to), 5
            ),
            "throughput": Part(
                ("-m", "benchmarks.throughput", "--configs", "classification/digits", "--steps", "2", "--compile", "off", *to),
                5,
            ),
        }  # fmt: skip
    parts_by_name = {"doctor": Part(doctor, 4, "doctor.json"), "native": Part(("-m", "benchmarks.native", *to), 8)}
    tests = ("-m", "pytest", "-q", "-n", "4", "--timeout", "0", "tests/kernels")
    parts_by_name["tests"] = Part(tests, 12, "tests.txt")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    # Without the memory cache of torch, every tensor is an allocation of its own, whose bounds the sanitizer checks.
    if sanitizer:
        for form in ("parallel", "chunked", "spanning"):
            command = (sanitizer, "--error-exitcode", "1", sys.executable, "-m", "benchmarks.native", "--case", form)
            parts_by_name[f"sanitizer {form}"] = Part(
                command, 4, f"sanitizer-{form}.txt", (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
            )
    parts_by_name["forms"] = Part(("-m", "benchmarks.forms"), 8, "forms.txt")
    peers = () if authors is None else ("--authors", str(authors.resolve()))
    parts_by_name["attention"] = Part(("-m", "benchmarks.attention", "--seconds", "0.2", *peers, *to), 10)
    parts_by_name["short blocks"] = Part(("-m", "benchmarks.short_blocks", "--runs", "3", "--seconds", "0.1", *to), 5)
    parts_by_name["tiles"] = Part(("-m", "benchmarks.tiles", *to), 10)
    parts_by_name["throughput"] = Part(("-m", "benchmarks.throughput", *to), 15)
    parts_by_name["generation"] = Part(("-m", "benchmarks.generation", *to), 8)
    parts_by_name["models"] = Part(("-m", "benchmarks.models", "--seconds", "3", *to), 12)
    parts_by_name["wan"] = Part(("-m", "benchmarks.wan", *to), 10)
    return parts_by_name


def folder_of(device: torch.device) -> str:
    """Return the name of a device in a form that is a valid folder name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def run(name: str, part: Part, out: Path, console: Console) -> dict[str, Any]:
    """Run a program to its end or its time limit.

    Args:
        name: name of the part.
        part: program and its limits.
        out: folder of the results.
        console: console for progress messages.

    Returns:
        Exit status, duration in seconds, date and command.
    """
    command = list(part.command) if not part.command[0].startswith("-") else [sys.executable, *part.command]
    console.print(f"[bold]{name}[/]: {' '.join(command)}", highlight=False, soft_wrap=True)
    start = time.perf_counter()
    log = out / f"{name.replace(' ', '-')}.log"
    environment = {**os.environ, **dict(part.environment)}
    with log.open("w") as log_file:
        stream: Any = subprocess.PIPE if part.keeps else log_file
        try:
            done = subprocess.run(
                command, stdout=stream, stderr=log_file, text=True, cwd=ROOT, env=environment, timeout=60 * part.minutes,
                check=False,
            )  # fmt: skip
            status, printed = done.returncode, done.stdout or ""
        except subprocess.TimeoutExpired as error:
            # The output so far is bytes, despite `text=True`.
            status, printed = 124, (error.stdout or b"").decode(errors="replace")
    if part.keeps and printed:
        (out / part.keeps).write_text(printed)
    seconds = time.perf_counter() - start
    told = log.read_text(errors="replace").strip().splitlines()[-1:] if status else []
    if not status:
        log.unlink()
    console.print(
        f"  {'ok' if status == 0 else f'status {status}'}, {seconds:.0f} s {' '.join(told)[:200]}", highlight=False
    )
    return {
        "status": status,
        "seconds": round(seconds, 1),
        "date": date.today().isoformat(),
        "command": [word.replace(str(out), "OUT") for word in command[1:]],
    }


def goals(out: Path) -> list[dict[str, Any]]:
    """Compare the operator's measured times with their floors and with those of the peers.

    Args:
        out: folder of the results, which may contain ``attention-cuda.json``.

    Returns:
        A row for each measured shape; an empty list without ``attention-cuda.json``.
    """
    path = out / "attention-cuda.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["rows"]
    goal_rows = []
    for name in dict.fromkeys(row["name"] for row in rows):
        group = {row["method"]: row for row in rows if row["name"] == name and "error" not in row}
        if "both_over_floor" not in group.get("auto", {}):
            continue
        auto = group["auto"]
        peers = {method: group[method]["both_ms"] / auto["both_ms"] for method in group if method in PEERS}
        goal_rows.append(
            {
                "shape": name,
                **{key: auto[key] for key in ("forward_ms", "forward_floor_ms", "both_ms", "both_floor_ms")},
                "forward_over_floor": auto["forward_over_floor"],
                "both_over_floor": auto["both_over_floor"],
                "met": max(auto["forward_over_floor"], auto["both_over_floor"]) <= GOAL,
                "times_faster_than": peers,
            }
        )
    return goal_rows


PEERS = ("softmax", "fla", "loop", "authors")


def print_goals(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a table that compares the operator's times with their goals, with a row for each shape."""
    table = Table(
        title=f"the operator against its floors (goal: at most {GOAL:g} times) and its peers, forward and backward"
    )
    for title in ("shape", "ms", "floor", "x", "forward x", "goal", *PEERS):
        table.add_column(title, justify="left" if title == "shape" else "right")
    for row in rows:
        peers = [row["times_faster_than"].get(peer) for peer in PEERS]
        table.add_row(
            row["shape"], f"{row['both_ms']:.3f}", f"{row['both_floor_ms']:.3f}", f"{row['both_over_floor']:.2f}",
            f"{row['forward_over_floor']:.2f}", "met" if row["met"] else "missed",
            *("" if peer is None else f"{peer:.1f} x" for peer in peers),
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Run all programs that have not succeeded yet, and exit with status 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="lightning bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run only these parts")
    parser.add_argument("--again", action="store_true", help="also run parts that have already succeeded")
    parser.add_argument("--authors", type=Path, metavar="DIR", help="checkout of the authors' code, to measure it too")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results"),
        help="folder for the results, in a subfolder named after the chip",
    )
    args = parser.parse_args()
    console, device = Console(width=150), torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu runs the same parts at small sizes")
    out = (args.out / folder_of(device)).resolve()
    out.mkdir(parents=True, exist_ok=True)
    all_parts = parts(out, device.type == "cuda", args.authors)
    unknown = sorted(set(args.only or ()) - set(all_parts))
    if unknown:
        parser.error(f"unknown parts: {', '.join(unknown)}; the parts are {', '.join(all_parts)}")
    path, machine = out / "parts.json", describe(device)
    previous = json.loads(path.read_text()) if path.exists() else {}
    versions = {**machine, "date": None}
    done = previous.get("parts", {}) if {**previous.get("machine", {}), "date": None} == versions else {}
    for name in args.only or all_parts:
        if done.get(name, {}).get("status") == 0 and not args.again:
            console.print(f"{name}: done on {done[name]['date']}", highlight=False)
            continue
        done[name] = run(name, all_parts[name], out, console)
        write_json(path, {"machine": machine, "parts": done}, indent=1)
    rows = goals(out)
    if rows:
        write_json(out / "goals.json", {"machine": machine, "goal": GOAL, "rows": rows}, indent=1)
        print_goals(rows, console)
    failed = [name for name in args.only or all_parts if done[name]["status"]]
    console.print(
        f"results: {out}" + (f"; failed: {', '.join(failed)}" if failed else ""), highlight=False, soft_wrap=True
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
