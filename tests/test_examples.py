"""The example programs, as a user starts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("attention", "epochs", "least"), [("mhla", 4, 0.5), ("linear", 2, 0.2)])
def test_a_whole_run_in_plain_python(tmp_path: Path, attention: str, epochs: int, least: float) -> None:
    command = [sys.executable, str(ROOT / "examples/train.py"), f"--epochs={epochs}", f"--attention={attention}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (accuracy,) = re.findall(r"accuracy on held-out digits: ([\d.]+)", done.stdout)
    assert float(accuracy) > least
    assert re.search(r"a held-out digit \d is classified as \d with probability 0\.\d\d", done.stdout)
    run = tmp_path / "runs/example"
    assert {"config.json", "model.safetensors", "classes.txt", "README.md"} <= {
        p.name for p in (run / "exported").iterdir()
    }
    assert (run / "metrics.csv").read_text().count("\n") > epochs
    assert (run / "checkpoints/last.ckpt").exists()
    assert (run / "checkpoints/learning_curves.png").exists()
