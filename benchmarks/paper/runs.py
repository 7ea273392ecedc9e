"""Resumable training of variants of a configuration, each once."""

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
    """Convert the name of a variant to a valid folder name."""
    return name.replace(", ", "-").replace(" ", "-").replace("+", "and")


def newest_checkpoint(run: Path) -> Path | None:
    """Return the path of the latest complete checkpoint in a run's folder; None if there is none."""
    try:
        return resolve_checkpoint(run)
    except FileNotFoundError:
        return None


def train(config: str, name: str, folder: Path, options: list[str]) -> tuple[Path, float]:
    """Train one variant of a configuration, or resume its training.

    Args:
        config: path of the configuration for ``lightning fit``.
        name: name of the run.
        folder: folder of all runs.
        options: additional options of ``lightning fit``.

    Returns:
        Path of the last checkpoint, and the processor seconds of training, including startup and validation.

    Raises:
        SystemExit: if the run was trained with different options or a different configuration.
    """
    home = (folder / slug(name)).resolve()
    clock = home / "seconds.json"
    settings = {
        "options": options,
        "config_sha256": hashlib.sha256((ROOT / config).read_bytes()).hexdigest()[:16],
    }
    spent: dict[str, Any] = {"seconds": 0.0, "done": False, **settings}
    if clock.exists():
        spent = json.loads(clock.read_text())
    for key, value in settings.items():
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
            # Also if training was interrupted, so that the time is the sum of all attempts.
            spent["seconds"] += _children_seconds() - start
            clock.write_text(json.dumps(spent))
    checkpoint = newest_checkpoint(home)
    assert checkpoint is not None
    return checkpoint, spent["seconds"]


def _children_seconds() -> float:
    """Return the processor time, in seconds, of child processes that have ended. It excludes other work on the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
