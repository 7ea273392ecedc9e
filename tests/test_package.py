"""The wheel holds what users need: packages, types, configurations; the version comes from one place."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import mhla_kernels
import pytest
import yaml
from mhla_tasks.commandline import shipped

import lightning_mhla

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, timeout=120)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_packages_types_and_configurations(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("mhla_kernels", "lightning_mhla", "mhla_tasks"):
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names
    configs = {
        f"mhla_tasks/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.yaml")
    }
    assert configs <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "configs/"))]


def test_an_installed_wheel_trains_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(site)
    work.mkdir()
    options = [
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=1",
        "--trainer.check_val_every_n_epoch=1",
        "--trainer.limit_val_batches=1",
        "--trainer.accelerator=cpu",
        "--model.shape.depth=1",
    ]
    code = "import mhla_tasks.commandline.main as m; assert m.__file__.startswith(sys.path[0]), m.__file__; m.main()"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}", "fit", "--config", "mhla://classification/digits.yaml", *options],
        cwd=work, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "val/accuracy" in done.stdout
    assert list(work.glob("runs/digits/version_0/run.json"))


def test_operator_and_layer_need_torch_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
others = {Requirement(line).name.replace("-", "_") for line in requires("lightning-mhla")} - {"torch", "triton", "typing_extensions"}
others |= {"PIL", "yaml", "sklearn"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in others:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])
import torch
from mhla_kernels import mhla_attention
from lightning_mhla import MHLA, AttentionConfig, BlockLayout
from lightning_mhla.attention import build_attention
assert sys.modules["lightning_mhla"].__file__.startswith(sys.argv[1])
layer = MHLA(32, 2, BlockLayout((4, 4), blocks=(2, 2)), AttentionConfig(lepe=3))
layer(torch.randn(2, 16, 32)).sum().backward()
for kind in ("softmax", "mhla_window", "gla", "mamba2"):
    build_attention(AttentionConfig(kind=kind), 32, 2, BlockLayout((8,), block_size=4), causal=True)(torch.randn(1, 8, 32))
try:
    from lightning_mhla import Backbone
except ModuleNotFoundError as error:
    print("Backbone needs", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "Backbone needs timm\n"


def test_one_version_everywhere(wheel: Path) -> None:
    number = mhla_kernels.__version__
    assert lightning_mhla.__version__ == number == version("lightning-mhla")
    assert f"-{number}-" in wheel.name
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == number


@pytest.mark.parametrize("word", ["mhla://", "--config=mhla://"])
def test_the_prefix_alone_lists_the_configurations_of_the_package(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        shipped.resolve(["fit", word])
    assert done.value.code == 0
    assert capsys.readouterr().out.split() == [f"mhla://{name}" for name in shipped.names()]


def test_configurations_of_the_package_are_found_by_name() -> None:
    assert "classification/mnist.yaml" in shipped.names()
    path = str(shipped.folder() / "classification/mnist.yaml")
    for before in ([], ["--config="]):
        (word,) = shipped.resolve(["".join([*before, "mhla://classification/mnist.yaml"])])
        assert word == "".join([*before, path])
    assert shipped.resolve(["--model.x=mhla://a", "a"]) == ["--model.x=mhla://a", "a"]
    with pytest.raises(FileNotFoundError, match=r"did you mean mhla://classification/mnist\.yaml"):
        shipped.resolve(["mhla://classification/mnst.yaml"])


def test_the_copyright_line_is_filled_in() -> None:
    assert re.search(r"^   Copyright 20\d\d [^\[]+$", (ROOT / "LICENSE").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".pre-commit-config.yaml"], ids=lambda path: path.name
)
def test_files_of_the_host_can_be_read(path: Path) -> None:
    assert yaml.safe_load(path.read_text())
