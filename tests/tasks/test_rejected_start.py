"""A start whose options are rejected changes no file of the run, which resumes and evaluates afterwards as if it never was."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from mhla_tasks.commandline.parser import main
from PIL import Image
from test_run_folder import cli_module, last, losses, write_config

from benchmarks.kills import differences

REPORT = {"class_path": "lightning_mhla.callbacks.RunReport"}
STATE = ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "global_step", "callbacks")


def hashes(run: Path) -> dict[str, str]:
    """Hash all files of a run but ``lock``, which names the process that used the folder last."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def reject(run: Path, *words: str) -> None:
    """Start a run with options that are rejected, and check that the start changes no file."""
    earlier = hashes(run)
    with pytest.raises((SystemExit, ValueError)):
        main(["fit", f"--run_dir={run}", *words])
    assert hashes(run) == earlier


def configuration(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    return content


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of two epochs, with two loggers and a report."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder, max_steps=10, limit_train_batches=5)
    content = yaml.safe_load(config.read_text())
    content["trainer"]["callbacks"].append(REPORT)
    config.write_text(yaml.safe_dump(content))
    main(["fit", f"--config={config}", f"--run_dir={folder / 'run'}"])
    return folder / "run"


REJECTED = {
    "attention": "--model.attention.kind=linear",
    "width": "--model.shape.dim=32",
    "batch size": "--data.batch_size=120",
    "seed": "--seed_everything=7",
    "epoch length": "--trainer.limit_train_batches=4",
    "optimizer": "--model.training.optimizer.kind=came",
    "interval": "--trainer.val_check_interval=9",
}


@pytest.mark.parametrize("option", REJECTED.values(), ids=REJECTED)
def test_a_rejected_resume_changes_no_file(
    trained: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    reject(run, "--trainer.max_steps=15", option)
    assert "error: " in capsys.readouterr().err


def test_a_run_resumes_and_evaluates_after_rejected_starts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = (shutil.copytree(trained, tmp_path / name) for name in ("whole", "run"))
    for option in REJECTED.values():
        reject(run, "--trainer.max_steps=15", option)
    for folder in (whole, run):
        main(["fit", f"--run_dir={folder}", "--trainer.max_steps=15"])
    assert losses(run) == losses(whole)
    ours, theirs = last(run), last(whole)
    for content in (ours, theirs):
        content["callbacks"] = {name: content["callbacks"][name] for name in ("LearningCurves", "ExponentialMovingAverage")
                                if name in content["callbacks"]}  # fmt: skip
    assert not [place for key in STATE for place in differences(theirs[key], ours[key], key)]
    assert configuration(run)["trainer"]["max_steps"] == 15
    tables = []
    for folder in (whole, run):
        capsys.readouterr()
        main(["validate", f"--run_dir={folder}"])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


def test_a_first_batch_that_fails_counts_as_rejection(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")

    def fail(*_: Any) -> None:
        raise ValueError("sizes do not fit")

    with monkeypatch.context() as patch:
        patch.setattr(cli_module(), "training_step", fail)
        reject(run, "--trainer.max_steps=15", "--model.training.optimizer.lr=0.5")
    main(["fit", f"--run_dir={run}", "--trainer.max_steps=15"])
    assert configuration(run)["model"]["init_args"]["training"]["optimizer"]["lr"] != 0.5


def test_a_start_with_nothing_left_to_train_is_accepted(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    main(["fit", f"--run_dir={run}", "--trainer.log_every_n_steps=2"])
    assert configuration(run)["trainer"]["log_every_n_steps"] == 2


def test_a_run_without_a_checkpoint_keeps_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start is interrupted, after which ``--run_dir`` alone repeats it; a second one is rejected."""
    run = tmp_path / "run"

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cli_module(), "training_step", stop)
        with pytest.raises(SystemExit):
            main(["fit", f"--config={write_config(tmp_path)}", f"--run_dir={run}"])
    assert not list(run.rglob("*.ckpt"))
    reject(run, "--trainer.val_check_interval=9")
    reject(run, "--data.batch_size=100000")
    main(["fit", f"--run_dir={run}", "--trainer.max_steps=1"])
    assert last(run)["global_step"] == 1


def test_data_with_different_classes_changes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for root, names in {"one": ("cat", "dog"), "two": ("cat", "eel")}.items():
        for part in ("train", "val"):
            for number, name in enumerate(names):
                folder = tmp_path / root / part / name
                folder.mkdir(parents=True)
                for sample in range(4):
                    Image.new("L", (16, 16), 60 * number + sample).save(folder / f"{sample}.png")
    model = {
        "attention": {"block_grid": [2, 2]},
        "image_size": 16,
        "num_classes": 2,
        "channels": 1,
        "training": {"optimizer": {"min_lr": 1e-4}},
    }
    config = {
        "model": {"class_path": "mhla_tasks.classification.ImageClassifier",
                  "init_args": {**model, "shape": {"patch_size": 4, "dim": 16, "depth": 1, "heads": 2}}},
        "data": {"class_path": "mhla_tasks.classification.ImageNetShards",
                 "init_args": {"train": "one/train", "val": "one/val", "batch_size": 4, "num_workers": 0, "image_size": 16}},
        "trainer": {"accelerator": "cpu", "max_steps": 2, "enable_progress_bar": False, "callbacks": [REPORT]},
    }  # fmt: skip
    (tmp_path / "classes.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config=classes.yaml", "--run_dir=run"])
    reject(Path("run"), "--trainer.max_steps=4", "--data.train=two/train", "--data.val=two/val")
    main(["fit", "--run_dir=run", "--trainer.max_steps=4"])
    assert last(Path("run"))["global_step"] == 4
