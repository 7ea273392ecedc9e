"""Several runs from one line, their records, and their comparison."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fork_server import Child
from grouped import grouped
from mhla_tasks.commandline import registry
from mhla_tasks.commandline.arguments import CommandLine
from mhla_tasks.tools import dry_runs, run_checks, sweep
from mhla_tasks.tools.comparison.options import flat
from mhla_tasks.tools.run_checks import CheckedRun, find_problem
from processes import fork_server

ROOT = Path(__file__).parents[2]


def config(folder: Path, **trainer: Any) -> str:
    """Write a small digits configuration of two epochs with four steps."""
    kept = yaml.safe_load((ROOT / "configs/classification/digits.yaml").read_text())
    kept["model"]["init_args"] = grouped(kept["model"]["init_args"], dim=16, depth=1, heads=2)
    kept["data"]["init_args"] = {"batch_size": 718}
    best = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/loss", "save_last": True}}
    report = {"class_path": "lightning_mhla.callbacks.RunReport"}
    kept["trainer"] = {
        "accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 1, "enable_progress_bar": False,
        "callbacks": [best, report, {"class_path": "lightning_mhla.callbacks.Recovery"}], **trainer,
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(kept))
    return str(path)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check of options, for sweeps whose options are invented."""
    monkeypatch.setattr(sweep, "find_problem", lambda runs, here: None)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands of a sweep, and run them in processes without startup time."""
    found: list[list[str]] = []

    def wait(command: list[str], output: Path) -> int:
        assert command[:4] == [sys.executable, "-m", "mhla_tasks", "fit"]
        found.append(command)
        status, said = fork_server().run(*command[3:], module="mhla_tasks", folder=Path.cwd())
        with output.open("a") as stream:
            stream.write(said)
        return status

    monkeypatch.setattr(sweep, "run_command", wait)
    return found


def test_a_sweep_trains_every_combination_once_and_compares(
    trained: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--config", config(tmp_path), "--sweep", "model.init_args.attention.kind=mhla,linear",
             "--sweep=seed_everything=0,1", "--run_dir=runs/kinds"]  # fmt: skip
    assert sweep.run(["fit", *words]) == 0
    names = [f"kind={kind},seed_everything={seed}" for kind in ("mhla", "linear") for seed in (0, 1)]
    assert sorted(path.name for path in Path("runs/kinds").iterdir() if path.is_dir()) == sorted(names)
    out, err = capsys.readouterr()
    table = [line.split() for line in out.splitlines() if re.match(r" kind=\w+,seed_everything=\* ", line)]
    assert [row[1:3] for row in table] == [["mhla", "2"], ["linear", "2"]], "in the order of the sweep, seeds averaged"
    assert Path("runs/kinds/compared.png").stat().st_size > 10_000
    assert Path("runs/kinds/compared.html").read_text().count("kind=linear (mean of 2 runs)</button>") == 1
    assert "as a table: lightning compare runs/kinds --latex\n" in err
    finals: dict[str, list[float]] = {"mhla": [], "linear": []}
    for name in names:
        record = json.loads((Path("runs/kinds") / name / "run.json").read_text())
        assert record["finished"]
        assert record["steps"] == 4
        losses = record["metrics"]["val/loss"]
        assert [step for step, _ in losses] == [2, 4]
        assert record["best"]["value"] == min(value for _, value in losses)
        checkpoint = torch.load(Path("runs/kinds") / name / "checkpoints/last.ckpt", weights_only=True)
        weights = {key: value for key, value in checkpoint["state_dict"].items() if key.startswith("network.")}
        assert record["parameters"] == sum(value.numel() for value in weights.values())
        finals[name.removeprefix("kind=").partition(",")[0]].append(losses[-1][1])
    for kind, row in zip(finals, table, strict=True):
        mean, _, spread = row[3:6]
        assert float(mean) == pytest.approx(sum(finals[kind]) / 2, abs=0.6 * 10 ** -len(mean.partition(".")[2]))
        assert float(spread) == pytest.approx(abs(finals[kind][0] - finals[kind][1]) / 2**0.5, rel=0.051)
    registry.run("compare", ["runs/kinds", "--csv", "--metrics", "val/loss"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["model.init_args.attention.kind"] for row in rows] == ["mhla", "linear"], "also of the folder alone"
    assert len(trained) == 4
    said = err.splitlines()
    assert said[0] == "4 runs in runs/kinds; what each prints is in its output.txt"
    told = [
        re.fullmatch(
            r"\[(\d)/4\] runs/kinds/(\S+): (?:\d+ min )?\d+ s, best val/loss [\d.]+(; \d left, about (?:\d+ min )?\d+ s)?",
            line,
        )
        for line in said[1:5]
    ]
    assert [(match[1], match[2], bool(match[3])) for match in told if match] == [
        (str(number), name, number < 4) for number, name in enumerate(names, 1)
    ]
    assert "`Trainer.fit` stopped" in (Path("runs/kinds") / names[0] / "output.txt").read_text()
    assert sweep.run(["fit", *words]) == 0
    assert len(trained) == 4, "what is finished is not trained again"
    assert sweep.run(["fit", *words, "--trainer.max_epochs=3"]) == 0
    assert len(trained) == 8, "other words are another run, which resumes"
    record = json.loads((Path("runs/kinds") / names[0] / "run.json").read_text())
    assert [step for step, _ in record["metrics"]["val/loss"]] == [2, 4, 6]
    capsys.readouterr()
    changed = [*words, "--trainer.max_epochs=1", "--data.batch_size=359", "--model.training.optimizer.lr=0.5"]
    assert sweep.run(["fit", *changed]) == 2
    said = capsys.readouterr().err
    assert "trainer.max_epochs 3, not 1" in said
    assert "model.training.optimizer.lr 0.002, not 0.5" in said
    assert "data.batch_size 718, not 359; choose another --run_dir" in said
    assert len(trained) == 8
    assert json.loads((Path("runs/kinds") / names[0] / "run.json").read_text()) == record


def test_a_run_that_fails_is_named_and_a_wrong_command_ends_the_sweep(
    trained: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--config", config(tmp_path), "--trainer.max_steps=1", "--run_dir=runs"]
    monkeypatch.setattr(sweep, "find_problem", lambda runs, here: None)  # as if a file was changed after the check
    assert sweep.run(["fit", *words, "--sweep", "model.init_args.nope=1,2"]) == 2
    assert len(trained) == 1
    monkeypatch.setattr(sweep, "run_command", lambda command, output: int("=1" in command[-1]))
    Path("runs/nope=2").mkdir(parents=True)
    assert sweep.run(["fit", *words, "--sweep", "model.init_args.nope=1,2"]) == 1
    assert "failed: nope=1; the same command tries them again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ["model.init_args.attention.kind=mhla,linear,mlha"],
            r"runs/kind=mlha: attention kind 'mlha' is not .*no run was started",
        ),
        (["model.init_args.training.optimizer.lr=1e-3,1e-4,fast"], r"runs/lr=fast: .*lr=fast.*float"),
        (["model.init_args.dim=16,33"], r"runs/dim=33: .*33"),
        (["model.init_args.depht=1,2"], r"runs/depht=1: .*did you mean .*depth\?; 2 of 2 runs have an error"),
        (
            [f"model.init_args.training.optimizer.warmup_{unit}" for unit in ("epochs=1", "steps=0,5")],
            r"runs/warmup_epochs=1,warmup_steps=5: give warmup_epochs=1.0 or warmup_steps=5, not both",
        ),
        (["model.init_args.training.optimizer.lr=1e-3,0.001"], r"runs/lr=0\.001: has the same options as lr=1e-3"),
        (["trainer.precision=32,bf61"], r"runs/precision=bf61: .*bf61"),
        (["trainer.devices=1,nine"], r"runs/devices=nine: .*--trainer\.devices takes a number above 0"),
        (["trainer.accumulate_grad_batches=1,0"], r"runs/accumulate_grad_batches=0: .*=0 must be at least 1"),
        (["config=config.yaml,other.yaml"], r"runs/config=other\.yaml: --config=other\.yaml: the file does not exist"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else "",
)
def test_values_of_all_runs_are_checked_before_the_first_one_starts(
    values: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "find_problem", in_fork)
    words = [f"--config={config(tmp_path)}", *(f"--sweep={value}" for value in values)]
    assert sweep.run(["fit", *words, "--run_dir=runs"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], "nothing is written"


def in_fork(runs: list[Any], here: bool) -> str | None:
    """Check runs in a process without startup time."""
    return problems_in_fork([runs], here)[0]


def problems_in_fork(sweeps: list[list[Any]], here: bool) -> list[str | None]:
    """Check the runs of several sweeps in one process without startup time."""
    program = (
        "import json, sys; from mhla_tasks.tools import dry_runs, run_checks; "
        "sweeps = [[run_checks.CheckedRun(**run) for run in runs] for runs in json.loads(sys.argv[1])]; "
        "print('\\x1e' + json.dumps([dry_runs.check_runs(runs, sys.argv[2] == 'True') for runs in sweeps]))"
    )
    words = json.dumps([[{"folder": run.folder, "words": run.words} for run in runs] for runs in sweeps])
    status, said = fork_server().program(program, words, str(here), folder=Path.cwd())
    assert status == 0, said
    problems: list[str | None] = json.loads(said.rpartition("\x1e")[2].splitlines()[0])
    return problems


def test_missing_data_is_an_error_only_where_the_runs_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a cluster may lie on the disks of its nodes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    configuration = str(ROOT / "configs/classification/deit_t_imagenet.yaml")
    runs = [
        CheckedRun(f"runs/{name}", [f"--config={configuration}", f"--data.train={name}", "--data.val=shards"])
        for name in ("shards", "http://localhost/train-{0..9}.tar", "shard-{000..009}.tar")
    ]
    assert in_fork(runs, here=False) is None
    assert str(in_fork(runs, here=True)).startswith(
        "runs/shard-{000..009}.tar: data.train: shard-000.tar does not exist; give"
    )


OWN_CLASSES = """
import torch
from mhla_tasks.classification import Digits, ImageClassifier

