"""The report in small: rows once each, several seeds, a page; and the recurrences' figures."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fork_server import ForkServer
from mhla_tasks.language import LanguageModel
from mhla_tasks.video.clips import to_frames
from mhla_tasks.video.digits import MovingDigitSamples
from PIL import Image

from benchmarks import photo_pieces, recurrences
from benchmarks.paper import __main__ as paper
from benchmarks.paper import contexts, full_runs, mnist, photographs, runs, scenes, video
from benchmarks.paper.jobs import Job, in_two_parts
from benchmarks.paper.page import write_page
from benchmarks.paper.runs import newest_checkpoint
from benchmarks.paper.study import Study, by_variant, spread
from lightning_mhla import AttentionConfig

ONE = [
    "--trainer.enable_progress_bar=false",
    "--trainer.max_epochs=-1",
    "--trainer.max_steps=1",
    "--trainer.limit_val_batches=1",
]
KEEP = "--trainer.callbacks=[{class_path: ModelCheckpoint, init_args: {save_last: true}}]"
GENERATION = ("{class_path: mhla_tasks.diffusion.GenerationMetrics, init_args: {name: %s, samples: 20, batch_size: 20, every_n_steps: 1, "
              "features: {class_path: mhla_tasks.diffusion.MnistFeatures, init_args: {epochs: 1}}}}")  # fmt: skip
DRAW = f"{KEEP[:-1]}, {GENERATION % 'generation'}, {GENERATION % 'guided'}]"
QUESTIONS = "{tokens: 16, pairs: 2, samples: 20}"
SMALL: dict[str, tuple[list[str], list[str]]] = {
    "mnist": (["mhla"], [KEEP, "--model.init_args.shape.depth=1"]),
    "photographs": (["softmax"], ["--trainer.max_epochs=8", "--trainer.max_steps=-1", "--trainer.limit_train_batches=1"]),
    "mqar": (["gla, 32", "mhla, 16"], [KEEP, "--data.init_args.batch_size=8", f"--data.init_args.train=[{QUESTIONS}]", f"--data.init_args.val=[{QUESTIONS}]"]),
    "needle": (["softmax"], [KEEP, "--data.init_args.tokens=32", "--data.init_args.val_samples=4", "--data.init_args.lengths=[1,2]"]),
    "stdlib": (["gla"], [KEEP, "--model.init_args.shape.dim=32", "--model.init_args.shape.depth=1", "--model.init_args.context=64",
                         "--data.init_args.context=64", "--model.init_args.vocab_size=512", "--data.init_args.vocab_size=512"]),
    "stdlib-2048": (["softmax", "mamba2"], [KEEP, "--model.init_args.shape.dim=32", "--model.init_args.shape.depth=1",
                                            "--model.init_args.vocab_size=512", "--data.init_args.vocab_size=512"]),
    "linearize-vit": (["mhla, relu features"], [KEEP]),
    "mnist-images": (["mhla + lepe + gate"], [DRAW, "--model.init_args.shape.dim=16", "--model.init_args.shape.heads=1", "--model.init_args.shape.depth=1"]),
    "scenes": (["mhla, 16 blocks"], [KEEP, "--model.init_args.transformer.num_layers=1", "--model.init_args.sampling.steps=1",
                                     "--trainer.val_check_interval=1"]),
    "video": (["mhla, 16 blocks"], [KEEP, "--model.init_args.transformer.num_layers=1", "--model.init_args.transformer.ffn_dim=16",
                                    "--model.init_args.sampling.steps=1", "--trainer.val_check_interval=1"]),
}  # fmt: skip
"""Variants, and options that make a study small."""


@pytest.fixture
def trained(server: ForkServer, monkeypatch: pytest.MonkeyPatch, cache_home: Path) -> list[list[str]]:
    """Record the commands that train a row, and run them in processes without startup time."""
    commands: list[list[str]] = []

    def run(command: list[str], check: bool, cwd: Path) -> None:
        commands.append(command)
        status, text = server.run(*command[2:], folder=cwd, XDG_CACHE_HOME=os.environ["XDG_CACHE_HOME"])
        assert check
        assert status == 0, text[-4000:]

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    monkeypatch.setattr("benchmarks.paper.runs.subprocess.run", run)
    return commands


def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> None:
    folders = [f"--{name}={tmp_path / name}" for name in ("runs", "results", "docs")]
    monkeypatch.setattr(sys, "argv", ["paper", *folders, *words])
    paper.main()


def use_small_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cut pieces of noise in place of photographs, and let the study read them."""
    generator = np.random.default_rng(0)
    (tmp_path / "tree").mkdir()
    for name in (name for names in photo_pieces.PHOTOGRAPHS.values() for name in names):
        noise = generator.integers(256, size=(16, 24, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"tree/{name}.jpg")
    monkeypatch.setattr(photo_pieces, "EACH", {"train": 3, "val": 2})
    monkeypatch.setattr(sys, "argv", ["", f"--out={tmp_path / 'pieces'}", f"--tree={tmp_path / 'tree'}"])
    photo_pieces.main()
    assert len(list((tmp_path / "pieces").glob("train/*/*.png"))) == 27 * 3
    assert len(list((tmp_path / "pieces").glob("val/*/*.png"))) == 27 * 2
    with pytest.raises(SystemExit, match="exists"):
        photo_pieces.main()
    options = tuple(option.replace(photographs.PIECES, f"{tmp_path}/pieces") for option in photographs.OPTIONS)
    study = replace(paper.STUDIES["photographs"], options=options, prepare=None)
    monkeypatch.setitem(paper.STUDIES, "photographs", study)


def test_a_study_makes_its_data_before_a_run_that_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events: list[str] = []

    def write(folder: Path) -> None:
        events.append("data")
        folder.mkdir(parents=True)

    def train(*_: Any) -> None:
        events.append("run")
        raise SystemExit("trained")

    monkeypatch.setattr(photographs, "ROOT", tmp_path)
    monkeypatch.setattr(photographs, "write_pieces", write)
    monkeypatch.setattr("benchmarks.paper.study.train", train)
    study = ["--seeds", "0", "--variants", "softmax", "--only"]
    for name, wanted in {"mnist784": ["run"], "photographs": ["data", "run"], "mnist": ["run"]}.items():
        events.clear()
        with pytest.raises(SystemExit, match="trained"):
            call(monkeypatch, tmp_path, *study, name)
        assert events == wanted
    events.clear()
    with pytest.raises(SystemExit, match="trained"):
        call(monkeypatch, tmp_path, *study, "photographs")
    assert events == ["run"], "the data exist"
    (tmp_path / photographs.PIECES).rmdir()
    machine = {"date": "2026-11-29", "device": "none", "threads": 1, "torch": "2.14.1"}
    row = {"variant": "softmax", "seed": 0, "accuracy_by_epoch": [0.5] * 8, "seconds": 1, "machine": machine}
    content = {"options": list(paper.STUDIES["photographs"].options), "rows": [row]}
    (tmp_path / "results").mkdir(exist_ok=True)
    (tmp_path / "results/photographs.json").write_text(json.dumps(content))
    events.clear()
    call(monkeypatch, tmp_path, *study, "photographs")
    assert events == [], "the result exists"

    def without_debian(folder: Path) -> None:
        raise FileNotFoundError("apt-get")

    monkeypatch.setattr(photographs, "write_pieces", without_debian)
    (tmp_path / "results/photographs.json").unlink()
    with pytest.raises(SystemExit, match="in Debian packages: apt-get; choose other studies by --only"):
        call(monkeypatch, tmp_path, *study, "photographs")


def test_no_held_out_pixel_of_a_photograph_is_trained_on() -> None:
    """Held-out regions have vertical stripes here, and all others horizontal ones."""
    height, width = 1024, 1500
    stripes = np.indices((height, width)) // 4 % 2 * 100.0
    values = stripes[0]
    for region in photo_pieces.HELD_OUT:
        row, column = divmod(region, 4)
        rows, columns = (np.array_split(range(side), 4) for side in (height, width))
        area = np.ix_(rows[row], columns[column])
        values[area] = stripes[1][area]
    for stage, axis in (("train", 1), ("val", 0)):
        cut = photo_pieces.pieces(values, stage)
        assert len(cut) == photo_pieces.EACH[stage]
        for piece in cut:
            assert piece.shape == (64, 64)
            assert piece.std(axis).max() == 0
            assert piece.mean() == pytest.approx(127.5, abs=1)
            assert piece.std() == pytest.approx(50, abs=1)
    assert photo_pieces.pieces(np.full((height, width), 7.0), "train") == []


def test_a_missing_photograph_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no photograph Aqua"):
        photo_pieces.find(tmp_path, "Aqua")


@pytest.mark.parametrize("study", SMALL)
def test_a_study_trains_each_row_once_and_writes_its_part_of_the_page(
    study: str, trained: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variants, options = SMALL[study]
    monkeypatch.setattr(video, "CLIPS_EACH", 1)
    monkeypatch.setattr(mnist, "LOOKED_AT", 1)
    monkeypatch.setattr(scenes, "DRAWN", 4)
    monkeypatch.setattr(scenes, "REAL", 20)
    seeds = [0, 1] if study == "mnist" else [0]
    words = ["--only", study, "--variants", *variants, "--seeds", *map(str, seeds), "--", *ONE, *options]
    monkeypatch.setattr("benchmarks.paper.language.LONG", 256)
    monkeypatch.setattr(contexts, "EDGES", (0, 2048, 2560))
    if study == "photographs":
        use_small_pieces(monkeypatch, tmp_path)
    call(monkeypatch, tmp_path, *words)
    rows = json.loads((tmp_path / "results" / f"{study}.json").read_text())["rows"]
    assert {(row["variant"], row["seed"]) for row in rows} == {(name, seed) for name in variants for seed in seeds}
    runs_each = 1 if paper.STUDIES[study].needs is None else 2
    assert len(trained) == runs_each * len(rows)
    call(monkeypatch, tmp_path, *words)
    assert len(trained) == runs_each * len(rows), "what is there is not trained again"
    page = (tmp_path / "docs/results.md").read_text()
    assert f"## {paper.STUDIES[study].title}" in page
    assert f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))};" in page
    for name in variants:
        assert f"| `{name}` |" in page
    assert ("±" in page) == (len(seeds) > 1)
    for picture in [line.partition("](")[2].rstrip(")") for line in page.splitlines() if line.startswith("![")]:
        assert (tmp_path / "docs" / picture).stat().st_size > 5000
    with pytest.raises(SystemExit, match="choose another --results"):
        call(monkeypatch, tmp_path, *words[:-1])


