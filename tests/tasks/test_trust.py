"""What a configuration and a checkpoint may name, from the command line as users call it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import yaml
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse._common import parsing_settings
from mhla_tasks.cli import main

DIGITS = Path(__file__).parents[2] / "configs/classification/digits.yaml"
RUN = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"]


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a mark when it is imported."""
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
    assert "overlay.yaml: allow is for the command line: --allow=evilmod" in said
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
    assert "are no named values" in failing(capsys, monkeypatch, "validate", f"--ckpt_path={tmp_path / 'b.ckpt'}", *RUN)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# caf\xe9\n", "is not text in UTF-8"),
        (b"trainer: " + b"[" * 5000 + b"]" * 5000, "nested more than 50 deep"),
        (b"# x\n" * 500_000, "is no configuration"),
        (b"a: !!python/object/apply:os.system [touch x]", "could not determine a constructor"),
        (b"{1: 2}", "1 is not an option"),
        (b"model: {class_path: ..x}", "is no name of a class"),
        (b"model: {class_path: " + b"a." * 50_000 + b"b}", "is no name of a class"),
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
    assert "does not exist" in failing(capsys, monkeypatch, "fit", "--config", os.devnull, *RUN)


@fuzz(25)
@given(text=st.text(alphabet="modelatrinr:_[]{}&*!\n \"'x1.", max_size=60))
def test_fuzzed_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Whatever stands in an overlay, it is refused in words, or the run is the digits'."""
    path = tmp_path / "fuzzed.yaml"
    path.write_text(text)
    words = ["fit", "--config", str(DIGITS), "--config", str(path), "--print_config"]
    monkeypatch.setattr("sys.argv", ["lightning", *words])
    with pytest.raises(SystemExit):
        main()


@pytest.mark.parametrize("name", ["lightning_evil.X", "torchmetrics2.X", "mhla_tasksx.video.Y"])
def test_packages_are_known_by_their_whole_name(name: str) -> None:
    from mhla_tasks.trust import refusal

    assert refusal(name) is not None
    assert refusal("lightning.pytorch.callbacks.Timer") is refusal("torchmetrics.MeanMetric") is None
