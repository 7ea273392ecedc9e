"""A classifier with a single class is an error that names the training data and what to give instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from mhla_tasks.commandline.arguments import read_words
from mhla_tasks.commandline.parser import build
from mhla_tasks.commandline.plan import make_plan
from mhla_tasks.commandline.registry import LIGHTNING
from PIL import Image

from lightning_mhla.data import write_shards

CONFIGS = Path(__file__).parents[2] / "configs/classification"


def start(*words: str) -> None:
    build(make_plan(read_words(["fit", *words, "--trainer.logger=false"], LIGHTNING)))


def test_a_single_class_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "train/cats").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "train/cats/1.png")
    with pytest.raises(ValueError, match=r"train has 1 class \(cats\), and ImageClassifier needs at least 2; name the"):
        start(f"--config={CONFIGS / 'folder.yaml'}", f"--data.train={tmp_path / 'train'}")


def test_shards_of_a_single_class_are_named(tmp_path: Path) -> None:
    write_shards([0], lambda label: {"jpg": b"", "cls": str(label)}, tmp_path, "train", per_shard=1)
    (tmp_path / "train-classes.txt").write_text("cats\n")
    with pytest.raises(ValueError, match=r"1 class \(cats\), and ImageClassifier needs at least 2"):
        start(f"--config={CONFIGS / 'folder.yaml'}", f"--data.train={tmp_path / 'train-0000.tar'}")


def test_one_class_in_the_options_is_too_few() -> None:
    with pytest.raises(ValueError, match="num_classes=1 must be at least 2"):
        start(f"--config={CONFIGS / 'digits.yaml'}", "--model.num_classes=1")
