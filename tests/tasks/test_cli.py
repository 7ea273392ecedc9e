"""The command line: short errors, precedence, and every shipped configuration.

Longer than other files: every error that the command line words itself.
"""

from __future__ import annotations

import csv
import json
import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from grouped import grouped
from lm_eval.tasks import TaskManager
from mhla_tasks.classification import ImageClassifier
from mhla_tasks.commandline.arguments import read_words
from mhla_tasks.commandline.parser import SuiteCLI, build, main
from mhla_tasks.commandline.plan import make_plan
from mhla_tasks.commandline.registry import LIGHTNING
from mhla_tasks.language import LanguageModel
from PIL import Image

from lightning_mhla import AttentionConfig
from lightning_mhla.attention import Attention
from lightning_mhla.data.digits import load_digits

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs/classification/digits.yaml"
CONFIGS = sorted((ROOT / "configs").glob("*/*.yaml"))
OVERLAYS = [path for path in CONFIGS if path.parent.name == "trainer"]
EVALUATIONS = [path for path in CONFIGS if path.parent.name == "eval"]
EXPERIMENTS = [path for path in CONFIGS if path not in (*OVERLAYS, *EVALUATIONS)]


def number_of_classes(path: Path) -> list[str]:
    """Return the option that an experiment needs if its classes are the folders of the user's photographs."""
    folders = [ROOT / "configs" / domain / "folder.yaml" for domain in ("classification", "diffusion")]
    return ["--model.init_args.num_classes=3"] if path in folders else []


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning", *arguments])
    main()


def parse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Parse a command line and make its options agree, without building anything."""
    monkeypatch.setattr(SuiteCLI, "instantiate_classes", lambda self: None)
    monkeypatch.setattr(SuiteCLI, "_set_seed", lambda self: None)
    return build(make_plan(read_words(arguments, LIGHTNING)))


def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command line that has to fail, and return the text that it prints."""
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *arguments)
    assert stop.value.code, "a failing command must leave with a status above 0"
    text = capsys.readouterr().err
    lines = [line for line in text.splitlines() if line.startswith(("error", "help", "Traceback", "usage"))]
    assert len(lines) <= 2, f"not short:\n{text}"
    return lines[0]