class Classifier(ImageClassifier):
    def __init__(self, rate: float = 0.5, **options):
        super().__init__(**options)
        if max(value.item() for value in torch.linspace(0, rate, 3)) > 1:
            raise ValueError(f"rate={rate} must be at most 1")

class Shuffled(Digits):
    def __init__(self, **options):
        super().__init__(**options)
        self.order = torch.randperm(4).tolist()
"""


def test_constructors_that_read_tensors_are_checked_with_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_classes.py").write_text(OWN_CLASSES)
    words = ["--allow=own_classes", f"--config={config(tmp_path)}", "--model=own_classes.Classifier"]
    right = [CheckedRun("a", [*words, "--data=own_classes.Shuffled"]), CheckedRun("b", [*words, "--model.rate=1"])]
    wrong = [right[0], CheckedRun("b", [*words, "--model.rate=2"])]
    problems = problems_in_fork([right, wrong], here=True)
    assert problems == [None, "b: rate=2.0 must be at most 1"]


def test_locations_of_data_are_read_as_the_data_module_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text on the hub, texts with braces in their names, shards behind URLs and patterns, folders of videos."""
    monkeypatch.chdir(tmp_path)
    for name in ("a{b}.txt", "c:d.txt", "texts/one.txt", "videos/one.mp4", "shards/train-0.tar", "shards/train-1.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    texts, clips = (tmp_path / f"{name}.yaml" for name in ("texts-of-data", "clips"))
    trainer = "trainer: {accelerator: cpu, logger: false}\n"
    texts.write_text(
        "model: {class_path: lightning.pytorch.demos.boring_classes.BoringModel}\n" + trainer
        + "data:\n  class_path: mhla_tasks.language.TextPassages\n"
        "  init_args: {train: texts, val: texts, tokenizer: t}\n"
    )  # fmt: skip
    clips.write_text(
        "model: {class_path: lightning.pytorch.demos.boring_classes.BoringModel}\n" + trainer
        + "data:\n  class_path: mhla_tasks.video.VideoFolders\n  init_args: {train: videos, val: videos}\n"
    )  # fmt: skip
    shards = str(ROOT / "configs/classification/deit_t_imagenet.yaml")
    shard_options = ["--data.val=shards", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"]

    accepted = [
        (texts, "hub:org/name", []), (texts, "hub:org/name:config:split", []), (texts, "a{b}.txt", []),
        (texts, "c:d.txt", []), (texts, "['hub:org/name', texts, 'a{b}.txt']", []),
        (texts, "texts", ["--data.val=missing", "--trainer.limit_val_batches=0"]), (clips, "videos", []),
        (shards, "http://localhost/train-{0..9}.tar", shard_options), (shards, "s3://bucket/train-0.tar", shard_options),
        (shards, "hf://org/name/train-{000..009}.tar", shard_options), (shards, "shards/train-{0..1}.tar", shard_options),
        (shards, "shards/*.tar", shard_options), (shards, "[shards/train-0.tar, 'gs://b/x.tar']", shard_options),
    ]  # fmt: skip
    runs = [
        CheckedRun(f"runs/{number}", [f"--config={configuration}", f"--data.train={location}", *words])
        for number, (configuration, location, words) in enumerate(accepted)
    ]
    runs.append(
        CheckedRun("runs/recall", [f"--config={ROOT / 'configs/language/mqar.yaml'}", "--trainer.accelerator=cpu"])
    )
    rejected = [
        (texts, ["--data.train=missing.txt"], "data.train: missing.txt is neither a file nor a folder"),
        (texts, ["--data.train=[texts,'texts/*.txt']"], "data.train: texts/*.txt is neither a file nor a folder"),
        (clips, ["--data.val=missing"], "data.val: missing is neither a file nor a folder"),
        (shards, ["--data.train=shards/train-{0..2}.tar", *shard_options],
         "data.train: shards/train-2.tar does not exist; give a folder of shards"),
        (shards, ["--data.train=hub:org/name", *shard_options],
         "'hub:org/name': shards come from a local path or"),
    ]  # fmt: skip
    single = [[CheckedRun("runs/a", [f"--config={configuration}", *words])] for configuration, words, _ in rejected]
    accepted_runs, *problems = problems_in_fork([runs, *single], here=True)
    assert accepted_runs is None
    for problem, (_, _, message) in zip(problems, rejected, strict=True):
        assert str(problem).startswith(f"runs/a: {message}")


def test_models_that_only_the_cluster_has_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configurations = ["language/linearize_stdlib", "classification/linearize_mnist", "video/digits_finetune"]
    runs = [
        CheckedRun(f"runs/{number}", [f"--config={ROOT / 'configs' / name}.yaml", "--model.pretrained=/models/llama"])
        for number, name in enumerate(configurations)
    ]
    resumed = CheckedRun("runs/resumed", [f"--config={config(tmp_path)}", "--ckpt_path=/models/last.ckpt"])
    wrong_words = (
        ["--model.training.optimizer.lr=fast"], ["--data.batch_size=x"], ["--config=missing.yaml"], ["--sed=0"],
    )  # fmt: skip
    wrong = [[CheckedRun("runs/wrong", [f"--config={config(tmp_path)}", *words])] for words in wrong_words]
    missing, *problems = problems_in_fork([[*runs, resumed], *wrong], here=False)
    assert missing is None
    for problem, words in zip(problems, wrong_words, strict=True):
        assert str(problem).startswith("runs/wrong: "), words
    assert "/models/llama is not a checkpoint" in str(in_fork(runs[:1], here=True))


def test_the_check_runs_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    right, wrong = (
        CheckedRun(f"runs/{lr}", [f"--config={config(tmp_path)}", f"--model.training.optimizer.lr={lr}"])
        for lr in ("0.1", "fast")
    )
    assert find_problem([right], here=True) is None
    assert str(find_problem([right, wrong], here=True)).startswith("runs/fast: ")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise ImportError('libcuda.so is missing')", "ended with status 1: ImportError: libcuda.so is missing"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9, as if memory ran out: it printed nothing"),
        ("print('done')", "ended with status 0: it printed nothing"),
    ],
    ids=["error", "killed", "text"],
)
def test_a_check_that_does_not_finish_is_a_warning(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken_check.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run_checks, "PROGRAM", "broken_check")
    assert find_problem([CheckedRun("runs/a", [])], here=True) is None
    assert caplog.messages == [f"the options of the runs could not be checked ({message})"]


