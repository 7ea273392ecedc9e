"""The page of a run: whole in one file, and nothing in it but text that was meant as text."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning import Callback, LightningDataModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import nn
from torch.utils.data import DataLoader

from lightning_mhla import MHLA, AttentionConfig, BlockLayout
from lightning_mhla.callbacks import LearningCurves, PeriodicEvaluation, RunReport, points
from lightning_mhla.callbacks.markup import Curve, plot
from lightning_mhla.callbacks.next_steps import next_steps
from lightning_mhla.callbacks.originals import original_scores
from lightning_mhla.callbacks.page import write_page
from lightning_mhla.callbacks.points import draw_curves, separate_stages
from lightning_mhla.callbacks.recovery import RunStopped
from lightning_mhla.callbacks.sample_texts import LONGEST, fenced
from lightning_mhla.callbacks.stored_pictures import read_picture
from lightning_mhla.system.figures import make_panels
from lightning_mhla.system.numbers import duration


class Reader(HTMLParser):
    """HTML parser that collects tags and the addresses that the page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]


def record(**changes: Any) -> dict[str, Any]:
    content = {
        "finished": False, "steps": 1200, "seconds": 61.4, "parameters": 1_000_000, "trained_parameters": 10, "processes": 2,
        "model": "Model<i>", "network": "", "data": "Photos", "data_options": {"train": "photos/<u>"}, "pretrained": "runs/<b>",
        "lr": 0.002,
        "batch_size": 64, "hardware": "CPU", "precision": "32-true", "usage": {"Ask it": "lightning ask {run} {folder}"},
        "attention": [{"kind": "mhla", "options": {"lepe": 3}, "layers": 4}, {"kind": "softmax", "options": {}, "layers": 1}],
        "skipped": [], "matching_steps": 0, "original": {},
        "best": {"metric": "val/loss", "mode": "min", "value": 0.25, "step": 600},
        "metrics": {"val/loss": [[600, 0.25], [900, None], [1200, 0.5]], "val/samples": [[600, 10], [1200, 10]], "val/<b>": [[1, 2.0]]},
        "versions": {"torch": "2.15"},
    }  # fmt: skip
    return {**content, **changes}


def page_of(run: Path, content: dict[str, Any], training: dict[str, Any] | None = None) -> str:
    """Write the page of a run, and return it without the style."""
    write_page(run, run / "checkpoints", content, training)
    return re.sub(r"<style>.*?</style>", "", (run / "report.html").read_text(), flags=re.S)


