"""One configuration from files and typed options: which source wins, and what each form of an option means."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mhla_tasks.classification import ImageNetShards
from mhla_tasks.commandline.agreement import _rank
from mhla_tasks.commandline.arguments import UsageError, read_words
from mhla_tasks.commandline.moved_keys import notice
from mhla_tasks.commandline.parser import main
from mhla_tasks.commandline.plan import PLAN, Plan, check_same, make_plan
from mhla_tasks.commandline.registry import LIGHTNING
from mhla_tasks.commandline.sources import Source
from mhla_tasks.tools.comparison.runs import differences, read_runs
from PIL import Image

from lightning_mhla.checkpoints.former_names import present_options

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/classification/digits.yaml")
FOLDER = str(ROOT / "configs/classification/folder.yaml")
MODEL = "mhla_tasks.classification.ImageClassifier"
SHARDS = "mhla_tasks.classification.ImageNetShards"
DIGITS = str(Path(__file__).parents[2] / "configs/classification/digits.yaml")
FORMER = {"max_skipped": 7, "shuffle_window": None, "cache_dir": "kept", "cache_bytes": 5}
"""Options of shards, which stood beside those of the data before they had a group of their own."""


def plan(*words: str) -> Plan:
    return make_plan(read_words(words, LIGHTNING))


def options(*words: str) -> dict[str, Any]:
    return plan("fit", *words).configuration


def write(path: Path, content: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_typed_option_beats_every_file_wherever_it_stands() -> None:
    for words in (["--trainer.max_epochs=3", "--config", DIGITS], ["--config", DIGITS, "--trainer.max_epochs=3"]):
        assert options(*words)["trainer"]["max_epochs"] == "3"
    assert (
        options("--trainer.max_epochs=3", "--config", DIGITS, "--trainer.max_epochs=4")["trainer"]["max_epochs"] == "4"
    )


def test_a_later_file_beats_an_earlier_one_and_a_base_is_weaker_than_the_file_that_names_it(tmp_path: Path) -> None:
    base = write(tmp_path / "sub/base.yaml", {"trainer": {"max_epochs": 1, "max_steps": 1, "log_every_n_steps": 1}})
    one = write(tmp_path / "sub/one.yaml", {"config": "base.yaml", "trainer": {"max_steps": 2, "log_every_n_steps": 2}})
    two = write(tmp_path / "two.yaml", {"trainer": {"log_every_n_steps": 3}})
    found = options("--config", DIGITS, "--config", one, "--config", two)["trainer"]
    assert (found["max_epochs"], found["max_steps"], found["log_every_n_steps"]) == (1, 2, 3)
    assert options("--config", one, "--config", base)["trainer"]["max_steps"] == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--model.shape.depth=3"],
        ["--model.init_args.shape.depth=3"],
        ["--model={init_args: {shape: {depth: 3}}}"],
        ["--model={shape: {depth: 3}}"],
        ["--model", f"{{class_path: {MODEL}, init_args: {{shape: {{depth: 3}}}}}}"],
        [f"--model={MODEL}", "--model.shape.depth=3"],
        ["--model.shape.depth=3", f"--model={MODEL}"],
        ["--config={model: {shape: {depth: 3}}}"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_every_form_of_an_option_of_a_class_means_the_same(words: list[str]) -> None:
    found = options("--config", DIGITS, *words)["model"]
    assert found["class_path"] == MODEL
    assert str(found["init_args"]["shape"]["depth"]) == "3"
    assert found["init_args"]["attention"]["kind"] == "mhla", "the file's other options stay"
    assert set(found) == {"class_path", "init_args"}


def test_a_different_class_keeps_what_both_take_in_the_same_way() -> None:
    for word in (f"--data={SHARDS}", f"--data.class_path={SHARDS}"):
        typed = ["--data.augment=true", "--data.batch_size=7", word, "--data.train=a"]
        found = options("--config", DIGITS, *typed)["data"]
        assert found["class_path"] == SHARDS
        assert found["init_args"]["train"] == "a"
        assert found["init_args"]["batch_size"] == "7"
        assert "augment" not in found["init_args"], "a number of options for one class, a truth value for the other"
    in_file = f"--config={{data: {{class_path: {SHARDS}}}}}"
    found = options("--config", DIGITS, "--data.batch_size=7", in_file, "--data.train=a")["data"]
    assert (found["class_path"], found["init_args"]["batch_size"]) == (SHARDS, "7")
    with pytest.raises(UsageError, match=r"data\.augment takes options by name"):
        options("--config", DIGITS, "--data.augment=true", in_file)  # a typed option is for the class of all files


@pytest.mark.parametrize(
    ("words", "kind", "expected"),
    [
        ([], "mhla_window", {"sinks": 4, "far_init": -4.0, "feature_positions": 1}),
        (["--model.attention.kind=mhla_window"], "mhla_window", {"sinks": 4, "far_init": -4.0, "feature_positions": 1}),
        (
            ["--model.attention.options.sinks=2"],
            "mhla_window",
            {"sinks": "2", "far_init": -4.0, "feature_positions": 1},
        ),
        (["--model.attention.kind=mhla"], "mhla", None),
        (["--model.attention.options.conv=3", "--model.attention.kind=gated_conv"], "gated_conv", {"conv": "3"}),
        (["--model.attention={kind: gla, options: {direction: forward}}"], "gla", {"direction": "forward"}),
        (["--model.attention={kind: linear}", "--model.attention.kind=softmax"], "softmax", None),
    ],
)
def test_a_different_kind_of_attention_drops_the_options_of_the_former(
    tmp_path: Path, words: list[str], kind: str, expected: Any
) -> None:
    window = {
        "kind": "mhla_window",
        "block_size": 32,
        "options": {"sinks": 4, "far_init": -4.0, "feature_positions": 1},
    }
    content = {"model": {"class_path": "mhla_tasks.language.LinearizedModel", "init_args": {"attention": window}}}
    attention = options("--config", write(tmp_path / "window.yaml", content), *words)["model"]["init_args"]["attention"]
    assert attention["kind"] == kind
    assert attention.get("options") == expected
    assert "block_size" in attention, "other options stay"


@pytest.mark.parametrize(
    ("words", "kind", "expected"),
    [
        ([], "mhla_window", {"sinks": 1, "far_init": -2.0, "feature_positions": None}),
        (["--model.attention.block_size=8"], "mhla_window", {"sinks": 1, "far_init": -2.0, "feature_positions": None}),
        (["--model.attention.kind=mhla"], "mhla", None),
        (["--model.attention={kind: gla, options: {direction: forward}}"], "gla", {"direction": "forward"}),
    ],
)
def test_options_in_the_default_of_a_class_are_of_its_kind_alone(
    capsys: pytest.CaptureFixture[str], words: list[str], kind: str, expected: Any
) -> None:
    model = ["--model=mhla_tasks.language.LinearizedTextEncoder", "--model.pretrained=a", *words]
    data = ["--data=mhla_tasks.language.TextPassages", "--data.train=a", "--data.val=a", "--data.tokenizer=a"]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *model, *data, "--print_config"])
    assert stop.value.code == 0
    attention = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["attention"]
    assert (attention["kind"], attention["options"]) == (kind, expected)


def test_lists_are_replaced_or_appended_to_and_options_below_belong_to_the_last(tmp_path: Path) -> None:
    before = [each["class_path"] for each in options("--config", DIGITS)["trainer"]["callbacks"]]
    added = options(
        "--config", DIGITS, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss",
        "--trainer.callbacks.patience=4", "--trainer.callbacks+={class_path: Timer}",
    )["trainer"]["callbacks"]  # fmt: skip
    assert [each["class_path"] for each in added] == [*before, "EarlyStopping", "Timer"]
    assert added[-2]["init_args"] == {"monitor": "val/loss", "patience": "4"}
    overlay = write(tmp_path / "overlay.yaml", {"trainer": {"callbacks+": [{"class_path": "Timer"}]}})
    assert [each["class_path"] for each in options("--config", DIGITS, "--config", overlay)["trainer"]["callbacks"]] == [
        *before, "Timer",
    ]  # fmt: skip
    replaced = options("--config", DIGITS, "--trainer.callbacks=[{class_path: Timer}]")["trainer"]["callbacks"]
    assert replaced == [{"class_path": "Timer"}]


@pytest.mark.parametrize("names", [("callbacks+", "callbacks"), ("callbacks", "callbacks+")])
def test_a_file_appends_to_the_list_that_it_gives_whatever_comes_first(tmp_path: Path, names: tuple[str, str]) -> None:
    items = {"callbacks": ["Timer"], "callbacks+": ["EarlyStopping"]}
    overlay = write(tmp_path / "a.yaml", {"trainer": {name: items[name] for name in names}})
    assert options("--config", DIGITS, "--config", overlay)["trainer"]["callbacks"] == ["Timer", "EarlyStopping"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--trainer.callbacks.0.monitor=x", "trainer.callbacks.OPTION is an option of the last item"),
        ("--trainer.logger.1.name=x", "trainer.logger.OPTION is an option of the last item"),
        ("--model.attention=linear", "model.attention takes options by name, such as model.attention.kind=linear"),
        ("--model.attention={kind: mhla, kind: linear}", "kind is given twice, in line 1; remove one"),
        (
            "--config={trainer: {max_epochs: 3, max_epochs: 4}}",
            "trainer.max_epochs is given twice, in line 1; remove one",
        ),
        (
            "--model.training.optimizer=0.1",
            "--model.training.optimizer=0.1: model.training.optimizer takes options by name",
        ),
    ],
)
def test_values_where_options_are_needed_are_one_line(word: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        plan("fit", "--config", DIGITS, word)
    assert message in str(error.value)


def test_a_mapping_of_the_users_own_keys_is_replaced_and_a_key_below_it_is_added(tmp_path: Path) -> None:
    model = {
        "class_path": "mhla_tasks.language.LanguageModel",
        "init_args": {"layer_kinds": {0: "softmax", 1: "linear"}},
    }
    path = write(tmp_path / "a.yaml", {"model": model})
    other = write(tmp_path / "b.yaml", {"model": {"init_args": {"layer_kinds": {2: "softmax"}}}})
    assert options("--config", path, "--config", other)["model"]["init_args"]["layer_kinds"] == {2: "softmax"}
    kept = options("--config", path, "--model.layer_kinds.3=softmax")["model"]["init_args"]["layer_kinds"]
    assert kept == {0: "softmax", 1: "linear", "3": "softmax"}


def test_texts_stay_as_typed() -> None:
    found = options("--config", DIGITS, "--data.predict_dir=001", "--seed_everything=1e0", "--model.pretrained={a,b}")
    assert found["data"]["init_args"]["predict_dir"] == "001"
    assert found["model"]["init_args"]["pretrained"] == "{a,b}"


def test_brackets_and_nothing_are_texts_where_no_class_can_stand() -> None:
    found = options(
        "--config", DIGITS, "--data.predict_dir=[a]", "--model.pretrained=a: b", "--trainer.max_epochs=null"
    )
    assert (found["data"]["init_args"]["predict_dir"], found["model"]["init_args"]["pretrained"]) == ("[a]", "a: b")
    assert found["trainer"]["max_epochs"] == "null"
    assert options("--config", DIGITS, "--trainer.callbacks=null")["trainer"]["callbacks"] is None
    added = options("--config", DIGITS, "--trainer.callbacks=null", "--trainer.callbacks+=Timer")["trainer"][
        "callbacks"
    ]
    assert added == ["Timer"]
    new = options("--config", DIGITS, "--model.training.optimizer=null", "--model.training.optimizer.lr=3")["model"][
        "init_args"
    ]["training"]["optimizer"]
    assert new == {"lr": "3"}
    strategy = options("--config", DIGITS, "--trainer.strategy=ddp", "--trainer.strategy.find_unused_parameters=true")
    assert strategy["trainer"]["strategy"] == {"find_unused_parameters": "true"}


def test_a_class_with_none_of_the_options_before_keeps_none() -> None:
    timm = "mhla_tasks.classification.TimmClassifier"
    found = options("--config", DIGITS, f"--model={timm}", "--model.model=vit_tiny_patch16_224")["model"]["init_args"]
    assert found["model"] == "vit_tiny_patch16_224"
    assert "shape" not in found
    assert found["num_classes"] == 10


def test_appending_below_a_mapping_of_the_users_own_keys() -> None:
    timm = "mhla_tasks.classification.TimmClassifier"
    typed = ["--model.model_args={l: [1]}", "--model.model_args.l+=4"]
    arguments = options("--config", DIGITS, f"--model={timm}", *typed)["model"]["init_args"]["model_args"]
    assert arguments == {"l": [1, "4"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config: nofile.yaml\n", "a.yaml: config must be the path of a file; there is no file nofile.yaml"),
        ("config: [a.yaml]\n", "config must be the path of a file"),
        ("config: {trainer: {}}\n", "config must be the path of a file"),
        ("trainer: foo\n", "trainer must contain options (KEY: VALUE), got foo"),
        ("model: {init_args: 3}\n", "init_args takes options by name (KEY: VALUE), got 3"),
        ("data: {dict_kwargs: {batch_size: 3}}\n", "Digits accepts only its own options; write them under init_args"),
        ("model: {init_args: {shape: !!binary aGk=}}\n", "could not determine a constructor"),
        ("model: {init_args: {shape: !!set {a}}}\n", "could not determine a constructor"),
        ("trainer: {callbacks++: [Timer]}\n", "trainer.callbacks++ is not an option"),
        ("trainer: {callbacks: {0: {monitor: a}}}\n", "trainer.callbacks.OPTION is an option of the last item"),
        ("model: {attention: linear}\n", "model.attention takes options by name, such as model.attention.kind=linear"),
        (
            "model: {init_args: {training: {optimizer: 3}}}\n",
            "model.init_args.training.optimizer takes options by name, such as",
        ),
    ],
)
def test_what_is_no_configuration_is_rejected_with_its_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError) as error:
        plan("fit", "--config", DIGITS, "--config", str(tmp_path / "a.yaml"))
    assert message in str(error.value)


def test_options_for_a_class_that_is_replaced_are_no_error(tmp_path: Path) -> None:
    overlay = write(tmp_path / "a.yaml", {"model": {"init_args": {"shape": {"depth": 3}}}})
    timm = "mhla_tasks.classification.TimmClassifier"
    made = plan("fit", "--config", DIGITS, "--config", overlay, f"--model={timm}", "--model.model=vit_tiny_patch16_224")
    assert "shape" not in made.configuration["model"]["init_args"]
    assert all("shape" not in each["model"]["init_args"] for each in made.replaced)
    assert plan("fit", "--config", DIGITS, "--config", overlay, "--model.shape.depth=2").replaced, (
        "it is checked where it is replaced"
    )


@pytest.mark.parametrize("text", ["model: {init_args: null}\n", "model: {init_args: {}}\n"])
def test_no_options_change_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert options("--config", DIGITS, "--config", str(tmp_path / "a.yaml")) == options("--config", DIGITS)


def test_numbers_in_files_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "model: {init_args: {drop_path: 1e-3}}\ndata: {init_args: {predict_dir: 2026-11-25}}\n"
    )
    found = options("--config", DIGITS, "--config", str(tmp_path / "a.yaml"))
    assert found["model"]["init_args"]["drop_path"] == 0.001
    assert found["data"]["init_args"]["predict_dir"] == "2026-11-25"


def test_values_that_are_replaced_are_kept_for_their_check(tmp_path: Path) -> None:
    wrong = write(tmp_path / "a.yaml", {"trainer": {"max_epochs": "ten"}})
    (checked,) = plan("fit", "--config", DIGITS, "--config", wrong, "--trainer.max_epochs=3").replaced[1:]
    assert checked["trainer"]["max_epochs"] == "ten"
    assert not plan("fit", "--config", DIGITS, "--trainer.val_check_interval=3").replaced


def test_a_file_that_is_edited_between_the_starts_of_two_processes_of_a_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lightning starts the other processes of a run with the same arguments, and each reads the files."""
    path = write(tmp_path / "a.yaml", {"trainer": {"max_steps": 3}})
    started = plan("fit", "--config", DIGITS, "--config", path)
    monkeypatch.delenv(PLAN, raising=False)
    check_same(started)
    mine = os.environ[PLAN]
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(os, "getppid", os.getpid)  # from here on, this is a process that the first one started
    check_same(plan("fit", "--config", DIGITS, "--config", path))
    assert os.environ[PLAN] == mine
    write(tmp_path / "a.yaml", {"trainer": {"max_steps": 4}})
    with pytest.raises(UsageError, match="changed while the processes of the run were started"):
        check_same(plan("fit", "--config", DIGITS, "--config", path))
    monkeypatch.undo()
    check_same(plan("fit", "--config", DIGITS, "--config", path))  # another run in the same shell