def changed(tmp_path: Path, old: str, new: str) -> str:
    text = DIGITS.read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new))
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("drop_path: 0.1", "drop_pth: 0.1", "model.init_args.drop_pth is not an option of ImageClassifier; did you mean model.init_args.drop_path?"),
        ("kind: mhla", "knd: mhla", "model.init_args.attention.knd is not an option of AttentionConfig; did you mean model.init_args.attention.kind?"),
        ("warmup_epochs: 2", "warmup_epoch: 2", "did you mean model.init_args.training.optimizer.warmup_epochs?"),
        ("max_epochs: 30", "max_epoch: 30", "trainer.max_epoch is not an option of the trainer; did you mean trainer.max_epochs?"),
        ("save_last: true", "save_lst: true", "trainer.callbacks[0].init_args.save_lst is not an option of ModelCheckpoint; did you mean"),
        ("trainer:", "trainr:", "trainr is not an option; did you mean trainer?"),
        ("class_path: LearningRateMonitor", "class_path: LearningRateMonitr", "there is no such class; did you mean LearningRateMonitor?"),
        ("ImageClassifier", "ImageClasifier", "there is no such class; did you mean ImageClassifier?"),
        ("mhla_tasks.classification.Digits", "mhla_task.classification.Digits", "cannot import mhla_task.classification; did you mean mhla_tasks?"),
        ("batch_size: 64", "batch_size: many", "data.init_args.batch_size: expected int, got many"),
    ],
)  # fmt: skip
def test_wrong_key_or_type_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    old: str,
    new: str,
    message: str,
) -> None:
    error = failing(monkeypatch, capsys, "fit", "--config", changed(tmp_path, old, new))
    assert message in error
    assert "mine.yaml: " in error, "where the key came from is not said"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--model.init_args.drop_pth=0.1", "did you mean model.init_args.drop_path?"),
        ("--model.dept=2", "did you mean model.shape.depth?"),
        ("--model.optimiser.lr=1", "did you mean model.training.optimizer?"),
        ("--model.init_args.attention.knd=linear", "did you mean model.init_args.attention.kind?"),
        ("--trainer.max_epoch=3", "did you mean trainer.max_epochs?"),
        ("--trainer.max_epochs=abc", "trainer.max_epochs: expected int, got abc"),
        ("--model.init_args.attention.normalize=maybe", "expected bool, got maybe"),
        ("--sed_everything=1", "did you mean seed_everything?"),
    ],
)
def test_wrong_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str, message: str
) -> None:
    error = failing(monkeypatch, capsys, "fit", "--config", str(DIGITS), argument)
    assert message in error
    assert argument in error, "where the key came from is not said"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit"], "no model is given; name a configuration"),
        (["fit", "--config", "absent.yaml"], "--config=absent.yaml: the file does not exist; mhla:// lists"),
        (["fit", "--config=/dev/null"], "/dev/null: is not a regular file; write its content to one, because each process"),
        (["fit", "--config=elsewhere/configs/video/folder.yaml"], "the package brings it as mhla://video/folder.yaml"),
        (["validate", "--run_dir=absent"], "--run_dir=absent: the folder does not exist"),
        (["fitt"], "fitt is not a command; the commands are fit, validate, test, predict"),
        (["fit", "--config", str(DIGITS), "--model.init_args.attention.kind=mlha"], "did you mean 'mhla'"),
        (["fit", "--config", str(DIGITS), "--model.init_args.attention.block_grid=[9,4]"], "block_grid (9, 4) does not fit the token grid (8, 8)"),
        (["predict", "--config", str(DIGITS)], "predict has no weights and would draw noise"),
        (["fit", "--config", str(DIGITS), "--model.init_args.num_classes=10", "--data.class_path=mhla_tasks.classification.ImageNetShards", "--data.init_args.train=a", "--data.init_args.val=b", "--data.init_args.num_classes=7"], "model.num_classes=10 and data.num_classes=7 must be equal"),
        (["fit", "--config", str(DIGITS), "--data.init_args.batch_size=4", "--data.init_args.batch_size=8"], "--data.init_args.batch_size is given 2 times: 4, 8"),
        (["fit", "--config", str(DIGITS), "--model.init_args.attention.mixing=exponental"], "got exponental"),
        (["fit", "--config", str(DIGITS), "--model.init_args.shape.pad_to=32"], "adds more than one patch of 1 pixels to each side"),
    ],
)  # fmt: skip
def test_wrong_call(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in failing(monkeypatch, capsys, *arguments)


def test_missing_data_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs/classification/deit_t_imagenet.yaml")
    options = ("--trainer.accelerator=cpu", "--trainer.precision=32-true")
    error = failing(monkeypatch, capsys, "fit", "--config", config, *options, "--data.init_args.train=absent")
    assert "absent does not exist; give a folder of shards" in error
    config = str(ROOT / "configs/classification/folder.yaml")  # counts the classes of the training data
    error = failing(monkeypatch, capsys, "fit", "--config", config, "--data.train=absent", "--data.val=absent")
    assert "absent does not exist; give a folder" in error
    assert "num_classes" not in error


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_experiment_parses_and_builds(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    if path.stem in ("mnist_timm", "linearize_mnist"):
        cli = parse(monkeypatch, "fit", "--config", str(path))
        swapped = [m for m in cli.parser.instantiate_classes(cli.config).model.modules() if isinstance(m, Attention)]
        assert len(swapped) == (4 if path.stem == "linearize_mnist" else 0)
        return
    if path.stem.startswith("linearize"):
        cli = parse(monkeypatch, "fit", "--config", str(path))
        with pytest.raises(ValueError, match="is not a checkpoint, a folder or a model on the hub"):
            cli.parser.instantiate_classes(cli.config)
        return
    if "network:" in path.read_text():
        cli = parse(monkeypatch, "fit", "--config", str(path))
        with torch.device("meta"):
            cli.parser.instantiate_classes(cli.config)
        cli = parse(monkeypatch, "fit", "--config", str(path), "--model.init_args.attention.kind=linear")
        with pytest.raises(ValueError, match="network brings its own attention"), torch.device("meta"):
            cli.parser.instantiate_classes(cli.config)
        return
    blocks = (
        ["--model.init_args.attention.block_size=14"] if path.stem == "mnist_dig" else []
    )  # of the kind gla, without blocks
    with torch.device("meta"):
        for kind in ("mhla", "linear", "softmax"):
            arguments = [f"--model.init_args.attention.kind={kind}", *blocks, *number_of_classes(path)]
            cli = parse(monkeypatch, "fit", "--config", str(path), *arguments)
            model = cli.parser.instantiate_classes(cli.config).model
            kinds = {module.config.kind for module in model.modules() if isinstance(module, Attention)}
            own = {
                "digits_pretrain": set(),
                "mqar": {"gated_conv", "mhla"},
                "needle": {"gated_conv", "mhla"},  # layer_kinds
                **{f"{size}_imagenet": {kind, "softmax"} for size in ("vlt_t", "vlt_s", "ravlt_t")},  # later stages
            }
            assert kinds == own.get(path.stem, {kind})


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_go_over_every_experiment_and_set_no_lists(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    assert "callbacks" not in yaml.safe_load(path.read_text())["trainer"]
    for experiment in EXPERIMENTS:
        arguments = ["--config", str(experiment), "--config", str(path), *number_of_classes(experiment)]
        config = parse(monkeypatch, "fit", *arguments).config
        assert config.trainer.callbacks
        assert config.trainer.strategy != "auto" or path.stem == "slurm", "slurm.yaml comes after one of the other two"


@cache
def known_tasks() -> set[str]:
    """List all tasks of lm-eval, which takes seconds."""
    return set(TaskManager().all_tasks)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_experiment_judges_weights_by_an_older_validation(path: Path) -> None:
    for callback in yaml.safe_load(path.read_text())["trainer"]["callbacks"]:
        options = callback.get("init_args", {})
        assert not (options.get("monitor", "").startswith("val/") and "every_n_train_steps" in options)


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_evaluations_add_themselves_to_a_language_model(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    experiment = str(ROOT / "configs/language/stdlib.yaml")
    alone = parse(monkeypatch, "fit", "--config", experiment).config.trainer.callbacks
    added = parse(monkeypatch, "fit", "--config", experiment, "--config", str(path)).config.trainer.callbacks
    assert [each.class_path for each in added[:-1]] == [each.class_path for each in alone]
    assert added[-1].class_path == "mhla_tasks.language.evaluation.LMEval"
    assert set(added[-1].init_args.tasks) <= known_tasks()


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gla", 341.7), ("gated_deltanet", 362.0), ("mamba", 385.6), ("mamba2", 349.6), ("transformer", 341.1)],
)
def test_language_baselines_have_the_paper_s_sizes(monkeypatch: pytest.MonkeyPatch, name: str, millions: float) -> None:
    path = str(ROOT / f"configs/language/{name}_340m_fineweb.yaml")
    cli = parse(monkeypatch, "fit", "--config", path)
    with torch.device("meta"):
        model = cli.parser.instantiate_classes(cli.config).model
    assert sum(p.numel() for p in model.network.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_the_language_models_of_the_paper_differ_in_attention_alone() -> None:
    folder = ROOT / "configs/language"
    files = {kind: (folder / f"{kind}_340m_fineweb.yaml").read_text() for kind in ("mhla", "linear", "softmax")}
    configs = {}
    for kind, text in files.items():
        config = yaml.safe_load(text)
        assert config["model"]["init_args"]["attention"].pop("kind") == kind
        assert config["trainer"]["logger"][0]["init_args"].pop("name") == f"{kind}_340m_fineweb"
        configs[kind] = config
    assert configs["mhla"] == configs["linear"] == configs["softmax"]
    with torch.device("meta"):
        options = configs["mhla"]["model"]["init_args"]
        model = LanguageModel(**{**options, "attention": AttentionConfig(kind="mhla", **options["attention"])})
    assert sum(p.numel() for p in model.network.parameters()) / 1e6 == pytest.approx(341, abs=1)
    assert configs["mhla"]["trainer"]["max_steps"] * 128 * 2048 == pytest.approx(10e9, rel=1e-4)


def test_deit_sizes_have_the_published_numbers_of_parameters() -> None:
    for name, millions in (("tiny", 5.7), ("small", 22.0), ("base", 86.5)):
        with torch.device("meta"):
            model = ImageClassifier({"kind": "softmax"}, 1000, size=name)  # type: ignore[arg-type]
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small run on the digits by the command line, and return its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    config = yaml.safe_load(DIGITS.read_text())
    config["model"]["init_args"] = grouped(config["model"]["init_args"], dim=16, depth=2, heads=2)
    config["trainer"] |= {
        "max_epochs": 2,
        "check_val_every_n_epoch": 1,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    config["trainer"]["logger"][0]["init_args"]["save_dir"] = str(folder)
    config["trainer"]["callbacks"][2]["init_args"]["every_n_epochs"] = 1
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(patch, "fit", "--config", str(folder / "small.yaml"))
    return folder / "digits" / "version_0"


def test_a_run_leaves_checkpoint_configuration_curves_and_pictures(trained: Path) -> None:
    for name in (
        "config.yaml",
        "checkpoints/last.ckpt",
        "checkpoints/learning_curves.png",
        "pictures/mixing-step0000044.png",
        "pictures/attention-step0000022.png",
    ):
        assert (trained / name).is_file(), f"{name} is missing"
    for picture in trained.rglob("*.png"):
        with Image.open(picture) as image:
            assert min(image.size) > 200
            assert len(image.convert("L").getcolors() or [0] * 9) > 8, f"{picture.name} is blank"


def test_a_checkpoint_needs_no_code_to_be_read(trained: Path) -> None:
    content = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)
    assert all(
        isinstance(value, dict)
        for value in (content["hyper_parameters"]["training"]["optimizer"], content["hyper_parameters"]["mixup"])
    )
    assert content["hyper_parameters"]["attention"]["kind"] == "mhla"
    model = ImageClassifier.load_from_checkpoint(trained / "checkpoints/last.ckpt", weights_only=True)
    assert model.network.backbone.blocks[0].attn.mixing.weight.shape == (16, 16)


def test_precedence_command_line_then_file_then_checkpoint(
    monkeypatch: pytest.MonkeyPatch, trained: Path, tmp_path: Path
) -> None:
    checkpoint = f"--ckpt_path={trained / 'checkpoints/last.ckpt'}"
    remembered = parse(monkeypatch, "validate", checkpoint).config.model.init_args
    assert (remembered.shape.dim, remembered.drop_path, remembered.training.optimizer.lr) == (16, 0.1, 2e-3)
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: {init_args: {drop_path: 0.3, training: {optimizer: {lr: 0.5}}}}")
    config = parse(
        monkeypatch, "fit", "--config", str(mine), checkpoint, "--model.init_args.training.optimizer.lr=0.77"
    ).config
    assert (config.model.init_args.shape.dim, config.model.init_args.drop_path) == (16, 0.3)
    assert config.model.init_args.training.optimizer.lr == 0.77, "the checkpoint or the file beat the command line"
    assert config.data.init_args.batch_size == 64


@pytest.mark.parametrize("words", [["--data={}"], ["--data.class_path={}"], ["--data", "{{class_path: {}}}"]])
def test_options_of_another_class_are_not_remembered(
    words: list[str], monkeypatch: pytest.MonkeyPatch, trained: Path
) -> None:
    checkpoint = f"--ckpt_path={trained / 'checkpoints/last.ckpt'}"

    def batch_size(name: str, *more: str) -> int:
        arguments = [*(word.format(name) for word in words), *more]
        return parse(monkeypatch, "validate", checkpoint, *arguments).config.data.init_args.batch_size

    same = "mhla_tasks.classification.Digits"
    assert (batch_size(same), batch_size("Digits")) == (64, 64)
    assert batch_size("mhla_tasks.classification.ImageNetShards", "--data.train=a.tar", "--data.val=b.tar") == 1024


def test_how_a_checkpoint_is_read_is_not_reported_wrongly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trained: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "validate", f"--ckpt_path={trained / 'checkpoints/last.ckpt'}", "--trainer.accelerator=cpu")
    assert not [message for message in caplog.messages if "weights_only" in message]
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").info("something else")
    assert "something else" in caplog.messages


def test_checkpoint_of_another_attention_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = f"--ckpt_path={trained / 'checkpoints/last.ckpt'}"
    error = failing(monkeypatch, capsys, "validate", checkpoint, "--model.init_args.attention.kind=linear")
    assert "trained with attention kind 'mhla', this run asks for 'linear'" in error
    error = failing(monkeypatch, capsys, "validate", checkpoint, "--model.init_args.shape.dim=32")
    assert "a model with different sizes" in error


def test_predict_writes_a_table(monkeypatch: pytest.MonkeyPatch, trained: Path, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    images, _ = load_digits(train=False)
    (tmp_path / "photos").mkdir()
    for i in range(5):
        Image.fromarray((images[i, 0].numpy() * 255).astype("uint8")).resize((40, 40), 0).save(f"photos/{i}.png")
    model = ImageClassifier.load_from_checkpoint(trained / "checkpoints/last.ckpt", weights_only=True).eval()
    content = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)
    content["state_dict"]["network.head.weight"] *= 100  # a model so sure of itself that no two images look alike to it
    torch.save(content, tmp_path / "sure.ckpt")
    model.network.head.weight.data *= 100
    checkpoint = f"--ckpt_path={tmp_path / 'sure.ckpt'}"
    run(monkeypatch, "predict", checkpoint, "--data.init_args.predict_dir=photos", "--trainer.accelerator=cpu")
    (table,) = tmp_path.rglob("predictions.csv")
    with table.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [Path(row["path"]).name for row in rows] == [f"{i}.png" for i in range(5)]
    with torch.no_grad():
        want = model((images[:5] * 255).byte() / 255).softmax(-1)
    got = torch.tensor([[float(row[str(c)]) for c in range(10)] for row in rows])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert torch.cdist(want, want)[~torch.eye(5, dtype=torch.bool)].min() > 1e-3, "predictions alike prove nothing"
    assert [row["predicted"] for row in rows] == [str(int(i)) for i in got.argmax(-1)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainer.profiler={class_path: SimpleProfiler}"],
        ["--trainer.plugins=[{class_path: SLURMEnvironment}]"],
        ["--trainer.callbacks+=LearningRateMonitor"],
        ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x"],
        ["--model.drop_path=0.2"],
        ["--print_config"],
    ],
    ids=lambda arguments: arguments[0][:25],
)
def test_right_keys_pass(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    if arguments[0] == "--print_config":
        with pytest.raises(SystemExit) as stop:
            parse(monkeypatch, "fit", *arguments, "--config", str(DIGITS))
        assert stop.value.code == 0
    else:
        parse(monkeypatch, "fit", "--config", str(DIGITS), *arguments)


@pytest.mark.parametrize("flags", ["", "=skip_default", "=skip_unset"])
def test_the_configuration_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(
            monkeypatch,
            "fit",
            "--config",
            str(DIGITS),
            "--model.shape.depth=3",
            f"--print_config{flags}",
            "--trainer.max_epochs=7",
        )
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["model"]["init_args"]["shape"]["depth"], printed["trainer"]["max_epochs"]) == (3, 7)
    assert ("barebones" in printed["trainer"]) == (flags != "=skip_default")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainer.strategy=lightning.pytorch.strategies.DDPStrategy"],
        ["--trainer.strategy", "lightning.pytorch.strategies.DDPStrategy"],
        ["--trainer.strategy=DDPStrategy"],
        ["--trainer.strategy={class_path: DDPStrategy}"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_strategy_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    config = parse(
        monkeypatch, "fit", "--config", str(DIGITS), *arguments, "--trainer.strategy.find_unused_parameters=true"
    ).config.trainer.strategy
    assert config.class_path == "lightning.pytorch.strategies.DDPStrategy"
    assert config.init_args.find_unused_parameters


@pytest.mark.parametrize("words", [["--trainer.strategy"], ["--trainer.strategy", "--trainer.devices=2"]], ids=len)
def test_an_option_without_a_value_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    error = failing(monkeypatch, capsys, "fit", "--config", str(DIGITS), *words)
    assert "--trainer.strategy needs a value: --trainer.strategy=VALUE" in error


def test_a_strategy_in_a_file_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text(
        "trainer: {accelerator: cpu, strategy: lightning.pytorch.strategies.DDPStrategy, fast_dev_run: true}\n"
    )
    words = ["fit", "--config", str(DIGITS), "--config", str(path)]
    assert type(build(make_plan(read_words(words, LIGHTNING))).trainer.strategy).__name__ == "DDPStrategy"


@pytest.mark.parametrize("form", ["--config={}", "--config {}", "-c {}"])
def test_options_may_stand_where_a_file_could(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Also where they are longer than the name of a file may be."""
    monitors = [{"class_path": "LearningRateMonitor", "init_args": {"logging_interval": "step"}}] * 8
    text = json.dumps({"trainer": {"max_steps": 7, "callbacks": monitors}})
    assert len(text) > 255
    words = [word.format(text) if "{}" in word else word for word in form.split(" ")]
    config = parse(monkeypatch, "fit", "--config", str(DIGITS), *words).config
    assert config.trainer.max_steps == 7
    assert len(config.trainer.callbacks) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{trainer: {max_stepz: 3}}", "trainer.max_stepz is not an option of the trainer; did you mean trainer.max_steps?"),
        ("{trainer: [}", "line 1, column 12"),
        ("{a: &a [*a]}", "refers to itself"),
        ("{a: " + "[" * 60 + "]" * 60 + "}", "nested more than 50 deep"),
    ],
)  # fmt: skip
def test_wrong_options_where_a_file_could_stand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    said = failing(monkeypatch, capsys, "fit", "--config", str(DIGITS), "--config", text)
    assert said.startswith("error: --config {")
    assert message in said


def test_a_class_may_be_named_by_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text("class_path: mhla_tasks.classification.Digits\ninit_args: {batch_size: 7}\n")
    config = parse(monkeypatch, "fit", "--config", str(DIGITS), f"--data={tmp_path / 'digits.yaml'}").config
    assert config.data.init_args.batch_size == 7


def test_a_file_may_keep_options_under_the_subcommand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full = tmp_path / "full.yaml"
    full.write_text(yaml.safe_dump({"fit": yaml.safe_load(DIGITS.read_text())}))
    assert parse(monkeypatch, "--config", str(full), "fit").config.model.init_args.shape.dim == 64


def test_a_checkpoint_lends_nothing_to_another_class(monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    config = str(ROOT / "configs/classification/deit_t_imagenet.yaml")
    checkpoint = f"--ckpt_path={trained / 'checkpoints/last.ckpt'}"
    data = parse(monkeypatch, "validate", "--config", config, checkpoint).config.data
    assert (data.class_path, data.init_args.batch_size) == ("mhla_tasks.classification.ImageNetShards", 1024)
    assert data.init_args.augment.auto_augment == "rand-m9-mstd0.5-inc1"


def test_checkpoints_are_read_without_running_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert parse(monkeypatch, "fit", "--config", str(DIGITS)).config.weights_only is True
    (tmp_path / "bad.ckpt").write_bytes(b"no checkpoint")
    torch.save({"hyper_parameters": Path("x")}, tmp_path / "code.ckpt")
    monkeypatch.undo()
    for name in ("bad.ckpt", "code.ckpt"):
        error = failing(monkeypatch, capsys, "validate", f"--ckpt_path={tmp_path / name}")
        assert "is not a checkpoint that can be read safely" in error
    for command in (["validate"], ["fit", "--config", str(DIGITS)]):
        error = failing(monkeypatch, capsys, *command, "--ckpt_path=absent/last.ckpt")
        assert "ckpt_path absent/last.ckpt does not exist" in error


def test_optimizer_options_that_would_drop_the_clip_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "optimizer" in failing(monkeypatch, capsys, "fit", "--config", str(DIGITS), "--optimizer=SGD")


@pytest.mark.parametrize("bar", ["", "RichProgressBar", "TQDMProgressBar"])
def test_nothing_is_printed_below_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, bar: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [
        "--model.shape.dim=16",
        "--model.shape.depth=1",
        "--model.shape.heads=2",
        "--trainer.max_steps=2",
        "--trainer.accelerator=cpu",
    ]
    run(monkeypatch, "fit", "--config", str(DIGITS), *options, *([f"--trainer.callbacks+={bar}"] if bar else []))
    above, _, below = capsys.readouterr().out.partition("─ result ─")
    assert "Epoch 0" in above
    assert "Epoch 0" not in below


def test_help_documents_every_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "fit", "--model.help", "mhla_tasks.classification.ImageClassifier")
    text = " ".join(capsys.readouterr().out.split())
    for option, said in (
        ("attention.kind", "mhla (mixed block summaries)"),
        ("attention.block_grid", "number of blocks along each axis"),
        ("mixup.cutmix", "0 disables cutmix"),
        ("drop_path", "stochastic depth"),
        ("shape.stem", "one convolution"),
        ("training.optimizer.warmup_epochs", "length of the linear warm-up in epochs"),
        ("training.ema_decay", "moving average"),
    ):
        assert f"--model.{option}" in text, f"{option} is missing"
        assert said in text, f"{option} is not explained"