def text_of(page: str) -> str:
    """Return the visible text of a page on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_the_page_shows_all_of_a_run_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/<script>"
    (run / "pictures/dark").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "lock").touch()
    for name in (
        "mixing-step0000100.png",
        "mixing-step0000200.png",
        "clips-step0000200.gif",
        "dark/mixing-step0000200.png",
    ):
        Image.new("L", (4, 4)).save(run / "pictures" / name)
    stored = PngInfo()
    stored.add_text("Description", "Look at <em>this</em>.")
    Image.new("L", (40, 4)).save(run / "pictures/images-step0000200.png", pnginfo=stored)
    (run / "pictures/broken.png").write_text("<em>")
    (run / "config.yaml").write_text("name: <img src=http://example.org/x>\n")
    (run / "samples.md").write_text("## step 1\n```\n<script>alert(2)</script> & more\n```\n")
    page = page_of(run, record(skipped=["No <em> today."]), {"train/loss": [(1, 2.0), (2, 1.0)]})
    reader = Reader()
    reader.feed(page)
    for tag in ("script", "em", "u", "i"):
        assert tag not in reader.tags
    assert reader.tags.count("svg") == 2, "the main metric, and the two losses"
    assert len(reader.loads) == 4, "the last mixing, its dark variant, the clips and the images"
    assert all(re.match(r"data:image/(png|gif);base64,\w", load) for load in reader.loads)
    text = text_of(page)
    for words in ("not finished", "1,200 steps in 1 min 01 s, 19.54 steps per second", "0.25 at step 600", "2 processes",
                  "lightning fit --run_dir 'runs/<script>'", "<script>alert(2)</script> & more", "torch 2.15",
                  "mixing, step 200", "Look at <em>this</em>.", "broken.png is not a picture", "No <em> today.",
                  "Photos (train=photos/<u>)", "mhla (lepe=3) in 4 layers; softmax in 1 layer", "peak learning rate 0.002",
                  "started from runs/<b>",
                  "1,000,000 parameters, 10 of them trained", "best 0.25 at step 600; lower is better"):  # fmt: skip
        assert words in text, words
    assert "step 100" not in text, "only the newest picture of a series"


@pytest.mark.timeout(60)
def test_an_animation_that_was_cut_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    frames, path = [Image.new("P", (4, 4), color) for color in (1, 2)], tmp_path / "clips.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], comment="Look at this.", loop=0)
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        picture = read_picture(path)
        assert (picture is None) == (length < 4)
        assert picture is None or "Look at this.".startswith(picture.description)
    assert picture is not None
    assert (picture.description, picture.width) == ("Look at this.", 4)


def test_what_comes_first_is_above_what_comes_later(tmp_path: Path) -> None:
    """Facts, score, reasons and the next command come before samples, curves, attention and the configuration."""
    (tmp_path / "pictures").mkdir()
    for name in ("attention", "samples"):
        Image.new("L", (4, 4)).save(tmp_path / f"pictures/{name}-step0000200.png")
    (tmp_path / "config.yaml").touch()
    (tmp_path / "samples.md").write_text("## step 1\n```\na text\n```\n")
    text = text_of(
        page_of(tmp_path, record(finished=True, skipped=["No bread."]), {"train/loss": [(1, 2.0), (2, 1.0)]})
    )
    order = ["finished", "Data Photos", "0.5 val/loss", "Use it", "Ask it", "lightning validate", "No bread.", "Samples, step 1",
             "Pictures", "Curves", "Metrics", "Attention attention, step 200", "config.yaml", "Versions"]  # fmt: skip
    places = [text.index(words) for words in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("step", "file", "says_best"), [(600, "best<1>.ckpt", True), (1200, "a.ckpt", False), (600, None, False)]
)
def test_a_report_says_whose_weights_its_commands_read(
    step: int, file: str | None, says_best: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").touch()
    best = {"metric": "val/loss", "mode": "min", "value": 0.25, "step": step} | ({} if file is None else {"file": file})
    text = text_of(page_of(tmp_path, record(finished=True, best=best), {}))
    assert "These commands read the weights of the last step, 1,200." in text
    assert ("is that of step 600: for these weights, name checkpoints/best<1>.ckpt in the folder" in text) is says_best
    assert "These commands" not in text_of(page_of(tmp_path, record(best=best), {}))
    if says_best:  # of a ModelCheckpoint with a folder of its own
        (tmp_path / "run").mkdir()
        (tmp_path / "run/config.yaml").touch()
        write_page(tmp_path / "run", tmp_path / "elsewhere", record(finished=True, best=best), {})
        text = text_of((tmp_path / "run/report.html").read_text())
        assert f"for these weights, name {tmp_path / 'elsewhere' / str(file)} ." in text


def test_the_next_command_depends_on_the_state_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, content = tmp_path / "a run", record()
    (run / "checkpoints").mkdir(parents=True)
    assert next_steps(run, run / "checkpoints", content) == [], "there is no configuration to resume with"
    (run / "config.yaml").touch()
    (resumed,) = next_steps(run, run / "checkpoints", content)
    assert resumed.command == "lightning fit --config 'a run/config.yaml' --ckpt_path 'a run'"
    (run / "checkpoints/last.ckpt").touch()
    commands = [step.command for step in next_steps(run, run / "checkpoints", {**content, "finished": True})]
    assert commands[0] == "lightning ask --ckpt_path 'a run/checkpoints/last.ckpt' 'a run'"
    assert commands[-1] == "lightning export 'a run' exported"
    (run / "lock").touch()
    (resumed,) = next_steps(run, run / "checkpoints", content)
    assert resumed.command == "lightning fit --run_dir 'a run'"
    assert (
        next_steps(run, run / "checkpoints", {**content, "finished": True})[0].command
        == "lightning ask --run_dir 'a run' 'a run'"
    )


def test_the_newest_sample_comes_first(tmp_path: Path) -> None:
    parts = [f"## step {step}\n\n{fenced(f'# text {step}')}\n\n{fenced('```inner```')}\n\n" for step in (10, 20, 30)]
    (tmp_path / "samples.md").write_text("".join(parts))
    page = page_of(tmp_path, record())
    text = text_of(page)
    assert "Samples, step 30 # text 30 ```inner``` 2 earlier steps step 20 # text 20" in text
    assert text.index("# text 20") < text.index("# text 10")
    assert page.index("<details>") > page.index("text 30"), "only earlier samples are folded"
    (tmp_path / "samples.md").write_text("x" * LONGEST + "\n```\n" + parts[0])
    assert "Samples, step 10 # text 10" in text_of(page_of(tmp_path, record())), (
        "what is cut off does not shift the fences"
    )
    again = "".join(parts).replace("# text", "# old") + parts[1]  # stopped after step 30, resumed from step 10
    (tmp_path / "samples.md").write_text(again)
    text = text_of(page_of(tmp_path, record()))
    assert "Samples, step 20 # text 20 ```inner``` 1 earlier step step 10 # old 10" in text
    assert "# old 20" not in text
    # two callbacks, and the run resumed from step 10
    two = [*parts, *(part.replace("# text", "# other") for part in parts[1:])]
    (tmp_path / "samples.md").write_text("".join(two[number] for number in (0, 1, 3, 2, 4, 1, 3, 1)))
    text = text_of(page_of(tmp_path, record()))
    assert "Samples, step 20 # text 20 ```inner``` # other 20 1 earlier step step 10 # text 10" in text
    assert "text 30" not in text


def test_matching_and_task_loss_are_apart() -> None:
    points = {
        "train/loss": [(10, 9.0), (20, 8.0), (30, 2.0), (40, 1.0)],
        "train/layer_distance": [(10, 9.0), (20, 8.0), (30, 8.0), (40, 8.0)],
        "val/loss": [(20, 3.0), (40, 1.5)],
    }
    assert separate_stages(points, 0) == points
    assert separate_stages(points, 20) == {
        "train/loss": [(30, 2.0), (40, 1.0)],
        "train/layer_distance": [(10, 9.0), (20, 8.0)],
        "val/loss": [(20, 3.0), (40, 1.5)],
    }
    assert "train/loss" not in separate_stages(points, 40)


def test_the_score_of_the_original_is_a_line(tmp_path: Path) -> None:
    content = record(original={"val/loss": 0.125})
    page = page_of(tmp_path, content)
    assert "original 0.125" in text_of(page)
    svg = next(part for part in page.split("<svg")[1:] if "reference" in part)
    heights = {name: float(height) for name, height in re.findall(r'class="(reference|frame)" d="M52 ([\d.]+)H', svg)}
    assert heights["reference"] > max(float(y) for y in re.findall(r'<circle [^>]*cy="([\d.]+)"', svg)), (
        "below both points"
    )
    assert "original 0.125" not in text_of(page_of(tmp_path, record()))


def config_of(**changes: Any) -> dict[str, Any]:
    data = {"class_path": "Mnist", "init_args": {"batch_size": 64, "path": "a", **changes}}
    model = {
        "class_path": "M",
        "init_args": {"pretrained": "original/checkpoints/last.ckpt", "distillation": {"layer_steps": 3}},
    }
    return {"model": model, "data": data}


def test_scores_of_the_original_come_from_its_run_if_the_data_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("original/checkpoints", "run"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "original/config.yaml").write_text(yaml.safe_dump(config_of(batch_size=8)))
    (tmp_path / "original/run.json").write_text(
        json.dumps({"metrics": {"val/accuracy": [[1, 0.5], [2, 0.75]], "val/x": [[1, None]]}})
    )
    config = tmp_path / "run/config.yaml"
    config.write_text(yaml.safe_dump(config_of()))
    assert original_scores(tmp_path / "run") == {"val/accuracy": 0.75}
    for name, scores in (("step000001-x.ckpt", {"val/accuracy": 0.5}), ("best.ckpt", {})):
        content = config_of()
        content["model"]["init_args"]["pretrained"] = f"original/checkpoints/{name}"
        config.write_text(yaml.safe_dump(content))
        assert original_scores(tmp_path / "run") == scores, "the score of the checkpoint that was loaded"
    config.write_text(yaml.safe_dump(config_of(path="b")))
    assert original_scores(tmp_path / "run") == {}, "other data"
    content = config_of()
    del content["model"]["init_args"]["distillation"]
    config.write_text(yaml.safe_dump(content))
    assert original_scores(tmp_path / "run") == {}, "a fine-tuned model is not a linearized one"
    config.write_text("model: [")
    assert original_scores(tmp_path / "run") == {}


def results_of(names: list[str], confusion: list[list[int]], **changes: Any) -> str:
    picture = io.BytesIO()
    Image.new("L", (8, 8)).save(picture, "PNG")
    mistake = {"label": 0, "predicted": 1, "probability": 0.875, "label_probability": 0.0312,
               "picture": base64.b64encode(picture.getvalue()).decode(), **changes}  # fmt: skip
    return json.dumps({"step": 1200, "names": names, "confusion": confusion, "mistakes": [mistake]})


def test_classes_are_shown_with_their_mistakes(tmp_path: Path) -> None:
    names = ["cat<s>", "dog", "fox"]
    (tmp_path / "classes.json").write_text(
        results_of(names, [[0, 0, 6], [0, 1, 3], [0, 2, 1], [1, 1, 8], [2, 2, 1], [2, 0, 4]])
    )
    page = page_of(tmp_path, record())
    reader = Reader()
    reader.feed(page)
    text = text_of(page)
    assert "s" not in reader.tags
    assert "15 of 23 validation samples right at step 1,200." in text
    assert "fox 20.0% 5 cat<s> (4) cat<s> 60.0% 10 dog (3) dog 100.0% 8" in text, "the lowest accuracy first"
    assert "true cat<s> dog fox cat<s> 6 3 1 dog 8 fox 4 1" in text
    assert "cat<s> taken for dog dog: 87.5% cat<s>: 3.1%" in text
    (tmp_path / "classes.json").write_text(results_of(names, [[0, 1, 3]], name="Süd <b> 1.JPG"))
    assert "cat<s>: 3.1% Süd <b> 1.JPG" in text_of(page_of(tmp_path, record()))
    many = [f"c{index}" for index in range(30)]
    (tmp_path / "classes.json").write_text(results_of(many, [[0, 0, 2], [0, 7, 5], [1, 2, 9], [3, 3, 1]]))
    text = text_of(page_of(tmp_path, record()))
    assert "Most confused classes true class predicted class samples c1 c2 9 c0 c7 5" in text
    assert "Confusion matrix" not in text
    assert (
        "A confusion matrix is drawn for up to 20 classes, and these are 30; classes.json in the folder of the run"
        in text
    )
    assert "not shown" not in text
    assert "Without validation samples: c2, c4, c5, c6, c7, c8, c9, c10, c11, c12 and 17 more." in text


def test_classes_without_samples_are_named_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "classes.json").write_text(results_of(["cat", "dog", "<b>fox"], [[0, 0, 1], [1, 0, 2]]))
    assert "Without validation samples: <b>fox." in text_of(page_of(tmp_path, record()))


@pytest.mark.parametrize(
    ("right", "hidden", "first"),
    [
        (dict.fromkeys(range(25), 0), "5 classes with an equal or higher accuracy not shown.", "c24 0.0% 26"),
        ({24: 1}, "5 classes with an equal or higher accuracy not shown.", "c23 0.0% 25"),
        (dict.fromkeys(range(20), 0), "", "c19 0.0% 21"),
    ],
    ids=["all equal", "one better", "all shown"],
)
def test_of_equal_accuracies_those_of_most_samples_are_shown(
    right: dict[int, int], hidden: str, first: str, tmp_path: Path
) -> None:
    count = 25 if hidden else 20
    samples = [[label, (label + 1) % count, label + 2 - right.get(label, 0)] for label in range(count)]
    samples += [[label, label, number] for label, number in right.items() if number]
    (tmp_path / "classes.json").write_text(results_of([f"c{label}" for label in range(count)], samples))
    text = text_of(page_of(tmp_path, record()))
    assert f"samples taken for {first}" in text
    assert hidden in text
    assert ("accuracy not shown" in text) == bool(hidden)
    assert (f"{count - 10} pairs with fewer or as many samples not shown." in text) == bool(hidden)


@pytest.mark.parametrize(
    "content",
    ["{", "{}", results_of(["a"], [[0, 5, 1]]), results_of(["a", "b"], [[0, 1, 1]], picture='"><script>')],
    ids=["not JSON", "empty", "unknown class", "not a picture"],
)
def test_broken_results_by_class_do_not_end_a_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "classes.json").write_text(content)
    page = page_of(tmp_path, record())
    assert "classes.json" in text_of(page)
    assert "<script>" not in page
    assert "Versions" in text_of(page)


@pytest.mark.parametrize("sign", ["\u202e", "\u2067", "\u061c", "\u200f", "\u2028", "\x1b"])
def test_no_name_of_a_run_reverses_or_breaks_its_text(sign: str, tmp_path: Path) -> None:
    run = tmp_path / f"a{sign}run"
    run.mkdir()
    results = results_of([f"cat{sign}dog", "b"], [[0, 0, 2], [0, 1, 1], [1, 1, 3]], name=f"{sign}.png")
    (run / "classes.json").write_text(results)
    content = record(
        metrics={f"val/{sign}x": [[1, 0.5], [2, 0.25]]}, best={}, data_options={"train": f"{sign}gpj"},
        skipped=[f"{sign}skip"],
    )  # fmt: skip
    page = page_of(run, content)
    assert sign not in page
    escape = sign.encode("unicode_escape").decode()
    for text in (
        f"a{escape}run",
        f"cat{escape}dog",
        f"{escape}.png",
        f"val/{escape}x",
        f"{escape}gpj",
        f"{escape}skip",
    ):
        assert text in page


def test_letters_and_spaces_of_any_language_stay_as_they_are(tmp_path: Path) -> None:
    names = ["\u9ed1\u3000\u732b", "chien\xa0noir", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"]
    (tmp_path / "classes.json").write_text(results_of(names, [[0, 0, 2], [0, 1, 1], [1, 1, 3], [2, 2, 1]]))
    page = page_of(tmp_path, record())
    for name in names:
        assert name in page


def test_metrics_that_move_are_drawn(tmp_path: Path) -> None:
    assert not draw_curves({"val/samples": [(1, 10.0), (2, 10.0)], "val/new": [(1, 0.5)]}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    assert draw_curves({"train/loss": [(1, 0.5), (2, 0.25)], "val/loss": [(2, 0.5)]}, tmp_path / "new/curves.png")
    with Image.open(tmp_path / "new/curves.png") as picture:
        assert picture.format == "PNG"
    not_finite = [(1, math.nan), (2, math.nan), (3, math.inf), (4, -1e308), (5, 1e308)]
    assert not draw_curves({"val/loss": not_finite}, tmp_path / "none.png"), "nothing can be drawn"
    assert draw_curves({"val/loss": [*not_finite, (6, 1.0), (7, 2.0)], "train/loss": not_finite}, tmp_path / "some.png")
    assert "not finite" in text_of(page_of(tmp_path, record(metrics={"val/loss": [[1, 1e308], [2, None]]}, best={})))
    content = record(metrics={"val/samples": [[1, 10], [2, None], [3, 10]]}, best={})
    assert "Curves" not in text_of(page_of(tmp_path, content)), "only a value that is not finite differs"


def test_a_plot_places_its_points_by_value() -> None:
    svg = plot("t", [Curve("a", [(0, 1.0), (100, 3.0)]), Curve("b", [(50, 2.0)])])
    places = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert (x2, y2) == pytest.approx(((x0 + x1) / 2, (y0 + y1) / 2), abs=0.11), "halfway"
    assert x0 < x1
    assert y0 > y1, "larger values are higher"
    labels = dict(re.findall(r'y="([\d.]+)" text-anchor="end">([\d.,]+)<', svg))
    by_value = {float(text): float(y) - 4 for y, text in labels.items()}
    assert by_value[2] == pytest.approx(y2, abs=0.11), "the tick of 2 is at the height of the point 2"
    assert "logarithmic" in plot("t", [Curve("a", [(0, 1000.0), (100, 3.0)])])
    assert "logarithmic" not in plot("t", [Curve("a", [(0, 1000.0), (100, 0.0)])])
    assert "nan" not in plot("t", [Curve("a", [(0, 5.0)])]), "a single point"
    assert all(label in plot("t", [Curve("a", [(1, 10.001), (9, 10.004)])]) for label in ("10.001", "10.002", "10.004"))


def test_long_curves_are_thinned_without_changing_their_ends() -> None:
    svg = plot("", [Curve("a", [(step, float(step)) for step in range(100_000)])])
    path = re.findall(r'stroke-linejoin="round" d="M([^"]+)"', svg)[0].split("L")
    assert len(path) <= 301
    assert path[-1] == "408.0 15.6", "the last point stays: at the right end, and below a margin of a twenty-second"


def quick_trainer(logger: CSVLogger, *callbacks: Callback, **options: Any) -> Trainer:
    """Build a trainer that prints nothing and, unless the options say otherwise, validates one batch after each epoch."""
    return Trainer(
        accelerator="cpu", num_sanity_val_steps=0, logger=logger, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), **{"limit_val_batches": 1, **options},
    )  # fmt: skip


class Measured(BoringModel):
    """Model that logs a metric under ``val/`` and one under ``train/``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/steps", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/epoch", float(self.current_epoch))


