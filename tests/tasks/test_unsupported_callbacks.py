"""Callbacks of Lightning that cannot work here are rejected before training, with the reason and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from mhla_tasks.commandline.arguments import read_words
from mhla_tasks.commandline.parser import build
from mhla_tasks.commandline.plan import make_plan
from mhla_tasks.commandline.registry import LIGHTNING

DIGITS = str(Path(__file__).parents[2] / "configs/classification/digits.yaml")
CALLBACKS = {
    "StochasticWeightAveraging": ("swa_lrs: 0.01", "use --model.training.ema_decay"),
    "BackboneFinetuning": ("verbose: true", "derive a callback from Lightning's BaseFinetuning"),
    "ModelPruning": ("pruning_fn: l1_unstructured", "prune the exported model"),
}


def start(command: str, *words: str) -> None:
    build(make_plan(read_words([command, f"--config={DIGITS}", "--trainer.logger=false", *words], LIGHTNING)))


@pytest.mark.parametrize("place", ["command line", "file", "subclass"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_that_cannot_work_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    options, way_out = CALLBACKS[name]
    words = [f"--trainer.callbacks+={{class_path: {name}, init_args: {{{options}}}}}"]
    if place == "file":
        (tmp_path / "callbacks.yaml").write_text(
            f"trainer:\n  callbacks:\n  - {{class_path: lightning.pytorch.callbacks.{name}, init_args: {{{options}}}}}\n"
        )
        words = [f"--config={tmp_path / 'callbacks.yaml'}"]
    if place == "subclass":
        module = f"with_{name.lower()}"
        (tmp_path / f"{module}.py").write_text(
            f"from lightning.pytorch.callbacks import {name}\n\n\nclass Mine{name}({name}):\n    pass\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        callback = f"{{class_path: {module}.Mine{name}, init_args: {{{options}}}}}"
        words = [f"--allow={module}", f"--trainer.callbacks+={callback}"]
    with pytest.raises(ValueError, match=f"{name} .*{way_out}"):
        start("fit", *words)


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--trainer.callbacks+={class_path: WeightAveraging}", "--model.training.ema_decay=null"],
        ["validate", "--trainer.callbacks+={class_path: StochasticWeightAveraging, init_args: {swa_lrs: 0.01}}"],
    ],
    ids=["other average", "validate"],
)
def test_other_callbacks_and_commands_are_not_affected(words: list[str]) -> None:
    start(*words)
