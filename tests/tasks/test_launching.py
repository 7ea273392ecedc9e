"""Several processes as users start them: by Lightning's own launcher in a run's folder, and FSDP from and to one file."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from grouped import grouped
from mhla_tasks.commandline.arguments import UsageError, read_words
from mhla_tasks.commandline.parser import main
from mhla_tasks.commandline.plan import PLAN, check_same, make_plan
from mhla_tasks.commandline.registry import LIGHTNING
from processes import run_cli

from lightning_mhla.checkpoints.runs import RunFolder, is_first_process
from lightning_mhla.system.processes import process_ranks

ROOT = Path(__file__).parents[2]
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", PLAN)


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a shell, which no launcher has touched; Lightning leaves its variables in this process."""
    for name in RANKS:
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a run sets
        monkeypatch.delenv(name)


def write_config(folder: Path, **trainer: Any) -> Path:
    """The digits configuration, smaller, with its report and a table; two epochs of five steps."""
    config = yaml.safe_load((ROOT / "configs/classification/digits.yaml").read_text())
    config["model"]["init_args"] = grouped(config["model"]["init_args"], dim=16, depth=1, heads=2, drop_path=0.0)
    config["model"]["init_args"]["training"]["optimizer"]["schedule"] = "constant"
    config["data"]["init_args"] = {"batch_size": 240, "augment": False}
    options = {"save_last": True, "monitor": "val/loss", "filename": "{step}"}
    config["trainer"] |= {
        "accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 1, "enable_progress_bar": False, "check_val_every_n_epoch": 1,
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": options}, {"class_path": "lightning_mhla.callbacks.RunReport"}],
        "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": "elsewhere"}}], **trainer,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def losses(run: Path, name: str = "train/loss") -> dict[int, float]:
    """Values by step over all starts; each step once."""
    rows = [row for path in sorted(run.glob("metrics*.csv")) for row in csv.DictReader(path.open()) if row.get(name)]
    found = {int(row["step"]): float(row[name]) for row in rows}
    assert len(found) == len(rows), "a step was logged twice"
    return found


def last(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    return content


def distance(one: dict[str, Any], two: dict[str, Any]) -> float:
    """Distance of two sets of weights."""
    return float(sum((one[name] - two[name]).square().sum() for name in one if one[name].is_floating_point())) ** 0.5


def test_lightnings_launcher_resumes_a_run_in_its_folder(tmp_path: Path) -> None:
    """A run that one process began, on two: one of them keeps the folder's books, and both train."""
    config, alone, run = write_config(tmp_path), tmp_path / "alone", tmp_path / "run"
    main(["fit", "--config", str(config), f"--run_dir={alone}"])
    run_cli("fit", "--config", str(config), f"--run_dir={run}", "--trainer.max_steps=3")
    options = ["--config", str(ROOT / "configs/trainer/ddp.yaml"), "--trainer.accelerator=cpu", "--trainer.devices=2"]
    said = run_cli("fit", "--config", str(config), *options, f"--run_dir={run}", launch=True)
    assert "step=00000003.ckpt: epoch 0, step 3" in said
    assert last(run)["global_step"] == 10
    one, two = losses(alone), losses(run)
    assert sorted(two) == list(range(10))
    assert {step: two[step] for step in range(3)} == {step: one[step] for step in range(3)}
    for step in range(3, 10):
        assert two[step] == pytest.approx(one[step], rel=1e-3), step
    record = json.loads((run / "run.json").read_text())
    assert (record["processes"], record["finished"], record["steps"]) == (2, True, 10)
    assert record["metrics"]["val/samples"][-1] == [10, 360]
    assert {path.name for path in run.iterdir()} == {
        "checkpoints", "classes.json", "config.yaml", "hparams.yaml", "lock", "metrics.csv", "metrics-1.csv", "report.html",
        "run.json",
    }  # fmt: skip
    assert not (tmp_path / "elsewhere").exists()
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["devices"] in (2, "2")


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_processes_of_notebooks_hand_back_their_weights(strategy: str, tmp_path: Path) -> None:
    """``ddp_notebook`` forks, too. The logs of the run stay, although the process that started it has trained nothing."""
    config = write_config(tmp_path)
    program = (
        "from mhla_tasks.commandline.parser import main\n"
        f"if __name__ == '__main__':\n    main(['fit', '--config={config}', '--trainer.strategy={strategy}', "
        "'--trainer.devices=2', '--trainer.accelerator=cpu', '--trainer.max_steps=2'])\n"
    )
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.rglob("metrics.csv")
    assert len(table.read_text().splitlines()) > 2
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2


@pytest.mark.parametrize(
    ("environment", "ranks", "first"),
    [
        ({}, (0, 1, 0), True),
        ({"LOCAL_RANK": "0"}, (0, 1, 0), True),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (0, 1, 0), False),  # of Lightning's launcher, before the group exists
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, (0, 1, 0), False),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (0, 4, 0), True),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (2, 4, 0), False),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1), False),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}, (0, 1, 0), True),  # of a batch script
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, (0, 2, 0), True),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}, (1, 2, 1), False),
    ],
)  # fmt: skip
def test_one_process_of_a_run_is_the_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    ranks: tuple[int, int, int],
    first: bool,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert process_ranks() == ranks
    assert is_first_process() is first
    (tmp_path / "run").mkdir()
    if not first:  # the others leave the check and the lock to it, which may not be there yet
        (tmp_path / "run/notes.txt").touch()
    RunFolder(tmp_path / "run")
    assert (tmp_path / "run/lock").exists() is first


