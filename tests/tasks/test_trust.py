"""Classes that a configuration and a checkpoint may name, tested by command lines of users."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentError
from jsonargparse._common import parsing_settings
from lightning import Callback, LightningModule
from lightning.pytorch.cli import instantiate_module
from mhla_tasks.captioned.text import TextConfig, make_encoder
from mhla_tasks.commandline.parser import main
from mhla_tasks.commandline.trust import allow_imports
from transformers import PretrainedConfig

from lightning_mhla import CrossAttentionConfig

DIGITS = Path(__file__).parents[2] / "configs/classification/digits.yaml"
RUN = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"]


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Module that leaves a mark when it is imported."""
    mark = tmp_path / "imported"
    (tmp_path / "evilmod.py").write_text(
        f"from pathlib import Path; Path({str(mark)!r}).touch()\nfrom lightning import Callback\nclass X(Callback): ..."
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evilmod", raising=False)
    monkeypatch.setitem(parsing_settings, "import_path_verdicts", {})  # what one process has allowed stays allowed
    return mark


def failing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr("sys.argv", ["lightning", *words])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "overlay",
    [
        {"model": {"class_path": "evilmod.X"}},
        {"data": {"class_path": "evilmod.X"}},
        {"trainer": {"callbacks": [{"class_path": "evilmod.X"}]}},
        {"trainer": {"callbacks": [{"class_path": "LambdaCallback", "init_args": {"on_fit_start": "evilmod.X"}}]}},
        {"trainer": {"logger": [{"class_path": "evilmod.X"}]}},
        {"trainer": {"plugins": [{"class_path": "evilmod.X"}]}},
        {"trainer": {"strategy": {"class_path": "evilmod.X"}}},
        {"trainer": {"profiler": {"class_path": "evilmod.X"}}},
    ],
    ids=lambda overlay: str(overlay)[:40],
)
def test_classes_of_other_packages_are_refused_and_not_imported(
    evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, overlay: object
) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text(yaml.safe_dump(overlay))
    said = failing(capsys, monkeypatch, "fit", "--config", str(DIGITS), "--config", str(path), *RUN)
    assert "evilmod" in said
    assert "--allow=evilmod" in said
    assert not evil.exists()


@pytest.mark.parametrize("name", ["os.system", "subprocess.Popen", "builtins.eval"])
def test_functions_of_the_system_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "overlay.yaml"
    callback = {"class_path": "LambdaCallback", "init_args": {"on_fit_start": name}}
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    said = failing(capsys, monkeypatch, "fit", "--config", str(DIGITS), "--config", str(path), *RUN)
    assert f"--allow={name.split('.')[0]}" in said