@pytest.mark.parametrize("order", [1, -1], ids=["curves first", "report first"])
def test_curves_and_report_share_one_record(tmp_path: Path, order: int) -> None:
    curves, report = LearningCurves(), RunReport()
    callbacks = [curves, report][::order]
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=1, log_every_n_steps=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(Measured())
    assert report.points is curves.points
    assert curves.points["val/epoch"] == [(2, 0.0), (4, 1.0)], "one point a validation, whoever comes first"
    saved = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=True)["callbacks"]
    assert saved["RunReport"]["points"] == {"val/epoch": saved["LearningCurves"]["points"]["val/epoch"]}
    assert {"val/epoch", "train/steps"} <= set(saved["LearningCurves"]["points"])
    alone = RunReport()
    alone.load_state_dict(saved["RunReport"])
    assert alone.points == {"val/epoch": [(2, 0.0), (4, 1.0)]}
    curves.points.clear()
    trainer.validate(Measured(), verbose=False)
    assert not curves.points, "a validation after the fit is not a point of its curves"


def test_a_run_that_has_nothing_yet_has_a_page(tmp_path: Path) -> None:
    empty = record(metrics={}, best={}, steps=0, seconds=0.0, processes=1)
    text = text_of(page_of(tmp_path, empty))
    assert "No validation yet" in text
    assert "Resume" not in text, "there is no configuration to resume with"
    (tmp_path / "config.yaml").touch()
    assert "Resume it: lightning fit" in text_of(page_of(tmp_path, record()))
    text = text_of(page_of(tmp_path, {**empty, "finished": True}, {"train/loss": [(1, 2.0), (2, 1.0)]}))
    assert "No validation The last train/loss is 1 at step 2." in text
    assert "not finite" in text_of(page_of(tmp_path, record(metrics={"val/loss": [[1, None]]}, best={})))


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"max_epochs": 2}, []),
        ({"max_epochs": 2, "check_val_every_n_epoch": 5}, ["No validation: check_val_every_n_epoch=5 is more than the 2 epochs"]),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2}, ["The last 2 steps had no validation", "metrics are those of step 4."]),
        ({"max_steps": 3, "val_check_interval": 2, "check_val_every_n_epoch": None}, ["The last 1 step had no", "val_check_interval=2"]),
        ({"max_epochs": 1, "limit_val_batches": 0}, ["No validation: limit_val_batches is 0."]),
        ({"max_steps": 5}, ["The last 1 step had no validation: the run ended inside an epoch"]),
        ({"max_steps": 1}, ["No validation: the run ended inside an epoch"]),
        ({"max_steps": 0}, []),
    ],
    ids=["complete", "period above the epochs", "last epoch", "last step", "no batches", "inside an epoch", "first step", "no step"],
)  # fmt: skip
def test_a_run_says_what_it_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], reasons: list[str]
) -> None:
    trainer = Trainer(
        accelerator="cpu", limit_train_batches=2, num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
        logger=CSVLogger(tmp_path), callbacks=[RunReport(), Silent(None, at_end=False)],
        **{"limit_val_batches": 1, **options},
    )  # fmt: skip
    trainer.fit(Measured())
    printed = " ".join(capsys.readouterr().out.split())
    folder = Path(str(trainer.log_dir))
    text, content = text_of((folder / "report.html").read_text()), json.loads((folder / "run.json").read_text())
    missing = "No Silent: every_n_steps is null, and at_end is false."
    for reason in [*reasons, missing]:
        assert reason in text
        assert reason in printed
        assert reason in " ".join(content["skipped"])
    assert len(content["skipped"]) == 1 + bool(reasons)


