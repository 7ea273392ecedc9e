"""Choice of the checkpoint, and content of a run's folder: rolled back, copied, moved, or with other runs below it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from grouped import grouped
from mhla_tasks.commandline.parser import main

from lightning_mhla.callbacks.best import complete
from lightning_mhla.checkpoints.io import find_checkpoints

ROOT = Path(__file__).parents[2]
MONITOR = {
    "monitor": "val/loss",
    "save_last": True,
    "auto_insert_metric_name": False,
    "filename": "step{step}-{val/loss:.5f}",
}


def write_config(folder: Path, *callbacks: dict[str, Any], best: dict[str, Any] | None = None, **trainer: Any) -> Path:
    """Write a configuration of two epochs of five steps, with a checkpoint every two steps."""
    config = yaml.safe_load((ROOT / "configs/classification/digits.yaml").read_text())
    config["model"]["init_args"] = grouped(config["model"]["init_args"], dim=8, depth=1, heads=1, drop_path=0.0)
    config["data"]["init_args"] = {"batch_size": 240}
    recovery = {"class_path": "lightning_mhla.callbacks.Recovery", "init_args": {"every_n_steps": 2, "keep": 20}}
    books = [{"class_path": "ModelCheckpoint", "init_args": {**MONITOR, **(best or {})}}, *callbacks, recovery]
    config["trainer"] = {
        "accelerator": "cpu", "max_epochs": 2, "enable_progress_bar": False, "log_every_n_steps": 1,
        "callbacks": books, "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": "."}}], **trainer,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def step(path: Path) -> int:
    return torch.load(path, weights_only=True)["global_step"]


def weights(path: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for value in torch.load(path, weights_only=True)["current_model_state"].values()])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished run of ten steps."""
    folder = tmp_path_factory.mktemp("trained")
    main(["fit", "--config", str(write_config(folder)), f"--run_dir={folder / 'run'}"])
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Copy of the finished run, with new file times."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_last_is_the_last_state_whatever_is_monitored(tmp_path: Path) -> None:
    """Where the monitored value ties, is worse each time, is not finite, or is not monitored at all."""
    ways: dict[str, dict[str, Any]] = {
        "ties": {"monitor": "val/samples", "mode": "max", "filename": "{step}"},
        "worse": {"mode": "max"},
        "rarely": {"every_n_epochs": 2},
        "nothing": {"monitor": None, "filename": "{step}"},
        "none kept": {"save_top_k": 0},
        "not asked for": {"save_last": False},
        "weights only": {"save_weights_only": True},
    }
    for name, best in ways.items():
        folder = tmp_path / name
        main(["fit", "--config", str(write_config(folder, best=best, max_epochs=3)), f"--run_dir={folder / 'run'}"])
        assert step(folder / "run/checkpoints/last.ckpt") == 15, name


@pytest.mark.parametrize("end", ["epochs", "steps", "inside", "early", "time"])
def test_last_is_the_last_state_however_training_ends(tmp_path: Path, end: str) -> None:
    early = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/samples", "patience": 1}}
    trainer: dict[str, Any] = {
        "epochs": {}, "steps": {"max_epochs": None, "max_steps": 10}, "inside": {"max_epochs": None, "max_steps": 7},
        "early": {"max_epochs": 9}, "time": {"max_epochs": 10_000, "max_time": "00:00:00:03"},
    }[end]  # fmt: skip
    folder = tmp_path / "run"
    callbacks = (early,) if end == "early" else ()
    main(["fit", "--config", str(write_config(tmp_path, *callbacks, **trainer)), f"--run_dir={folder}"])
    rows = (folder / "metrics.csv").read_text().splitlines()
    trained = max(int(row.split(",")[rows[0].split(",").index("step")]) for row in rows[1:]) + 1
    assert step(folder / "checkpoints/last.ckpt") == trained
    if end == "early":
        assert trained == 10


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_commands_say_what_they_use(run: Path, tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture) -> None:
    more = []
    if command == "predict":
        from PIL import Image

        (tmp_path / "new").mkdir()
        Image.new("L", (8, 8)).save(tmp_path / "new/a.png")
        more = [f"--data.predict_dir={tmp_path / 'new'}"]
    main([command, f"--run_dir={run}", *more])
    assert re.search(r"using checkpoint \S+step=00000010\.ckpt: epoch 1, step 10", caplog.text)
    caplog.clear()
    early = run / "checkpoints/recovery/step=00000004.ckpt"
    main([command, f"--ckpt_path={early}", *more])
    assert f"using checkpoint {early}: epoch 0, step 4" in caplog.text


