"""Kinds of attention, and the modules around them, as diffusion models of digits: trains each, prints a table, writes JSON.

    python -m benchmarks.diffusion --out benchmarks/results

Each is ``lightning fit --config configs/diffusion/digits.yaml`` with another attention, everything else equal. What is done
is not done again: a stopped report resumes from the last checkpoint of the model that it was training. The figures are
those that ``GenerationMetrics`` logged at the end: FID without guidance, and how often the classifier of real digits names
the class that a guided sample was drawn for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs import Row, report

CONFIG = "configs/diffusion/digits.yaml"

DEPENDS = (
    "samples",
    "sampler",
    "sampling_steps",
    "guidance",
    "seed",
    "ema_decay",
    "reference",
    "reference_images",
    "reference_sha256",
    "features",
    "features_sha256",
    "marks",
)

PLAIN = {"lepe": 0, "gate": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {"kind": "softmax", **PLAIN},
    "linear": {"kind": "linear", **PLAIN},
    "mhla": {"kind": "mhla", **PLAIN},
    "mhla + lepe": {"kind": "mhla", "lepe": 3, "gate": False},
    "mhla + gate": {"kind": "mhla", "lepe": 0, "gate": True},
    "mhla + lepe + gate": {"kind": "mhla", "lepe": 3, "gate": True},
    "linear + lepe + gate": {"kind": "linear", "lepe": 3, "gate": True},
    "softmax + lepe + gate": {"kind": "softmax", "lepe": 3, "gate": True},
}


def logged(folder: Path, name: str) -> list[Row]:
    """All lines that the callback ``name`` wrote in any run of a variant, one for each step."""
    rows: dict[int, Row] = {}
    for path in sorted(folder.glob(f"version_*/{name}.jsonl"), key=lambda path: path.stat().st_mtime):
        rows |= {row["step"]: row for row in map(json.loads, path.read_text().splitlines())}
    return [rows[step] for step in sorted(rows)]


def measure(name: str, checkpoint: Path, seconds: float) -> Row:
    """One row of the table: what was logged last, and on the way."""
    content = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)
    logs = checkpoint.parents[2]
    plain, guided = logged(logs, "generation"), logged(logs, "guided")
    if {plain[-1]["step"], guided[-1]["step"]} != {content["global_step"]}:
        raise SystemExit(f"error: the last evaluation in {logs} is not of the last step; delete the folder")
    shown = {"generation": plain, "guided": guided}
    return {
        "variant": name,
        "fid": plain[-1]["fid"],
        "fid_by_step": {row["step"]: row["fid"] for row in plain},
        "precision": plain[-1]["precision"],
        "recall": plain[-1]["recall"],
        "label_accuracy": plain[-1]["label_accuracy"],
        "guided_label_accuracy": guided[-1]["label_accuracy"],
        "steps": content["global_step"],
        "seconds": round(seconds),
        "parameters": sum(t.numel() for key, t in content["state_dict"].items() if key.startswith("network.")),
        "depends": {name: {key: rows[-1][key] for key in DEPENDS} for name, rows in shown.items()},
    }


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| attention | FID | precision | recall | guided samples that show their class |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        shares = [f"{row[key]:.1%}" for key in ("precision", "recall", "guided_label_accuracy")]
        name, fid = f"`{row['variant']}`", f"{row['fid']:.2f}"
        lines.append(f"| {' | '.join([name, fid, *shares])} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    report(__doc__, CONFIG, VARIANTS, "runs/report-diffusion", "diffusion-digits.json", measure, table)


if __name__ == "__main__":
    main()