class Silent(PeriodicEvaluation):
    """Evaluation that is never due."""


@dataclass
class Source:
    """Options of the data with an address."""

    path: str


class Numbers(LightningDataModule):
    """Data of random numbers."""

    def __init__(self, source: Source, batch_size: int = 3, length: int = 6, password: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size, self.length = batch_size, length

    def train_dataloader(self) -> DataLoader[Any]:
        """Return batches of the width that the model takes."""
        return DataLoader(torch.randn(self.length, 32), self.batch_size)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


class LogsNothing(Measured):
    """Module whose validation logs no metrics."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return None


@pytest.mark.parametrize("steps", [2, 3])
def test_a_validation_without_metrics_took_place(tmp_path: Path, steps: int) -> None:
    trainer = quick_trainer(CSVLogger(tmp_path, "", ""), RunReport(), max_steps=steps, limit_train_batches=2)
    trainer.fit(LogsNothing())
    *later, text = json.loads((tmp_path / "run.json").read_text())["skipped"]
    assert text == "The validation logged no metrics."
    assert [reason.partition(":")[0] for reason in later] == ["The last 1 step had no validation"] * (steps - 2)
    assert "The metrics are those" not in "".join(later)


def test_a_run_records_what_it_trains(tmp_path: Path) -> None:
    trainer = quick_trainer(CSVLogger(tmp_path), RunReport(), max_epochs=1, limit_train_batches=1)
    model, data = Measured(), Numbers(Source("https://me:secret@example.org/x.tar?key=secret"), password="secret")
    config = AttentionConfig("mhla", block_size=4, normalize=False)
    model.network = nn.ModuleList(MHLA(8, 2, BlockLayout((16,), block_size=4), config) for _ in range(3))
    trainer.fit(model, data)
    text = (Path(str(trainer.log_dir)) / "report.html").read_text()
    content = json.loads((Path(str(trainer.log_dir)) / "run.json").read_text())
    assert content["attention"] == [{"kind": "mhla", "options": {"block_size": 4, "normalize": False}, "layers": 3}]
    assert content["model"] == "Measured"
    assert content["hardware"].startswith("CPU, ")
    assert content["skipped"] == []
    assert content["data"] == "Numbers"
    assert content["data_options"] == {"source.path": "https://***@example.org/x.tar?***", "password": "***"}
    assert content["batch_size"] == 3
    assert "secret" not in text


class OddData(Numbers):
    """Data with options that JSON cannot represent."""

    def __init__(self, files: list[Any], weights: Any = None, limit: float = 1.0) -> None:
        super().__init__(Source("numbers"))
        self.save_hyperparameters()


class OddModule(Measured):
    """Module with an attribute that happens to have the name of the commands that a report lists."""

    def __init__(self) -> None:
        super().__init__()
        self.usage = "research only"


def test_a_module_and_data_of_any_kind_have_a_report(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"r\xff")  # a byte that is not UTF-8
    data = OddData([Path("a"), (1, 2), None], weights=np.zeros(2), limit=math.inf)
    quick_trainer(CSVLogger(folder, "", ""), RunReport(), max_epochs=1, limit_train_batches=1).fit(OddModule(), data)
    content = json.loads((folder / "run.json").read_text(), parse_constant=pytest.fail)
    options = {"files": ["a", [1, 2], None], "weights": "[0. 0.]", "limit": "inf"}
    assert {name: content["data_options"].get(name) for name in options} == options
    assert content["usage"] == {}
    assert "r\\udcff" in text_of((folder / "report.html").read_text())


def test_a_metric_of_training_and_validation_is_that_of_validation_after_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training has logged the name before the checkpoint, and validation logs it only after the resume."""
    monkeypatch.setattr(points, "_latest", lambda trainer, prefix: {"loss": 0.5})
    stopped, resumed = LearningCurves(), LearningCurves()
    stopped.points.note_training(SimpleNamespace(global_step=10))  # type: ignore[arg-type]
    resumed.load_state_dict(stopped.state_dict())
    resumed.points.note_validation(SimpleNamespace(global_step=20))  # type: ignore[arg-type]
    assert resumed.points == {"loss": [(20, 0.5)]}


class StopsInValidation(Measured):
    """Module whose validation is stopped by a signal if no fit is running."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.state.fn == "validate":
            raise SystemExit(75)
        super().validation_step(batch, batch_idx)


def test_a_finished_run_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation that is stopped afterwards does not mark the run as unfinished, and time after the fit does not count."""
    report = RunReport()
    trainer = quick_trainer(CSVLogger(tmp_path, "", ""), report, max_epochs=1, limit_train_batches=1)
    module = StopsInValidation()
    trainer.fit(module)
    content, seconds = (tmp_path / "run.json").read_bytes(), report.state_dict()["seconds"]
    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(SystemExit):
        trainer.validate(module, verbose=False)
    assert (tmp_path / "run.json").read_bytes() == content
    assert report.state_dict()["seconds"] == seconds


class StopsAt(Callback):
    """Callback that stops a run after a number of steps."""

    def __init__(self, steps: int, error: BaseException) -> None:
        self.steps, self.error = steps, error

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step == self.steps:
            raise self.error


def test_a_report_names_the_weights_that_its_run_started_from(tmp_path: Path) -> None:
    trainer = quick_trainer(CSVLogger(tmp_path), RunReport(), max_epochs=1, limit_train_batches=1)
    folder = Path(str(trainer.log_dir))
    folder.mkdir(parents=True)
    start = "https://me:secret@example.org/weights?key=secret"
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"pretrained": start}}}))
    trainer.fit(Measured(), Numbers(Source("x.tar")))
    assert json.loads((folder / "run.json").read_text())["pretrained"] == "https://***@example.org/weights?***"
    assert "started from https://***@example.org/weights" in text_of((folder / "report.html").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"pretrained": None}}}))
    (checkpoint,) = (folder / "checkpoints").glob("*.ckpt")
    resumed = quick_trainer(CSVLogger(tmp_path, version=0), RunReport(), max_epochs=2, limit_train_batches=1)
    resumed.fit(Measured(), Numbers(Source("x.tar")), ckpt_path=str(checkpoint), weights_only=False)
    content = json.loads((folder / "run.json").read_text())
    assert (content["steps"], content["pretrained"]) == (2, "https://***@example.org/weights?***")