def test_a_model_that_all_seeds_start_from_is_trained_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str, int]] = []
    monkeypatch.setattr(Study, "run", lambda self, variant, seed, *_: asked.append((self.name, variant, seed)))
    call(monkeypatch, tmp_path, "--only", "scenes-pretrain", "scenes", "--variants", "original", "linear")
    each = [("scenes", "linear", seed) for seed in (0, 1, 2)]
    assert asked == [("scenes-pretrain", "original", 0), *each]
    wanted = sum(
        len(study.variants) * (3 if study.seeds is None else len(study.seeds)) for study in paper.STUDIES.values()
    )
    assert f"**0 of {wanted} runs" in (tmp_path / "docs/results.md").read_text()


STOPPED = """
import subprocess, sys
from pathlib import Path
from benchmarks.paper.jobs import Job, run_jobs

class Endless:
    needs = None
    def run(self, variant, seed, *_):
        write = "import os, signal, sys; os.symlink(str(os.getpid()), sys.argv[1]); signal.pause()"
        subprocess.run([sys.executable, "-c", write, f"{sys.argv[1]}/{seed}"])

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run_jobs([Job(Endless(), "any", seed) for seed in range(4)], 2, folder, folder, [], lambda: None)
"""


def test_a_signal_stops_the_runs_too(tmp_path: Path) -> None:
    """They went on without their parent, and began the next runs."""
    program = tmp_path / "program.py"
    program.write_text(STOPPED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(program), str(tmp_path)], env=environment)
    first, second = tmp_path / "0", tmp_path / "1"
    while not (first.is_symlink() and second.is_symlink()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    for link in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(int(os.readlink(link)), 0)
    assert not (tmp_path / "2").is_symlink()


FAILED = """
import os, subprocess, sys
from pathlib import Path
from benchmarks.paper.jobs import Job, run_jobs

class Fails:
    needs = None
    def run(self, variant, seed, *_):
        if seed:
            write = "import os, signal, sys; os.symlink(str(os.getpid()), sys.argv[1]); signal.pause()"
            subprocess.run([sys.executable, "-c", write, f"{sys.argv[1]}/other"])
        while not Path(sys.argv[1], "other").is_symlink():
            pass
        raise SystemExit("error: no data")

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run_jobs([Job(Fails(), "any", seed) for seed in range(4)], 2, folder, folder, [], lambda: None)
"""


def test_a_run_that_fails_ends_the_other_ones(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FAILED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "error: no data" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(os.readlink(tmp_path / "other")), 0)


@pytest.mark.parametrize("name", paper.STUDIES)
def test_every_study_is_sent_to_another_process(name: str) -> None:
    """With --jobs, studies whose section was a local function ended in a traceback before the first run."""
    study = paper.STUDIES[name]
    arrived = pickle.loads(pickle.dumps(study))
    assert (arrived.name, arrived.variants, arrived.options) == (study.name, study.variants, study.options)


def test_what_others_start_from_is_trained_before_them(tmp_path: Path) -> None:
    jobs = [
        Job(paper.STUDIES[name], "softmax", seed) for name in ("video", "linearize-vit-original") for seed in (0, 1)
    ]
    jobs += [Job(paper.STUDIES["linearize-vit"], "linear attention", seed) for seed in (0, 1)]
    first, then = in_two_parts(jobs, tmp_path)
    assert [(job.study.name, job.seed) for job in first] == [
        ("video-pretrain", 0), ("linearize-vit-original", 0), ("linearize-vit-original", 1)
    ]  # fmt: skip
    assert [(job.study.name, job.seed) for job in then] == [
        (name, seed) for name in ("video", "linearize-vit") for seed in (0, 1)
    ]


def test_several_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_home: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    variants, options = SMALL["mnist"]
    asked = [*variants, "linear"]
    call(
        monkeypatch,
        tmp_path,
        "--only",
        "mnist",
        "--variants",
        *asked,
        "--seeds",
        "0",
        "--jobs",
        "2",
        "--",
        *ONE,
        *options,
    )
    rows = json.loads((tmp_path / "results/mnist.json").read_text())["rows"]
    assert {(row["variant"], row["machine"]["threads"]) for row in rows} == {(name, 1) for name in asked}
    assert all(f"| `{name}` |" in (tmp_path / "docs/results.md").read_text() for name in asked)


def test_a_stopped_row_resumes_from_its_checkpoint(
    trained: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (study, (variants, options)) = ("mnist", SMALL["mnist"])
    monkeypatch.setattr(runs, "_children_seconds", count().__next__)  # the server's children are not ours
    words = ["--only", study, "--variants", variants[0], "--seeds", "0", "--", *ONE, *options]
    call(monkeypatch, tmp_path, *words)
    (clock,) = tmp_path.glob("runs/*/seconds.json")
    spent = json.loads(clock.read_text())
    clock.write_text(json.dumps({**spent, "done": False}))  # as it is when training is stopped
    results = tmp_path / "results/mnist.json"
    (first,) = json.loads(results.read_text())["rows"]
    results.unlink()
    call(monkeypatch, tmp_path, *words)
    (again,) = json.loads(results.read_text())["rows"]
    assert any(word.startswith("--ckpt_path=") for word in trained[1])
    assert {**again, "seconds": 0} == {**first, "seconds": 0}
    assert json.loads(clock.read_text())["seconds"] == 2 * spent["seconds"] == 2
    results.unlink()
    with pytest.raises(SystemExit, match="was trained with"):
        call(monkeypatch, tmp_path, *words, "--trainer.max_steps=3")


def test_clips_of_real_digits_are_judged_right() -> None:
    source = MovingDigitSamples(False, 8, 12, 12)
    samples = [source[index] for index in range(200)]
    clips = to_frames(torch.stack([each["video"] for each in samples]))
    found = video.judge(clips, [each["caption"] for each in samples])
    assert found["moves_as_said"] == 1
    assert found["shows_its_digit"] > 0.95
    assert found["frames_alike"] > 0.999
    clips[:, 1::2] = clips.roll(1, 0)[:, 1::2]  # every other frame of another clip
    assert video.judge(clips, [each["caption"] for each in samples])["frames_alike"] < 0.9
    turned = video.judge(
        to_frames(torch.stack([each["video"].flip(1) for each in samples])), [each["caption"] for each in samples]
    )
    assert turned["moves_as_said"] == 0


def built(study: Study, variant: str) -> Any:
    """Build the model of a variant on the meta device."""
    content = yaml.safe_load((runs.ROOT / study.config).read_text())
    for option in (*study.options, *study.variants[variant]):
        path, _, value = option.removeprefix("--").partition("=")
        *parents, last = path.split(".")
        place = content
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = yaml.safe_load(value)
    package, _, name = content["model"]["class_path"].rpartition(".")
    arguments = {**content["model"]["init_args"], "pretrained": None}
    if name == "ImageClassifier":
        arguments.setdefault("num_classes", 2)  # in place of the data, which have a folder for each class
    if name == "LinearizedModel":  # in place of weights, which describe their network
        arguments.setdefault("network", yaml.safe_load(paper.linearize.LLAMA))
    with torch.device("meta"):
        return getattr(import_module(package), name)(**arguments)


@pytest.mark.parametrize("name", paper.STUDIES)
def test_every_variant_builds_its_model(name: str) -> None:
    study = paper.STUDIES[name]
    for variant in study.variants:
        module = built(study, variant)
        assert sum(parameter.numel() for parameter in module.parameters()) > 1000, variant


def test_every_row_of_the_committed_results_is_of_a_variant() -> None:
    for name, study in paper.STUDIES.items():
        file = paper.RESULTS / f"{name}.json"
        if file.exists():
            content = json.loads(file.read_text())
            assert content["options"] == list(study.options)
            for variant, options in content["variants"].items():
                assert variant in study.variants
                assert list(study.variants[variant]) == options, (
                    f"{variant} was trained with other options: delete its rows"
                )
            keys = [(row["variant"], row["seed"]) for row in content["rows"]]
            assert len(set(keys)) == len(keys)


def test_the_middle_learning_rate_of_the_search_is_the_best() -> None:
    scores = {row["variant"]: row["bits_per_byte"] for row in paper.STUDIES["stdlib-2048-rates"].rows(paper.RESULTS)}
    for kind, rates in contexts.RATES.items():
        low, middle, high = (scores[f"{kind}, {rate}"] for rate in sorted(rates))
        assert middle < min(low, high)
        assert rates == tuple(sorted(rates))


@pytest.mark.parametrize("module", [mnist, photographs], ids=["mnist", "photographs"])
def test_the_best_learning_rates_are_those_of_the_search(module: Any) -> None:
    """None of them is the lowest or highest that was tried, because the next one could be better."""
    search = paper.STUDIES[f"{module.__name__.rpartition('.')[2]}-rates"]
    scores = {row["variant"]: row["accuracy"] for row in search.rows(paper.RESULTS)}
    for kind, rates in module.RATES.items():
        assert module.BEST[kind] == max(rates, key=lambda rate: scores[f"{kind}, {rate}"])
        assert min(rates) < module.BEST[kind] < max(rates)


def test_scaled_rotary_embedding_stretches_the_slowest_frequency_alone() -> None:
    shape = {"dim": 32, "depth": 2, "heads": 2}
    model = LanguageModel(AttentionConfig(kind="softmax", rotary=True), vocab_size=64, context=16, shape=shape).eval()
    rotary = model.network.backbone.layers[1].attn.rotary
    before = rotary.frequencies()
    assert contexts.scale_rotary(model, 8)
    after = model.network.backbone.layers[1].attn.rotary.frequencies()
    assert float(after[0]) == float(before[0]) == 1
    assert float(after[-1] * 8) == pytest.approx(float(before[-1]))
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    scaled = model.network(tokens).logits
    assert contexts.scale_rotary(model, 1 / 8)
    assert not torch.allclose(scaled, model.network(tokens).logits)


def test_linearised_models_stand_beside_the_one_each_seed_starts_from(tmp_path: Path) -> None:
    accuracies = {
        "linearize-vit-original": {"softmax": (0.80, 0.84)},
        "linearize-vit": {"mhla, learned features": (0.79, 0.85), "linear attention": (0.70, 0.72)},
    }
    machine = {"date": "2026-11-24", "device": "none", "threads": 1, "torch": "2.14.1"}
    for name, by_name in accuracies.items():
        rows = [
            {"variant": variant, "seed": seed, "accuracy": value, "steps": 2, "seconds": 1, "machine": machine}
            for variant, values in by_name.items()
            for seed, value in enumerate(values)
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    page = write_page([paper.STUDIES[name] for name in accuracies], tmp_path, tmp_path / "docs").read_text()
    table = page[page.index("with its attention replaced") :]
    assert "| `softmax` | 2 | 82.0 ± 2.8 |  |\n| `mhla, learned features` | 2 | 82.0 ± 4.2 | 0.0 ± 1.4 |" in table
    assert "| `linear attention` | 2 | 71.0 ± 1.4 | -11.0 ± 1.4 |" in table


def test_a_run_of_two_studies_counts_once_in_the_hours(tmp_path: Path) -> None:
    def study(name: str, *variants: str) -> Study:
        return Study(name, name, "c.yaml", dict.fromkeys(variants, ()), lambda _: {}, lambda *_: "table", seeds=(0, 1))

    def save(name: str, *rows: tuple[str, int, float]) -> None:
        content = [{"variant": one, "seed": seed, "accuracy": score, "seconds": 3600} for one, seed, score in rows]
        (tmp_path / f"{name}.json").write_text(json.dumps({"options": [], "rows": content}))

    studies = [study("search", "rate 1", "rate 2"), study("best", "kind")]
    save("search", ("rate 1", 0, 0.25), ("rate 1", 1, 0.5), ("rate 2", 0, 0.75), ("rate 2", 1, 0.75))
    save("best", ("kind", 0, 0.75))
    page = write_page(studies, tmp_path, tmp_path / "docs").read_text()
    assert "Training of all rows below took 4.0 hours on one core.\n" in page
    assert "**5 of 6 runs are done so far.**" in page
    save("best", ("kind", 0, 0.75), ("kind", 1, 0.25))
    page = write_page(studies, tmp_path, tmp_path / "docs").read_text()
    assert "took 5.0 hours on one core, so `lightning paper --jobs 2` trains about 2 hours on two cores." in page
    assert "are done so far" not in page


def test_the_readme_shows_the_committed_figures() -> None:
    root = Path(__file__).parents[1]
    images, text = by_variant(paper.STUDIES["mnist"].rows(paper.RESULTS)), (root / "README.md").read_text()
    accuracies = re.findall(r"`([^`]+)` (\d\d\.\d ± [\d.]*\d)", text)
    assert len(accuracies) >= 4
    for name, accuracy in accuracies:
        assert accuracy == spread([row["accuracy"] for row in images[name]], 1, 100), name
    longer = by_variant(paper.STUDIES["mnist-long"].rows(paper.RESULTS))
    seeds = {name: [row["accuracy"] for row in longer[name]] for name, _ in accuracies}
    assert {len(runs) for runs in seeds.values()} == {1}, "README says that it is one seed"
    ends = ", ".join(f"{100 * runs[0]:.1f}" for runs in seeds.values())
    assert f"after {mnist.LONG_EPOCHS} at each one's best (one seed) {ends}." in text
    pieces = by_variant(paper.STUDIES["photographs"].rows(paper.RESULTS))
    means = ", ".join(f"{100 * np.mean([row['accuracy'] for row in pieces[name]]):.1f}" for name, _ in accuracies)
    assert f"On pieces of photographs: {means}." in text
    longest = [
        json.loads((root / f"benchmarks/results/real-language/{name}-curve-5-60-and-480-steps.json").read_text())[
            "tuned"
        ]
        for name in ("softmax-seed-0", "mhla_window-256-seed-0", "mhla_window-256-seed-0-0.25-kept")
    ]
    ends = "{:.2f}; {:.2f}; 22 layers {:.2f}".format(*(row["4096"][0] for row in longest))
    assert f"after 480 training steps with blocks of 256 ({ends})" in text
    shown = {
        "SmolLM2-135M": "mhla_window",
        "22 of 30 layers": "mhla_window",
        "with softmax": "softmax",
        "near tokens only": "window",
        "plain linear": "linear",
    }
    for words, name in shown.items():
        suffix = "-0.25-kept" if words.startswith("22") else ""
        row = json.loads((root / f"benchmarks/results/real-language/{name}-seed-0{suffix}.json").read_text())
        (line,) = (line for line in text.splitlines() if line.startswith("| ") and words in line)
        _, _, _, swapped, trained, *_ = (cell.strip() for cell in line.split("|"))
        assert trained == f"{row['tuned']['1024'][0]:.{0 if name == 'linear' else 1}f}", name
        if name != "softmax":
            assert float(swapped.replace(",", "")) == pytest.approx(
                row["swapped"]["1024"][0], abs=0.51 if name == "linear" else 0.051
            )


def test_the_guide_to_linearising_shows_the_committed_figures() -> None:
    names = {"softmax": "linearize-original"} | dict.fromkeys(
        ("layers matched", "all layers", "one of four layers softmax"), "linearize"
    )
    found = {name: by_variant(paper.STUDIES[study].rows(paper.RESULTS))[name] for name, study in names.items()}
    before = {row["seed"]: row["bits_per_byte"] for row in found["softmax"]}
    text = (Path(__file__).parents[1] / "docs/guides/linearize.md").read_text()
    cells = [line.split(" | ") for line in text.split("held-out bits per byte")[1].splitlines()[2:6]]
    for (_, _, bits, *more), (name, rows) in zip(cells, found.items(), strict=True):
        assert bits == spread([row["bits_per_byte"] for row in rows], 3), name
        if name != "softmax":
            percent = spread([row["bits_per_byte"] / before[row["seed"]] - 1 for row in rows], 2, 100)
            assert more == [f"{percent} % |"], name
    rows = paper.STUDIES["linearize-vit-original"].rows(paper.RESULTS) + paper.STUDIES["linearize-vit"].rows(
        paper.RESULTS
    )
    shown = {"softmax": 744, "mhla, learned features": 148, "softmax, trained as much longer": 148}
    lines = text.split("held-out accuracy, %")[1].splitlines()[2:5]
    for line, (name, steps) in zip(lines, shown.items(), strict=True):
        each = by_variant(rows)[name]
        assert {row["steps"] for row in each} == {steps}, name
        assert line.endswith(f"{steps} | {spread([row['accuracy'] for row in each], 1, 100)} |"), name


def test_a_row_is_of_the_last_step_not_of_the_best_validation(tmp_path: Path) -> None:
    """Also in a folder of an earlier version, whose ``last.ckpt`` was the best validation."""
    folder = tmp_path / "logs/version_0/checkpoints"
    (folder / "recovery").mkdir(parents=True)
    assert newest_checkpoint(tmp_path) is None
    for name, step in {"recovery/step=00000003.ckpt": 3, "last.ckpt": 2}.items():
        torch.save({"global_step": step, "state_dict": {}}, folder / name)
    assert newest_checkpoint(tmp_path) == folder / "recovery/step=00000003.ckpt"


def test_an_unknown_variant_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, tmp_path, "--only", "mnist", "--variants", "mlha")
    assert "--variants: unknown: mlha; --list shows the variants" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "samples", "tokens"),
    [
        ("configs/classification/deit_t_imagenet.yaml", 300 * 1_281_167, 256),
        ("configs/diffusion/dit_s2_256.yaml", 400_000 * 256, 256),
        ("configs/language/mhla_340m_fineweb.yaml", 38_147 * 128, 2048),
        ("configs/text_to_image/sana_600m_512.yaml", 40_000 * 256, 256),
    ],
)
def test_gpu_hours_of_a_configuration_are_those_of_its_operations(config: str, samples: int, tokens: int) -> None:
    row = full_runs.count(config)
    assert row == full_runs.read_counts([config])[0], "count again: lightning paper --count"
    assert row["samples"] == samples
    module, _ = full_runs.build(paper.ROOT / config)
    embedded = sum(p.numel() for name, p in module.named_parameters() if "embed" in name)
    by_weights = 6 * tokens * (row["parameters"] - embedded)  # arXiv 2001.08361, section 2.1
    assert 0.6 < row["flops_per_sample"] / by_weights < 1.3, "operators add, and modulation of whole samples takes away"
    assert full_runs.gpu_hours(row) == pytest.approx(samples * row["flops_per_sample"] / 2.967e14 / 3600)