def test_the_best_of_a_run(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (best,) = (run / "checkpoints").glob("step*.ckpt")
    for place in (run, tmp_path / "moved"):
        if not place.exists():
            run.rename(place)
        caplog.clear()
        main(["validate", f"--run_dir={place}", "--ckpt_path=best"])
        assert f"using checkpoint {place / 'checkpoints' / best.name}: epoch" in caplog.text
    main(["validate", f"--run_dir={place}", "--ckpt_path=last"])
    assert "step 10" in caplog.text
    with pytest.raises(SystemExit):
        main(["validate", "--config", str(place / "config.yaml"), "--ckpt_path=best"])
    assert "--ckpt_path=best needs a run: add --run_dir=FOLDER" in capsys.readouterr().err
    (place / "checkpoints" / best.name).unlink()
    with pytest.raises(SystemExit):
        main(["validate", f"--run_dir={place}", "--ckpt_path=best"])
    assert f"its best checkpoint, {best.name}, no longer exists" in capsys.readouterr().err


def test_a_run_rolls_back(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To an earlier state of its own; what came after it is set aside, and does not come back."""
    early = run / "checkpoints/recovery/step=00000004.ckpt"
    later = sorted(path.name for path in run.rglob("*.ckpt") if step(path) > 4)
    main(
        [
            "fit",
            f"--run_dir={run}",
            f"--ckpt_path={early}",
            "--model.training.optimizer.lr=5e-4",
            "--trainer.max_steps=6",
        ]
    )
    assert "using checkpoint" in caplog.text
    assert "epoch 0, step 4" in caplog.text
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["ckpt_path"] is saved["run_dir"] is None, (
        "another run that takes this configuration would start from there"
    )
    assert sorted(path.name for path in (run / "checkpoints/set-aside-1").rglob("*.ckpt")) == later
    assert step(run / "checkpoints/last.ckpt") == 6
    assert step(find_checkpoints(run)[0]) == 6
    rolled = weights(run / "checkpoints/last.ckpt")
    caplog.clear()
    main(["fit", f"--run_dir={run}", "--model.training.optimizer.lr=5e-4", "--trainer.max_steps=6"])
    assert "step 6" in caplog.text, "the next start goes on with the branch that was taken"
    assert torch.equal(weights(run / "checkpoints/last.ckpt"), rolled)
    caplog.clear()
    main(["fit", f"--run_dir={run}", f"--ckpt_path={early}", "--trainer.max_steps=5"])
    assert "epoch 0, step 4" in caplog.text, "a finished run rolls back again"
    assert (run / "checkpoints/set-aside-2").is_dir()


def test_the_same_command_resumes_after_a_rollback_that_was_stopped(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler repeats the command, even if its checkpoint is deleted or is in the folder of a different run."""
    early = run / "checkpoints/recovery/step=00000004.ckpt"
    away = tmp_path / "elsewhere.ckpt"
    shutil.copy(early, away)
    for origin, place in ((early, run), (away, tmp_path / "new")):
        words = ["fit", "--config", str(tmp_path / "config.yaml"), f"--run_dir={place}", f"--ckpt_path={origin}"]
        write_config(tmp_path)
        main(words)
        last = place / "checkpoints/last.ckpt"
        for path in [*place.rglob("recovery/*.ckpt"), last]:  # as if it had been killed at step 6
            if step(path) > 6 and "set-aside" not in str(path):
                path.unlink()
        origin.unlink()
        caplog.clear()
        main(words)
        assert f"{place} started from {origin} already, and continues from its latest checkpoint" in caplog.text
        assert "step 6" in caplog.text
        assert step(last) == 10


def test_a_run_does_not_take_the_place_of_another(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.ckpt"
    shutil.copy(run / "checkpoints/recovery/step=00000002.ckpt", other)
    with pytest.raises(SystemExit):
        main(["fit", f"--run_dir={run}", f"--ckpt_path={other}"])
    assert f"{run} has checkpoints of its own, which did not start from there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fit", f"--run_dir={run}", f"--ckpt_path={run}/checkpoints/nothing.ckpt"])
    assert "does not exist" in capsys.readouterr().err


def test_ckpt_path_of_a_configuration_counts_too(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    back = tmp_path / "back.yaml"
    back.write_text(f"ckpt_path: {run}/checkpoints/recovery/step=00000006.ckpt\n")
    main(
        [
            "fit",
            "--config",
            str(run / "config.yaml"),
            "--config",
            str(back),
            f"--run_dir={run}",
            "--trainer.max_steps=7",
        ]
    )
    assert "epoch 1, step 6" in caplog.text


def test_runs_below_are_not_this_run(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """runs/ above runs/digits/version_0, a run moved into another's folder, temporary files of a tuner."""
    above = tmp_path / "above"
    shutil.copytree(run, above / "digits/version_0")
    shutil.copytree(run, above / "digits/version_1")
    shutil.copy(run / "checkpoints/last.ckpt", above / ".scale_batch_size_x.ckpt")
    shutil.copy(run / "checkpoints/last.ckpt", above / ".lr_find_x.ckpt")
    main(["fit", "--config", str(run / "config.yaml"), f"--run_dir={above}", "--trainer.max_steps=1"])
    assert "using checkpoint" not in caplog.text
    assert step(above / "checkpoints/last.ckpt") == 1
    shutil.rmtree(above / "checkpoints")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["validate", f"--run_dir={above}", "--config", str(run / "config.yaml")])
    assert (
        f"name one of the runs below it: {above}/digits/version_0, {above}/digits/version_1" in capsys.readouterr().err
    )


def test_states_count_by_their_steps_not_by_the_clock(run: Path) -> None:
    for path in (run / "checkpoints/recovery").glob("*.ckpt"):
        os.utime(path, (2e9, 2e9 - step(path)))
    main(["fit", f"--run_dir={run}", "--trainer.max_epochs=3", "--trainer.callbacks.keep=2"])
    states = sorted(path.name for path in (run / "checkpoints/recovery").iterdir())
    assert states == ["step=00000014.ckpt", "step=00000015.ckpt"]


def test_two_checkpoints_of_one_moment_do_not_share_a_name(tmp_path: Path) -> None:
    other = {
        "class_path": "ModelCheckpoint",
        "init_args": {**MONITOR, "monitor": "val/accuracy", "mode": "max", "filename": "{step}"},
    }
    main(
        [
            "fit",
            "--config",
            str(write_config(tmp_path, other, best={"filename": "{step}"}, max_epochs=1)),
            f"--run_dir={tmp_path / 'run'}",
        ]
    )
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("*.ckpt")) == [
        "5-v1.ckpt",
        "5.ckpt",
        "last.ckpt",
    ]


def test_a_folder_of_its_own_gets_the_last_state_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    path = write_config(tmp_path, best={"dirpath": str(own)})
    main(["fit", "--config", str(path), f"--run_dir={tmp_path / 'run'}"])
    assert step(own / "last.ckpt") == step(tmp_path / "run/checkpoints/last.ckpt") == 10
    assert len(list(own.glob("step*.ckpt"))) == 1


def test_files_that_a_killed_start_left_out_are_completed(run: Path) -> None:
    """The state is written first, and says which names it gets and which files go."""
    (best,) = (run / "checkpoints").glob("step*.ckpt")
    saved = torch.load(run / "checkpoints/recovery" / f"step={step(best):08d}.ckpt", weights_only=True)
    assert saved["callbacks"]["Recovery"]["plan"]["names"] == [best.name]
    best.unlink()
    main(["fit", f"--run_dir={run}", "--trainer.max_epochs=3"])
    (now,) = (run / "checkpoints").glob("step*.ckpt")
    assert step(now) in (10, 15)


def test_a_checkpoint_cannot_have_foreign_files_made_or_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    state, precious = folder / "state.ckpt", tmp_path / "precious.ckpt"
    for path in (state, precious, folder / "notes.txt"):
        path.write_text("mine")
    names = ["../../made.ckpt", str(tmp_path / "absolute.ckpt"), "inside/good.ckpt"]
    complete({"names": names, "removals": ["../../precious.ckpt", str(precious), "notes.txt"]}, state, folder)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "good.ckpt",
        "notes.txt",
        "precious.ckpt",
        "state.ckpt",
    ]


