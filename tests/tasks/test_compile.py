"""``model.init_args.training.compile``: the same losses, names of weights and checkpoints, in every domain, by the command line."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch
import yaml
from grouped import grouped
from processes import run_cli

from lightning_mhla import AttentionConfig, Backbone
from lightning_mhla.training.compilation import CompileOptions, compile_layers

ROOT = Path(__file__).parents[2]
SMALL = {
    "classification/digits": {"depth": 1},
    "diffusion/digits": {"depth": 1},
    "video/digits_pretrain": {},
    "language": {"depth": 1},
}
LINES = {
    "seed_everything": 0,
    "model": {
        "class_path": "mhla_tasks.language.LanguageModel",
        "init_args": {
            "attention": {"kind": "mhla", "block_size": 8, "mixing": "exponential", "normalize": False},
            "vocab_size": 64, "context": 32, "shape": {"dim": 16, "heads": 2},
        },
    },
    "data": {"class_path": "lines.Lines"},
}  # fmt: skip
MODULE = """
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

class Lines(LightningDataModule):
    def train_dataloader(self):
        words = torch.randint(64, (16, 33), generator=torch.Generator().manual_seed(0))
        samples = [
            {"tokens": row[:-1], "targets": row[1:], "bytes": torch.ones(32), "index": index} for index, row in enumerate(words)
        ]
        return DataLoader(samples, batch_size=8)

    val_dataloader = train_dataloader
"""


def small(folder: Path, name: str) -> Path:
    """Write a configuration with fewer layers, losses in a CSV file, and a checkpoint at every step."""
    config = LINES if name == "language" else yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
    config["model"]["init_args"] = grouped(config["model"]["init_args"], **SMALL[name])
    checkpoint = {
        "filename": "{step}",
        "every_n_train_steps": 1,
        "save_top_k": -1,
        "dirpath": str(folder / "checkpoints"),
    }
    config["trainer"] = {
        "accelerator": "cpu", "max_steps": 4, "log_every_n_steps": 1, "enable_progress_bar": False,
        "limit_val_batches": 1, "val_check_interval": 2, "check_val_every_n_epoch": None,
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": checkpoint}],
        "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": "log", "version": ""}}],
    }  # fmt: skip
    folder.mkdir()
    (folder / "lines.py").write_text(MODULE)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def losses(folder: Path) -> dict[int, float]:
    with (folder / "log/metrics.csv").open() as stream:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(stream) if row.get("train/loss")}


@pytest.mark.parametrize("name", SMALL)
def test_a_compiled_run_is_the_same_run(name: str, tmp_path: Path) -> None:
    """Compiled, and resumed without from its second step; graphs after the first step are counted."""
    backend = "inductor" if name == "classification/digits" else "aot_eager"
    compiled = ["--model.training.compile=true", f"--model.training.compile_options.backend={backend}"]
    own = ["--allow=lines"] if name == "language" else []
    plain, both, resumed = (tmp_path / name for name in ("plain", "both", "resumed"))
    run_cli("fit", "--config", str(small(plain, name)), *own, folder=plain)
    said = run_cli("fit", "--config", str(small(both, name)), *own, *compiled, folder=both)
    first, later = (int(number) for number in re.findall(r"compiled (\d+) graphs", said))
    assert first >= 1
    assert later <= 2
    start = both / "checkpoints/step=2.ckpt"
    one, two = (torch.load(f / "checkpoints/step=2.ckpt", weights_only=True) for f in (plain, both))
    assert one["state_dict"].keys() == two["state_dict"].keys()
    run_cli("fit", "--config", str(small(resumed, name)), *own, f"--ckpt_path={start}", folder=resumed)
    expected = losses(plain)
    assert sorted(expected) == [0, 1, 2, 3]
    assert losses(both) == pytest.approx(expected, rel=1e-4)
    assert losses(resumed) == pytest.approx({step: expected[step] for step in (2, 3)}, rel=1e-4)


def test_compiled_layers_are_sharded(tmp_path: Path) -> None:
    options = ["--config", str(ROOT / "configs/trainer/fsdp.yaml"), "--trainer.accelerator=cpu", "--trainer.devices=2"]
    compiled = ["--model.training.compile=true", "--model.training.compile_options.backend=aot_eager"]
    one, two = tmp_path / "one", tmp_path / "two"
    run_cli("fit", "--config", str(small(one, "classification/digits")), *options, folder=one)
    run_cli("fit", "--config", str(small(two, "classification/digits")), *options, *compiled, folder=two)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_sizes_and_checkpointing(checkpointing: bool) -> None:
    """With stochastic depth, whose random numbers are drawn outside of the graphs."""
    made = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = Backbone(
            16, 4, 2, (4, 4), AttentionConfig(block_grid=[2, 2]), drop_path=0.5, checkpointing=checkpointing
        )
        names = set(model.state_dict())
        if compile:
            compile_layers(model.blocks, CompileOptions(backend="aot_eager"))
        assert set(model.state_dict()) == names
        found = []
        for batch in (5, 3, 8):
            torch.manual_seed(batch)
            out = model(torch.randn(batch, 16, 16))
            found += [
                out.detach(),
                *torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True),
            ]
        made.append(found)
    for one, two in zip(*made, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        CompileOptions(mode="max-autotune", options={"max_autotune": True})
