"""Reports that train several variants of one configuration, each once, and resume after a stop."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from lightning_mhla.system.files import write_whole

ROOT = Path(__file__).parents[1]

Row = dict[str, Any]


def slug(name: str) -> str:
    """A variant's name for a folder."""
    return name.replace(", ", "-").replace(" ", "-").replace("+", "and")


def newest_checkpoint(run: Path) -> Path | None:
    """The last checkpoint that ``run`` wrote."""
    found = sorted(run.glob("logs/version_*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def train(config: str, name: str, attention: Mapping[str, Any], folder: Path, options: list[str]) -> tuple[Path, float]:
    """Train one variant, or resume it.

    Args:
        config: of ``lightning fit``.
        name: of the variant.
        attention: its attention options.
        folder: for all variants.
        options: more options of ``lightning fit``.

    Returns:
        Its last checkpoint, and the seconds that training took, start-up and validation included.
    """
    home = (folder / slug(name)).resolve()
    clock = home / "seconds.json"
    asked = {
        "options": options,
        "attention": dict(attention),
        "config_sha256": hashlib.sha256((ROOT / config).read_bytes()).hexdigest()[:16],
    }
    spent: dict[str, Any] = {"seconds": 0.0, "done": False, **asked}
    if clock.exists():
        spent = json.loads(clock.read_text())
    for key, value in asked.items():
        if spent.get(key, value) != value:
            raise SystemExit(
                f"error: {home} was trained with {key} {spent[key]}, not {value}; choose another --runs, or delete it"
            )
    if not spent["done"]:
        home.mkdir(parents=True, exist_ok=True)
        chosen = [f"--model.init_args.attention.{key}={value}" for key, value in attention.items()]
        logs = [f"--trainer.logger.init_args.save_dir={home}", "--trainer.logger.init_args.name=logs"]
        last = newest_checkpoint(home)
        resume = [f"--ckpt_path={last}"] if last else []
        start = time.perf_counter()
        try:
            command = [sys.executable, "cli.py", "fit", "--config", config, *chosen, *logs, *resume, *options]
            subprocess.run(command, check=True, cwd=ROOT)
            spent["done"] = True
        finally:
            spent["seconds"] += time.perf_counter() - start
            clock.write_text(json.dumps(spent))
    checkpoint = newest_checkpoint(home)
    assert checkpoint is not None
    return checkpoint, spent["seconds"]


def report(
    description: str | None,
    config: str,
    variants: Mapping[str, Mapping[str, Any]],
    folder: str,
    file: str,
    measure: Callable[[str, Path, float], Row],
    table: Callable[[list[Row]], str],
) -> None:
    """Command line of a report: train each variant, measure it, print the table so far, keep it as JSON.

    Args:
        description: for ``--help``.
        config: of ``lightning fit``.
        variants: attention options by name.
        folder: where the runs are kept, unless said otherwise.
        file: name of the JSON file.
        measure: one row from a variant's name, checkpoint and seconds; its ``variant`` is the name.
        table: Markdown of the rows.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--runs", type=Path, default=Path(folder), help="where the runs are kept")
    parser.add_argument("--only", nargs="+", choices=variants, default=list(variants), help="variants, all by default")
    parser.add_argument("options", nargs="*", help="options for lightning fit, after --")
    args = parser.parse_args()
    path = None if args.out is None else args.out / file
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    rows = known["rows"] if known.get("options") == args.options else []
    for name in args.only:
        checkpoint, seconds = train(config, name, variants[name], args.runs, args.options)
        rows = [row for row in rows if row["variant"] != name] + [measure(name, checkpoint, seconds)]
        rows.sort(key=lambda row: list(variants).index(row["variant"]))
        print(table(rows), flush=True)
        if path is not None:
            result = {"machine": describe(torch.device("cpu")), "config": config, "options": args.options, "rows": rows}
            write_whole(path, json.dumps(result, indent=2) + "\n")
