"""`make gpu` at small sizes on a CPU: every part, resuming, parts that fail or hang, and the table of goals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import gpu, native, throughput

pytestmark = pytest.mark.processes


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", *options])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    return int(ended.value.code or 0)


def test_every_part_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--out", str(tmp_path)) == 0, capfd.readouterr().out
    folder = tmp_path / "cpu"
    done = json.loads((folder / "parts.json").read_text())
    assert done["machine"]["torch"] == torch.__version__
    assert set(done["parts"]) == set(gpu.parts(folder, False, None))
    assert str(tmp_path) not in json.dumps(done)
    written = {path.name for path in folder.iterdir()}
    assert {"doctor.json", "native.json", "attention-cpu.json", "short-blocks-cpu.json", "throughput.json"} <= written
    assert not [name for name in written if name.endswith(".log")]
    (row,) = json.loads((folder / "throughput.json").read_text())["rows"]
    assert row["operations"] > 1e8
    capfd.readouterr()
    assert run(monkeypatch, "--out", str(tmp_path)) == 0
    assert capfd.readouterr().out.count("done on") == len(done["parts"])


def test_a_part_that_fails_or_hangs_is_told_and_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    works = gpu.Part(("-c", "print('found')"), 1, "works.txt")
    fails = gpu.Part(("-c", "import sys; sys.exit('no such GPU')"), 1)
    hangs = gpu.Part(("-c", "import time; print('so far', flush=True); time.sleep(600)"), 0.05, "hangs.txt")
    monkeypatch.setattr(gpu, "parts", lambda *_: {"works": works, "fails": fails, "hangs": hangs})
    assert run(monkeypatch, "--out", str(tmp_path)) == 1
    said = capfd.readouterr().out
    assert "no such GPU" in said
    assert "failed: fails, hangs" in said
    found = json.loads((tmp_path / "cpu/parts.json").read_text())["parts"]
    assert {name: part["status"] for name, part in found.items()} == {"works": 0, "fails": 1, "hangs": 124}
    assert (tmp_path / "cpu/works.txt").read_text() == "found\n"
    assert (tmp_path / "cpu/hangs.txt").read_text() == "so far\n"
    monkeypatch.setattr(gpu, "parts", lambda *_: {"works": fails, "fails": works})
    assert run(monkeypatch, "--out", str(tmp_path)) == 0, "what ended well is not run again"
    assert run(monkeypatch, "--out", str(tmp_path), "--only", "works", "--again") == 1
    assert run(monkeypatch, "--out", str(tmp_path), "--only", "nothing") == 2


def test_the_table_of_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(name: str, method: str, both: float, **more: float) -> dict[str, Any]:
        return {"name": name, "method": method, "forward_ms": both / 3, "both_ms": both, **more}

    floor = {"forward_floor_ms": 0.5, "both_floor_ms": 1.0, "forward_over_floor": 1.2}
    rows = [
        row("LM", "auto", 1.5, **floor, both_over_floor=1.5), row("LM", "softmax", 6.0),
        row("DiT", "auto", 9.0, **floor, both_over_floor=9.0), {"name": "DiT", "method": "fla", "error": "none"},
    ]  # fmt: skip
    (tmp_path / "attention-cuda.json").write_text(json.dumps({"rows": rows}))
    found = gpu.goals(tmp_path)
    assert [(one["shape"], one["met"]) for one in found] == [("LM", True), ("DiT", False)]
    assert found[0]["times_faster_than"] == {"softmax": 4.0}
    gpu.print_goals(found, Console(width=150))
    said = capsys.readouterr().out
    assert "4.0 x" in said
    assert "missed" in said


def test_a_check_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(device: torch.device) -> Any:
        yield "first", "fine"
        raise AssertionError("second: off by 1e-2")

    monkeypatch.setattr(native, "CHECKS", {"some": (wrong, False), "streams": (wrong, True)})
    rows = native.check(torch.device("cpu"), Console(width=150))
    assert [(row["check"], row["passed"]) for row in rows] == [("some", True), ("some", False)]
    assert "off by 1e-2" in rows[1]["found"]


@pytest.mark.parametrize("name", throughput.CONFIGS)
def test_a_batch_for_every_configuration(name: str) -> None:
    """A batch suits the model of its configuration: it has the network's number of tokens. The model takes no memory."""
    with torch.device("meta"):
        module, config = throughput.build(throughput.ROOT / f"configs/{name}.yaml", False)
        module.configure_model()
        batch, tokens = throughput.make_batch(module, config, 2)
    assert all(x.is_meta and len(x) == 2 for x in batch.values())
    if name == "video/wan_1_3b":
        assert tokens == 31500
    if name.startswith("language"):
        assert batch["tokens"].shape == (2, tokens + 1)
