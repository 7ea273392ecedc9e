"""One folder for a run: it resumes from the newest whole checkpoint there, whoever stopped it, and belongs to one process."""

from __future__ import annotations

import csv
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from grouped import grouped
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger
from mhla_tasks.commandline.parser import main
from processes import fork_server

from benchmarks.kills import differences
from lightning_mhla.callbacks import Recovery
from lightning_mhla.callbacks.recovery import TEMPORARY_FAILURE, RunStopped
from lightning_mhla.checkpoints.runs import LogFiles, RunFolder
from lightning_mhla.system.files import beside

ROOT = Path(__file__).parents[2]
STEPS = 24  # epochs of five steps, in batches of 240; validation after every second one


def write_config(folder: Path, **trainer: Any) -> Path:
    """Write a smaller digits configuration with a checkpoint every seven steps."""
    config = yaml.safe_load((ROOT / "configs/classification/digits.yaml").read_text())
    config["model"]["init_args"] = grouped(
        config["model"]["init_args"], dim=16, depth=2, heads=2, ema_decay=0.9, drop_path=0.2
    )
    config["data"]["init_args"] = {"batch_size": 240}
    recovery = {"class_path": "lightning_mhla.callbacks.Recovery", "init_args": {"every_n_steps": 7}}
    best = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/loss", "save_last": True}}
    config["trainer"] = {
        "accelerator": "cpu", "max_steps": STEPS, "log_every_n_steps": 1, "enable_progress_bar": False,
        "enable_model_summary": False, "check_val_every_n_epoch": 2,
        "callbacks": [best, recovery, {"class_path": "lightning_mhla.callbacks.LearningCurves"}],
        "logger": [
            {"class_path": "CSVLogger", "init_args": {"save_dir": "elsewhere"}},
            {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "elsewhere"}},
        ],
        **trainer,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def losses(run: Path) -> list[tuple[str, int, str]]:
    rows = [row for path in sorted(run.glob("metrics*.csv")) for row in csv.DictReader(path.open())]
    return [(name, int(row["step"]), row[name]) for row in rows for name in ("train/loss", "val/loss") if row.get(name)]


