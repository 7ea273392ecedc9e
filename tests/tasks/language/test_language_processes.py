"""A language model on two processes: the numbers of one, every sample and every task request counted once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from grouped import grouped
from processes import run_cli

ROOT = Path(__file__).parents[3]
TASKS = ["mmlu_anatomy", "longbench_trec"]


def fit(folder: Path, config: dict[str, Any], *options: str) -> dict[str, Any]:
    """Run the command line in a separate process, and return the callback's file and the last validation metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["fit", "--config", str(folder / "config.yaml"), *options, f"--trainer.default_root_dir={folder}"]
    printed = run_cli(*arguments, folder=folder)
    lines = [line.split() for line in printed.splitlines() if line.startswith("val/")]
    scores = list(folder.rglob("lm_eval/step*.json"))
    return {
        "val": {line[0]: float(line[1]) for line in lines},
        "scores": json.loads(scores[0].read_text())["scores"] if scores else None,
    }


def small_config(task_data: Path, cache: Path) -> dict[str, Any]:
    config = yaml.safe_load((ROOT / "configs/language/stdlib.yaml").read_text())
    sizes = {"dim": 32, "depth": 2, "heads": 2, "mlp_width": 64, "context": 512, "vocab_size": 300}
    config["model"]["init_args"] = grouped(config["model"]["init_args"], **sizes)
    config["data"]["init_args"] = {"context": 512, "vocab_size": 300, "batch_size": 4, "cache_dir": str(cache)}
    evaluation = {"tasks": TASKS, "batch_size": 2, "data_dir": str(task_data), "max_length": 512}
    config["trainer"] = {
        "accelerator": "cpu", "max_steps": 3, "val_check_interval": 3, "check_val_every_n_epoch": None,
        "limit_val_batches": 3, "enable_progress_bar": False, "logger": False,
        "callbacks": [
            {"class_path": "lightning_mhla.callbacks.RunReport"},
            {"class_path": "mhla_tasks.language.evaluation.LMEval", "init_args": evaluation},
        ],
    }  # fmt: skip
    return config


@pytest.mark.timeout(600)
def test_two_processes_score_as_one_does(task_data: Path, cache_dir: Path, tmp_path: Path) -> None:
    config = small_config(task_data, cache_dir)
    one = fit(tmp_path / "one", config)
    ddp = ("--config", str(ROOT / "configs/trainer/ddp.yaml"), "--trainer.accelerator=cpu", "--trainer.devices=2")
    two = fit(tmp_path / "two", config, *ddp)
    assert one["val"]["val/samples"] == two["val"]["val/samples"] == 12
    for values in ("val", "scores"):
        assert two[values].keys() == one[values].keys()
        for name, value in one[values].items():
            assert two[values][name] == pytest.approx(value, rel=1e-3), name
    assert one["scores"]["longbench_trec/prompts_cut"] == 0.5


def test_sharded_weights_refuse_the_callback(task_data: Path, cache_dir: Path, tmp_path: Path) -> None:
    """The callback is rejected; training of sharded weights is tested in tests/tasks/sharding."""
    fsdp = ("--config", str(ROOT / "configs/trainer/fsdp.yaml"), "--trainer.accelerator=cpu", "--trainer.devices=2")
    with pytest.raises(AssertionError, match="LMEval needs complete weights on every process"):
        fit(tmp_path / "refused", small_config(task_data, cache_dir), *fsdp)
