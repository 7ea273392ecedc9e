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


@pytest.mark.parametrize(("words", "saved"), CALLBACKS.values(), ids=CALLBACKS)
def test_callbacks_of_lightning_are_saved_and_read_again(
    tmp_path: Path, words: list[str], saved: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    name, *options = words
    words_of_callback = [f"--trainer.callbacks+={name}", *(f"--trainer.callbacks.{option}" for option in options)]
    main(["fit", f"--config={write_config(tmp_path)}", f"--run_dir={run}", "--trainer.max_steps=0", *words_of_callback])
    main(["fit", f"--run_dir={run}", "--trainer.max_steps=0"])
    callbacks = yaml.safe_load((run / "config.yaml").read_text())["trainer"]["callbacks"]
    (options_of_it,) = [entry["init_args"] for entry in callbacks if entry["class_path"].endswith(f".{name}")]
    assert options_of_it.items() >= saved.items()
    assert "erialize" not in (run / "config.yaml").read_text()


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