def test_the_page_states_gpu_hours_of_every_configuration_of_full_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = Path("docs/results.md").read_text()
    configs = [config for study in paper.STUDIES.values() for config in study.full]
    for row in full_runs.read_counts(configs):
        assert f"| `{row['config']}` |" in page
        assert f" | {full_runs.gpu_hours(row):,.3g} |" in page
    (tmp_path / "counted.json").write_text('{"rows": []}')
    monkeypatch.setattr(full_runs, "COUNTED", tmp_path / "counted.json")
    with pytest.raises(SystemExit, match=r"lacks configs/a\.yaml; count them with: lightning paper --count"):
        full_runs.read_counts(["configs/a.yaml"])


def test_recurrences_agree_and_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["recurrences", "--tokens", "600", "--seconds", "0", "--out", str(tmp_path)])
    recurrences.main()
    rows = json.loads((tmp_path / "recurrences-cpu.json").read_text())["rows"]
    assert [row["operator"] for row in rows] == [
        "retention", "state_space_dual", "gated_linear_attention", "gated_delta_rule"
    ]  # fmt: skip
    for row in rows:
        assert row["error"] < 1e-5
        assert row["gradient_error"] < 1e-4
        assert row["difference_from_theirs"] < 1e-5
    assert "`gated_delta_rule`" in capsys.readouterr().out


