"""Reports that train several variants of one configuration, each once, and resume after a stop."""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from lightning_mhla.checkpoints.io import resolve_checkpoint

ROOT = Path(__file__).parents[2]

Row = dict[str, Any]


def slug(name: str) -> str:
    """A variant's name for a folder."""
    return name.replace(", ", "-").replace(" ", "-").replace("+", "and")


def newest_checkpoint(run: Path) -> Path | None:
    """The latest complete checkpoint of ``run``; None without one."""
    try:
        return resolve_checkpoint(run)
    except FileNotFoundError:
        return None


def train(config: str, name: str, folder: Path, options: list[str]) -> tuple[Path, float]:
    """Train one variant, or resume it.

    Args:
        config: config of ``lightning fit``.
        name: name of the variant.
        folder: for all variants.
        options: options of ``lightning fit``, beside the configuration.

    Returns:
        Its last checkpoint, and the processor seconds that training took, startup and validation included.
    """
    home = (folder / slug(name)).resolve()
    clock = home / "seconds.json"
    asked = {
        "options": options,
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
        logs = [f"--trainer.logger.init_args.save_dir={home}", "--trainer.logger.init_args.name=logs"]
        last = newest_checkpoint(home)
        resume = [f"--ckpt_path={last}"] if last else []
        start = _children_seconds()
        try:
            command = [sys.executable, "cli.py", "fit", "--config", config, *logs, *resume, *options]
            subprocess.run(command, check=True, cwd=ROOT)
            spent["done"] = True
        finally:
            spent["seconds"] += _children_seconds() - start
            clock.write_text(json.dumps(spent))
    checkpoint = newest_checkpoint(home)
    assert checkpoint is not None
    return checkpoint, spent["seconds"]


def _children_seconds() -> float:
    """Processor time of all processes that were started and have ended: other work on the machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
