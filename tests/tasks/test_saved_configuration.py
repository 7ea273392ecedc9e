"""The saved configuration of a run holds what the user gave, in a form that every command reads again."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from mhla_tasks.commandline.parser import main
from mhla_tasks.commandline.saved_configuration import to_yaml
from test_run_folder import write_config

CALLBACKS = {
    "an Enum as default": (["Timer", "duration=00:00:00:30"], {"duration": "00:00:00:30", "interval": "step"}),
    "a name of a function": (["ModelPruning", "pruning_fn=l1_unstructured"], {"pruning_fn": "l1_unstructured"}),
    "a device as default": (
        ["StochasticWeightAveraging", "swa_lrs=0.01", "swa_epoch_start=1"],
        {"swa_lrs": 0.01, "device": "cpu"},
    ),
    "a device": (["WeightAveraging", "device=cpu", "use_buffers=false"], {"device": "cpu", "use_buffers": False}),
}


def words_of(name: str, *options: str) -> list[str]:
    return [f"--trainer.callbacks+={name}", *(f"--trainer.callbacks.{option}" for option in options)]


def saved_options(text: str, name: str) -> dict[str, Any]:
    """Return the options of the callback with a name in a configuration."""
    callbacks = yaml.safe_load(text)["trainer"]["callbacks"]
    (options,) = [entry["init_args"] for entry in callbacks if entry["class_path"].endswith(f".{name}")]
    return dict(options)


@pytest.mark.parametrize(("words", "saved"), CALLBACKS.values(), ids=CALLBACKS)
def test_callbacks_of_lightning_are_printed_and_read_again(
    tmp_path: Path, words: list[str], saved: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    for added in (words_of(*words), []):
        with pytest.raises(SystemExit) as done:
            main(["fit", f"--config={config}", *added, "--print_config"])
        assert not done.value.code
        text = capsys.readouterr().out
        assert saved_options(text, words[0]).items() >= saved.items()
        config.write_text(text)


@pytest.mark.parametrize("case", ["an Enum as default", "a device"])
def test_callbacks_of_lightning_are_saved_with_a_run(tmp_path: Path, case: str) -> None:
    words, saved = CALLBACKS[case]
    run = tmp_path / "run"
    first = [f"--config={write_config(tmp_path)}", *words_of(*words)]
    for start in (first, []):
        main(["fit", f"--run_dir={run}", "--trainer.max_steps=0", *start])
    assert saved_options((run / "config.yaml").read_text(), words[0]).items() >= saved.items()


class Color(Enum):
    RED = "red"


class Word(StrEnum):
    HELLO = "hello"


def test_values_that_yaml_does_not_know_become_plain() -> None:
    values = {
        "enum": Color.RED, "text": Word.HELLO, "number": np.float64(0.5), "path": Path("a/b"), "pair": (1, [Color.RED]),
        "nested": {"list": [Word.HELLO, None, True]}, "function": "Unable to serialize instance <function f at 0x1>",
        "object": timedelta(1),
    }  # fmt: skip
    assert yaml.safe_load(to_yaml(values)) == {
        "enum": "red", "text": "hello", "number": 0.5, "path": "a/b", "pair": [1, ["red"]],
        "nested": {"list": ["hello", None, True]},
    }  # fmt: skip