# --- options that have moved


def old_checkpoint(path: Path, **arguments: Any) -> str:
    """Write a checkpoint with data options of an earlier version."""
    memory = {"_class_path": SHARDS, "train": "a", "val": "b", **FORMER, **arguments}
    torch.save({"datamodule_hyper_parameters": memory, "hyper_parameters": {}, "state_dict": {}}, path)
    return str(path)


@pytest.mark.parametrize("form", ["short", "long", "below the command"])
def test_a_file_may_name_options_as_an_earlier_version_did(tmp_path: Path, form: str) -> None:
    content: dict[str, Any] = {"data": FORMER if form == "short" else {"init_args": FORMER}}
    path = write(tmp_path / "old.yaml", {"fit": content} if form == "below the command" else content)
    made = plan("fit", "--config", FOLDER, "--config", path)
    arguments = made.configuration["data"]["init_args"]
    assert arguments["shards"] == FORMER
    assert not FORMER.keys() & arguments.keys()
    message = notice(made.moves)
    assert "data.cache_dir is now data.shards.cache_dir" in message
    assert f"(from {path})" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--data.cache_dir=kept", "--data.cache_bytes=5"],
        ["--data.init_args.cache_dir=kept", "--data.init_args.cache_bytes=5"],
        ["--data={cache_dir: kept, cache_bytes: 5}"],
        ["--data.init_args={cache_dir: kept, cache_bytes: 5}"],
        ["--data", f"{{class_path: {SHARDS}, init_args: {{cache_dir: kept, cache_bytes: 5}}}}"],
        ["--config={data: {cache_dir: kept, cache_bytes: 5}}"],
        ["--data.cache_dir=kept", "--data.shards.cache_bytes=5"],
    ],
    ids=lambda words: " ".join(words)[:50],
)
def test_options_may_be_typed_as_an_earlier_version_named_them(words: list[str]) -> None:
    made = plan("fit", "--config", FOLDER, *words)
    arguments = made.configuration["data"]["init_args"]
    assert {name: str(value) for name, value in arguments["shards"].items()} == {
        "cache_dir": "kept",
        "cache_bytes": "5",
    }
    assert not FORMER.keys() & arguments.keys()
    assert "data.cache_dir is now data.shards.cache_dir" in notice(made.moves)
    assert "(from the command line)" in notice(made.moves)


