"""Killed runs end bit-identical to undisturbed ones, even if killed while writing a checkpoint.

``python -m benchmarks.kills`` repeats this many times.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from fork_server import Child
from processes import fork_server
from test_run_folder import write_config

from benchmarks.kills import compare, train_killed


def start(config: Path, run: Path) -> Child:
    run.mkdir(exist_ok=True)
    options = {"module": "mhla_tasks.commandline.parser", "output": run / "output.txt"}
    return fork_server().start("fit", "--config", str(config), "--run_dir", str(run), **options)


@pytest.mark.timeout(280)
def test_kills_lose_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path, max_steps=60)
    content = yaml.safe_load(config.read_text())
    content["trainer"]["logger"] = [
        {"class_path": "CSVLogger", "init_args": {"save_dir": ".", "flush_logs_every_n_steps": 1}}
    ]
    content["trainer"]["callbacks"][1]["init_args"] = {"every_n_steps": 2}
    config.write_text(yaml.safe_dump(content))
    assert start(config, tmp_path / "whole").wait() == 0
    kills = train_killed(config, tmp_path / "killed", 3, random.Random(1), 0.4, start)
    assert "writing" in kills
    found = compare(tmp_path / "whole", tmp_path / "killed")
    assert found["steps"] == 60
    assert not found["losses_that_differ"]
    assert not found["tensors_and_values_that_differ"]