def test_the_guide_shows_the_measured_dinov2() -> None:
    root = Path(__file__).parents[1]
    measured = json.loads((root / "benchmarks/results/real-encoders/dino-linear.json").read_text())["results"]
    sizes = [measured[pixels] for pixels in ("224", "518", "756", "1022")]
    text = (root / "docs/guides/linearize.md").read_text()
    for name, shown in (
        ("tokens", [f"{size['tokens']:,}" for size in sizes]),
        ("blocks along each side", [str(size["blocks"][0]) for size in sizes]),
        ("cosine of class tokens", [f"{size['class_cosine']:.3f}" for size in sizes]),
        ("cosine of patches", [f"{size['patch_cosine']:.3f}" for size in sizes]),
        (
            "time of a forward pass, softmax = 1",
            [f"{size['seconds']['linearized'] / size['seconds']['original']:.2f}" for size in sizes],
        ),
    ):
        assert f"| {name} | {' | '.join(shown)} |" in text, name
    for model in ("original", "linearized"):
        assert f"{measured['probe'][model]:.1%}" in text


def test_the_guide_shows_the_measured_smollm2() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs/guides/linearize.md").read_text()
    folder = root / "benchmarks/results/real-language"
    without = json.loads((folder / "window-without-sinks-seed-0-0-and-0-steps.json").read_text())
    assert f"has a perplexity of {without['swapped']['1024'][0]:.1f} before training" in text
    for name, file in {
        "`softmax`": "softmax-seed-0",
        "`mhla_window` in all layers, 4 sinks, blocks of 128": "mhla_window-seed-0",
        "`mhla_window` in 22 layers": "mhla_window-seed-0-0.25-kept",
        "`mhla_window` in 22 layers, blocks of 256": "mhla_window-256-seed-0-0.25-kept",
        "`mhla_window` in all layers, 4 sinks, blocks of 256": "mhla_window-256-seed-0",
        "`mhla_window` in all layers, equal coefficients, not trained": "mhla_window-uniform-seed-0",
        "the window and the sinks alone, in all layers": "window-seed-0",
        "the window and the sinks alone, blocks of 64": "window-64-seed-0",
        "`mhla_window` in all layers, 4 sinks, blocks of 64": "mhla_window-64-seed-0",
        "`mhla_window` in all layers, decaying coefficients, not trained": "mhla_window-frozen-seed-0",
        "`mhla_window` in all layers, a dense matrix of coefficients": "mhla_window-dense-seed-0",
        "`mhla_window` in all layers, blocks of 256, distilled": "mhla_window-256-seed-0-distill-1",
        "`mhla_window` in all layers, blocks of 256, LoRA of rank 8": "mhla_window-256-seed-0-tune_lr-0.001-lora-8",
        "`mhla_window` in all layers, 4 sinks, blocks of 32": "mhla_window-32-seed-0",
        "`mhla_window` in 22 layers, blocks of 256, chosen on 4,096 tokens": "mhla_window-256-seed-0-0.25-kept-choose-4096",
        "`mhla_window` in all layers, new parameters learn ten times faster": "mhla_window-seed-0-new_lr-100",
        "`mhla_window` in all layers, attention weights matched too": "mhla_window-seed-0-weights-1",
        "`mhla_window` in all layers, features that keep norms": "mhla_window-norms-seed-0",
        "`mhla` in all layers, without a window, learned features": "mhla-seed-0",
        "the window and the sinks alone, blocks of 32": "window-32-seed-0",
        "`linear` in all layers, learned features": "linear-seed-0",
        "`softmax`, longer": "softmax-seed-0-60-and-240-steps",
        "`mhla_window` in all layers, features with positions": "mhla_window-positions-seed-0",
        "`mhla_window` in all layers, features with positions, longer": "mhla_window-positions-seed-0-60-and-240-steps",
    }.items():
        row = json.loads((folder / f"{file}.json").read_text())
        lines = text.split("**Long texts.**")[0].splitlines()
        (line,) = (line for line in lines if line.startswith(f"| {name} | "))
        digits = 0 if file in ("linear-seed-0", "mhla-seed-0") else 2
        stages = [
            row["swapped"]["1024"],
            row.get("matched", {}).get("1024"),
            row["tuned"]["1024"],
            row["tuned"]["4096"],
        ]
        shown = ["" if values is None else f"{values[0]:,.{digits}f}" for values in stages]
        assert [cell.strip() for cell in line.split("|")[2:6]] == shown, name
    for name, file in {
        "`softmax`": "softmax-seed-0",
        "`mhla_window` in all layers": "mhla_window-seed-0",
        "the window and the sinks alone": "window-seed-0",
        "`mhla_window` in all layers, blocks of 256": "mhla_window-256-seed-0",
        "`mhla_window` in 22 layers": "mhla_window-seed-0-0.25-kept",
        "`mhla_window` in 22 layers, blocks of 256": "mhla_window-256-seed-0-0.25-kept",
    }.items():
        measured = json.loads((folder / f"{file}.json").read_text())["long"]
        cells = [f"{measured['perplexity'][tokens][0]:.1f}" for tokens in ("8192", "16384", "32768")]
        cells += [f"{measured['needle'][tokens]['numbers']:.0%}" for tokens in ("1024", "4096", "8192")]
        assert f"| {name} | {' | '.join(cells)} |" in text, name