def test_a_checkpoint_may_remember_options_as_an_earlier_version_named_them(tmp_path: Path) -> None:
    checkpoint = f"--ckpt_path={old_checkpoint(tmp_path / 'old.ckpt')}"
    made = plan("validate", checkpoint)
    assert made.configuration["data"]["init_args"] == {"train": "a", "val": "b", "shards": FORMER}
    assert f"(from {tmp_path / 'old.ckpt'})" in notice(made.moves)
    for typed in ("--data.cache_bytes=9", "--data.shards.cache_bytes=9"):
        arguments = plan("validate", checkpoint, typed).configuration["data"]["init_args"]
        assert arguments["shards"] == {**FORMER, "cache_bytes": "9"}, "what is typed beats the checkpoint"
        assert "cache_bytes" not in arguments


def test_a_stronger_source_wins_by_whichever_name(tmp_path: Path) -> None:
    old = write(tmp_path / "old.yaml", {"data": {"cache_dir": "old", "max_skipped": 1}})
    new = write(tmp_path / "new.yaml", {"data": {"shards": {"cache_dir": "new"}}})
    for first, second, found in ((old, new, "new"), (new, old, "old")):
        shards = options("--config", FOLDER, "--config", first, "--config", second)["data"]["init_args"]["shards"]
        assert shards == {"cache_dir": found, "max_skipped": 1}
    assert options("--config", FOLDER, "--config", old, "--data.shards.cache_dir=c")["data"]["init_args"]["shards"] == {
        "cache_dir": "c", "max_skipped": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["--data.cache_dir=a", "--data.shards.cache_dir=b"],
        ["--data.shards.cache_dir=b", "--data.init_args.cache_dir=a"],
        ["--data.shards={cache_dir: b}", "--data.cache_dir=a"],
        ["--data.shards=b", "--data.cache_dir=a"],
        ["FILE", {"cache_dir": "a", "shards": {"cache_dir": "b"}}],
        ["FILE", {"cache_dir": "a", "init_args": {"shards": {"cache_dir": "b"}}}],
        ["FILE", {"init_args": {"cache_dir": "a", "shards": None}}],
    ],
    ids=str,
)
def test_an_option_by_both_names_is_an_error(tmp_path: Path, words: list[Any]) -> None:
    giver = "the command line"
    if words[0] == "FILE":
        giver = write(tmp_path / "both.yaml", {"data": words[1]})
        words = ["--config", giver]
    with pytest.raises(UsageError) as error:
        plan("fit", "--config", FOLDER, *words)
    assert str(error.value) == (
        f"{giver} gives data.shards.cache_dir also by its former name, data.cache_dir; leave data.cache_dir out"
    )


