"""An export takes the place of an earlier one in one step, and keeps the user's own files beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mhla_tasks.classification import VisionTransformer
from mhla_tasks.commandline import registry
from mhla_tasks.commandline.parser import main

from lightning_mhla.system.files import rebuilt_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two classifiers with different widths."""
    folder = tmp_path_factory.mktemp("runs")
    for name, width in (("first", 16), ("second", 24)):
        main(["fit", f"--config={ROOT}/configs/classification/digits.yaml", f"--run_dir={folder / name}",
              f"--model.shape.dim={width}", "--model.shape.depth=1", "--model.shape.heads=1",
              "--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.accelerator=cpu",
              "--trainer.enable_progress_bar=false"])  # fmt: skip
    return folder


def width(folder: Path) -> int:
    return VisionTransformer.from_pretrained(str(folder)).num_features


def test_files_of_the_user_stay_and_weights_of_before_go(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    registry.run("export", [str(runs / "first"), str(target)])
    (target / ".git").mkdir()
    (target / ".git/config").write_text("mine")
    (target / "notes.txt").write_text("mine")
    (target / "model-00001-of-00002.safetensors").write_bytes((target / "model.safetensors").read_bytes())
    (target / "link").symlink_to("nowhere")
    own_card = b"my card, caf\xe9\r\n"  # Latin-1, with line endings of Windows
    (target / "README.md").write_bytes(own_card)
    registry.run("export", [str(runs / "second"), str(target)])
    assert width(target) == 24
    assert (target / ".git/config").read_text() == (target / "notes.txt").read_text() == "mine"
    assert (target / "README.md").read_bytes() == own_card
    assert (target / "README.new.md").exists()
    assert os.readlink(target / "link") == "nowhere"
    assert not (target / "model-00001-of-00002.safetensors").exists(), "weights of an earlier model"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


KILLED = """
import os, signal, sys
from pathlib import Path
from mhla_tasks.commandline import registry
from mhla_tasks.tools import export
at = sys.argv[1]
def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)
if at == "card":
    export.write_card = die
else:
    replace = Path.replace
    def half(self, target):
        die() if Path(target).name == "model" else replace(self, target)
    Path.replace = half
registry.run("export", sys.argv[2:])
"""


@pytest.mark.parametrize("at", ["card", "exchange"])
def test_a_killed_export_leaves_the_earlier_one(runs: Path, tmp_path: Path, at: str) -> None:
    target = tmp_path / "model"
    registry.run("export", [str(runs / "first"), str(target)])
    words = [sys.executable, "-c", KILLED, at, str(runs / "second"), str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if at == "card":
        assert width(target) == 16
    registry.run("export", [str(runs / "second"), str(target)])
    assert width(target) == 24


def half_written(target: Path) -> None:
    with rebuilt_folder(target) as aside:
        (aside / "model.safetensors").write_bytes(b"half")
        (aside / "none/config.json").write_bytes(b"no such folder")


def test_an_export_that_fails_leaves_the_earlier_one(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    registry.run("export", [str(runs / "first"), str(target)])
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    last = runs / "second/checkpoints/last.ckpt"
    (tmp_path / "cut.ckpt").write_bytes(last.read_bytes()[:2000])
    with pytest.raises(SystemExit):
        registry.run("export", [str(tmp_path / "cut.ckpt"), str(target)])
    with pytest.raises(FileNotFoundError):
        half_written(target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.ckpt", "model"]


@pytest.mark.parametrize("place", ["inside", "link", "new"])
def test_where_the_folder_is(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    target = tmp_path / "deep/model"
    if place != "new":
        registry.run("export", [str(runs / "first"), str(target)])
    if place == "inside":  # the working directory of the shell
        monkeypatch.chdir(target)
        registry.run("export", [str(runs / "second"), "."])
        assert Path.cwd().samefile(target)
    elif place == "link":
        (tmp_path / "link").symlink_to(target)
        registry.run("export", [str(runs / "second"), str(tmp_path / "link")])
        assert (tmp_path / "link").is_symlink()
    else:
        registry.run("export", [str(runs / "second"), str(target)])
    assert width(target) == 24
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert not list(target.glob(".*"))
    (tmp_path / "plain").mkdir()
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode, "as readable as any new folder"
