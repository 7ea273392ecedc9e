"""Made-up command lines, configurations and checkpoints: each is understood, or one error, and nothing of them runs."""

from __future__ import annotations

import io
import shlex
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from mhla_tasks.commandline.arguments import CommandLine, UsageError, read_words
from mhla_tasks.commandline.memory import remembered_options
from mhla_tasks.commandline.plan import Plan, make_plan
from mhla_tasks.commandline.registry import LIGHTNING

from lightning_mhla.checkpoints.io import read_header

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs/classification/digits.yaml"
PLANTED = "planted_by_the_fuzzer"

NAMES = st.sampled_from(
    [
        "config", "c", "run_dir", "ckpt_path", "allow", "seed_everything", "model", "data", "trainer", "weights_only",
        "trainer.max_steps", "trainer.callbacks", "trainer.callbacks+", "trainer.callbacks.monitor", "trainer.strategy",
        "trainer.logger", "model.class_path", "model.init_args", "model.init_args.shape.depth", "model.attention.kind",
        "model.training.optimizer", "data.init_args.batch_size", "data.train", "model.help", "help", "print_config", "sweep", "",
        ".", "a..b", "model.", "-", "trainer.plugins", "model.dict_kwargs.x", "trainer.callbacks.init_args.dirpath",
    ]
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        [
            "", "1", "-1", "1e-3", "null", "true", "{}", "[]", "{a,b}", "{class_path: os.system}", "[1, {x: 2}]", "~", "-",
            "--", "fit", "last.ckpt", f"{PLANTED}.Class", f"{PLANTED}", "os.system", "mhla_tasks.tools.sweep.run", "&a [*a]",
            "{class_path: mhla_tasks.classification.Digits, init_args: {batch_size: 4}}", "EarlyStopping", "a: b: c", "\t",
            f"{{class_path: {PLANTED}.Class}}", "lightning.fabric.utilities.cloud_io._load", "\x1b[2J", "é", "x" * 300,
        ]
    ),
    st.text(max_size=20).filter(lambda text: "\0" not in text),
)  # fmt: skip
OPTIONS = st.one_of(
    st.builds(lambda name, value: [f"--{name}={value}"], NAMES, VALUES),
    st.builds(lambda name, value: [f"--{name}", value], NAMES, VALUES),
    st.builds(lambda name: [f"--{name}"], NAMES),
    st.builds(lambda value: [value], VALUES),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder with modules that must not be imported."""
    for name in (PLANTED, "last"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\nclass Class: pass\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(words: list[str], folder: Path) -> Plan | None:
    """Return the plan of a command line; None if it is rejected."""
    before = set(sys.modules)
    try:
        made = make_plan(read_words(words, LIGHTNING))
    except (
        UsageError,
        OSError,
    ):  # the second for a name that the file system rejects, which ends every command with one line
        made = None
    allowed = any(word.startswith("--allow") for word in words)  # the user's own word
    assert allowed or not {PLANTED, "last"} & (set(sys.modules) - before), words
    assert allowed or not (folder / "ran").exists(), words
    return made


@fuzz(300)
@given(st.lists(OPTIONS, max_size=6), st.sampled_from(["fit", "validate", "fitt", ""]), st.integers(0, 6))
def test_every_word_is_the_command_an_option_or_the_value_of_one(
    options: list[list[str]], command: str, place: int
) -> None:
    words = [word for option in options for word in option]
    words.insert(min(place, len(words)), command)
    try:
        line = read_words(words, LIGHTNING)
    except UsageError:
        return
    assert line.command in LIGHTNING
    assert sorted([line.command, *line.words]) == sorted(words), "a word was lost, or made up"
    assert read_words([line.command, *line.words], LIGHTNING) == line
    assert all("=" not in option.name for option in line.options)


@fuzz(60)
@given(st.lists(OPTIONS, max_size=4))
def test_made_up_command_lines_are_understood_or_one_error(folder: Path, options: list[list[str]]) -> None:
    words = ["fit", "--config", str(DIGITS), *(word for option in options for word in option if word != "--allow")]
    made = plan([word for word in words if not word.startswith("--allow")], folder)
    assert made is None or made.command == "fit"


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), VALUES)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.one_of(NAMES, VALUES), inner, max_size=3),
    max_leaves=6,
)
PLACES = st.sampled_from(
    [
        ("model",), ("data",), ("trainer",), ("model", "class_path"), ("model", "init_args"), ("model", "init_args", "attention"),
        ("model", "init_args", "optimizer", "lr"), ("data", "init_args"), ("data", "init_args", "batch_size"),
        ("trainer", "callbacks"), ("trainer", "logger"), ("trainer", "strategy"), ("trainer", "plugins"), ("seed_everything",),
        ("allow",), ("weights_only",), ("config",), ("fit",), ("ckpt_path",), ("run_dir",), ("new",),
    ]
)  # fmt: skip


@fuzz(60)
@given(st.lists(st.tuples(PLACES, NESTED), min_size=1, max_size=3))
def test_made_up_configurations_are_understood_or_one_error(
    folder: Path, changes: list[tuple[tuple[str, ...], Any]]
) -> None:
    content = yaml.safe_load(DIGITS.read_text())
    for path, value in changes:
        below = content
        for key in path[:-1]:
            below = below.setdefault(key, {}) if isinstance(below, dict) else {}
        if isinstance(below, dict):
            below[path[-1]] = value
    (folder / "made.yaml").write_text(yaml.safe_dump(content, allow_unicode=True))
    plan(["fit", "--config", "made.yaml"], folder)


@fuzz(100)
@given(st.binary(max_size=60), st.integers(0, 3000))
def test_configurations_with_damaged_bytes_are_one_error_or_read(folder: Path, damage: bytes, place: int) -> None:
    text = DIGITS.read_bytes()
    (folder / "made.yaml").write_bytes(text[:place] + damage + text[place + len(damage) :])
    plan(["fit", "--config", "made.yaml"], folder)


def checkpoint(header: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(header, stream)
    return stream.getvalue()


@fuzz(60)
@given(
    st.dictionaries(NAMES, NESTED, max_size=3),
    NESTED,
    st.sampled_from(["hyper_parameters", "datamodule_hyper_parameters"]),
)
def test_made_up_memories_of_checkpoints_are_options_or_one_error(
    folder: Path, memory: dict[str, Any], class_path: Any, key: str
) -> None:
    (folder / "made.ckpt").write_bytes(checkpoint({key: {**memory, "_class_path": class_path}, "global_step": 1}))
    plan(["validate", "--config", str(DIGITS), "--ckpt_path=made.ckpt"], folder)
    plan(["validate", "--ckpt_path=made.ckpt"], folder)


@fuzz(150)
@given(st.binary(min_size=1, max_size=40), st.floats(0, 1), st.booleans())
def test_damaged_checkpoints_are_one_error_or_read(folder: Path, damage: bytes, where: float, inside: bool) -> None:
    """Damage of the file, and of the pickle inside of a file that is intact."""
    content = checkpoint(
        {"hyper_parameters": {"_class_path": "mhla_tasks.classification.Digits", "x": [1, 2]}, "epoch": 3}
    )
    if inside:
        packed, stream = zipfile.ZipFile(io.BytesIO(content)), io.BytesIO()
        with zipfile.ZipFile(stream, "w") as made:
            for name in packed.namelist():
                data = packed.read(name)
                place = int(where * len(data))
                made.writestr(
                    name, data[:place] + damage + data[place + len(damage) :] if name.endswith("data.pkl") else data
                )
        content = stream.getvalue()
    else:
        place = int(where * len(content))
        content = content[:place] + damage + content[place + len(damage) :]
    (folder / "made.ckpt").write_bytes(content)
    with suppress(ValueError):
        read_header(folder / "made.ckpt")
    with suppress(ValueError):
        remembered_options("made.ckpt", [])
    assert not (folder / "ran").exists()


def test_a_command_line_is_read_as_it_is_written() -> None:
    line = read_words(shlex.split("--config a.yaml fit -c b.yaml --x=1=2 --y -1 --print_config --z 'a b'"), LIGHTNING)
    assert isinstance(line, CommandLine)
    found = [(option.name, option.value) for option in line.options]
    assert found == [
        ("config", "a.yaml"), ("config", "b.yaml"), ("x", "1=2"), ("y", "-1"), ("print_config", None), ("z", "a b"),
    ]  # fmt: skip