def test_classes_that_take_an_option_by_its_former_name_keep_it() -> None:
    made = plan("fit", "--config", str(ROOT / "configs/language/stdlib.yaml"), "--data.cache_dir=kept")
    assert made.configuration["data"]["init_args"]["cache_dir"] == "kept"
    assert not made.moves
    shards = ["--data=mhla_tasks.language.TokenShards", "--data.train=a", "--data.val=b", "--data.cache_dir=kept"]
    made = plan("fit", "--config", str(ROOT / "configs/language/stdlib.yaml"), *shards)
    assert made.configuration["data"]["init_args"]["shards"] == {"cache_dir": "kept"}
    with pytest.raises(UsageError, match=r"data\.cache_dir is not an option of Digits"):
        plan("fit", "--config", DIGITS, "--data.cache_dir=kept")


def test_tools_read_what_an_earlier_version_wrote(tmp_path: Path) -> None:
    assert present_options("data", ImageNetShards, {"train": "a", **FORMER}) == {"train": "a", "shards": FORMER}
    for name, arguments in (("old", FORMER), ("new", {"shards": FORMER})):
        write(tmp_path / name / "config.yaml", {"data": {"class_path": SHARDS, "init_args": arguments}})
        (tmp_path / name / "run.json").write_text(
            '{"metrics": {}, "seconds": 1, "steps": 1, "parameters": 1, "finished": true}'
        )
    assert differences(read_runs([tmp_path])) == []