def test_the_guide_shows_smollm2_trained_on_longer_samples() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs/guides/linearize.md").read_text()
    linear, softmax = (
        json.loads(
            (root / f"benchmarks/results/real-language/{name}-seed-0-length-4096-24-and-20-steps.json").read_text()
        )["tuned"]
        for name in ("mhla_window-256", "softmax")
    )
    assert f"a perplexity of {linear['1024'][0]:.2f} at 1,024 tokens and {linear['4096'][0]:.2f} at 4,096" in text
    assert f"has {softmax['1024'][0]:.2f} and {softmax['4096'][0]:.2f}" in text
    more = [f"{one / other - 1:.0%}" for one, other in zip(linear["4096"], softmax["4096"], strict=True)]
    assert f"is {more[0]}: {more[1]} in the first quarter of the positions, and {more[4]} in the last" in text


def test_the_guide_shows_the_learning_curve_of_smollm2() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs/guides/linearize.md").read_text()
    softmax, linear, mixed, shorter, widest = (
        json.loads((root / f"benchmarks/results/real-language/{name}-steps.json").read_text())
        for name in (
            "softmax-seed-0-curve-5-60-and-480",
            "mhla_window-256-seed-0-curve-5-60-and-480",
            "mhla_window-256-seed-0-0.25-kept-curve-5-60-and-480",
            "mhla_window-256-seed-0-0.25-kept-curve-4-60-and-240",
            "mhla_window-512-seed-0-curve-5-60-and-480",
        )
    )
    assert list(softmax["steps"]) == list(linear["steps"]) == list(mixed["steps"]) == ["30", "60", "120", "240", "480"]

    def distance(row: dict[str, Any], step: str) -> list[float]:
        return [row["steps"][step][tokens][0] / softmax["steps"][step][tokens][0] - 1 for tokens in ("1024", "4096")]

    for step, original in softmax["steps"].items():
        cells = [f"{original['1024'][0]:.2f}, {original['4096'][0]:.2f}"]
        for row in (linear, mixed):
            cells.append(", ".join(f"{row['steps'][step][tokens][0]:.2f}" for tokens in ("1024", "4096")))
            cells.append(", ".join(f"{value:.1%}" for value in distance(row, step)))
        assert f"| {int(step) * 1024:,} | {' | '.join(cells)} |" in text, step
    tokens = np.log([int(step) * 1024 for step in softmax["steps"]])
    slope, offset = np.polyfit(tokens[-3:], [distance(linear, step)[1] for step in list(softmax["steps"])[-3:]], 1)
    assert f"reaches zero at {np.exp(-offset / slope) / 1e6:.1f} million tokens" in text

    def by_position(row: dict[str, Any], step: str) -> list[float]:
        pairs = zip(row["steps"][step]["4096"], softmax["steps"][step]["4096"], strict=True)
        return [one / other - 1 for one, other in pairs]

    first, last = by_position(linear, "30"), by_position(linear, "480")
    assert f"{-last[1]:.0%} ahead in the first quarter of the positions, and {last[4]:.0%} behind in the last" in text
    assert f"({first[4]:.0%} after 30,720 tokens)" in text
    near, far = distance(mixed, "480")
    end = by_position(mixed, "480")[4]
    assert f"end {-near:.1%} ahead at 1,024 tokens and {far:.1%} behind at 4,096, where the last quarter" in text
    assert f"the last quarter of the positions is {end:.0%} behind" in text
    near, far = distance(shorter, "240")
    assert f"ended {near:.1%} and {far:.1%} behind" in text
    assert len(set(mixed["kept"]) - set(shorter["kept"])) == 2
    assert (linear["device"], softmax["device"], shorter["device"]) == ("AMD EPYC",) * 3
    assert "Xeon" in mixed["device"]
    assert widest["tune"]["steps"] == 30
    near, far = (widest["tuned"][tokens][0] for tokens in ("1024", "4096"))
    assert f"after 30,720 tokens, perplexity is {near:.2f} at 1,024 tokens, but {far:.2f} at 4,096" in text
    minutes = [
        sum(row[part]["seconds"] for part in ("match", "tune") if part in row) / 60 for row in (softmax, linear, mixed)
    ]
    assert f"{minutes[0]:.0f}, {minutes[1]:.0f} and {minutes[2]:.0f} processor minutes" in text


