"""Options of models by the names of the release before: files, typed options, sweeps, checkpoints, run folders and Python."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fork_server import ForkServer
from mhla_tasks.classification import ImageClassifier, VisionShape
from mhla_tasks.commandline.arguments import UsageError, read_words
from mhla_tasks.commandline.moved_keys import notice, present_word
from mhla_tasks.commandline.parser import main
from mhla_tasks.commandline.plan import Plan, make_plan
from mhla_tasks.commandline.registry import LIGHTNING
from mhla_tasks.language import LanguageModel, LinearizedModel
from mhla_tasks.tools.comparison.runs import differences, read_runs
from mhla_tasks.tools.export import load_trained

from lightning_mhla import AttentionConfig
from lightning_mhla.checkpoints.former_names import present_options
from lightning_mhla.checkpoints.io import resolve_checkpoint
from lightning_mhla.training import OptimizerConfig, TrainingOptions

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs/classification/digits.yaml"
CONFIGS = (
    "classification/digits", "classification/mnist_timm", "classification/linearize_mnist", "classification/vlt_t_imagenet",
    "diffusion/digits", "language/stdlib", "language/linearize_stdlib", "text_to_image/digits_pretrain", "video/digits_pretrain",
)  # fmt: skip
"""One configuration of each class of models."""
SMALL = ["--model.dim=16", "--model.heads=2", "--model.depth=1", "--trainer.accelerator=cpu", "--trainer.callbacks=[]",
         "--trainer.logger=CSVLogger", "--trainer.log_every_n_steps=1", "--trainer.enable_progress_bar=false",
         "--trainer.limit_val_batches=1", "--trainer.max_epochs=-1"]  # fmt: skip
"""A short run of the digits, by former names."""


def former(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a model without groups, as the release before named them."""
    plain = {name: value for name, value in arguments.items() if name not in ("shape", "training")}
    return {**plain, **(arguments.get("shape") or {}), **(arguments.get("training") or {})}


def former_file(config: Path, path: Path) -> str:
    content = yaml.safe_load(config.read_text())
    content["model"]["init_args"] = former(content["model"]["init_args"])
    path.write_text(yaml.safe_dump(content))
    return str(path)


def former_run(run: Path) -> None:
    """Rewrite a run's configuration and checkpoints as the release before wrote them."""
    former_file(run / "config.yaml", run / "config.yaml")
    for path in {path.resolve() for path in (run / "checkpoints").rglob("*.ckpt")}:
        content = torch.load(path, weights_only=True)
        content["hyper_parameters"] = former(content["hyper_parameters"])
        path.unlink()  # another name of the file keeps its content
        torch.save(content, path)


def plan(*words: str) -> Plan:
    return make_plan(read_words(["fit", *words], LIGHTNING))


def losses(run: Path) -> dict[int, str]:
    rows = [row for path in run.glob("metrics*.csv") for row in csv.DictReader(path.open())]
    return {int(row["step"]): row["train/loss"] for row in rows if row.get("train/loss")}