def test_a_wrong_value_under_a_former_name_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.yaml").write_text("data:\n  max_skipped: 3\n  cache_bytes: many\n")
    with pytest.raises(SystemExit):
        main(["fit", "--config", FOLDER, "--config", str(tmp_path / "old.yaml")])
    message = capsys.readouterr().err.splitlines()[0]
    assert f"{tmp_path}/old.yaml: data.shards.cache_bytes: " in message
    assert "(line 3)" in message


def test_a_run_of_an_earlier_version_resumes_and_is_written_by_present_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for label in "ab":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (60 * number, 0, 0)).save(tmp_path / "photos" / label / f"{number}.png")
    run, photos = tmp_path / "run", tmp_path / "photos"
    small = [f"--data.train={photos}", f"--data.val={photos}", "--data.image_size=8", "--data.batch_size=4",
             "--data.num_workers=0", "--data.augment.color_jitter=0", "--model.shape.dim=8", "--model.shape.depth=1",
             "--model.shape.heads=1", "--model.attention.block_grid=[2,2]", "--trainer.accelerator=cpu",
             "--trainer.callbacks=[{class_path: ModelCheckpoint, init_args: {save_last: true}}]",
             "--trainer.enable_progress_bar=false", "--data.shards.max_skipped=7"]  # fmt: skip
    main(["fit", "--config", FOLDER, f"--run_dir={run}", *small, "--trainer.max_epochs=1"])
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["init_args"] |= config["data"]["init_args"].pop("shards")
    write(run / "config.yaml", config)
    for path in {path.resolve() for path in (run / "checkpoints").glob("*.ckpt")}:
        content = torch.load(path, weights_only=True)
        memory = content["datamodule_hyper_parameters"]
        memory |= memory.pop("shards")
        path.unlink()  # another name of the file keeps its content
        torch.save(content, path)
    with caplog.at_level(logging.INFO):
        main(["fit", f"--run_dir={run}", "--trainer.max_epochs=2", "--data.shards.max_skipped=9"])
    assert "resumed with a changed option: data.shards.max_skipped 7 -> 9" in caplog.text
    (message,) = [text for text in caplog.messages if "is now" in text]
    assert "data.max_skipped is now data.shards.max_skipped" in message
    assert f"{run}/config.yaml" in message
    arguments = yaml.safe_load((run / "config.yaml").read_text())["data"]["init_args"]
    assert arguments["shards"]["max_skipped"] == 9
    assert "max_skipped" not in arguments
    content = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert content["epoch"] == 1
    assert content["datamodule_hyper_parameters"]["shards"] == arguments["shards"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command is given; the commands are fit, validate, test, predict"),
        (["fitt"], "fitt is not a command"),
        (["fit", "--config", DIGITS, "more"], "unexpected argument 'more' after --config"),
        (["fit", "--data.train=a", "b"], "'--data.train=[a,b]'"),
        (["fit", "validate"], "unexpected argument 'validate'"),
        (["fit", "--model.shape.depth"], "--model.shape.depth needs a value"),
        (["fit", "--"], "unexpected argument '--'"),
        (["fit", "--config"], "--config needs a value"),
        (["fit", "--config", "--model.shape.depth=3"], "--config needs a value"),
        (["fit", "-c", DIGITS, "-x"], "unexpected argument '-x'"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_what_is_no_command_line_is_rejected(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        plan(*words)
    assert message in str(error.value)


@pytest.mark.parametrize("folder", ["2024", "1e3", "true", "0x10", "2024-11-27"])
def test_a_folder_may_be_named_like_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir()
    torch.save({"state_dict": {}, "global_step": 3}, Path(folder) / "last.ckpt")
    for words in (
        ["fit", f"--run_dir={folder}"],
        ["validate", f"--run_dir={folder}"],
        ["fit", f"--ckpt_path={folder}"],
    ):
        assert plan(*words, "--config", DIGITS).checkpoint == folder, words


def test_a_file_that_is_named_twice_counts_where_it_stands_last() -> None:
    a = Source("a.yaml", {"model": {"init_args": {"num_classes": 7}}})
    b = Source("b.yaml", {"data": {"init_args": {"num_classes": 5}}})
    assert [_rank(part, "num_classes", [a, b, a]) for part in ("model", "data")] == [2, 1]
