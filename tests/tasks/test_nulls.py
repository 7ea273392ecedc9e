"""Options that are null, although their type does not include None: an error with the option, the type and the place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from mhla_tasks.commandline.arguments import UsageError, read_words
from mhla_tasks.commandline.plan import make_plan
from mhla_tasks.commandline.registry import LIGHTNING

CONFIGS = Path(__file__).parents[2] / "configs"

NULLS = [
    ("classification/digits", "data.batch_size", "int"),
    ("classification/digits", "data.num_workers", "int"),
    ("classification/digits", "model.image_size", "int"),
    ("classification/digits", "model.training.optimizer.lr", "float"),
    ("classification/digits", "model.training.optimizer", "OptimizerConfig"),
    ("classification/digits", "model.attention", "AttentionConfig"),
    ("classification/digits", "model.attention.mixing", "dense or exponential"),
    ("classification/digits", "model.drop_path", "float"),
    ("classification/digits", "trainer.num_nodes", "int"),
    ("classification/vlt_t_imagenet", "data.shards.max_skipped", "int"),
    ("diffusion/digits", "data.samples", "SampleRequest"),
    ("diffusion/digits", "model.training.optimizer.weight_decay", "float"),
    ("language/stdlib", "data.context", "int"),
    ("language/stdlib", "model.attention.rotary_base", "float"),
    ("language/mqar", "data.batch_size", "int"),
    ("text_to_image/digits_pretrain", "data.num_workers", "int"),
    ("video/digits_pretrain", "data.frames", "int"),
]


def configuration(path: str) -> str:
    return f"--config={CONFIGS / path}.yaml"


def nested(key: str, inner: object) -> dict[str, object]:
    root, *names = key.split(".")
    for name in reversed(names):
        inner = {name: inner}
    return {root: inner if root == "trainer" else {"init_args": inner}}


def problem(*words: str) -> str:
    with pytest.raises(UsageError) as error:
        make_plan(read_words(["fit", *words], LIGHTNING))
    return str(error.value)


@pytest.mark.parametrize(("base", "key", "expected"), NULLS, ids=lambda value: str(value))
def test_an_option_that_may_not_be_null_is_named_with_its_type(
    tmp_path: Path, base: str, key: str, expected: str
) -> None:
    file = tmp_path / "n.yaml"
    file.write_text(yaml.safe_dump(nested(key, None)))
    lines = len(file.read_text().splitlines())
    written = key if key.startswith("trainer") else key.replace(".", ".init_args.", 1)
    assert problem(configuration(base), f"--config={file}") == (
        f"{file}: {written}: expected {expected}, got null (line {lines})"
    )
    assert problem(configuration(base), f"--{key}=null") == f"--{key}=null: {key}: expected {expected}, got null"


def test_a_null_is_an_error_in_a_run_folder_and_where_it_is_overridden(tmp_path: Path) -> None:
    text = yaml.safe_load((CONFIGS / "classification/digits.yaml").read_text())
    text["data"]["init_args"]["batch_size"] = None
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(text))
    message = f"{file}: data.init_args.batch_size: expected int, got null"
    assert message in problem(f"--run_dir={tmp_path}")
    assert message in problem(f"--config={file}", "--data.batch_size=4")
    assert message in problem(f"--config={file}", configuration("classification/digits"))


@pytest.mark.parametrize(
    "callback", ["{class_path: lightning_mhla.callbacks.AttentionPictures, init_args: {every_n_epochs: null}}", "null"]
)
def test_callbacks_and_their_options_may_not_be_null(tmp_path: Path, callback: str) -> None:
    (tmp_path / "n.yaml").write_text(f"trainer: {{callbacks: [{callback}]}}")
    expected = "Callback" if callback == "null" else "int"
    file = problem(configuration("classification/digits"), f"--config={tmp_path / 'n.yaml'}")
    assert f"expected {expected}, got null (line 1)" in file
    typed = problem(configuration("classification/digits"), f"--trainer.callbacks+={callback}")
    assert typed.endswith(f"expected {expected}, got null")


@pytest.mark.parametrize(
    "word",
    [
        "--trainer.max_epochs=null",
        "--trainer.callbacks=null",
        "--trainer.logger.name=null",  # text in the command line, although YAML reads it as null
        "--data.seed=null",
        "--model.attention.block_size=null",
        "--config={trainer: {precision: null, max_time: null}, model: {init_args: {pretrained: null, size: null}}}",
        "--config={trainer: {callbacks: [{class_path: Timer, init_args: {duration: null}}]}}",
    ],
)
def test_null_stays_valid_where_an_option_accepts_it(word: str) -> None:
    make_plan(read_words(["fit", configuration("classification/digits"), word], LIGHTNING))