def test_what_the_command_line_allows_is_imported(evil: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": [{"class_path": "evilmod.X"}]}}))
    words = ["fit", "--config", str(DIGITS), "--config", str(path), "--allow=evilmod", *RUN]
    monkeypatch.setattr("sys.argv", ["lightning", *words])
    main()
    assert evil.exists()


def test_a_class_that_is_typed_is_allowed(evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["lightning", "fit", "--config", str(DIGITS), "--trainer.callbacks+=evilmod.X", *RUN]
    )
    main()
    assert evil.exists()


def test_a_file_allows_nothing(
    evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text(yaml.safe_dump({"allow": ["evilmod"], "trainer": {"callbacks": [{"class_path": "evilmod.X"}]}}))
    said = failing(capsys, monkeypatch, "fit", "--config", str(DIGITS), "--config", str(path), *RUN)
    assert "overlay.yaml: allow works only on the command line: --allow=evilmod" in said
    assert not evil.exists()


def test_a_checkpoint_names_no_other_class(
    evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"state_dict": {}, "hyper_parameters": {"_class_path": "evilmod.X", "a": 1}}
    torch.save(content, tmp_path / "a.ckpt")
    said = failing(capsys, monkeypatch, "validate", f"--ckpt_path={tmp_path / 'a.ckpt'}", *RUN)
    assert "was trained with the class evilmod.X" in said
    assert not evil.exists()
    torch.save({"state_dict": {}, "hyper_parameters": {1: 2}}, tmp_path / "b.ckpt")
    assert "must be a mapping with text keys" in failing(
        capsys, monkeypatch, "validate", f"--ckpt_path={tmp_path / 'b.ckpt'}", *RUN
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# caf\xe9\n", "is not text in UTF-8"),
        (b"trainer: " + b"[" * 5000 + b"]" * 5000, "nested more than 50 deep"),
        (b"# x\n" * 500_000, "is too large for a configuration"),
        (b"a: !!python/object/apply:os.system [touch x]", "could not determine a constructor"),
        (b"{1: 2}", "1 is not an option"),
        (b"model: {class_path: ..x}", "is not the name of a class"),
        (b"model: {class_path: " + b"a." * 50_000 + b"b}", "is not the name of a class"),
    ],
    ids=["encoding", "deep", "large", "python tag", "number as key", "dots", "many dots"],
)
def test_files_that_are_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_bytes(content)
    said = failing(capsys, monkeypatch, "fit", "--config", str(DIGITS), "--config", str(path), *RUN)
    assert message in said
    assert len(said) < 2500


def test_a_device_is_no_configuration(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not a regular file" in failing(capsys, monkeypatch, "fit", "--config", os.devnull, *RUN)


@fuzz(25)
@given(text=st.text(alphabet="modelatrinr:_[]{}&*!\n \"'x1.", max_size=60))
def test_fuzzed_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Whatever an overlay contains, it is rejected with a message, or the run trains the digits."""
    path = tmp_path / "fuzzed.yaml"
    path.write_text(text)
    words = ["fit", "--config", str(DIGITS), "--config", str(path), "--print_config"]
    monkeypatch.setattr("sys.argv", ["lightning", *words])
    with pytest.raises(SystemExit):
        main()


COMMAND = {"class_path": "mhla_tasks.tools.sweep._wait", "init_args": {"command": ["touch", "ran"], "environment": {}}}
"""A function of the suite that runs a command."""


def callback(**options: object) -> dict[str, object]:
    return {"trainer": {"callbacks": [{"class_path": "LambdaCallback", "init_args": options}]}}


def timm_model(value: object) -> dict[str, object]:
    options = {"model": "vit_tiny_patch16_224", "num_classes": 10, "model_args": {"x": value}}
    return {"model": {"class_path": "mhla_tasks.classification.TimmClassifier", "init_args": options}}


ATTACKS = {
    "function in a callback": callback(on_fit_start=COMMAND),
    "function by name": callback(on_fit_start="mhla_tasks.tools.sweep.run"),
    "function behind a module": callback(on_fit_start="lightning.pytorch.trainer.trainer.os.system"),
    "method of an allowed class": callback(on_fit_start="lightning.pytorch.callbacks.LambdaCallback.on_fit_start"),
    "function in a mapping": timm_model(COMMAND),
    "function deep in a mapping": timm_model({"y": [{"z": COMMAND}]}),
    "class in a mapping": timm_model({"class_path": "lightning_mhla.checkpoints.runs.RunFolder", "init_args": {"path": "x"}}),
    "import in a mapping": timm_model({"class_path": "mhla_tasks.commandline.user_modules.import_own", "init_args": {"names": ["evilmod"]}}),
    "pickle in a mapping": timm_model({"class_path": "lightning.fabric.utilities.cloud_io._load", "init_args": {"path_or_url": "x"}}),
    "metric": callback(on_fit_start={"class_path": "torchmetrics.image.fid.FrechetInceptionDistance", "init_args": {"feature": 64}}),
    "metric in an average": {"trainer": {"callbacks": [{
        "class_path": "lightning.pytorch.callbacks.StochasticWeightAveraging",
        "init_args": {"swa_lrs": 0.1, "avg_fn": {"class_path": "torchmetrics.image.inception.InceptionScore"}},
    }]}},
    "function as a callback": {"trainer": {"callbacks": [COMMAND]}},
    "consolidate as a logger": {"trainer": {"logger": {"class_path": "mhla_tasks.tools.export.load_trained", "init_args": {"checkpoint": "x"}}}},
    "run folder as data": {"data": {"class_path": "lightning_mhla.checkpoints.runs.RunFolder", "init_args": {"path": "x"}}},
    "callback as a model": {"model": {"class_path": "lightning.pytorch.callbacks.Timer"}},
    "command line as a model": {"model": {"class_path": "mhla_tasks.commandline.parser.SuiteCLI"}},
    "checkpoint reader as a plugin": {"trainer": {"plugins": [{"class_path": "mhla_tasks.tools.sweep._wait"}]}},
    "class under a number": {"trainer": {"max_steps": {"class_path": "lightning_mhla.checkpoints.runs.RunFolder"}}},
    "class beside the options": {"seed_everything": COMMAND},
    "model configuration that is none": timm_model({"class_path": "transformers.AutoConfig", "init_args": {"x": 1}}),
    "unpickling": {"weights_only": False},
    "unpickling of a sharded checkpoint": {"trainer": {"strategy": "fsdp", "accelerator": "cpu"}},
    "unpickling by a class": {"trainer": {"strategy": {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}}},
    "unpickling in the background": {"trainer": {"plugins": [{"class_path": "lightning.pytorch.plugins.io.AsyncCheckpointIO"}]}},
    "unpickling by a plugin": {"trainer": {"plugins": [{"class_path": "lightning.pytorch.plugins.io.XLACheckpointIO"}]}},
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_files_run_nothing(
    evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "overlay.yaml"
    path.write_text(yaml.safe_dump(ATTACKS[name]))
    said = failing(capsys, monkeypatch, "fit", "--config", str(DIGITS), "--config", str(path), *RUN)
    assert said.startswith("error: ")
    assert (len(said.splitlines()) == 2 and f"{path}: " in said) or name.startswith("unpickling")
    assert not evil.exists()
    assert {file.name for file in tmp_path.iterdir()} <= {"overlay.yaml", "evilmod.py", "__pycache__"}


TIMM = "mhla_tasks.classification.TimmClassifier"
MONITOR = {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor", "init_args": {"logging_interval": "step"}}
TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "class": (MONITOR, "a class is not accepted here"),
    "class in a list": ([MONITOR], "a class is not accepted here"),  # type: ignore[dict-item]
    "class in a text in a text": ({"a": json.dumps(MONITOR)}, "a class is not accepted here"),
    "method of a configuration": ({"class_path": "transformers.PretrainedConfig.from_pretrained"}, "a class is not accepted here"),
    "base of configurations": ({"class_path": "transformers.PretrainedConfig"}, "is not a configuration of transformers"),
    "method of the data": ({"class_path": f"{TIMM}.load_from_checkpoint", "init_args": {"checkpoint_path": "e.ckpt"}}, "a class is not accepted here"),
    "method of a plugin": ({"class_path": "lightning.pytorch.plugins.io.TorchCheckpointIO.load_checkpoint"}, "a class is not accepted here"),
    "module": ({"class_path": "evilmod.X"}, "a class is not accepted here"),
}  # fmt: skip


@pytest.mark.parametrize("place", ["file", "typed", "checkpoint"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_means_a_class_is_checked_as_the_class(
    evil: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    name: str,
) -> None:
    """The parser reads texts under options that take any value as YAML."""
    monkeypatch.chdir(tmp_path)
    value, message = TEXTS[name]
    arguments = {"model": "vit_tiny_patch16_224", "num_classes": 10, "image_size": 8, "channels": 1}
    model = {"class_path": TIMM, "init_args": {**arguments, "model_args": {"x": json.dumps(value)}}}
    data = {"class_path": "mhla_tasks.classification.Digits"}
    typed = ["--data.batch_size=8"]
    if place == "checkpoint":
        memory = {"_class_path": TIMM, **model["init_args"]}
        content = {"state_dict": {}, "hyper_parameters": memory, "global_step": 1, "epoch": 0}
        torch.save({**content, "datamodule_hyper_parameters": {"_class_path": data["class_path"]}}, "a.ckpt")
        words = ["validate", "--ckpt_path=a.ckpt"]
    else:
        if place == "typed":
            del model["init_args"]["model_args"]
            typed.append(f"--model.model_args.x={json.dumps(value)}")
        (tmp_path / "a.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
        words = ["fit", "--config=a.yaml"]
    said = failing(capsys, monkeypatch, *words, *typed, *RUN)
    assert message in said.splitlines()[0]
    assert "model_args.x" in said
    assert not evil.exists()


@pytest.mark.parametrize("option", ["callbacks", "logger", "strategy", "profiler", "plugins"])
@pytest.mark.parametrize("kind", ["text", "json", "fifo"])
def test_no_other_file_is_read_in_the_place_of_a_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "fifo":
        os.mkfifo("other.txt")
    else:
        (tmp_path / "other.txt").write_text("precious" if kind == "text" else json.dumps({"class_path": "Timer"}))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"trainer": {option: "other.txt"}}))
    said = failing(capsys, monkeypatch, "fit", "--config", str(DIGITS), "--config=a.yaml", *RUN)
    assert f"a.yaml: trainer.{option}: other.txt is a file; options are read from files that end in .yaml" in said
    assert "precious" not in said


@pytest.mark.parametrize("value", [False, "false", "no", "False", 0])
def test_checkpoints_are_never_unpickled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"weights_only": value}))
    for words in (["--config", str(tmp_path / "a.yaml")], [f"--weights_only={value}"]):
        said = failing(capsys, monkeypatch, "fit", "--config", str(DIGITS), *words, *RUN)
        assert "checkpoints are read as plain data" in said


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize(
    "name", ["function in a mapping", "function deep in a mapping", "pickle in a mapping", "class in a mapping"]
)
def test_checkpoints_run_nothing(
    evil: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ATTACKS[name]["model"]
    assert isinstance(model, dict)
    memory = {"_class_path": model["class_path"], **model["init_args"], "image_size": 28}
    content = {"state_dict": {}, "hyper_parameters": memory, "global_step": 1, "epoch": 0}
    torch.save({**content, "datamodule_hyper_parameters": {"_class_path": "mhla_tasks.classification.Mnist"}}, "a.ckpt")
    said = failing(capsys, monkeypatch, command, "--ckpt_path=a.ckpt", *RUN)
    assert said.startswith("error: a.ckpt: model.model_args.x")
    assert {file.name for file in tmp_path.iterdir()} <= {"a.ckpt", "evilmod.py", "__pycache__"}


@pytest.mark.parametrize("name", ["--run_dir=x.yaml", "-x.yaml", "--config.yaml"])
@pytest.mark.parametrize(
    "content",
    [
        {"allow": "evilmod", **callback(on_fit_start="evilmod.X")},
        {"trainer": {"callbacks": [{"class_path": "evilmod.X"}]}},
    ],
    ids=["allow", "class"],
)
def test_a_file_that_is_called_like_an_option_is_a_file(
    evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, content: dict[str, object],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(yaml.safe_dump(content))
    said = failing(capsys, monkeypatch, "fit", "--config", str(DIGITS), f"--config={name}", *RUN)
    assert "--allow=evilmod" in said
    assert not evil.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--ckpt_path=evilmod.X"],
        ["--run_dir=evilmod.X"],
        ["--data.train=evilmod.X"],
        ["--trainer.default_root_dir=evilmod.X"],
        ["--data=evilmod.X"],
        ["--trainer.callbacks+=evilmod.X"],
    ],
    ids=" ".join,
)
def test_what_is_typed_imports_nothing_from_the_working_folder(
    evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """A value that is not a class is never imported; a class in the working folder requires ``--allow``."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "overlay.yaml"
    path.write_text(yaml.safe_dump(callback(on_fit_start="evilmod.X")))
    said = failing(capsys, monkeypatch, "fit", "--config", str(DIGITS), "--config", str(path), *words, *RUN)
    assert "--allow=evilmod" in said or "does not exist" in said or "is not an option" in said
    assert not evil.exists()


def test_a_model_of_others_is_read_as_plain_data(
    evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that know nothing of this suite unpickle no checkpoint either, by whatever name it is given."""

    class Payload:
        def __reduce__(self) -> object:
            return (Path.touch, (tmp_path / "ran",))

    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "global_step": 1, "epoch": 0, "x": Payload()}, "a.ckpt")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"class_path": "lightning.pytorch.demos.BoringModel"}}))
    for name in ("a.ckpt", (tmp_path / "a.ckpt").as_uri()):
        said = failing(
            capsys, monkeypatch, "fit", "--config", str(path), "--data=lightning.pytorch.demos.boring_classes.BoringDataModule",
            f"--ckpt_path={name}", *RUN,
        )  # fmt: skip
        assert "error: " in said
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["tokenizer", "text_encoder"])
def test_code_in_the_folder_of_a_text_encoder_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    names = {"AutoConfig": "evil.X", "AutoModel": "evil.X", "AutoTokenizer": ["evil.X", "evil.X"]}
    for name in ("tokenizer", "text_encoder"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "evil.py").write_text(f"from pathlib import Path; Path({str(tmp_path / 'ran')!r}).touch()")
        mapped = {"auto_map": names, "model_type": "evil"} if name == place else {"model_type": "t5"}
        (folder / "config.json").write_text(json.dumps(mapped))
        (folder / "tokenizer_config.json").write_text(json.dumps(mapped))
    encoder = make_encoder(TextConfig(str(tmp_path), 12), 8)
    with pytest.raises(FileNotFoundError, match="is not a folder or hub name of a pipeline"):
        encoder.encode(["a"], torch.device("cpu"))
    assert not (tmp_path / "ran").exists()


def test_no_reader_of_model_folders_runs_their_code_or_asks() -> None:
    """transformers asks on the terminal where ``trust_remote_code`` is not given."""
    readers = {
        "AutoConfig",
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoTokenizer",
        "AutoProcessor",
        "CLIPModel",
        "CLIPProcessor",
    }
    seen = 0
    for root in ("lightning_mhla", "tasks/mhla_tasks"):
        for file in (Path(__file__).parents[2] / root).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                trusted = [ast.unparse(each.value) for each in node.keywords if each.arg == "trust_remote_code"]
                assert trusted in ([], ["False"]), f"{file}:{node.lineno}"
                if (
                    isinstance(node.func, ast.Attribute)
                    and node.func.attr in ("from_pretrained", "from_config")
                    and getattr(node.func.value, "id", "") in readers
                ):
                    seen += 1
                    assert trusted, f"{file}:{node.lineno}"
    assert seen >= 6


def test_classes_are_taken_where_a_parameter_names_their_base() -> None:
    from lightning import Callback, LightningDataModule, Trainer
    from mhla_tasks.classification import ImageClassifier
    from mhla_tasks.commandline.trust import find_class, parameter_bases

    from lightning_mhla import AttentionConfig

    assert parameter_bases(Trainer)["callbacks"] == (Callback,)
    assert parameter_bases(Trainer)["max_steps"] == ()
    assert parameter_bases(ImageClassifier)["attention"] == (AttentionConfig,)
    with pytest.raises(ValueError, match="is not a LightningDataModule"):
        find_class("lightning.pytorch.callbacks.Timer", (LightningDataModule,))
    assert find_class("lightning.pytorch.callbacks.Timer", (Callback,)).__name__ == "Timer"


class Own(LightningModule):
    """Module with options of the kinds that checkpoints of the suite name by class."""

    def __init__(
        self,
        network: PretrainedConfig | None = None,
        cross_attention: CrossAttentionConfig | None = None,
        callback: Callback | None = None,
    ) -> None:
        super().__init__()
        self.options = {"network": network, "cross_attention": cross_attention, "callback": callback}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("network", {"class_path": "transformers.LlamaConfig", "init_args": {"hidden_size": 64}}),
        ("cross_attention", {"block_grid": [2, 2], "key_block_size": 2}),
        ("callback", {"class_path": "lightning_mhla.callbacks.Recovery"}),
    ],
)
def test_a_command_leaves_later_code_free_to_load_checkpoints(
    name: str, options: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning builds the objects in a checkpoint by jsonargparse, whose settings a command in this process has changed."""
    monkeypatch.setitem(parsing_settings, "import_path_verdicts", {})
    failing(capsys, monkeypatch, "fit", "--config", str(DIGITS), "--model.wrong=1", *RUN)
    built = instantiate_module(Own, {name: options})
    assert type(built.options[name]).__name__ in ("LlamaConfig", "CrossAttentionConfig", "Recovery")

    allow_imports([])  # the start of another command, which may name none of these classes by itself
    with pytest.raises(ArgumentError, match="is not allowed"):
        instantiate_module(Own, {name: options})


@pytest.mark.parametrize("name", ["lightning_evil.X", "torchmetrics2.X", "mhla_tasksx.video.Y"])
def test_packages_are_known_by_their_whole_name(name: str) -> None:
    from mhla_tasks.commandline.trust import refusal

    assert refusal(name) is not None
    assert refusal("lightning.pytorch.callbacks.Timer") is None
    assert refusal("torchmetrics.MeanMetric") is not None
