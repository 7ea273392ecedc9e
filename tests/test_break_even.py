"""The page about break-even lengths has the figures of the committed measurements.

As a program, PYTHONPATH=.:kernels:tasks python tests/test_break_even.py writes the tables of the page from the measurements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/guides/break-even.md"
HEAD = (
    "| model | machine | work | softmax faster up to | linear faster from | softmax / linear at the longest |\n"
    "| --- | --- | --- | ---: | ---: | ---: |"
)
OPERATOR = "operator, forward and backward"
CPU = {"device": "AMD EPYC", "threads": 2}


def row(model: str, machine: Mapping[str, Any], work: str, unit: str, times: Mapping[int, Sequence[float]]) -> str:
    """Return a row of a table.

    Args:
        model: name of the model.
        machine: name of the processor as ``device``, and the number of threads for a CPU.
        work: what was measured.
        unit: unit of the lengths.
        times: times of softmax and of linear attention by length.
    """
    lengths = sorted(times)
    slower = [length for length in lengths if times[length][1] >= times[length][0]]
    faster = [length for length in lengths if not slower or length > slower[-1]]
    until = f"{slower[-1]:,} {unit}" if slower else "never"
    since = f"{faster[0]:,} {unit}" if faster else f"not up to {lengths[-1]:,} {unit}"
    softmax, linear = times[lengths[-1]]
    device = re.sub(r"\(R\)| Processor", "", machine["device"])
    threads = "" if "NVIDIA" in device else f", {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return f"| {model} | {device}{threads} | {work} | {until} | {since} | {softmax / linear:.2f} at {lengths[-1]:,} |"


def training_rows() -> list[str]:
    """Return the rows of training steps, of ``lightning bench models``, ``architectures`` and ``attention``."""
    rows = []
    attention = json.loads((RESULTS / "attention-cpu.json").read_text())
    groups: dict[str, dict[int, dict[str, float]]] = {}
    for entry in attention["rows"]:
        name = re.sub(r",? (N=\d+|256 tokens|\d+ px)$", "", entry["name"])
        groups.setdefault(name, {}).setdefault(entry["tokens"], {})[entry["method"]] = entry["both_ms"]
    for name in ("LM 340M", "DiT-XL/2"):
        pairs = {tokens: (methods["softmax"], methods["auto"]) for tokens, methods in groups[name].items()}
        rows.append(row(f"one layer of {name}", attention["machine"], OPERATOR, "tokens", pairs))
    steps = json.loads((RESULTS / "models-cpu.json").read_text())
    for name in ("S/2", "XL/2"):
        times = {
            (entry["tokens"], entry["kind"]): entry["seconds"] for entry in steps["rows"] if entry["model"] == name
        }
        pairs = {tokens: (times[tokens, "softmax"], times[tokens, "mhla"]) for tokens, _ in times}
        rows.append(row(f"DiT-{name}", steps["machine"], "training step", "tokens", pairs))
    networks = json.loads((RESULTS / "architectures-cpu.json").read_text())
    for name in ("VLT-T", "DiG-S/2"):
        times = {
            (entry["pixels"], entry["kind"]): entry["milliseconds"]
            for entry in networks["rows"]
            if entry["model"] == name
        }
        pairs = {pixels: (times[pixels, "softmax"], times[pixels, "mhla"]) for pixels, _ in times}
        rows.append(row(name, networks["machine"], "forward and backward", "pixels", pairs))
    return rows


def gpu_rows() -> list[str]:
    """Return the rows of the operator on a GPU, of ``lightning bench attention`` and, for MHLA in texts, ``tiles``."""
    attention = json.loads((RESULTS / "nvidia-h200/attention-cuda.json").read_text())
    times = {(entry["name"], entry["method"]): entry["both_ms"] for entry in attention["rows"]}
    tiles = json.loads((RESULTS / "nvidia-h200/tiles-cuda.json").read_text())["rows"]
    for entry in tiles:
        if not entry.get("kernel"):  # the tiles as they are
            times.setdefault((entry["shape"], "auto"), entry["both_ms"])
    lengths = {
        "one layer of DiT-XL/2": {256: "DiT-XL/2 256 px", 1024: "DiT-XL/2 512 px"},
        "one layer of LM 340M": {2048: "LM 340M, 2k", 32768: "LM 340M, 32k, C=64"},
    }
    return [
        row(model, attention["machine"], OPERATOR, "tokens",
            {tokens: (times[name, "softmax"], times[name, "auto"]) for tokens, name in names.items()})
        for model, names in lengths.items()
    ]  # fmt: skip


def layer_rows() -> list[str]:
    """Return the rows of one attention layer of a vision transformer, of ``lightning bench layers``."""
    content = json.loads((RESULTS / "layers-cpu.json").read_text())
    measured = content["rows"]
    rows = []
    for kind in ("mhla", "mhla_window"):
        for part, work in (("forward_ms", "forward pass"), ("both_ms", "forward and backward")):
            pairs = {entry["tokens"]: (median(entry[part]["softmax"]), median(entry[part][kind])) for entry in measured}
            rows.append(row(f"one layer of DeiT-S, `{kind}`", content, work, "tokens", pairs))
    return rows


def generation_rows() -> list[str]:
    """Return the rows of the time for a token in generation."""
    small = json.loads((RESULTS / "generation-cpu.json").read_text())
    times = {(entry["context"], entry["kind"]): entry["median_milliseconds"] for entry in small["rows"]}
    contexts = sorted({context for context, _ in times})
    names = {"exponential": "MHLA, exponential mixing", "dense": "MHLA, dense mixing", "linear": "linear attention"}
    rows = [
        row(f"4 layers of width 256, {name}", small["machine"], "a token after this context", "tokens",
            {context: (times[context, "softmax"], times[context, kind]) for context in contexts})
        for kind, name in names.items()
    ]  # fmt: skip
    published = json.loads((RESULTS / "real-linearize/smollm2.json").read_text())
    pairs = {
        int(context): (entry["original"]["seconds"], entry["linearized"]["seconds"])
        for context, entry in published["generation"].items()
    }
    return [
        *rows,
        row(f"SmolLM2-135M, {replaced(published)}", published, "a token after this context", "tokens", pairs),
    ]


def replaced(content: Mapping[str, Any]) -> str:
    """Say in how many layers ``lightning linearize`` replaced the attention."""
    kinds = content.get("layers", {}).get("layer_kinds")
    share = "all layers" if kinds is None else f"{kinds.count('replace')} of {len(kinds)} layers"
    return f"`{content['settings']['kind']}` in {share}"


def published_rows() -> list[str]:
    """Return the rows of the forward pass of published models whose attention was replaced."""
    rows = []
    names = {
        "smollm2": ("SmolLM2-135M", "tokens"),
        "minilm": ("MiniLM", "tokens"),
        "dinov2": ("DINOv2-S", "pixels"),
    }
    for name, (title, unit) in names.items():
        content = json.loads((RESULTS / f"real-linearize/{name}.json").read_text())
        pairs = {int(length): (entry["original"], entry["linearized"]) for length, entry in content["speed"].items()}
        rows.append(row(f"{title}, {replaced(content)}", content, "forward pass", unit, pairs))
    return rows


TABLES = {
    "training": training_rows,
    "gpu": gpu_rows,
    "layers": layer_rows,
    "generation": generation_rows,
    "published": published_rows,
}


def with_tables(page: str) -> str:
    """Return the page with its tables computed from the measurements. A table follows a comment with its name."""
    for name, rows in TABLES.items():
        table = "\n".join([HEAD, *rows()])
        page, count = re.subn(
            rf"(<!-- {name} -->\n\n)(?:\|.*\n)*\n*", lambda match, table=table: f"{match[1]}{table}\n\n", page
        )
        assert count == 1, name
    return page


def test_the_page_has_the_figures_of_the_measurements() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run tests/test_break_even.py as a program"


def test_break_even_lies_above_the_longest_length_at_which_softmax_is_faster() -> None:
    cells = row("m", CPU, "w", "tokens", {512: (1.0, 2.0), 1024: (3.0, 2.0), 2048: (3.0, 4.0), 4096: (9.0, 4.5)}).split(
        " | "
    )
    assert cells[3:] == ["2,048 tokens", "4,096 tokens", "2.00 at 4,096 |"], "a single faster length does not count"
    assert row("m", CPU, "w", "tokens", {512: (1.0, 2.0)}).split(" | ")[4] == "not up to 512 tokens"
    assert row("m", CPU, "w", "tokens", {512: (2.0, 1.0)}).split(" | ")[3] == "never"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
