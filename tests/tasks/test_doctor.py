"""`lightning doctor`: what it says here, and where something is broken."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mhla_tasks.tools import doctor
from mhla_tasks.tools.doctor import machine, operator, training
from processes import fork_server


def run(capsys: pytest.CaptureFixture[str], *parts: str) -> tuple[int, list[dict[str, Any]]]:
    status = doctor.main(["--json", "--only", *parts])
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"] == "wrong") == bool(status)
    return status, told["findings"]


def test_this_machine(tmp_path: Path) -> None:
    """By the command line, whole: JSON and nothing else on standard output, all parts, status 0."""
    status, said = fork_server().run("doctor", "--json", module="mhla_tasks", folder=tmp_path)
    assert status == 0, said[-4000:]
    found = json.loads(said)
    assert list(dict.fromkeys(one["part"] for one in found["findings"])) == list(doctor.PARTS)
    by_name = {one["name"]: one for one in found["findings"]}
    assert by_name["torch chunked, bfloat16, causal"]["values"]["gradient_error"] < 1e-2
    assert by_name["fit"]["status"] == "ok"
    assert len(by_name["fit"]["values"]["losses"]) == training.STEPS
    assert by_name["4,096 tokens, causal"]["values"]["softmax_ms"] > 0
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


def test_the_table_is_read_by_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--only", "versions", "storage"]) == 0
    said = capsys.readouterr().out
    assert "needed" in said
    assert "shared memory" in said
    assert said.endswith("Training will work here.\n")
    with pytest.raises(SystemExit):
        doctor.main(["--only", "nothing"])
    assert "choose from" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    assert "Check this machine" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["off", "random", "raises"])
def test_an_operator_that_computes_wrong(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend, calls = operator.mhla_attention, [0]

    def broken(*given: Any, form: str, **options: Any) -> torch.Tensor:
        out = attend(*given, form=form, **options)
        if form != "chunked" or not options["causal"]:
            return out
        calls[0] += 1
        if way == "raises":
            raise RuntimeError("no kernel image is available")
        return out * (1.1 if way == "off" else 1 + 1e-7 * calls[0])

    monkeypatch.setattr(operator, "mhla_attention", broken)
    status, found = run(capsys, "operator")
    wrong = {one["name"]: one for one in found if one["status"] == "wrong"}
    text = {"off": "off by", "random": "two runs differ", "raises": "no kernel image is available"}[way]
    assert status == 1
    assert "torch chunked, float32, causal" in wrong
    assert set(wrong) <= {f"torch chunked, {dtype}, causal" for dtype in ("float32", "bfloat16")}
    assert all(text in one["found"] and one["advice"] for one in wrong.values())
    sound = [one["found"] for one in found if one["status"] == "ok" and one["found"].startswith("errors ")]
    assert sound
    assert all(0 < float(error) < 0.1 for line in sound for error in re.findall(r"[\d.]+e[+-]\d+", line)), sound


def test_kernels_that_are_turned_off_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a kernel that crashes its process would end the doctor, too."""
    monkeypatch.setattr(operator, "AUTOMATIC", "torch")
    (finding,) = operator.kernels(torch.device("cuda"))
    assert finding.found == "MHLA_BACKEND=torch turns them off"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(operator, "_problem", lambda *_: 1 / 0)  # without a GPU, nothing can be computed there
    assert not [finding.name for finding in operator.forms() if finding.name.startswith("triton")]


def test_what_training_needs_and_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = machine.version

    def version(name: str) -> str:
        if name == "diffusers":
            raise machine.PackageNotFoundError(name)
        return "0.1" if name == "lightning" else installed(name)

    monkeypatch.setattr(machine, "version", version)
    status, found = run(capsys, "versions")
    by_name = {one["name"]: one for one in found}
    assert status == 1
    assert by_name["needed"]["found"] == "lightning 0.1 is not >=2.6"
    assert by_name["needed"]["advice"] == "pip install -U lightning-mhla"
    assert (by_name["video"]["status"], by_name["video"]["found"]) == ("note", "diffusers is not installed")
    assert by_name["video"]["advice"] == "pip install -U 'lightning-mhla[video]'"

    usage = shutil.disk_usage("/")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    monkeypatch.setattr(machine, "_write_speed", lambda _: 3.0)
    status, found = run(capsys, "storage")
    by_name = {one["name"]: one for one in found}
    assert [by_name[name]["status"] for name in ("room for runs", "runs", "shared memory")] == [
        "wrong",
        "note",
        "wrong",
    ]
    assert "--shm-size" in by_name["shared memory"]["advice"]
    assert by_name["shared memory"]["values"]["free_mib"] == 1  # 2**20 bytes
    assert by_name["room for runs"]["values"]["free_gib"] == 1 / 1024

    def refuse(_: Path) -> float:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine, "_write_speed", refuse)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    status, found = run(capsys, "storage")
    assert status == 1
    assert "Permission denied" in found[1]["found"]


def test_the_speed_of_reading_images_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(capsys, "data")
    assert status == 0, found
    (rate,) = (one["values"]["per_core_per_s"] for one in found if one["name"].startswith("JPEG files"))
    assert 1 < rate < 1e5


def test_a_fit_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: no space left\n")
    monkeypatch.setattr(training.subprocess, "run", lambda *_, **__: done)
    status, found = run(capsys, "training")
    assert status == 1
    assert "no space left" in found[0]["found"]
    assert "fit" in found[0]["advice"]
    monkeypatch.setattr(training, "find_spec", lambda _: None)
    status, found = run(capsys, "training")
    assert (status, found[0]["status"], found[0]["advice"]) == (
        0,
        "note",
        "pip install 'lightning-mhla[classification]'",
    )


def test_an_examination_that_fails_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode() -> Any:
        raise KeyError("cuda")
        yield

    monkeypatch.setitem(doctor.PARTS, "devices", explode)
    status, found = run(capsys, "devices")
    assert status == 1
    assert "KeyError" in found[0]["found"]
