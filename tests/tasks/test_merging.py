"""One configuration from files and typed options: which source wins, and what each form of an option means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from mhla_tasks.commandline.arguments import UsageError, read_words
from mhla_tasks.commandline.plan import PLAN, Plan, check_same, make_plan
from mhla_tasks.commandline.registry import LIGHTNING

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/classification/digits.yaml")
MODEL = "mhla_tasks.classification.ImageClassifier"


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
        ["--model.depth=3"],
        ["--model.init_args.depth=3"],
        ["--model={init_args: {depth: 3}}"],
        ["--model={depth: 3}"],
        ["--model", f"{{class_path: {MODEL}, init_args: {{depth: 3}}}}"],
        [f"--model={MODEL}", "--model.depth=3"],
        ["--model.depth=3", f"--model={MODEL}"],
        ["--config={model: {depth: 3}}"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_every_form_of_an_option_of_a_class_means_the_same(words: list[str]) -> None:
    found = options("--config", DIGITS, *words)["model"]
    assert found["class_path"] == MODEL
    assert str(found["init_args"]["depth"]) == "3"
    assert found["init_args"]["attention"]["kind"] == "mhla", "the file's other options stay"
    assert set(found) == {"class_path", "init_args"}


def test_a_different_class_keeps_what_both_take_in_the_same_way() -> None:
    shards = "mhla_tasks.classification.ImageNetShards"
    for word in (f"--data={shards}", f"--data.class_path={shards}"):
        typed = ["--data.augment=true", "--data.batch_size=7", word, "--data.train=a"]
        found = options("--config", DIGITS, *typed)["data"]
        assert found["class_path"] == shards
        assert found["init_args"]["train"] == "a"
        assert found["init_args"]["batch_size"] == "7"
        assert "augment" not in found["init_args"], "a number of options for one class, a truth value for the other"
    in_file = f"--config={{data: {{class_path: {shards}}}}}"
    found = options("--config", DIGITS, "--data.batch_size=7", in_file, "--data.train=a")["data"]
    assert (found["class_path"], found["init_args"]["batch_size"]) == (shards, "7")
    with pytest.raises(UsageError, match=r"data\.augment takes options by name"):
        options("--config", DIGITS, "--data.augment=true", in_file)  # a typed option is for the class of all files


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
        ("--model.optimizer=0.1", "--model.optimizer=0.1: model.optimizer takes options by name"),
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
    found = options("--config", DIGITS, "--data.predict_dir=[a]", "--model.pretrained=a: b", "--trainer.max_steps=null")
    assert (found["data"]["init_args"]["predict_dir"], found["model"]["init_args"]["pretrained"]) == ("[a]", "a: b")
    assert found["trainer"]["max_steps"] == "null"
    assert options("--config", DIGITS, "--trainer.callbacks=null")["trainer"]["callbacks"] is None
    added = options("--config", DIGITS, "--trainer.callbacks=null", "--trainer.callbacks+=Timer")["trainer"][
        "callbacks"
    ]
    assert added == ["Timer"]
    new = options("--config", DIGITS, "--model.optimizer=null", "--model.optimizer.lr=3")["model"]["init_args"][
        "optimizer"
    ]
    assert new == {"lr": "3"}
    strategy = options("--config", DIGITS, "--trainer.strategy=ddp", "--trainer.strategy.find_unused_parameters=true")
    assert strategy["trainer"]["strategy"] == {"find_unused_parameters": "true"}


def test_a_class_with_none_of_the_options_before_keeps_none() -> None:
    timm = "mhla_tasks.classification.TimmClassifier"
    found = options("--config", DIGITS, f"--model={timm}", "--model.model=vit_tiny_patch16_224")["model"]["init_args"]
    assert found["model"] == "vit_tiny_patch16_224"
    assert "patch_size" not in found
    assert found["num_classes"] == 10


def test_appending_below_a_mapping_of_the_users_own_keys() -> None:
    timm = "mhla_tasks.classification.TimmClassifier"
    typed = ["--model.model_args={l: [1]}", "--model.model_args.l+=4"]
    arguments = options("--config", DIGITS, f"--model={timm}", *typed)["model"]["init_args"]["model_args"]
    assert arguments == {"l": [1, "4"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config: nofile.yaml\n", "a.yaml: config takes the name of a file, and there is no file nofile.yaml"),
        ("config: [a.yaml]\n", "config takes the name of a file"),
        ("config: {trainer: {}}\n", "config takes the name of a file"),
        ("trainer: foo\n", "trainer is not a value, got foo"),
        ("model: {init_args: 3}\n", "init_args takes options by name (KEY: VALUE), got 3"),
        ("data: {dict_kwargs: {batch_size: 3}}\n", "Digits takes its own options alone; write them under init_args"),
        ("model: {init_args: {depth: !!binary aGk=}}\n", "could not determine a constructor"),
        ("model: {init_args: {depth: !!set {a}}}\n", "could not determine a constructor"),
        ("trainer: {callbacks++: [Timer]}\n", "trainer.callbacks++ is not an option"),
        ("trainer: {callbacks: {0: {monitor: a}}}\n", "trainer.callbacks.OPTION is an option of the last item"),
        ("model: {attention: linear}\n", "model.attention takes options by name, such as model.attention.kind=linear"),
        ("model: {init_args: {optimizer: 3}}\n", "model.init_args.optimizer takes options by name, such as"),
    ],
)
def test_what_is_no_configuration_is_rejected_with_its_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError) as error:
        plan("fit", "--config", DIGITS, "--config", str(tmp_path / "a.yaml"))
    assert message in str(error.value)


def test_options_for_a_class_that_is_replaced_are_no_error(tmp_path: Path) -> None:
    overlay = write(tmp_path / "a.yaml", {"model": {"init_args": {"depth": 3}}})
    timm = "mhla_tasks.classification.TimmClassifier"
    made = plan("fit", "--config", DIGITS, "--config", overlay, f"--model={timm}", "--model.model=vit_tiny_patch16_224")
    assert "depth" not in made.configuration["model"]["init_args"]
    assert all("depth" not in each["model"]["init_args"] for each in made.replaced)
    assert plan("fit", "--config", DIGITS, "--config", overlay, "--model.depth=2").replaced, (
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command is given; there are fit, validate, test, predict"),
        (["fitt"], "fitt is not a command"),
        (["fit", "--config", DIGITS, "more"], "unexpected argument 'more' after --config"),
        (["fit", "--data.train=a", "b"], "'--data.train=[a,b]'"),
        (["fit", "validate"], "unexpected argument 'validate'"),
        (["fit", "--model.depth"], "--model.depth needs a value"),
        (["fit", "--"], "unexpected argument '--'"),
        (["fit", "--config"], "--config needs a value"),
        (["fit", "--config", "--model.depth=3"], "--config needs a value"),
        (["fit", "-c", DIGITS, "-x"], "unexpected argument '-x'"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_what_is_no_command_line_is_rejected(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        plan(*words)
    assert message in str(error.value)