def test_the_guide_shows_smollm2_by_seed() -> None:
    root = Path(__file__).parents[1]
    table = (root / "docs/guides/linearize.md").read_text().split("**Seeds.**")[1].split("\n\n")[1].splitlines()[2:]
    names = (
        "softmax-seed-{}",
        "mhla_window-256-seed-{}",
        "mhla_window-256-seed-{}-0.25-kept",
        "mhla_window-seed-{}",
        "window-seed-{}",
    )
    for line, name in zip(table, names, strict=True):
        files = [root / f"benchmarks/results/real-language/{name.format(seed)}.json" for seed in range(3)]
        results = [json.loads(file.read_text())["tuned"] if file.exists() else None for file in files]
        cells = ["not run" if row is None else f"{row['1024'][0]:.2f}, {row['4096'][0]:.2f}" for row in results]
        assert [cell.strip() for cell in line.split("|")[2:5]] == cells, name


def test_the_guide_shows_minilm_with_half_of_its_layers() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs/guides/linearize.md").read_text()
    rows = json.loads((root / "benchmarks/results/real-encoders/minilm-half.json").read_text())["results"]
    short, middle, longest = (f"{rows[tokens]['cosine']:.3f}" for tokens in ("64", "128", "512"))
    assert f"the cosine is {short} at 64 tokens, {middle} at 128 and {longest} at 512" in text
