"""A run that is stopped, killed, moved and resumed ends with the weights, the files and the best score of one left alone.

Every start is a process of its own, by the command line, with the callbacks that people use together.
"""

from __future__ import annotations

import functools
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from grouped import grouped
from processes import fork_server

from benchmarks.kills import differences
from lightning_mhla.callbacks.recovery import TEMPORARY_FAILURE

ROOT = Path(__file__).parents[2]

STOPPER = textwrap.dedent(
    """
    import os, signal
    from lightning import Callback

    class StopAt(Callback):
        '''SIGTERM while the batch of this number is trained on, counted from 0 over all epochs.'''

        def on_train_batch_start(self, trainer, *_):
            if trainer.fit_loop.epoch_loop.total_batch_idx == int(os.environ.get("STOP_AT_BATCH", -1)):
                os.kill(os.getpid(), signal.SIGTERM)
    """
)

BATCHES = 5
"""Batches of an epoch in both domains."""


def config_of(domain: str) -> dict[str, Any]:
    """Return a small version of a shipped configuration with all callbacks that have state."""
    if domain == "classification":
        config = yaml.safe_load((ROOT / "configs/classification/digits.yaml").read_text())
        config["model"]["init_args"] = grouped(
            config["model"]["init_args"], dim=16, depth=1, heads=2, ema_decay=0.9, drop_path=0.2
        )
        config["data"]["init_args"] = {"batch_size": 24}
    else:
        config = yaml.safe_load((ROOT / "configs/language/mqar.yaml").read_text())
        config["model"]["init_args"] = grouped(config["model"]["init_args"], dim=16, mlp_width=16, ema_decay=0.9)
        parts = [{"tokens": 32, "pairs": 4, "samples": 160}]
        config["data"]["init_args"] |= {"batch_size": 32, "train": parts, "val": parts}
    books = [
        {"class_path": "ModelCheckpoint", "init_args": {
            "monitor": "val/loss", "save_last": True, "save_top_k": 2, "auto_insert_metric_name": False,
            "filename": "step{step}-loss{val/loss:.6f}"}},
        {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 20}},
        {"class_path": "lightning_mhla.callbacks.LearningCurves"},
        {"class_path": "lightning_mhla.callbacks.RunReport"},
        {"class_path": "stopper.StopAt"},
    ]  # fmt: skip
    if domain == "classification":
        books.append({"class_path": "lightning_mhla.callbacks.AttentionPictures", "init_args": {"every_n_epochs": 2}})
    config["trainer"] = {
        "accelerator": "cpu", "max_epochs": 4, "log_every_n_steps": 1, "enable_progress_bar": False,
        "check_val_every_n_epoch": 1, "limit_val_batches": 1, "callbacks": books,
        "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": "."}}],
    }  # fmt: skip
    if domain == "classification":
        config["trainer"]["limit_train_batches"] = BATCHES  # in the other domain, epochs end with the data
    return config


SCHEDULE = {"class_path": "GradientAccumulationScheduler", "init_args": {"scheduling": {0: 1, 1: 2, 3: 3}}}
WANDB = {"class_path": "WandbLogger", "init_args": {"offline": True, "project": "matrix", "save_dir": "."}}
TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "steps": {"max_epochs": None, "max_steps": 17},
    "accumulates 2": {"accumulate_grad_batches": 2},
    "accumulates 3, steps": {"accumulate_grad_batches": 3, "max_epochs": None, "max_steps": 7},
    "schedule": {"callback": SCHEDULE},
    "validates inside": {"val_check_interval": 2},
    "validates inside an accumulation": {"val_check_interval": 3, "accumulate_grad_batches": 2},
    "validates rarely": {"check_val_every_n_epoch": 2},
    "by steps": {"best": {"every_n_train_steps": 3}},
    "wandb": {"logger": [WANDB]},
}
"""Options of the trainer by the test's id; ``callback`` is one more, ``best`` are options of the ModelCheckpoint."""


def prepare(folder: Path, domain: str, trainer: str) -> None:
    """Write the configuration of a run."""
    config, options = config_of(domain), dict(TRAINERS[trainer])
    callbacks = config["trainer"]["callbacks"]
    if extra := options.pop("callback", None):
        callbacks.append(extra)
    callbacks[0]["init_args"] |= options.pop("best", {})
    config["trainer"] |= options
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "stopper.py").write_text(STOPPER)


def fit(folder: Path, run: str, **options: Any) -> tuple[int, str]:
    """Run ``lightning fit`` in a new process."""
    command = ("fit", "--config", "config.yaml", "--allow=stopper", f"--run_dir={run}")
    return fork_server().run(*command, folder=folder, WANDB_SILENT="true", WANDB_MODE="offline", **options)


@functools.cache
def alone(base: Path, domain: str, trainer: str) -> Path:
    """Train the undisturbed run, and return its folder."""
    folder = base / domain / trainer.replace(" ", "-") / "alone"
    prepare(folder, domain, trainer)
    status, text = fit(folder, "run")
    assert status == 0, text[-3000:]
    return folder / "run"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def files(run: Path) -> set[str]:
    """Return the files of a run, except those of loggers."""
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return {name for name in names if not name.startswith(("metrics", "events", "wandb", "lock", "hparams"))}


