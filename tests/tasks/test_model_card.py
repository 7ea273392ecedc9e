"""The model card of an export: classes, the score of the exported weights, and the commands that made it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from grouped import grouped
from mhla_tasks.classification import ImageClassifier
from mhla_tasks.commandline import registry
from mhla_tasks.language import LinearizedTextEncoder
from mhla_tasks.tools.card import ExportedRun, write_card
from transformers import BertConfig


def module(classes: int) -> ImageClassifier:
    sizes = {"image_size": 8, "channels": 1, "patch_size": 2, "dim": 16, "depth": 1, "heads": 2}
    return ImageClassifier(attention={"kind": "linear"}, **grouped(num_classes=classes, **sizes))  # type: ignore[arg-type]


def checkpoint(path: Path, names: list[str], points: dict[str, Any], step: int, **entries: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    model = module(len(names))
    content = {
        "state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams), "global_step": step, "epoch": 2,
        "class_names": names, "callbacks": {"RunReport": {"points": points, "seconds": 5.0, "versions": {}}}, **entries,
    }  # fmt: skip
    torch.save(content, path)
    return path


def sections(card: Path) -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", card.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_card_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs/my run")
    points = {"val/accuracy": [[10, 0.5], [20, 0.923456]], "val/loss": [[20, 12345.6]]}
    path = checkpoint(run / "checkpoints/best.ckpt", ["cat", "a|b", "<i>"], points, 20)
    configuration = {
        "model": {"init_args": {"dim": 16, "api_key": "planted"}}, "data": {"init_args": {"train": "/home/alice/train.tar"}},
        "trainer": {"max_epochs": 3},
    }  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(configuration))
    (run / "lock").write_text(json.dumps({"host": "h", "pid": 1, "job": None}))
    registry.run("export", [str(path), "out", "--license=mit", "--live"])
    parts = sections(Path("out/README.md"))
    assert parts["Classes"].strip() == "3 classes, in the order of the model's outputs: `cat`, a\\|b, \\<i\\>."
    assert "| `val/accuracy` | 0.9235 | 20 |\n| `val/loss` | 12,346 | 20 |" in parts["Metrics"]
    assert parts["Training"].startswith("\n20 optimizer steps, 3 epochs, 5 s."), "the epoch that was running counts"
    assert "The exported checkpoint is the state after step 20." in parts["Metrics"]
    assert "the metrics are those of the average, and the export is not" in parts["Metrics"]
    assert "with exactly these weights" not in parts["Metrics"], "--live exports different ones"
    assert "lightning validate --ckpt_path 'runs/my run/checkpoints/best.ckpt'" in parts["Metrics"]
    commands = parts["Commands"].partition("```sh\n")[2].partition("\n```")[0].splitlines()
    assert [shlex.split(line) for line in commands] == [
        ["lightning", "fit", "--config", "training.yaml"],
        ["lightning", "export", str(path), "out", "--live", "--license=mit"],
    ]
    written = yaml.safe_load(parts["Commands"].partition("```yaml\n")[2].partition("\n```")[0])
    assert written == {
        "model": {"init_args": {"dim": 16, "api_key": "***"}}, "data": {"init_args": {"train": "train.tar"}},
        "trainer": {"max_epochs": 3},
    }  # fmt: skip
    registry.run("export", [str(path), "out"])
    assert "with exactly these weights" in sections(Path("out/README.md"))["Metrics"]


def test_a_score_of_earlier_weights_is_said_to_be_one(tmp_path: Path) -> None:
    # A checkpoint that was saved after the last epoch, whose entry `epoch` is 2.
    loops = {"fit_loop": {"epoch_progress": {"current": {"ready": 2, "started": 2, "processed": 2, "completed": 2}}}}
    names = [str(number) for number in range(150)]
    path = checkpoint(tmp_path / "alone.ckpt", names, {"val/loss": [[20, 0.5]]}, 25, loops=loops)
    (tmp_path / "config.yaml").write_text("model: {}\n")
    registry.run("export", [str(path), str(tmp_path / "out")])
    parts = sections(tmp_path / "out/README.md")
    assert parts["Training"].startswith("\n25 optimizer steps, 2 epochs, 5 s.")
    assert "The exported checkpoint is the state after step 25." in parts["Metrics"]
    assert "with exactly these weights" not in parts["Metrics"]
    assert "Metrics of other steps in the table were measured with the weights of those steps." in parts["Metrics"]
    assert parts["Classes"].startswith("\n150 classes, ")
    assert parts["Classes"].rstrip().endswith("`99`, and 50 more.")
    assert "The checkpoint does not say which command trained it." in parts["Commands"], (
        "config.yaml is not that of a run"
    )
    assert str(tmp_path) not in (tmp_path / "out/README.md").read_text()
    assert "lightning export alone.ckpt out" in parts["Commands"]


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (None, "attention: `mhla_window`."),
        (["replace"], "attention: `mhla_window`."),
        (["keep", "replace", "replace", "keep"], "attention: `mhla_window`, original attention in 2 of 4 layers."),
        (["keep", "replace"], "attention: `mhla_window`, original attention in 2 of 4 layers."),
        (
            ["keep", "linear", "replace", "linear"],
            "attention: `linear`, `mhla_window`, original attention in 1 of 4 layers.",
        ),
    ],
    ids=str,
)
def test_a_hybrid_names_its_attention_and_the_layers_that_keep_the_original(
    kinds: list[str] | None, text: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    BertConfig(vocab_size=40, **sizes).save_pretrained(tmp_path)
    model = LinearizedTextEncoder(str(tmp_path), layer_kinds=kinds)
    points = {"val/cosine": [[4, 0.9999967]], "val/loss": [[4, 9.514e-07]]}
    content = {"hyper_parameters": dict(model.hparams), "callbacks": {"RunReport": {"points": points}}}
    write_card(model, content, tmp_path / "README.md", "out", "", None, ExportedRun(tmp_path / "a.ckpt", [], False))
    card = (tmp_path / "README.md").read_text()
    assert f"trained with lightning-mhla; {text}\n" in card
    assert "| `val/cosine` | 0.9999967 | 4 |\n| `val/loss` | 9.514e-07 | 4 |" in card
