"""Files of drawn samples: PNG and ``samples.npz`` hold the same samples, of any shape and number, and pictures of a grid."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from mhla_tasks.diffusion import ClassToImage, DiTShape
from mhla_tasks.diffusion.data import DigitImages, SampleRequest
from mhla_tasks.diffusion.process import ProcessConfig
from mhla_tasks.diffusion.sampling import DiTSamplingConfig
from PIL import Image
from processes import fork_server

from lightning_mhla import AttentionConfig
from lightning_mhla.generative.drawing import draw_grid

PROGRAM = """
import json, logging, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_sample_files import predict
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
predict(Path.cwd(), **json.loads(sys.argv[1]))
"""


def predict(folder: Path, size: Any = 8, channels: int = 1, output: Any = "npz", **options: Any) -> None:
    """Draw 20 samples of the classes 3 and 7 with a random model, in batches of 8."""
    torch.manual_seed(0)
    module = ClassToImage(
        AttentionConfig(block_grid=[2, 2]), 10, size, channels, shape=DiTShape(dim=16, depth=1, heads=2, patch_size=2),
        process=ProcessConfig("flow"), sampling=DiTSamplingConfig("euler", 2), output=output,
    )  # fmt: skip
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": folder}
    trainer = Trainer(**quiet, callbacks=module.prediction_callbacks(), **options)
    data = DigitImages(batch_size=8, samples=SampleRequest(classes=[3, 7], per_class=10))
    trainer.predict(module, data, return_predictions=False)


def in_processes(folder: Path, **options: Any) -> str:
    """Draw the samples in two processes, and return their output."""
    folder.mkdir()
    tests = [str(path) for path in Path(__file__).parents[:3]]
    settings = json.dumps({**options, "devices": 2, "strategy": "ddp"})
    status, said = fork_server().program(PROGRAM, settings, *tests, folder=folder, processes=2)
    assert status == 0, said[-3000:]
    return said


def drawn(folder: Path) -> tuple[np.ndarray, list[int]]:
    """Return the pixels and the labels of the PNG files in a folder, in the order of their indices."""
    paths = sorted((folder / "samples").glob("*.png"))
    assert [int(path.name[:6]) for path in paths] == list(range(len(paths)))
    labels = [int(path.stem.rpartition("class")[2]) for path in paths]
    return np.stack([np.array(Image.open(path).convert("RGB")) for path in paths]), labels


def packed(folder: Path) -> tuple[np.ndarray, list[int]]:
    """Return the pixels and the labels in ``samples.npz``."""
    assert not (folder / "samples").exists()
    with np.load(folder / "samples.npz") as content:
        assert (content["arr_0"].dtype, content["arr_1"].dtype) == (np.uint8, np.int64)
        return content["arr_0"], content["arr_1"].tolist()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [[8, 16], [16, 8], 8], ids=str)
def test_npz_and_png_hold_the_same_samples(size: Any, channels: int, tmp_path: Path) -> None:
    for output in ("npz", "png"):
        predict(tmp_path / output, size, channels, output)
    (pixels, labels), (images, classes) = packed(tmp_path / "npz"), drawn(tmp_path / "png")
    height, width = size if isinstance(size, list) else (size, size)
    assert images.shape == (20, height, width, 3)
    assert np.array_equal(pixels, images)
    assert labels == classes == [3, 7] * 10


@pytest.mark.parametrize("size", [[8, 16], [16, 8]], ids=str)
def test_two_processes_write_rows_of_the_same_size(size: list[int], tmp_path: Path) -> None:
    predict(tmp_path / "one", size)
    in_processes(tmp_path / "two", size=size)
    (one, labels), (two, classes) = packed(tmp_path / "one"), packed(tmp_path / "two")
    assert one.shape == two.shape == (20, *size, 3)
    assert np.abs(one.astype(int) - two).max() <= 1
    assert labels == classes


@pytest.mark.parametrize("output", ["npz", "png"])
@pytest.mark.parametrize(("limit", "count"), [(1, 8), (2, 16), (0.34, 8), (9, 20)])
def test_only_drawn_samples_are_written_and_counted(
    output: Any, limit: float, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    read = packed if output == "npz" else drawn
    predict(tmp_path, output=output, limit_predict_batches=limit)
    some, labels = read(tmp_path)
    assert f"{count} samples written to" in caplog.text
    assert len(some) == count
    assert labels == [3, 7] * (count // 2)
    predict(tmp_path, output=output)  # once more in the same folder
    complete, _ = read(tmp_path)
    assert len(complete) == 20
    assert np.array_equal(complete[:count], some)
    assert complete.reshape(20, -1).max(1).min() > 0, "a black image was not drawn"
    predict(tmp_path, output=output, limit_predict_batches=limit)
    assert len(read(tmp_path)[0]) == count, "samples of the earlier call remain"


@pytest.mark.parametrize("output", ["npz", "png"])
def test_two_processes_count_what_they_draw_together(output: str, tmp_path: Path) -> None:
    said = in_processes(tmp_path / "two", output=output, limit_predict_batches=1)
    pixels, labels = (packed if output == "npz" else drawn)(tmp_path / "two")
    assert (len(pixels), labels) == (8, [3, 7] * 4)
    assert pixels.reshape(8, -1).max(1).min() > 0
    assert said.count("samples written to") == said.count("8 samples written to") == 1


@pytest.mark.parametrize(("height", "width"), [(8, 16), (16, 8), (70, 20), (8, 8)])
@pytest.mark.parametrize("num_classes", [3, 1000])
def test_a_grid_shows_images_of_any_shape(height: int, width: int, num_classes: int) -> None:
    images = torch.randint(0, 256, (12, 3, height, width), dtype=torch.uint8)
    figure = draw_grid(images, num_classes, "title")
    (axis,) = figure.axes
    canvas: Any = axis.images[0].get_array()
    rows, columns = (3, 4) if num_classes == 3 else (2, 10)
    assert canvas.shape == (rows * (height + 1) - 1, columns * (width + 1) - 1, 3)
    for number, image in enumerate(images):
        row, column = (number % 3, number // 3) if num_classes == 3 else divmod(number, 10)
        top, left = row * (height + 1), column * (width + 1)
        assert np.array_equal(canvas[top : top + height, left : left + width], image.permute(1, 2, 0))
    if num_classes == 3:
        assert [int(tick // (height + 1)) for tick in axis.get_yticks()] == [0, 1, 2]
    across, down = figure.get_size_inches() - (0.6, 0.4)
    assert across / down == pytest.approx(columns * width / (rows * height))
