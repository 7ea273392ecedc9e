"""Runs end by steps, time, a callback or epochs, in every domain: the last state, the report and the next start agree."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mhla_tasks.commandline.parser import main
from shipped_small import shrunk

ROOT = Path(__file__).parents[2]
SMALLEST = (
    "classification/digits", "diffusion/digits", "language/needle", "text_to_image/digits_pretrain", "video/digits_pretrain",
)  # fmt: skip
BATCHES = 4
"""Batches of an epoch."""
BOOKS = ("ModelCheckpoint", "LearningCurves", "RunReport")

ENDS: dict[str, tuple[dict[str, Any], int]] = {
    "max_steps": ({"max_steps": 2}, 2),  # inside an epoch
    "max_time": ({"max_epochs": 50, "max_time": {"milliseconds": 1}}, 3),  # after the first batch
    "should_stop": ({"max_epochs": 50}, 4),  # a callback stops at the first validation
    "max_epochs": ({"max_epochs": 2}, 8),
}
"""Options of the trainer for each start of one run, and the step at which the start ends."""
STOPPING = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "stopping_threshold": 1e9}}


def write_config(folder: Path, name: str, end: str) -> Path:
    config = shrunk(ROOT / f"configs/{name}.yaml", Path("no data"))
    trainer = config["trainer"]
    for option in ("max_steps", "max_epochs", "val_check_interval"):
        trainer.pop(option, None)
    trainer |= {
        "limit_train_batches": BATCHES,
        "check_val_every_n_epoch": 1,
        "enable_progress_bar": False,
        **ENDS[end][0],
    }
    trainer["callbacks"] = [one for one in trainer["callbacks"] if one["class_path"].rpartition(".")[2] in BOOKS]
    trainer["callbacks"] += [STOPPING] if end == "should_stop" else []
    trainer["logger"] = [{"class_path": "CSVLogger", "init_args": {"save_dir": "elsewhere"}}]
    config["model"]["init_args"]["training"]["optimizer"]["schedule"] = "constant"
    if "num_workers" in config["data"]["init_args"]:
        config["data"]["init_args"]["num_workers"] = 0
    (folder / f"{end}.yaml").write_text(yaml.safe_dump(config))
    return folder / f"{end}.yaml"


def trained_steps(run: Path) -> list[int]:
    """Steps that were logged, over all starts."""
    rows = [row for path in run.glob("metrics*.csv") for row in csv.DictReader(path.open()) if row.get("train/loss")]
    return sorted(int(row["step"]) for row in rows)


@pytest.mark.parametrize("name", SMALLEST)
def test_a_run_ends_in_every_way_and_goes_on(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, before = tmp_path / "run", 0
    for end, (_, step) in ENDS.items():
        caplog.clear()
        main(["fit", "--config", str(write_config(tmp_path, name, end)), f"--run_dir={run}"])
        if before:
            assert f"step={before:08d}.ckpt: epoch {before // BATCHES if before % BATCHES else before // BATCHES - 1}, step {before}" in caplog.text, end  # fmt: skip
        assert trained_steps(run) == list(range(step)), end
        content = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
        assert content["global_step"] == step, end
        assert content["callbacks"]["Recovery"]["finished"] is True, end
        (newest,) = (run / "checkpoints/recovery").glob(f"step={step:08d}.ckpt")
        assert torch.load(newest, weights_only=True)["global_step"] == step
        record = json.loads((run / "run.json").read_text())
        assert (record["finished"], record["steps"]) == (True, step), end
        before = step
    assert [point[0] for point in record["metrics"]["val/loss"]] == [3, 4, 8], (
        "where time ends, and after each epoch, once"
    )
    weights = content["state_dict"]
    main(["fit", "--config", str(tmp_path / "max_epochs.yaml"), f"--run_dir={run}"])
    assert trained_steps(run) == list(range(8)), "a finished run was trained again"
    again = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert again["global_step"] == 8
    assert all(torch.equal(weights[key], again["state_dict"][key]) for key in weights)