def test_processes_of_one_run_have_one_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that Lightning starts compare their configuration with that of the process that started them; others are runs of their own."""
    config = write_config(tmp_path)

    def check(*words: str) -> None:
        check_same(make_plan(read_words(["fit", "--config", str(config), *words], LIGHTNING)))

    check()
    monkeypatch.setattr(os, "getppid", os.getpid)  # from here on this process is its own child
    check("--model.dim=32")
    monkeypatch.setenv("LOCAL_RANK", "1")
    check("--model.dim=32")
    with pytest.raises(
        UsageError, match="a configuration file was changed while the processes of the run were started"
    ):
        check("--model.dim=16")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    check("--model.dim=16")


def test_fsdp_resumes_from_one_file_and_writes_one(tmp_path: Path) -> None:
    """The state of a run without sharding goes on sharded as it would alone: weights, average, momenta and schedule."""
    config = write_config(tmp_path)
    alone, single, start = (tmp_path / name for name in ("alone", "single", "start"))
    main(["fit", "--config", str(config), f"--run_dir={alone}"])
    main(["fit", "--config", str(config), f"--run_dir={start}", "--trainer.max_steps=3"])
    options = ["--config", str(ROOT / "configs/trainer/fsdp.yaml"), "--trainer.accelerator=cpu", "--trainer.devices=2"]
    options += [
        f"--ckpt_path={start / 'checkpoints/last.ckpt'}",
        "--trainer.strategy.init_args.save_distributed_checkpoint=false",
    ]
    run_cli("fit", "--config", str(config), *options, f"--run_dir={single}")
    expected, found = losses(alone), losses(single)
    assert sorted(found) == list(range(3, 10))
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=1e-3), step
    assert (single / "checkpoints/last.ckpt").is_file(), "one file, not a folder of shards"
    ours, theirs, before = last(single), last(alone), last(start)
    assert ours["global_step"] == theirs["global_step"] == 10
    for key in ("state_dict", "current_model_state"):
        assert ours[key].keys() == theirs[key].keys()
        error, way = (distance(theirs[key], other[key]) for other in (ours, before))
        assert error < 0.03 * way, f"{key} differs by {error}, where seven steps are {way}"
    main(["validate", f"--run_dir={single}", "--trainer.devices=1", "--trainer.strategy=auto"])