def test_a_run_that_is_stopped_before_it_resumes_keeps_its_report(tmp_path: Path) -> None:
    def make_trainer(*callbacks: Callback) -> Trainer:
        return quick_trainer(
            CSVLogger(tmp_path, name="", version=""), RunReport(), *callbacks, max_epochs=2, limit_train_batches=2
        )

    class StopsFirst(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            raise KeyboardInterrupt

    make_trainer().fit(Measured(), Numbers(Source("x.tar")))
    wanted = (tmp_path / "run.json").read_text()
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        make_trainer(StopsFirst()).fit(Measured(), Numbers(Source("x.tar")))
    assert (tmp_path / "run.json").read_text() == wanted
    assert json.loads(wanted)["steps"] == 4


@pytest.mark.parametrize("rejected", [False, True], ids=["trains on", "first batch rejected"])
def test_a_run_that_goes_on_is_not_finished(rejected: bool, tmp_path: Path) -> None:
    """Also before its next validation, and if it is killed by then."""
    seen: list[tuple[bool, bool]] = []

    class Looks(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if rejected:
                raise ValueError("a wrong batch")

        def on_train_batch_end(self, *_: Any) -> None:
            finished = json.loads((tmp_path / "run.json").read_text())["finished"]
            seen.append((finished, '<span class="badge">not finished' in (tmp_path / "report.html").read_text()))

    def fit(*callbacks: Callback) -> None:
        logger = CSVLogger(tmp_path, name="", version="")
        quick_trainer(logger, RunReport(), *callbacks, max_epochs=1, limit_train_batches=2).fit(
            Measured(), Numbers(Source("x.tar"))
        )

    fit()
    record = (tmp_path / "run.json").read_text()
    assert json.loads(record)["finished"]
    with pytest.raises(ValueError, match="wrong batch") if rejected else nullcontext():
        fit(Looks())
    assert seen == ([] if rejected else [(False, True)] * 2)
    assert json.loads((tmp_path / "run.json").read_text())["finished"]
    if rejected:
        assert (tmp_path / "run.json").read_text() == record


@pytest.mark.parametrize(
    ("error", "written"), [(RunStopped(), True), (KeyboardInterrupt(), True), (OSError("disk full"), False)], ids=repr
)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_report_of_a_stopped_run_is_of_its_last_step(
    steps: int, error: BaseException, written: bool, tmp_path: Path
) -> None:
    trainer = quick_trainer(
        CSVLogger(tmp_path), RunReport(), StopsAt(steps, error), max_epochs=3, limit_train_batches=2
    )
    with pytest.raises((SystemExit, KeyboardInterrupt, OSError)):
        trainer.fit(Measured(), Numbers(Source("x.tar")))
    file = Path(str(trainer.log_dir)) / "run.json"
    content = json.loads(file.read_text()) if file.exists() else {"steps": None}
    assert content["steps"] == (steps if written else 2 if steps == 3 else None)
    assert not content.get("finished")


@pytest.mark.parametrize(
    ("options", "reasons", "heading"),
    [
        ({"limit_val_batches": 0}, ["No validation: limit_val_batches is 0."], "No validation"),
        ({"check_val_every_n_epoch": 9}, [], "No validation yet"),
        ({}, [], "No validation yet"),
    ],
    ids=["no batches", "later", "first epoch"],
)
def test_a_stopped_run_says_if_it_never_validates(
    options: dict[str, Any], reasons: list[str], heading: str, tmp_path: Path
) -> None:
    trainer = quick_trainer(
        CSVLogger(tmp_path), RunReport(), StopsAt(1, RunStopped()), max_epochs=3, limit_train_batches=2, **options
    )
    with pytest.raises(SystemExit):
        trainer.fit(Measured(), Numbers(Source("x.tar")))
    folder = Path(str(trainer.log_dir))
    assert json.loads((folder / "run.json").read_text())["skipped"] == reasons
    assert f'<p class="score">{heading}</p>' in (folder / "report.html").read_text()


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (61, "1 min 01 s"), (3725, "1 h 02 min")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_lines_of_one_panel_are_told_apart_by_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    def remember(*arguments: Any) -> Any:
        shown.append(make_panels(*arguments))
        return shown[-1]

    monkeypatch.setattr("lightning_mhla.callbacks.points.make_panels", remember)
    curve = [(1, 2.0), (2, 1.0)]
    assert draw_curves({"train/loss": curve, "val/loss": curve, "lr": curve}, tmp_path / "curves.png")
    ((_, axes),) = shown
    legends = {axis.get_title(): axis.get_legend() for axis in axes}
    assert [text.get_text() for text in legends["loss"].get_texts()] == ["train", "val"]
    assert legends["lr"] is None