def test_a_folder_of_something_else_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/two").mkdir(parents=True)
    (tmp_path / "runs/two/thesis.tex").touch()
    runs = [
        CheckedRun(f"runs/{name}", [f"--config={config(tmp_path)}", f"--run_dir={name}"]) for name in ("one", "two")
    ]
    assert "runs/two: --run_dir=runs/two: the folder is not that of a run, and holds thesis.tex" in str(
        in_fork(runs, True)
    )
    same = [CheckedRun(f"runs/{name}", [f"--config={config(tmp_path)}"]) for name in ("three", "../runs/three")]
    assert "runs/../runs/three: is also the folder of the run with --config=" in str(in_fork(same, True))


@pytest.mark.parametrize(
    ("key", "trained", "present", "differs"),
    [
        ("model.init_args.label_smoothing", 0.1, 0.2, True),
        ("model.init_args.training.optimizer.lr", 1, 1.0, False),
        ("model.init_args.pretrained", "a", None, False),
        ("data.init_args.num_workers", 0, 4, False),
        ("data.init_args.num_classes", 2, 4, True),
        ("seed_everything", 0, 1, True),
        ("trainer.accumulate_grad_batches", 1, 2, True),
        ("trainer.gradient_clip_val", None, 1.0, True),
        ("trainer.limit_val_batches", None, 1, True),
        ("trainer.enable_progress_bar", True, False, False),
        ("trainer.max_epochs", 3, 2, True),
        ("trainer.max_epochs", 3, 4, False),
        ("trainer.max_epochs", 3, -1, False),
        ("trainer.max_steps", -1, 10, True),
        ("trainer.max_steps", 10, 20, False),
    ],
)
def test_options_that_decide_the_results_may_not_change(key: str, trained: Any, present: Any, differs: bool) -> None:
    assert dry_runs._differs(key, trained, present) == differs


