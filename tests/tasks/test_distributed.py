"""The command line on several processes: counts are exact, DDP and FSDP2 train, and resume is exact there too."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from grouped import grouped
from mhla_tasks.commandline import registry
from mhla_tasks.commandline.parser import main
from processes import run_cli

from lightning_mhla.checkpoints.sharded import is_sharded

ROOT = Path(__file__).parents[2]
DDP = ROOT / "configs/trainer/ddp.yaml"
FSDP = ROOT / "configs/trainer/fsdp.yaml"


def small_config(folder: Path) -> Path:
    """Write a smaller digits configuration with a checkpoint at every step and losses in a CSV file."""
    config = yaml.safe_load((ROOT / "configs/classification/digits.yaml").read_text())
    config["model"]["init_args"] = grouped(
        config["model"]["init_args"], dim=16, depth=2, heads=2, ema_decay=0.9, drop_path=0.2
    )
    config["data"]["init_args"] = {"batch_size": 240}
    checkpoint = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1, "save_on_train_epoch_end": False}
    config["trainer"] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "callbacks": [
            {"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(folder / "checkpoints"), **checkpoint}}
        ],
        "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": "log", "version": ""}}],
    }
    path = folder / "config.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return path


def logged(folder: Path, name: str) -> dict[int, str]:
    """Return a logged metric by step, as text with all digits."""
    with (folder / "log" / "metrics.csv").open() as stream:
        return {int(row["step"]): row[name] for row in csv.DictReader(stream) if row.get(name)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed run of two processes."""
    folder = tmp_path_factory.mktemp("whole")
    run_cli(
        "fit",
        "--config",
        str(small_config(folder)),
        "--config",
        str(DDP),
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
    )
    return folder


@pytest.mark.parametrize(("step", "workers"), [(2, 2), (5, 0), (8, 0)], ids=["inside, 2 workers", "between", "second"])
def test_ddp_resume_is_bitwise_exact(whole: Path, tmp_path: Path, step: int, workers: int) -> None:
    run_cli(
        "fit",
        *("--config", str(small_config(tmp_path)), "--config", str(DDP)),
        *("--trainer.accelerator=cpu", "--trainer.devices=2"),
        f"--data.num_workers={workers}",
        f"--ckpt_path={whole / 'checkpoints' / f'step={step}.ckpt'}",
    )
    expected = {k: v for k, v in logged(whole, "train/loss").items() if k >= step}
    assert logged(tmp_path, "train/loss") == expected, "losses differ"
    one, two = (torch.load(f / "checkpoints" / "step=10.ckpt", weights_only=True) for f in (whole, tmp_path))
    for key in ("state_dict", "current_model_state"):
        differ = [name for name in one[key] if not torch.equal(one[key][name], two[key][name])]
        assert not differ, f"{key} differs: {differ}"


def test_two_processes_see_the_samples_that_one_sees(whole: Path, tmp_path: Path) -> None:
    run_cli("fit", "--config", str(small_config(tmp_path)), "--model.drop_path=0", "--trainer.max_epochs=1")
    folder = tmp_path / "two"
    config = str(small_config(folder))
    options = (
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--model.drop_path=0",
        "--trainer.max_epochs=1",
    )
    run_cli("fit", "--config", config, "--config", str(DDP), *options, launch=True)
    one, two = (torch.load(f / "checkpoints" / "step=5.ckpt", weights_only=True) for f in (tmp_path, folder))
    for name, tensor in one["current_model_state"].items():
        torch.testing.assert_close(two["current_model_state"][name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    alone, shared = (logged(each, "train/loss") for each in (tmp_path, folder))
    assert alone.keys() == shared.keys()
    for step, loss in alone.items():
        assert float(shared[step]) == pytest.approx(float(loss), rel=1e-4), "the loss is that of one process's share"


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_validation_count_is_exact(whole: Path, tmp_path: Path, processes: int) -> None:
    strategy = [] if processes == 1 else ["--config", str(DDP)]
    run_cli(
        "validate",
        *("--config", str(small_config(tmp_path)), *strategy),
        *("--trainer.accelerator=cpu", f"--trainer.devices={processes}"),
        f"--ckpt_path={whole / 'checkpoints' / 'step=10.ckpt'}",
    )
    assert [float(v) for v in logged(tmp_path, "val/samples").values()] == [360.0]
    trained = logged(whole, "val/accuracy")
    assert list(logged(tmp_path, "val/accuracy").values()) == [trained[max(trained)]]


def test_fsdp_trains_validates_resumes_and_becomes_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, run = tmp_path / "one", tmp_path / "run"
    options = ("--config", str(FSDP), "--trainer.accelerator=cpu", "--trainer.devices=2")
    run_cli("fit", "--config", str(small_config(one)), *options)
    assert is_sharded(one / "checkpoints" / "step=7.ckpt")
    assert set(logged(one, "val/samples").values()) == {"360.0"}
    losses = logged(one, "train/loss")
    assert float(losses[9]) < float(losses[0])

    config = str(small_config(tmp_path / "again"))
    run_cli("fit", "--config", config, *options, f"--run_dir={run}", "--trainer.max_steps=7")
    run_cli("fit", "--config", config, *options, f"--run_dir={run}")
    with (run / "metrics.csv").open() as stream:
        again = {int(row["step"]): row["train/loss"] for row in csv.DictReader(stream) if row.get("train/loss")}
    assert again == {k: v for k, v in losses.items() if k >= 7}

    whole = tmp_path / "whole.ckpt"
    words = [str(one / "checkpoints/step=10.ckpt"), str(whole)]
    registry.run("consolidate", words)
    with pytest.raises(SystemExit, match="exists already"):
        registry.run("consolidate", words)
    for number, checkpoint in enumerate((whole, one / "checkpoints/step=10.ckpt")):
        alone = tmp_path / f"alone{number}"
        main(["validate", "--config", str(small_config(alone)), f"--ckpt_path={checkpoint}"])
        assert list(logged(alone, "val/accuracy").values()) == [logged(one, "val/accuracy")[9]]


FAILS_ALONE = """
from mhla_tasks.classification import ImageClassifier
from mhla_tasks.commandline.parser import main


def on_train_start(self):
    if self.global_rank == 1:
        raise ValueError("this process fails alone")


ImageClassifier.on_train_start = on_train_start
main()
"""


def test_a_process_that_fails_alone_ends_the_run(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FAILS_ALONE)
    command = ["fit", "--config", str(small_config(tmp_path)), "--config", str(DDP), "--trainer.accelerator=cpu"]
    done = subprocess.run(
        [sys.executable, str(program), *command, "--trainer.devices=2"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "this process fails alone" in done.stderr
