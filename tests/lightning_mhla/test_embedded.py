"""The digits that ship with Python packages, as the domains take them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mhla_tasks.classification import Digits, Mnist
from mhla_tasks.diffusion import DigitImages, MnistFeatures, MnistImages
from mhla_tasks.video import MovingMnist
from mhla_tasks.video.digits import moving_digits
from PIL import Image

from lightning_mhla.data.digits import load_digits, load_mnist


@pytest.mark.parametrize(("load", "side", "counts"), [(load_digits, 8, (1437, 360)), (load_mnist, 28, (4000, 1000))])
def test_images_are_whole_and_held_out_ones_are_others(load: type, side: int, counts: tuple[int, int]) -> None:
    parts = [load(train) for train in (True, False)]
    for (images, labels), count in zip(parts, counts, strict=True):
        assert images.shape == (count, 1, side, side)
        assert images.dtype == torch.float32
        assert images.min() == 0
        assert images.max() == 1
        assert labels.dtype == torch.int64
        assert set(labels.tolist()) == set(range(10))
    seen = {image.numpy().tobytes() for image in parts[0][0]}
    assert not any(image.numpy().tobytes() in seen for image in parts[1][0])


def test_every_domain_has_them(tmp_path: Path) -> None:
    sample = Mnist(augment=False).source("train")[3]
    assert sample["image"].shape == (1, 28, 28)
    assert Digits(augment=False).source("train")[3]["image"].shape == (1, 8, 8)
    drawn = MnistImages().source("train")[3]["image"]
    torch.testing.assert_close(drawn, sample["image"] * 2 - 1)
    assert DigitImages().source("train")[3]["image"].shape == (1, 8, 8)
    Image.fromarray(np.zeros((60, 50, 3), dtype=np.uint8)).save(tmp_path / "dark.png")
    assert Mnist(predict_dir=str(tmp_path)).source("predict")[0]["image"].shape == (1, 28, 28)


@pytest.mark.parametrize("size", [(8, 28, 28), (5, 30, 44)])
def test_digits_move_over_a_canvas_as_their_caption_says(size: tuple[int, int, int]) -> None:
    frames, height, width = size
    source = MovingMnist(frames, height, width).clips("train")
    images, labels = moving_digits("mnist", True)
    assert len(source) == 4 * len(labels)
    for index in (0, 1, 2, 3, 402):
        sample = source[index]
        clip = (sample["video"][0] + 1) / 2
        assert clip.shape == size
        assert sample["caption"].startswith(("a zero", "a one", "a two", "a three", "a four", "a five", "a six", "a seven",
                                             "a eight", "a nine"))  # fmt: skip
        rows, columns = ((frame > 0).nonzero().float().mean(0) for frame in (clip[0], clip[-1]))
        way = (columns - rows).round().int().tolist()
        move = sample["caption"].rsplit(" ", 1)[1]
        expected = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}[move]
        far = min(frames - 1, (height if expected[0] else width) - 20)
        assert way == [far * step for step in expected]
        torch.testing.assert_close(clip[0].sum(), images[index // 4].sum(), rtol=1e-4, atol=1e-2)
    with pytest.raises(ValueError, match="at least 1 frame and 20 x 20 pixels"):
        MovingMnist(4, 16, 28).clips("train")


def test_features_tell_the_digits_apart() -> None:
    features = MnistFeatures(epochs=2)
    images, labels = load_mnist(False)
    found = features.extract(features.network(), (images[:300] * 255).round().to(torch.uint8))
    assert found.pooled.shape == (300, 64)
    assert (found.logits.argmax(-1) == labels[:300]).float().mean() > 0.85
    with pytest.raises(ValueError, match="MnistFeatures supports digits of"):
        features.extract(features.network(), torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