def test_a_run_of_another_process_is_not_a_success(
    unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "run_command", lambda command, output=None: 0)
    monkeypatch.setattr(sweep, "in_use", lambda folder: folder.name == "a=1")
    assert sweep.run(["fit", "--sweep=a=1,2", "--run_dir=r"]) == 1
    printed = capsys.readouterr().err
    assert "[1/2] r/a=1: in use by another process" in printed
    assert "in use by another process: a=1; the table has their earlier results" in printed


def test_the_estimate_leaves_out_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = sweep.SweepProgress(5, sweep.Console(), seconds=[10.0], done=1, ready=3)
    assert progress.left() == "; 1 left, about 10 s"
    progress.ready, progress.done = 0, 5
    assert progress.left() == ""


def test_the_page_names_runs_that_failed(
    unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def train(command: list[str], output: Path) -> int:
        if "--a=2" in command:
            return 1
        record(output.parent, {"seed_everything": 1})
        return 0

    monkeypatch.setattr(sweep, "run_command", train)
    assert sweep.run(["fit", "--sweep=a=1,2", "--run_dir=r"]) == 1
    page = Path("r/compared.html").read_text()
    assert "Left out, because they have no run.json, which RunReport writes at each validation: a=2." in page
    printed = capsys.readouterr().err
    assert "failed: a=2" in printed
    assert "runs without run.json" not in printed


def test_the_progress_of_a_run_is_that_of_its_last_validation(tmp_path: Path) -> None:
    assert sweep._position(tmp_path) == ""
    record(tmp_path, {}, finished=False)
    assert sweep._position(tmp_path) == ", step 1,200: val/loss 0.5"
    record(tmp_path, {}, best={})
    assert sweep._position(tmp_path) == ""
    for broken in ("[]", "{"):
        (tmp_path / "run.json").write_text(broken)
        assert sweep._position(tmp_path) == ""
        line = CommandLine("fit")
        sweep._begin(tmp_path, line)
        assert not sweep._finished(tmp_path, line)


def test_jobs_are_submitted_once(
    unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To programs that stand for SLURM's: a job that waits in the queue is not submitted again."""
    monkeypatch.chdir(tmp_path)
    programs = {
        "sbatch": 'echo "$RUN_DIR $@" >> submitted\nwc -l < submitted',
        "squeue": 'for word in "$@"; do case $word in --jobs=*) cat queue-${word#--jobs=};; esac; done',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    words = [
        "--config=a.yaml",
        "--sweep",
        "seed_everything=0,1",
        "--sweep_sbatch",
        "--nodes=2 train.sbatch",
        "--run_dir=r",
    ]
    assert sweep.run(["fit", *words]) == 0
    options = "--nodes=2 train.sbatch --config=a.yaml --seed_everything"
    lines = [
        f"r/seed_everything={seed} --parsable --export=ALL --job-name=seed_everything={seed} {options}={seed}"
        for seed in (0, 1)
    ]
    assert (tmp_path / "submitted").read_text().splitlines() == lines
    (tmp_path / "queue-1").write_text("PENDING\n")  # squeue fails for the other, which SLURM has forgotten
    assert sweep.run(["fit", *words]) == 0
    assert (tmp_path / "submitted").read_text().splitlines() == [*lines, lines[1]]
    out, err = capsys.readouterr()
    assert "seed_everything=0: job 1 is pending" in err
    assert not out, "nothing is compared while jobs are running"
    for seed, loss in enumerate((0.5, 0.75)):
        record(tmp_path / f"r/seed_everything={seed}", {"seed_everything": seed}, metrics={"val/loss": [[1200, loss]]})
    assert sweep.run(["fit", *words]) == 0
    assert "0.62 ± 0.18" in capsys.readouterr().out, "the same command compares once all jobs have finished"


@pytest.mark.parametrize(
    ("ending", "status", "outcome", "end"),
    [
        ("kill -9 $$", 137, "killed by signal 9, as if memory ran out", "stopped at run 1 of 2"),
        ("kill -15 $$", 143, "ended with status 143", "stopped at run 1 of 2"),
        ("exit 255", 1, "ended with status 255", "failed: seed_everything=0, seed_everything=1"),
    ],
    ids=["killed", "terminated", "255"],
)
@pytest.mark.parametrize("submitted", [False, True], ids=["run", "sbatch"])
def test_a_signal_ends_a_sweep_and_a_failure_does_not(
    unchecked: None, submitted: bool, ending: str, status: int, outcome: str, end: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A program in place of a run, or of sbatch, ends by a signal or with a large status of its own."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\necho start >> starts\n{ending}\n")
    program.chmod(0o755)
    words = ["--sweep=seed_everything=0,1", "--run_dir=r"]
    if submitted:
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        words.append("--sweep_sbatch=x.sbatch")
        line = f"r/seed_everything=0: not submitted: sbatch {outcome}"
    else:
        monkeypatch.setattr(sys, "executable", str(program))
        line = f"r/seed_everything=0: {outcome} (see output.txt)"
    assert sweep.run(["fit", *words]) == status
    said = capsys.readouterr().err
    assert line in said
    assert end in said
    assert (tmp_path / "starts").read_text().count("start") == (2 if status == 1 else 1)


def begun(folder: Path, seeds: str) -> Child:
    """Start a sweep whose first run does not end, and wait until it has validated."""
    line = [
        "fit",
        "--config",
        config(folder, max_epochs=100_000),
        "--sweep",
        f"seed_everything={seeds}",
        "--run_dir=runs",
    ]
    said = folder / "said"
    run = fork_server().start(*line, module="mhla_tasks", output=said, folder=folder)
    until = time.monotonic() + 200
    while not list(folder.glob("runs/*/run.json")):
        assert run.poll() is None, said.read_text()
        assert time.monotonic() < until
        time.sleep(0.05)
    return run


def test_a_stopped_sweep_saves_and_resumes(tmp_path: Path) -> None:
    """SIGTERM to the sweep reaches the run, which saves; the same line goes on."""
    run = begun(tmp_path, "0")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, (tmp_path / "said").read_text()
    record = json.loads(next(tmp_path.glob("runs/*/run.json")).read_text())
    assert not record["finished"]
    assert record["steps"] > 0
    assert list(tmp_path.glob("runs/*/checkpoints/recovery/*.ckpt"))


def test_ctrl_c_ends_the_sweep_and_not_its_run_alone(tmp_path: Path) -> None:
    """The terminal sends it to both; the run ends with status 1, as Lightning does."""
    run = begun(tmp_path, "0,1")
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait() == 130, (tmp_path / "said").read_text()
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()] == ["seed_everything=0"]


def test_help_is_that_of_fit_and_an_edited_configuration_is_another_run(
    unchecked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[list[str]] = []
    monkeypatch.setattr(sweep, "run_command", lambda command, output=None: asked.append(command) or 0)
    assert sweep.run(["fit", "--sweep=a=1,2", "--print_config"]) == 0
    assert asked == [[sys.executable, "-m", "mhla_tasks", "fit", "--print_config"]]
    Path("a.yaml").write_text("x: 1\n")
    words = ["--config=a.yaml", "--sweep=a=1", "--run_dir=r"]
    record(Path("r/a=1"), {})
    assert sweep.run(["fit", *words]) == 0
    assert len(asked) == 2, "trained by other words before"
    done = json.loads(Path("r/a=1/run.json").read_text())
    assert not done["finished"], "the record of the other run would count as this one's"
    Path("r/a=1/run.json").write_text(json.dumps({**done, "finished": True}))
    assert sweep.run(["fit", *words]) == 0
    assert len(asked) == 2
    Path("a.yaml").write_text("x: 2\n")
    assert sweep.run(["fit", *words]) == 0
    assert len(asked) == 3
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "find_problem", lambda runs, here: None)
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine of a cluster has sbatch
    assert sweep.run(["fit", "--sweep=a=1", "--sweep_sbatch=x.sbatch", "--run_dir=other"]) == 2
    assert "the program sbatch is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a,b", ["a", "b"]),
        ("[mhla,softmax],[linear]", ["[mhla,softmax]", "[linear]"]),
        ("{a: 1, b: [2, 3]},null", ["{a: 1, b: [2, 3]}", "null"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("1e-3", ["1e-3"]),
        ("don't,it's,-1", ["don't", "it's", "-1"]),
        ("'it''s, so',\"a\\\", b\",c", ["'it''s, so'", '"a\\", b"', "c"]),
        ("['a]',b], {c: \"d,e\"}", ["['a]',b]", '{c: "d,e"}']),
    ],
)
def test_values_are_split_at_commas_outside_brackets(text: str, values: list[str]) -> None:
    assert sweep.split_values(text) == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep"], "--sweep needs a value: --sweep=VALUE"),
        (["--sweep", "seed_everything"], "--sweep seed_everything: write KEY=VALUE,VALUE"),
        (["--sweep", "a=1,,2"], "--sweep a=1,,2: write KEY=VALUE,VALUE"),
        (["--sweep=a=1", "--sweep=a=2"], "--sweep a is given twice"),
        (["--sweep=a=1,2,1"], "--sweep a has a value twice"),
        (["--sweep=a=1, 2, 1"], "--sweep a has a value twice"),
        (["--sweep=a=1, "], "--sweep a=1, : write KEY=VALUE,VALUE"),
        (["--sweep=a=1,2", "--sweep_sbatch=x 'y"], "--sweep_sbatch x 'y: No closing quotation"),
        (
            ["--sweep=run_dir=a,b"],
            "--sweep run_dir: a sweep makes a folder for each run itself, in the folder that --run_dir names",
        ),
        (["--sweep=sweep=a,b"], "--sweep sweep: sweep is not an option of a run, so a sweep cannot vary it"),
        (
            ["--sweep=model.help=a,b"],
            "--sweep model.help: model.help is not an option of a run, so a sweep cannot vary it",
        ),
    ],
)
def test_a_sweep_that_cannot_be_read(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.run(["fit", *words]) == 2
    assert f"error: {message}\n" in capsys.readouterr().err


def test_names_tell_keys_apart() -> None:
    chosen = {
        "model.init_args.attention.kind": "mhla",
        "model.init_args.training.optimizer.lr": "1e-3",
        "data.init_args.lr": "[a, b]",
    }
    name = sweep.name_of(chosen)
    assert re.fullmatch(r"kind=mhla,optimizer\.lr=1e-3,data\.lr=-a,-b--[0-9a-f]{6}", name)
    assert name != sweep.name_of({**chosen, "data.init_args.lr": "(a, b)"}), "two runs would share a folder"
    assert len(sweep.name_of({"a": "x" * 300})) < 200
    assert len(os.fsencode(sweep.name_of({"a": "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 300}))) <= 255, (
        "the limit of file systems"
    )
    assert sweep.name_of({"a": "\udcff"}) != sweep.name_of({"a": "\udcfe"}), "bytes that are not UTF-8"


def record(folder: Path, options: dict[str, Any], **changes: Any) -> None:
    """Write a run as RunReport and the command line do."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"finished": True, "steps": 1200, "seconds": 3725.0, "parameters": 1_000_000, "trained_parameters": 5, "processes": 1,
            "best": {"metric": "val/loss", "mode": "min", "value": 0.25, "step": 600},
            "metrics": {"val/loss": [[600, 0.25], [1200, 0.5]], "val/samples": [[600, 10], [1200, 10]]}, "versions": {}}  # fmt: skip
    (folder / "run.json").write_text(json.dumps({**kept, **changes}))
    (folder / "config.yaml").write_text(yaml.safe_dump(options))


def test_what_differs_is_shown_and_what_does_not_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [{"class_path": "a.b.EMA", "init_args": {"decay": 0.9}}]
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "x"}}
    common = {
        "model": {"init_args": {"dim": 64, "kind": "mhla"}},
        "trainer": {"callbacks": callbacks, "logger": logger},
    }
    record(tmp_path / "runs/version_9", {**common, "run_dir": "one"})
    other = json.loads(json.dumps(common))
    other["model"]["init_args"]["kind"] = "linear"
    other["trainer"]["callbacks"][0]["init_args"]["decay"] = 0.99
    other["trainer"]["logger"]["init_args"]["save_dir"] = "y"
    worse = {"val/loss": [[600, 0.75], [1200, None]], "val/samples": [[1200, 10]]}
    record(tmp_path / "runs/version_10", other, finished=False, metrics=worse, best={})
    registry.run("compare", [str(tmp_path / "runs"), "--picture", str(tmp_path / "drawn.png")])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    header, one, two, _ = lines
    assert re.split("  +", header) == [
        "run", "kind", "decay", "val/loss ↓", "best val/loss ↓", "steps", "time", "parameters", "notes",
    ]  # fmt: skip
    assert one.split() == ["version_9", "mhla", "0.9", "0.5", "0.25", "1,200", "1", "h", "02", "min", "1,000,000"]
    assert re.split("  +", two.strip()) == [
        "version_10", "linear", "0.99", "not finite", "1,200", "1 h 02 min", "1,000,000", "not finished",
    ]  # fmt: skip
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
    registry.run("compare", [str(tmp_path / "runs"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["options"] for row in found] == [
        {"model.init_args.kind": "mhla", "trainer.callbacks.EMA.decay": 0.9},
        {"model.init_args.kind": "linear", "trainer.callbacks.EMA.decay": 0.99},
    ]


@pytest.mark.parametrize("told", ["given", "begun by a sweep", "configured"])
def test_runs_without_a_record_are_named_and_left_out(
    told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "runs/good", {"seed_everything": 1})
    bad = tmp_path / "runs/bad one"
    bad.mkdir()
    if told == "begun by a sweep":
        (bad / "sweep.json").write_text("{}")
    if told == "configured":
        (bad / "config.yaml").write_text("model: {}\ndata: {}\n")
        (bad / "checkpoints").mkdir()
        (bad / "checkpoints/last.ckpt").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    folders = [str(tmp_path / "runs/good"), str(bad)] if told == "given" else [str(tmp_path / "runs")]
    registry.run("compare", [*folders, str(tmp_path / "empty")])
    printed = capsys.readouterr()
    assert str(tmp_path / "empty") in printed.err
    assert "good" in printed.out
    assert "Left out, because they have no run.json" in printed.err
    assert "bad one" in printed.err


def test_an_option_that_is_wrong_in_all_runs_stops_a_sweep(
    unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'error: --sed=0: sed is not an option'\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert sweep.run(["fit", "--sweep=sed=0,1,2", "--run_dir=r"]) == 2
    printed = capsys.readouterr().err
    assert "(error: --sed=0: sed is not an option); the sweep is stopped" in printed
    assert "left" not in printed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "contains no run.json; it is written by runs"),
        ("{", "is not a JSON file"),
        ("{}", "is not a record of a run"),
        ("[]", "must contain a JSON object, not list"),
        ("[" * 100_000, "is not a JSON file"),
        ('{"metrics": [], "seconds": 1}', "is not a record of a run"),
    ],
)
def test_folders_without_runs_are_told(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(SystemExit, match=message):
        registry.run("compare", [str(tmp_path)])


@pytest.mark.parametrize(
    "config",
    [
        "a0: &a0 [1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)),
        "[" * 100_000,
        "# x\n" * 600_000,
        "a: !!python/object/apply:os.system [touch ran]",
        "a: &a [*a]",
    ],
    ids=["aliases", "deep", "large", "python", "circle"],
)
def test_a_hostile_configuration_in_a_foreign_folder_is_an_error(config: str, tmp_path: Path) -> None:
    record(tmp_path / "foreign", {})
    (tmp_path / "foreign/config.yaml").write_text(config)
    with pytest.raises(SystemExit, match=r"config.yaml cannot be read"):
        registry.run("compare", [str(tmp_path)])


def test_runs_that_end_alike_and_odd_values_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [{"class_path": "a.Metrics", "init_args": {"n": 1}}, {"class_path": "a.Metrics", "init_args": {"n": 2}}]
    for name, value in (("one", "[/data]"), ("two", [True, False])):
        record(tmp_path / name, {"model": {"x": value}, "trainer": {"callbacks": callbacks}})
    record(tmp_path / "three", {}, best={"metric": "val/accuracy", "mode": "max", "value": 0.9, "step": 1})
    (tmp_path / "three/config.yaml").unlink()
    registry.run("compare", [str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    header, one, three, two = (re.split("  +", line.strip()) for line in lines[:4])
    assert header == ["run", "x", "val/loss ↓", "best val/loss ↓", "steps", "time", "parameters", "notes"]
    assert one[:4] == ["one", "[/data]", "0.5", "0.25"]
    assert three[:3] == ["three", "0.5", "1,200"], "chosen by a different metric"
    assert three[-1] == "options unknown, config.yaml is missing or empty"
    assert two[:4] == ["two", "[true, false]", "0.5", "0.25"]
    assert lines[4:] == ["Each row is a single run, so the numbers do not say how much they depend on the seed."]
    assert flat({"trainer": {"callbacks": callbacks}}) == {
        "trainer.callbacks.Metrics": "a.Metrics", "trainer.callbacks.Metrics.n": 1,
        "trainer.callbacks.Metrics-2": "a.Metrics", "trainer.callbacks.Metrics-2.n": 2,
    }  # fmt: skip
    for name in ("none", "constant"):
        record(tmp_path / "other" / name, {}, metrics={} if name == "none" else {"val/loss": [[1, 2.0]]})
    with pytest.raises(SystemExit, match="no metric of these runs changes"):
        registry.run("compare", [str(tmp_path / "other"), "--picture", str(tmp_path / "x.png")])