def books(run: Path) -> dict[str, Any]:
    """Return the final states of the callbacks, with paths relative to the run."""
    content = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    kept: dict[str, Any] = {}
    for name, state in content["callbacks"].items():
        if name.startswith("ModelCheckpoint"):
            scores = {Path(path).name: score for path, score in state["best_k_models"].items()}
            kept["best"] = {Path(state["best_model_path"]).name: state["best_model_score"], **scores}
        elif name.startswith(("EarlyStopping", "AttentionPictures", "LearningCurves")):
            kept[name] = state
        elif name == "RunReport":
            kept[name] = {"points": state["points"]}
    kept["callbacks"] = kept.copy()
    return kept | {key: content[key] for key in ("global_step", "epoch")}


def check_equal(run: Path, other: Path) -> None:
    """Compare the weights, optimizers, schedules, callback states and files of two runs."""
    ours, theirs = (torch.load(each / "checkpoints/last.ckpt", weights_only=True) for each in (run, other))
    keys = ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "global_step")
    assert not [place for key in keys for place in differences(theirs[key], ours[key], key)]
    assert not differences(books(other), books(run))
    assert files(run) == files(other)
    best = list((run / "checkpoints").glob("step*.ckpt"))
    assert len(best) == 2, f"save_top_k: 2, but {best}"


def check_names(run: Path) -> None:
    """Check that the loss in the name of a best checkpoint is that of its weights, and that these are the best."""
    content = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    losses = dict(map(tuple, content["callbacks"]["RunReport"]["points"]["val/loss"]))
    steps = {
        torch.load(path, weights_only=True)["global_step"]: path for path in (run / "checkpoints").glob("step*.ckpt")
    }
    assert sorted(losses[step] for step in steps) == sorted(losses.values())[:2]
    for step, path in steps.items():
        assert f"{losses[step]:.6f}" in path.name, "a best checkpoint has the weights of another step"


CASES = [
    ("classification", "plain", (4,)),  # the last batch of an epoch
    ("language", "plain", (7,)),
    ("classification", "steps", (9, 12)),
    ("language", "steps", (4,)),
    ("classification", "accumulates 2", (5, 8, 12)),  # the first half of a step; thrice
    ("language", "accumulates 3, steps", (4, 6, 10)),
    ("classification", "schedule", (8, 15)),
    ("language", "validates inside", (3, 6, 9)),
    ("classification", "validates inside an accumulation", (6, 9)),
    ("language", "validates rarely", (9, 11)),
    ("classification", "by steps", (7, 8)),
    ("language", "wandb", (8, 9)),
]
"""Domain, trainer and batches to stop at. The domain decides about model and data, the trainer about loops and books: two
trainers in both domains show the former, and each further trainer is shown in one of them."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("domain", "trainer", "stops"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_stopped_moved_and_resumed(
    base: Path, tmp_path: Path, domain: str, trainer: str, stops: tuple[int, ...]
) -> None:
    """After each SIGTERM the folder is renamed, and the same command resumes it there."""
    whole = alone(base, domain, trainer)
    prepare(tmp_path, domain, trainer)
    run = "run"
    for number, stop in enumerate(stops):
        status, text = fit(tmp_path, run, STOP_AT_BATCH=str(stop))
        assert status == TEMPORARY_FAILURE, text[-3000:]
        assert "Traceback" not in text
        moved = f"elsewhere/moved-{number}"
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        shutil.move(tmp_path / run, tmp_path / moved)
        run = moved if number % 2 else str(tmp_path / moved)  # relative and absolute paths of one folder
    status, text = fit(tmp_path, run)
    assert status == 0, text[-3000:]
    check_equal(tmp_path / run, whole)
    if (
        "best" not in TRAINERS[trainer]
    ):  # those that save every so many steps judge by the validation before, and say so
        check_names(whole)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("domain", "trainer", "kill"),
    [
        ("classification", "plain", {"kill_after_save": 10}),  # before the best checkpoint has its name
        ("language", "steps", {"kill_after_save": 5}),
        ("classification", "accumulates 2", {"kill_at": 7}),
        ("language", "validates inside", {"kill_after_save": 9}),
        ("classification", "by steps", {"kill_at": 11}),
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else value.replace(" ", "-"),
)
def test_killed_and_resumed(base: Path, tmp_path: Path, domain: str, trainer: str, kill: dict[str, int]) -> None:
    """SIGKILL leaves no time for anything."""
    whole = alone(base, domain, trainer)
    prepare(tmp_path, domain, trainer)
    status, text = fit(tmp_path, "run", **kill)
    assert status == -9, text[-3000:]
    status, text = fit(tmp_path, "run")
    assert status == 0, text[-3000:]
    check_equal(tmp_path / "run", whole)