@pytest.mark.parametrize(
    "finder",
    [
        {"class_path": "BatchSizeFinder", "init_args": {"max_trials": 2, "steps_per_trial": 1, "init_val": 60}},
        {"class_path": "LearningRateFinder", "init_args": {"num_training_steps": 40, "min_lr": 1e-4, "max_lr": 1e-1}},
    ],
    ids=lambda finder: finder["class_path"],
)
def test_a_run_that_a_tuner_began_resumes_with_what_it_found(tmp_path: Path, finder: dict[str, Any]) -> None:
    path = write_config(tmp_path, finder, max_epochs=1)
    size = 240 if finder["class_path"] == "BatchSizeFinder" else 24
    words = ["fit", "--config", str(path), f"--run_dir={tmp_path / 'run'}", f"--data.batch_size={size}"]
    main(words)
    assert not list((tmp_path / "run").glob(".*.ckpt")), "the tuner's own checkpoint is left"
    first = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    lr = first["hyper_parameters"]["training"]["optimizer"]["lr"]
    main([*words, "--trainer.max_epochs=2", "--model.training.optimizer.schedule=constant"])
    second = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    assert second["hyper_parameters"]["training"]["optimizer"]["lr"] == lr
    assert second["Digits"]["batch_size"] == first["Digits"]["batch_size"]
    assert second["global_step"] == 2 * first["global_step"]
    if finder["class_path"] == "BatchSizeFinder":
        assert first["Digits"]["batch_size"] in (60, 120, 240)
        assert first["global_step"] == 1437 // first["Digits"]["batch_size"]
        schedule = first["lr_schedulers"][0]["lr_lambdas"][0]
        assert schedule["steps"] == first["global_step"], "the schedule has the steps of the batch size that was found"
    else:
        assert lr != 2e-3
        assert {group["initial_lr"] for group in second["optimizer_states"][0]["param_groups"]} == {lr}