def last(run: Path) -> dict[str, Any]:
    return torch.load(sorted((run / "checkpoints/recovery").glob("*.ckpt"))[-1], weights_only=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    main(["fit", "--config", str(write_config(folder)), f"--run_dir={folder / 'run'}"])
    return folder / "run"


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGUSR1) -> None:
    """Make the training send this process a signal in the middle of a step."""
    training_step = cli_module().training_step

    def stepped(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == step:
            os.kill(os.getpid(), number)
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(cli_module(), "training_step", stepped)


def cli_module() -> Any:
    from mhla_tasks.classification import ImageClassifier

    return ImageClassifier


def test_a_run_keeps_everything_in_its_folder(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert {"config.yaml", "metrics.csv", "checkpoints", "lock"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    saved = sorted(path.name for path in (whole / "checkpoints/recovery").iterdir())
    assert saved == [f"step={step:08d}.ckpt" for step in (21, 24)], "two are kept, the last at the end of training"


@pytest.mark.parametrize(
    ("step", "number"),
    [(3, signal.SIGUSR1), (3, signal.SIGINT), (4, signal.SIGUSR1), (9, signal.SIGUSR1)],
    ids=["inside", "Ctrl+C", "epoch ends", "validation follows"],
)
def test_a_signal_loses_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, number: int
) -> None:
    run = tmp_path / "run"
    if number == signal.SIGINT:  # ignored where the tests run in the background of a shell
        signal.signal(number, signal.default_int_handler)
    with monkeypatch.context() as patch:
        stop_at(patch, step, number)
        with pytest.raises(RunStopped) as stopped:
            main(["fit", "--config", str(write_config(tmp_path)), f"--run_dir={run}"])
    assert stopped.value.code == TEMPORARY_FAILURE == 75
    main(["fit", f"--run_dir={run}"])  # with the configuration that it was started with
    assert sorted(losses(run)) == sorted(losses(whole)), "a loss is missing, differs, or came twice"
    keys = ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "global_step")
    ours, theirs = last(run), last(whole)
    assert not [place for key in keys for place in differences(theirs[key], ours[key], key)]
    assert ours["callbacks"]["LearningCurves"] == theirs["callbacks"]["LearningCurves"]


def test_a_damaged_newest_checkpoint_costs_the_steps_since_the_one_before(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_config(tmp_path)
    run = tmp_path / "run"
    main(
        ["fit", "--config", str(config), f"--run_dir={run}", "--trainer.limit_val_batches=0", "--trainer.max_steps=15"]
    )
    for path in (run / "checkpoints").glob("*.ckpt"):
        path.unlink()  # those of ModelCheckpoint, of the same step
    newest = sorted((run / "checkpoints/recovery").glob("*.ckpt"))[-1]
    newest.write_bytes(newest.read_bytes()[:5000])
    main(["fit", "--config", str(config), f"--run_dir={run}", "--trainer.limit_val_batches=0"])
    assert "Skipped a damaged checkpoint" in caplog.text
    again = [step for name, step, _ in losses(run) if name == "train/loss"]
    assert again == [*range(15), *range(14, STEPS)]


def test_tensorboard_shows_each_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    config = write_config(tmp_path)
    main(["fit", "--config", str(config), f"--run_dir={run}", "--trainer.max_steps=10"])
    for path in (run / "checkpoints/recovery").glob("step=00000010.ckpt"):
        path.unlink()
    main(["fit", "--config", str(config), f"--run_dir={run}", "--trainer.max_steps=13"])
    points = EventAccumulator(str(run)).Reload().Scalars("train/loss")
    assert [point.step for point in points] == list(range(13))


@pytest.mark.parametrize("end", [8, 9, 10, 20], ids=["inside", "before the last", "epoch", "validation"])
def test_a_longer_run_goes_on_where_the_shorter_one_ended(whole: Path, tmp_path: Path, end: int) -> None:
    words = ["fit", "--config", str(write_config(tmp_path)), "--model.training.optimizer.schedule=constant"]
    main([*words, f"--run_dir={tmp_path / 'long'}"])
    main([*words, f"--run_dir={tmp_path / 'run'}", f"--trainer.max_steps={end}"])
    main([*words, f"--run_dir={tmp_path / 'run'}"])
    assert sorted(losses(tmp_path / "run")) == sorted(losses(tmp_path / "long"))


def test_a_finished_run_is_not_trained_again(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = last(whole)
    main(["fit", f"--run_dir={whole}"])
    assert last(whole)["global_step"] == before["global_step"] == STEPS


def test_evaluation_takes_the_newest(whole: Path) -> None:
    config = (whole / "config.yaml").read_text()
    main(["validate", f"--run_dir={whole}"])
    assert (whole / "config.yaml").read_text() == config


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_the_whole_group_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Schedulers, timeout and Ctrl+C send signals to all processes of a group, including those that load data."""
    run, said = tmp_path / "run", tmp_path / "said.txt"
    config = write_config(tmp_path, max_steps=100_000)
    words = ("fit", "--config", str(config), f"--run_dir={run}", "--data.num_workers=2")
    process = fork_server().start(*words, module="mhla_tasks", output=said)
    try:
        until = time.monotonic() + 200
        while not list((run / "checkpoints/recovery").glob("*.ckpt")):
            assert process.poll() is None, said.read_text()[-3000:]
            assert time.monotonic() < until, said.read_text()[-3000:]
            time.sleep(0.02)
        os.killpg(process.pid, number)
        assert process.wait() == TEMPORARY_FAILURE, said.read_text()[-3000:]
    finally:
        process.kill()
    text = said.read_text()
    assert f"stopped on {number.name} after step" in text
    assert "Traceback" not in text, text[-3000:]


def wait_for_word(place: Path) -> None:
    until = time.monotonic() + 60
    while "taken" not in place.read_text():
        assert time.monotonic() < until, "the process has not taken the folder"
        time.sleep(0.01)


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import sys, time; from pathlib import Path; from lightning_mhla.checkpoints.runs import RunFolder\n"
    script += "folder = RunFolder(Path(sys.argv[1])); print('taken', flush=True); time.sleep(60)"
    process = fork_server().start(script, str(tmp_path / "run"), module="-c", output=tmp_path / "said.txt")
    try:
        wait_for_word(tmp_path / "said.txt")
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(write_config(tmp_path)), f"--run_dir={tmp_path / 'run'}"])
        assert f"is in use by process {process.pid} on" in capsys.readouterr().err
    finally:
        process.kill()
        process.wait()
    RunFolder(tmp_path / "run")


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_what_a_killed_process_left_is_tidied(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder(run)
    unfinished = [beside(run / name) for name in ("checkpoints/a.ckpt", "run.json", "checkpoints/recovery/b.ckpt/x")]
    replaced, other = (beside(run / "checkpoints" / name, "old") for name in ("c.ckpt", "d.ckpt"))
    make(run, *(str(path.relative_to(run)) for path in unfinished), "checkpoints/c.ckpt/x")
    make(run, *(str(path.relative_to(run)) + "/x" for path in (replaced, other)))
    make(run, *(f"checkpoints/e.ckpt.old/{name}" for name in ("meta.pt", "manifest.json")))
    RunFolder(run)
    left = ["c.ckpt/x", "d.ckpt/x", "e.ckpt/manifest.json", "e.ckpt/meta.pt"]
    assert files_in(run) == [*(f"checkpoints/{name}" for name in left), "lock"]


FILES_OF_THE_USER = (
    "Downloads/thesis.zip.part", "thesis.zip.part", "checkpoints/movie.host.12.part", "checkpoints/last.ckpt.old",
    "checkpoints/best.ckpt.old/meta.pt", "checkpoints/recovery/step=5.ckpt.part", "last.ckpt.old", "notes.mhla.part",
    "neighbour/checkpoints/a.ckpt.mhla-0123456789ab.1.part", "checkpoints/moved/lock",
    "checkpoints/moved/a.ckpt.mhla-0123456789ab.1.part", "mhla-0123456789ab.1.part",
)  # fmt: skip


def test_files_of_the_user_in_a_run_stay(tmp_path: Path) -> None:
    """Downloads and backups in the run's own folders, and what a run in a folder below it is writing."""
    run = tmp_path / "run"
    RunFolder(run)
    make(run, *FILES_OF_THE_USER, "checkpoints/last.ckpt")
    elsewhere = tmp_path / "elsewhere"
    make(elsewhere, "kept")
    beside(run / "linked").symlink_to(elsewhere)
    RunFolder(run)
    assert files_in(run) == sorted([*FILES_OF_THE_USER, "checkpoints/last.ckpt", "lock"])
    assert files_in(elsewhere) == ["kept"]


@pytest.mark.parametrize(
    "names",
    [
        ("Downloads/thesis.zip.part",),
        ("last.ckpt.old", "notes.txt"),
        ("lock",),
        ("config.yaml", "checkpoints/model.ckpt", "train.py"),
        ("model.ckpt",),
        ("checkpoints/thesis.zip",),
        ("config.yaml", "logs/photo.jpg"),
    ],
    ids=["download", "backup", "a lock of others", "project", "weights", "checkpoints", "below"],
)
def test_a_folder_that_is_not_a_run_is_rejected(
    tmp_path: Path, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "home"
    make(folder, *names)
    with pytest.raises(ValueError, match=r"the folder is not that of a run, and holds .*; give a new or empty folder"):
        RunFolder(folder)
    assert files_in(folder) == sorted(names)
    assert all((folder / name).read_text() == name for name in names)


def test_the_command_line_rejects_a_folder_that_is_not_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "home"
    make(folder, "thesis.zip.part", "last.ckpt.old")
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(write_config(tmp_path)), f"--run_dir={folder}"])
    said = capsys.readouterr().err
    assert (
        f"--run_dir={folder}: the folder is not that of a run, and holds last.ckpt.old; give a new or empty folder"
        in said
    )
    assert "Traceback" not in said
    assert files_in(folder) == ["last.ckpt.old", "thesis.zip.part"]


@pytest.mark.parametrize(
    "names",
    [
        ("slurm-deit-t-12.out",),
        ("logs/12_0.err", "logs/12_0.out", "train.log", "nohup.out", "log.txt"),
        ("sweep.json", "slurm-job.txt"),
        ("crashes", "job.o123", ".gitkeep"),
        ("mnist.yaml",),
        ("config.yaml", "hparams.yaml", "metrics.csv", "events.out.tfevents.1.host.2.0"),
        ("checkpoints/step=5.ckpt",),
    ],
    ids=["SLURM", "logs", "sweep", "batch script", "configuration", "failed start", "copied checkpoints"],
)
def test_what_is_there_before_a_run_starts_is_accepted(tmp_path: Path, names: tuple[str, ...]) -> None:
    make(tmp_path / "run", *names)
    (tmp_path / "run/checkpoints").mkdir(exist_ok=True)
    RunFolder(tmp_path / "run")
    assert set(names) | {"lock"} <= set(files_in(tmp_path / "run"))


def test_a_log_of_any_name_is_accepted_if_the_shell_writes_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    script = "import sys; from pathlib import Path; from lightning_mhla.checkpoints.runs import RunFolder\n"
    script += "RunFolder(Path(sys.argv[1])); print('taken')"
    process = fork_server().start(script, str(tmp_path / "run"), module="-c", output=tmp_path / "run/said")
    assert process.wait() == 0, (tmp_path / "run/said").read_text()


@pytest.mark.parametrize(
    "names",
    [
        ("config.yaml", "checkpoints/epoch=1.ckpt", "notes.txt"),
        ("checkpoints/recovery/step=00000007.ckpt", "notes.txt"),
        ("lock", "notes.txt", "thesis.zip.part"),
    ],
    ids=["with its configuration", "with a state", "with its lock"],
)
def test_a_run_of_an_earlier_version_resumes(tmp_path: Path, names: tuple[str, ...]) -> None:
    make(tmp_path, *names)
    (tmp_path / "config.yaml").write_text("# lightning.pytorch==2.5\nmodel:\n  x: 1\n")
    if "lock" in names:
        (tmp_path / "lock").write_text('{"host": "a", "pid": 1, "job": null}')
    RunFolder(tmp_path)
    assert set(names) <= set(files_in(tmp_path))
    RunFolder(tmp_path)


def test_a_configuration_that_the_user_wrote_there_is_kept(tmp_path: Path) -> None:
    """The start writes one with all options, and without the comments, under the same name."""
    (tmp_path / "config.yaml").write_text("# mine\nmodel: {}\n")
    make(tmp_path, "config-2.yaml")
    for _ in range(2):
        RunFolder(tmp_path)
    assert (tmp_path / "config-1.yaml").read_text() == (tmp_path / "config.yaml").read_text() == "# mine\nmodel: {}\n"
    assert files_in(tmp_path) == ["config-1.yaml", "config-2.yaml", "config.yaml", "lock"]


def test_a_requeued_job_waits_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, time; from pathlib import Path; from lightning_mhla.checkpoints.runs import RunFolder\n"
    script += "folder = RunFolder(Path(sys.argv[1])); print('taken', flush=True); time.sleep(60)"
    process = fork_server().start(script, str(tmp_path), module="-c", output=tmp_path / "said.txt")
    wait_for_word(tmp_path / "said.txt")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    threading.Timer(1.5, process.kill).start()
    begun = time.monotonic()
    RunFolder(tmp_path)
    assert time.monotonic() - begun > 1
    process.wait()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep=0"),
        ({"every_minutes": -1.0}, "every_minutes=-1.0"),
        ({"signals": ("USR1",)}, "is not a signal here"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recovery(**options)


def test_a_signal_between_two_halves_of_a_step_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, accumulate_grad_batches=2, max_steps=6)
    main(["fit", "--config", str(config), f"--run_dir={tmp_path / 'whole'}"])
    with monkeypatch.context() as patch:
        stop_at(patch, 1)  # its first half comes first
        with pytest.raises(RunStopped):
            main(["fit", "--config", str(config), f"--run_dir={tmp_path / 'run'}"])
    main(["fit", f"--run_dir={tmp_path / 'run'}"])
    ours, theirs = last(tmp_path / "run"), last(tmp_path / "whole")
    keys = ("state_dict", "current_model_state", "optimizer_states", "global_step")
    assert not [place for key in keys for place in differences(theirs[key], ours[key], key)]


def test_the_tables_of_all_starts_are_kept(tmp_path: Path) -> None:
    trainer = Trainer(logger=CSVLogger(tmp_path, name="", version=""), accelerator="cpu", enable_progress_bar=False)
    for start in ("first", "second", "third"):
        (tmp_path / "metrics.csv").write_text(start)
        LogFiles(trainer)
    assert [(tmp_path / f"metrics-{n}.csv").read_text() for n in (1, 2, 3)] == ["first", "second", "third"]
    (tmp_path / "metrics-1.csv").unlink()
    for start in ("fourth", "fifth"):
        (tmp_path / "metrics.csv").write_text(start)
        LogFiles(trainer)
    assert [(tmp_path / f"metrics-{n}.csv").read_text() for n in (1, 2, 3, 4)] == ["fourth", "second", "third", "fifth"]


def test_the_best_checkpoint_counts_the_last_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The loss falls all the way; saving every so many steps would judge the weights by the validation before."""
    report = {"class_path": "lightning_mhla.callbacks.RunReport"}
    steps: dict[str, Any] = {"max_steps": 6, "val_check_interval": 2, "check_val_every_n_epoch": None}
    checkpoint: dict[str, Any] = {"monitor": "val/loss", "filename": "step{step}-loss{val/loss:.4f}"}
    checkpoint |= {"auto_insert_metric_name": False}
    for name, every in (("after", {}), ("before", {"every_n_train_steps": 2})):
        best = {"class_path": "ModelCheckpoint", "init_args": checkpoint | every}
        config = write_config(tmp_path / name, **steps, callbacks=[best, report])
        main(["fit", "--config", str(config), f"--run_dir={tmp_path / name / 'run'}"])
    said = capsys.readouterr().out
    values = {step: float(value) for name, step, value in losses(tmp_path / "after/run") if name == "val/loss"}
    assert min(values, key=lambda step: values[step]) == max(values)
    assert f"best checkpoint    {tmp_path}/after/run/checkpoints/step6-loss{min(values.values()):.4f}.ckpt" in said
    assert "ModelCheckpoint saves every 2 steps, before the validation of the same step" in caplog.text
