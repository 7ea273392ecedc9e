"""The table of keys in docs/guides/data.md is right; batches that lack something are rejected."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from mhla_tasks.classification import ImageClassifier, VisionShape
from mhla_tasks.commandline.sources import Source
from mhla_tasks.commandline.trust import allow_imports
from mhla_tasks.diffusion import ClassToImage
from mhla_tasks.language import LanguageModel
from mhla_tasks.video import VideoDiffusion
from torch.utils.data import DataLoader

from lightning_mhla import AttentionConfig
from lightning_mhla.training.batches import check_batch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/data.md").read_text()
DOMAINS: dict[type[LightningModule], dict[str, set[str]]] = {
    each: {
        "train": set(each.train_batch), "evaluation": set(each.evaluation_batch), "predict": set(each.predict_batch)
    }
    for each in (ImageClassifier, ClassToImage, LanguageModel, VideoDiffusion)
}  # fmt: skip


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: domain.__name__)
def test_the_page_lists_what_is_checked(domain: type[LightningModule]) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{domain.__name__}`")]
    training, evaluation, predict = ({*re.findall(r"`(\w+)`", cell)} for cell in row.split("|")[2:5])
    for part, said in {"train": training, "evaluation": training | evaluation, "predict": predict}.items():
        for key in DOMAINS[domain][part]:
            assert set(key.split("|")) <= said, f"{part}: {key}"


class Plain(LightningDataModule):
    """Data module with a plain DataLoader."""

    def __init__(self, *leave_out: str) -> None:
        super().__init__()
        self.leave_out = leave_out

    def loader(self) -> DataLoader[Any]:
        samples = [{"image": torch.rand(1, 8, 8), "label": index % 3, "index": index} for index in range(10)]
        return DataLoader(
            [{k: v for k, v in each.items() if k not in self.leave_out} for each in samples], batch_size=4
        )  # type: ignore[arg-type]

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


def fitted(data: Plain) -> Trainer:
    attention = AttentionConfig(block_grid=[2, 2])
    shape = VisionShape(patch_size=2, dim=8, depth=1, heads=1)
    model = ImageClassifier(attention, num_classes=3, image_size=8, channels=1, shape=shape)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, num_sanity_val_steps=0, **quiet)
    trainer.fit(model, datamodule=data)
    return trainer


def test_every_sample_of_a_plain_loader_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = Plain()
    trainer = fitted(data)
    assert trainer.callback_metrics["val/samples"] == 10
    trainer.predict(trainer.model, datamodule=data)  # type: ignore[arg-type]
    rows = (tmp_path / "predictions.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["path", *map(str, range(10))]


def test_valid_has_one_entry_for_each_sample() -> None:
    """Whatever else the batch holds, and in whatever order."""
    batch: dict[str, Any] = {
        "cu_seqlens": (0, 3, 8),
        "seed": torch.tensor(0),
        "tokens": torch.zeros(2, 5),
        "bytes": torch.ones(2),
    }
    check_batch(batch, LanguageModel.evaluation_batch, "validation")
    assert batch["valid"].tolist() == [True, True]
    batch = {"caption": ["a", "b", "c"], "video": torch.zeros(3, 1, 1, 8, 8), "index": torch.arange(3)}
    check_batch(batch, VideoDiffusion.evaluation_batch, "test")
    assert batch["valid"].tolist() == [True] * 3
    batch = {"other": torch.zeros(3)}
    check_batch(batch, (), "validation")
    assert list(batch) == ["other"], "a module that names no keys gets what its data gives"


def test_a_module_in_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed command, whose first entry of sys.path is its own folder, finds the module, but only if it is allowed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    with pytest.raises(ValueError, match="--allow=stripes: there is no module 'stripes'"):
        allow_imports([Source("--allow=stripes", {"allow": "stripes"}, typed=True)])
    assert str(tmp_path) not in sys.path
    (tmp_path / "stripes.py").write_text("")
    allow_imports([Source("--ckpt_path=last.ckpt", {"ckpt_path": "last.ckpt"}, typed=True)])
    assert str(tmp_path) not in sys.path
    allow_imports([Source("--allow=stripes", {"allow": "stripes"}, typed=True)])
    assert sys.path[-1] == str(tmp_path)
    del sys.modules["stripes"]
    allow_imports([])


def test_a_batch_without_a_key_is_rejected() -> None:
    with pytest.raises(
        ValueError, match="a training batch must be a dict with image, label; this one has only image, index"
    ):
        fitted(Plain("label"))
    with pytest.raises(
        ValueError, match="a training batch must be a dict with latent or image, label; this one is a list without keys"
    ):
        check_batch([torch.rand(2, 1, 8, 8), torch.zeros(2)], ClassToImage.train_batch, "training")