@pytest.fixture(scope="module")
def trained(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps by present names."""
    folder = tmp_path_factory.mktemp("trained")
    present = [present_word(word) for word in SMALL]
    status, text = server.run(
        "fit", "--config", str(DIGITS), *present, "--run_dir=run", "--trainer.max_steps=4", folder=folder
    )
    assert status == 0, text[-3000:]
    assert "is now" not in text
    return folder / "run"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_may_use_the_names_of_the_release_before(name: str, tmp_path: Path) -> None:
    config = ROOT / f"configs/{name}.yaml"
    old = plan("--config", former_file(config, tmp_path / "old.yaml"))
    assert old.configuration == plan("--config", str(config)).configuration
    message = notice(old.moves)
    assert "model.optimizer is now model.training.optimizer" in message
    assert message.endswith(f"(from {tmp_path / 'old.yaml'}); the next release will reject the former names")


def test_a_run_by_former_names_is_the_same_run_with_one_message(
    server: ForkServer, trained: Path, tmp_path: Path
) -> None:
    config = former_file(DIGITS, tmp_path / "old.yaml")
    words = ["fit", "--config", config, *SMALL, "--model.optimizer.lr=2e-3", "--run_dir=run"]
    status, text = server.run(*words, "--trainer.max_steps=4", folder=tmp_path)
    assert status == 0, text[-3000:]
    assert losses(tmp_path / "run") == losses(trained)
    said = " ".join(text.split())
    assert said.count("is now model.training.optimizer") == 1
    assert "model.dim is now model.shape.dim" in said
    assert "the command line" in said
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]["init_args"]
    assert (written["shape"]["dim"], written["training"]["optimizer"]["lr"]) == (16, 2e-3)
    assert not {"dim", "depth", "optimizer", "ema_decay", "compile"} & written.keys()


def test_a_run_of_the_release_before_resumes_and_names_changed_options(
    server: ForkServer, trained: Path, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(trained, tmp_path / "new")
    shutil.copytree(trained, tmp_path / "old")
    former_run(tmp_path / "old")
    for name in ("new", "old"):
        status, text = server.run("fit", f"--run_dir={name}", "--trainer.max_steps=6", folder=tmp_path)
        assert status == 0, text[-3000:]
        assert "another option" not in text, "only names have changed"
        assert ("is now" in text) == (name == "old")
    assert sorted(losses(tmp_path / "old")) == list(range(6))
    assert losses(tmp_path / "old") == losses(tmp_path / "new")
    former_run(tmp_path / "old")
    status, text = server.run(
        "fit",
        "--run_dir=old",
        "--trainer.max_steps=7",
        "--model.ema_decay=0.5",
        "--model.optimizer.lr=1e-3",
        folder=tmp_path,
    )
    assert status == 0, text[-3000:]
    said = " ".join(text.split())
    assert "resumed with a changed option: model.training.ema_decay 0.99 -> 0.5" in said
    assert "model.training.optimizer.lr 0.002 -> 0.001" in said


def test_a_checkpoint_of_the_release_before_loads_in_python_and_tools(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = torch.load(resolve_checkpoint(trained), weights_only=True)
    content["hyper_parameters"] = former(content["hyper_parameters"])
    torch.save(content, tmp_path / "old.ckpt")
    for model in (
        ImageClassifier.load_from_checkpoint(tmp_path / "old.ckpt", weights_only=True),
        ImageClassifier.load_from_checkpoint(str(tmp_path / "old.ckpt"), map_location="cpu", weights_only=True),
        load_trained(tmp_path / "old.ckpt"),
    ):
        assert isinstance(model, ImageClassifier)
        assert (model.training_options.ema_decay, model.optimizer_config.warmup_epochs) == (0.99, 2)
        assert model.hparams["shape"]["stem"] == "conv"
        assert torch.equal(model.state_dict()["network.head.weight"], content["state_dict"]["network.head.weight"])
    messages = [text for text in caplog.messages if "model.ema_decay is now model.training.ema_decay" in text]
    assert len(messages) == 3, "one for each load"
    assert all(text.endswith(f"(from {tmp_path / 'old.ckpt'})") for text in messages)
    options = TrainingOptions(OptimizerConfig(lr=7.0))
    other = ImageClassifier.load_from_checkpoint(tmp_path / "old.ckpt", weights_only=True, training=options)
    assert other.lr == 7.0
    with pytest.raises(TypeError, match="takes ema_decay as an option of training"):
        ImageClassifier.load_from_checkpoint(tmp_path / "old.ckpt", weights_only=True, ema_decay=0.5)
    main(["validate", f"--ckpt_path={tmp_path / 'old.ckpt'}", "--trainer.accelerator=cpu"])


def test_a_sweep_may_use_a_former_name(server: ForkServer, tmp_path: Path) -> None:
    def sweep(key: str) -> str:
        words = ["fit", "--config", str(DIGITS), *SMALL[3:-1], f"--sweep={key}=1e-3,2e-3", "--run_dir=runs",
                 "--trainer.max_steps=1", "--trainer.callbacks=[lightning_mhla.callbacks.RunReport]"]  # fmt: skip
        status, text = server.run(*words, folder=tmp_path, module="mhla_tasks")
        assert status == 0, text[-3000:]
        return text

    assert "finished before" not in sweep("model.optimizer.lr")
    for rate in ("1e-3", "2e-3"):
        config = yaml.safe_load((tmp_path / f"runs/lr={rate}/config.yaml").read_text())
        assert config["model"]["init_args"]["training"]["optimizer"]["lr"] == float(rate)
        assert "model.optimizer is now" in " ".join((tmp_path / f"runs/lr={rate}/output.txt").read_text().split())
    assert sweep("model.training.optimizer.lr").count("finished before") == 2, "it is the same option"


@pytest.mark.parametrize(
    ("words", "new", "old"),
    [
        (["--model.optimizer.lr=1", "--model.training.optimizer.lr=2"], "model.training.optimizer", "model.optimizer"),
        (["--model.shape={dim: 8}", "--model.init_args.dim=8"], "model.shape.dim", "model.dim"),
        ({"ema_decay": 0.5, "training": {"ema_decay": 0.9}}, "model.training.ema_decay", "model.ema_decay"),
        ({"init_args": {"training": {"compile": True}}, "compile": True}, "model.training.compile", "model.compile"),
    ],
    ids=str,
)
def test_an_option_by_both_names_is_an_error(words: Any, new: str, old: str, tmp_path: Path) -> None:
    origin = "the command line"
    if isinstance(words, dict):
        (tmp_path / "both.yaml").write_text(yaml.safe_dump({"model": words}))
        origin, words = str(tmp_path / "both.yaml"), ["--config", str(tmp_path / "both.yaml")]
    with pytest.raises(UsageError) as error:
        plan("--config", str(DIGITS), *words)
    assert str(error.value) == f"{origin} gives {new} also by its former name, {old}; leave {old} out"


def test_a_stronger_source_wins_by_whichever_name(tmp_path: Path) -> None:
    old = former_file(DIGITS, tmp_path / "old.yaml")
    for typed in ("--model.depth=7", "--model.shape.depth=7"):
        for config in (old, str(DIGITS)):
            shape = plan("--config", config, typed).configuration["model"]["init_args"]["shape"]
            assert (str(shape["depth"]), shape["heads"]) == ("7", 4)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (ImageClassifier, {"ema_decay": 0.9}, "ImageClassifier takes ema_decay as an option of training: training=TrainingOptions(ema_decay=...)"),
        (ImageClassifier, {"dim": 8, "depth": 1}, "ImageClassifier takes dim as an option of shape: shape=VisionShape(dim=...)"),
        (LanguageModel, {"mlp_width": 8}, "LanguageModel takes mlp_width as an option of shape: shape=DecoderShape(mlp_width=...)"),
        (LinearizedModel, {"optimizer": None}, "LinearizedModel takes optimizer as an option of training: training=TrainingOptions(optimizer=...)"),
    ],
)  # fmt: skip
def test_python_says_where_an_option_is(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as error:
        kind(AttentionConfig(), **arguments)
    assert str(error.value) == message


class Wide(ImageClassifier):
    """A module of a user, with an option of its own."""

    def __init__(self, attention: AttentionConfig, extra: int = 1, **options: Any) -> None:
        super().__init__(attention, **options)
        self.extra = extra


def test_modules_of_users_that_pass_options_on_take_former_names() -> None:
    found = present_options("model", Wide, {"extra": 2, "dim": 8, "optimizer": {"lr": 1.0}})
    assert found == {"extra": 2, "shape": {"dim": 8}, "training": {"optimizer": {"lr": 1.0}}}
    shape = VisionShape(dim=8, depth=1, heads=1, patch_size=2)
    assert Wide({"kind": "linear"}, num_classes=2, image_size=8, shape=shape).extra == 1  # type: ignore[arg-type]


def test_comparisons_see_one_option(trained: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((trained / "config.yaml").read_text())
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(
            json.dumps({"metrics": {}, "seconds": 1, "steps": 1, "parameters": 1, "finished": True})
        )
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(content))
    former_file(tmp_path / "old/config.yaml", tmp_path / "old/config.yaml")
    assert differences(read_runs([tmp_path])) == []


def test_options_of_the_training_are_checked() -> None:
    for wrong, message in (
        ({"ema_decay": 1.0}, "ema_decay=1.0 must lie between 0 and 1"),
        ({"ema_batch": 0}, "ema_batch=0 must be a number of samples"),
        ({"optimizer": {"lr": -1.0}}, "lr=-1.0 must be at least 0"),
        ({"optimiser": {}}, "training has no option 'optimiser'; did you mean 'optimizer'"),
        ({"compile_options": {"mod": "a"}}, "training.compile_options has no option 'mod'"),
    ):
        with pytest.raises(ValueError, match=message):
            LanguageModel(training=wrong)  # type: ignore[arg-type]


def test_the_message_of_a_resume_is_silent_on_present_names(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mhla_tasks"):
        main(["validate", f"--ckpt_path={resolve_checkpoint(trained)}", "--trainer.accelerator=cpu"])
    assert "is now" not in caplog.text
