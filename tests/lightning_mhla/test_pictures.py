"""Content of the pictures: measures of attention, matrices, curves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from mhla_kernels import attention_matrix
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mhla import MHLA, AttentionConfig, BlockLayout
from lightning_mhla.callbacks import AttentionPictures
from lightning_mhla.callbacks.maps import draw_attention, draw_frames, draw_matrices, draw_mixing, fold_mixing
from lightning_mhla.callbacks.pictures import attention_entropy, attention_rank, numbered_layers
from lightning_mhla.system.figures import make_panels, plain_numbers, save_figure, set_title

LAYOUT = BlockLayout((4, 4), (2, 2))


def panels(figure: Figure) -> list[Axes]:
    """Return the axes of a figure that show a picture, without its color scales."""
    return [axis for axis in figure.axes if axis.get_label() != "<colorbar>"]


def test_rank_of_mhla_exceeds_the_bound_of_linear_attention() -> None:
    q, k = torch.rand(1, 64, 2, 4), torch.rand(1, 64, 2, 4)
    linear = attention_matrix(q, k, torch.ones(1, 1), block_size=64)[0]
    mixed = attention_matrix(q, k, torch.rand(16, 16), block_size=4)[0]
    assert attention_rank(linear) == 4
    assert attention_rank(mixed) > 40


def test_entropy_runs_from_one_token_to_all() -> None:
    assert attention_entropy(torch.eye(8)[None]) == 0.0
    assert math.isclose(attention_entropy(torch.full((2, 8, 8), 1 / 8)), math.log(8), rel_tol=1e-5)


def test_a_row_is_folded_back_to_the_grid() -> None:
    layout = BlockLayout((6, 4), (3, 2))
    mixing = torch.arange(36.0).view(6, 6)
    folded = fold_mixing(mixing, layout)
    assert folded.shape == (3 * 4 - 1, 2 * 3 - 1)
    for block in range(6):
        row, column = divmod(block, 2)
        tile = folded[row * 4 : row * 4 + 3, column * 3 : column * 3 + 2]
        assert torch.equal(tile.flatten(), mixing[block])
    assert folded[3].isnan().all()
    assert torch.equal(fold_mixing(mixing, BlockLayout((6,), (6,))), mixing)


def test_layers_of_other_grids_are_drawn_beside_each_other() -> None:
    """The stages of a VLT, say."""
    layouts = {"0.0": BlockLayout((6, 4), (3, 2)), "1.0": BlockLayout((3, 2), (1, 2))}
    weights = {"0.0": torch.rand(1, 24, 24), "1.0": torch.rand(2, 6, 6)}
    figure, _ = draw_attention(weights, layouts, None, 7, queries=2)
    assert [axis.get_images()[0].get_array().shape for axis in panels(figure)] == [(6, 4)] * 2 + [(3, 2)] * 2
    assert [tuple(axis.lines[0].get_xydata()[0]) for axis in panels(figure)] == [(1, 1), (3, 4), (0, 0), (1, 2)]
    figure, _ = draw_mixing({"0.0": torch.rand(6, 6), "1.0": torch.rand(2, 2)}, layouts, 7)
    shapes = [axis.get_images()[0].get_array().shape for axis in panels(figure)]
    assert shapes == [(3 * 4 - 1, 2 * 3 - 1), (1, 2 * 3 - 1)]


def test_every_layer_gets_a_panel() -> None:
    layout = BlockLayout((4, 4), (2, 2), prefix_tokens=1)
    figure, _ = draw_mixing({"0": torch.rand(5, 5), "3": torch.rand(3, 5, 5)}, {"0": layout, "3": layout}, 7)
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert titles == ["layer 0\nall heads", "layer 3\nmean of 3 heads"]
    for channels in (1, 3, 4):
        weights = {number: torch.rand(2, 17, 17) for number in ("1", "2", "5")}
        image = torch.rand(channels, 8, 8)
        figure, _ = draw_attention(weights, dict.fromkeys(weights, layout), image, 7, queries=4)
        assert len(panels(figure)) == 3 * 5
        assert len(figure.axes) == 3 * 5 + 3, "a color scale for each layer"
        assert [axis.get_ylabel() for axis in panels(figure) if axis.get_ylabel()] == ["layer 1", "layer 2", "layer 5"]


@pytest.mark.parametrize(("length", "shown"), [(1, [0]), (5, [0, 1, 2, 3, 4]), (9, [0, 2, 4, 6, 8])])
def test_attention_in_a_clip_is_drawn_by_frame(length: int, shown: list[int]) -> None:
    """The picture shows the query in the middle of the middle frame; entries of the matrix identify query and key."""
    layout = BlockLayout((length, 3, 4), (1, 1, 1))
    tokens = layout.num_tokens
    weights = torch.arange(float(tokens**2)).view(1, tokens, tokens).repeat(2, 1, 1)
    clip = torch.arange(4.0 * length).view(1, -1, 1, 1).expand(1, -1, 6, 8)  # four frames for one of the grid
    figure, _ = draw_frames({"1": weights}, layout, clip, 7)
    axes, middle = panels(figure), length // 2
    row = weights[0, (middle * 3 + 1) * 4 + 2].view(length, 3, 4)
    assert [axis.get_title() for axis in axes[: len(shown)]] == [f"frame {frame}" for frame in shown]
    for column, frame in enumerate(shown):
        below = axes[len(shown) + column]
        assert below.images[0].get_array().tolist() == row[frame].tolist()
        assert bool(below.lines) == (frame == middle)
    assert axes[len(shown)].get_ylabel() == "layer 1"


def test_layers_have_the_numbers_of_the_model() -> None:
    config = AttentionConfig(block_grid=(1, 1))
    layout = BlockLayout((4, 4), (1, 1))
    ours = [MHLA(8, 2, layout, config) for _ in range(2)]
    blocks = nn.ModuleList([nn.ModuleDict({"attn": each}) for each in (nn.Identity(), ours[0], nn.Identity(), ours[1])])
    assert list(numbered_layers(nn.ModuleDict({"blocks": blocks}))) == ["1", "3"]
    twice = nn.ModuleList([nn.ModuleDict({"first": ours[0], "second": ours[1]})])
    assert list(numbered_layers(twice)) == ["0", "1"], "names that do not tell them apart"


def test_sequences_are_drawn_as_whole_matrices() -> None:
    weights = torch.randn(2, 9, 9).tril()  # signed, as rotary makes them
    figure, _ = draw_matrices({str(index): weights for index in range(5)}, 7)
    assert [axis.get_title() for axis in panels(figure)] == [f"layer {index}\nmean of 2 heads" for index in range(5)]
    shown = torch.from_numpy(panels(figure)[0].images[0].get_array().filled(float("nan")))
    assert torch.equal(shown.isnan(), weights[0] == 0)
    torch.testing.assert_close(shown.nansum(-1), torch.ones(9), rtol=0, atol=1e-3)


@pytest.mark.parametrize("layers", [1, 3, 12])
@pytest.mark.parametrize("kind", ["attention", "mixing", "matrices", "frames"])
def test_no_text_of_a_picture_is_cut_or_overlaps(kind: str, layers: int) -> None:
    numbers = [f"{index}.11" for index in range(layers)]
    clip = BlockLayout((2, 2, 4), (1, 1, 1))
    weights = {number: torch.rand(16, 16, 16) for number in numbers}
    figure, caption = {
        "attention": lambda: draw_attention(weights, dict.fromkeys(numbers, LAYOUT), torch.rand(3, 8, 8), 1_234_567),
        "mixing": lambda: draw_mixing(
            {number: torch.rand(16, 4, 4) for number in numbers}, dict.fromkeys(numbers, LAYOUT), 1_234_567
        ),
        "matrices": lambda: draw_matrices(weights, 1_234_567),
        "frames": lambda: draw_frames(weights, clip, torch.rand(3, 2, 8, 8), 1_234_567),
    }[kind]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, width, height = canvas.get_renderer(), figure.bbox.width, figure.bbox.height
    titles = [
        text for text in figure.findobj(Text) if text.get_text() and text.get_fontsize() >= 9 and text.get_visible()
    ]
    boxes = {text.get_text(): text.get_window_extent(renderer) for text in titles if "layer" in text.get_text()}
    suptitle = figure.get_suptitle()
    assert "step 1,234,567" in " ".join(suptitle.split())
    boxes[suptitle] = next(text for text in titles if text.get_text() == suptitle).get_window_extent(renderer)
    for text, box in boxes.items():
        assert 0 <= box.x0 < box.x1 <= width, text
        assert 0 <= box.y0 < box.y1 <= height, text
    for first, one in boxes.items():
        overlapping = [second for second, other in boxes.items() if second != first and one.overlaps(other)]
        assert not overlapping, (first, overlapping)
    assert "step 1,234,567" in caption


def test_a_picture_has_a_variant_for_dark_screens_and_its_caption(tmp_path: Path) -> None:
    figure, axes = make_panels(1, 1, (2, 2))
    set_title(figure, "a title that is far too long for one line of this narrow picture")
    axes[0].imshow(np.full((4, 4), 0.5), cmap="gray", vmin=0, vmax=1)
    save_figure(figure, tmp_path / "x.png", "Look at this.")
    light, dark = (Image.open(tmp_path / name).convert("RGB") for name in ("x.png", "dark/x.png"))
    assert Image.open(tmp_path / "x.png").info["Description"] == "Look at this."
    assert light.getpixel((1, 1)) == (255, 255, 255)
    assert dark.getpixel((1, 1)) == (0x14, 0x17, 0x1C), "the background of the page on a dark screen"
    middle = (light.width // 2, light.height * 3 // 4)
    assert light.getpixel(middle) == dark.getpixel(middle) == (128, 128, 128), "data has the same colors"
    assert min(np.array(light).flatten()) < 60, "dark letters"
    assert max(np.array(dark).flatten()) > 200, "light letters"
    save_figure(figure, tmp_path / "again.png", "Look at this.")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "x.png").read_bytes(), "the figure has its colors again"


@pytest.mark.parametrize("setting", ["figure.autolayout", "figure.constrained_layout.use"])
def test_settings_of_the_user_do_not_change_the_arrangement(setting: str, tmp_path: Path) -> None:
    """A ``matplotlibrc`` may choose a layout engine that does not work with colorbars of another one."""
    weights = {"0": torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(0)).softmax(-1)}
    for name, chosen in (("default.png", False), ("chosen.png", True)):
        with rc_context({setting: chosen}):
            save_figure(draw_matrices(weights, 1)[0], tmp_path / name)
    for folder in (tmp_path, tmp_path / "dark"):
        assert (folder / "default.png").read_bytes() == (folder / "chosen.png").read_bytes()


@pytest.mark.parametrize("kind", ["attention", "matrices", "mixing", "curves"])
def test_both_variants_of_a_picture_have_the_same_arrangement(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure is arranged once and drawn once for each file; with two arrangements, the dark variant had another size."""
    layout = BlockLayout((8, 8), (4, 4))
    weights = {"0": torch.rand(2, 64, 64).softmax(-1), "1": torch.rand(2, 64, 64).softmax(-1)}
    if kind == "curves":
        figure, axes = make_panels(2, 2, (2, 2))
        for axis in axes:
            axis.plot([1, 10, 1000], [0.001, 1, 300])
            axis.set(xscale="log", yscale="log", title="a title")
    else:
        figure, _ = {
            "attention": lambda: draw_attention(weights, dict.fromkeys(weights, layout), torch.rand(1, 8, 8), 1),
            "matrices": lambda: draw_matrices(weights, 1),
            "mixing": lambda: draw_mixing({"0": torch.rand(16, 16)}, {"0": layout}, 1),
        }[kind]()
    drawn = []
    draw = Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda self, renderer: (drawn.append(self), draw(self, renderer)))
    save_figure(figure, tmp_path / "x.png")
    assert len(drawn) == 2
    light, dark = (np.array(Image.open(tmp_path / name).convert("L"), int) for name in ("x.png", "dark/x.png"))
    assert light.shape == dark.shape
    rows = [np.flatnonzero((abs(image - image[0, 0]) > 60).any(1)) for image in (light, dark)]
    columns = [np.flatnonzero((abs(image - image[0, 0]) > 60).any(0)) for image in (light, dark)]
    for first, second in (rows, columns):
        assert abs(first[0] - second[0]) <= 1
        assert abs(first[-1] - second[-1]) <= 1


class Model(LightningModule):
    """Model with one attention layer, whose validation step logs and uses random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MHLA(8, 2, LAYOUT, AttentionConfig(block_grid=[2, 2]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return a loss."""
        self.log("train/noise", torch.rand(()))
        return self.layer(batch["x"]).square().mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log a loss."""
        assert not self.training
        self.log("val/loss", self.layer(batch["x"]).square().mean() + torch.rand(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a plain optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 3, "check_val_every_n_epoch": 1}, [4, 6]),
        ({"max_epochs": 3, "check_val_every_n_epoch": 2}, [4, 6]),
        ({"max_epochs": 3, "check_val_every_n_epoch": 5}, [6]),
        ({"max_steps": 3, "val_check_interval": 2}, [3]),
        ({"max_epochs": 2, "limit_val_batches": 0}, []),
    ],
    ids=["every epoch", "period of two", "no validation", "stopped between", "no validation data"],
)
def test_the_final_weights_are_always_drawn(tmp_path: Path, options: dict[str, int], steps: list[int]) -> None:
    samples = [{"x": torch.randn(16, 8)} for _ in range(4)]
    pictures, model = AttentionPictures(every_n_epochs=2), Model()
    trainer = Trainer(
        accelerator="cpu", num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[pictures], **options,
    )  # fmt: skip
    trainer.fit(model, DataLoader(samples, batch_size=2), DataLoader(samples, batch_size=2))
    drawn = sorted(path.name for path in (tmp_path / "pictures").glob("*.png"))
    assert drawn == [f"{name}-step{step:07d}.png" for name in ("attention", "mixing") for step in steps]
    assert model.training
    assert not model.layer._forward_pre_hooks
    assert "log" not in vars(model), "the module logs again"
    reasons = pictures.skipped_parts(trainer)
    assert bool(reasons) == (not steps), reasons


class ModelOfSeveralLoaders(Model):
    """Model whose validation step takes the number of the loader."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log a loss."""
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("loaders", ["none", "by name", "several"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_final_weights_are_drawn_with_any_loaders_and_precision(
    tmp_path: Path, loaders: str, precision: Any
) -> None:
    samples = [{"x": torch.randn(16, 8)} for _ in range(4)]
    loader = DataLoader(samples, batch_size=2)
    validation: Any = {"none": [], "by name": {"a": loader, "b": loader}, "several": [loader, loader]}[loaders]
    model = Model() if loaders == "none" else ModelOfSeveralLoaders()
    trainer = Trainer(
        accelerator="cpu", num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[AttentionPictures()], max_steps=1,
        val_check_interval=2, precision=precision,
    )  # fmt: skip
    trainer.fit(model, loader, validation)
    assert bool(list(tmp_path.rglob("attention-step0000001.png"))) == (loaders != "none")
    assert not model.layer._forward_pre_hooks


def test_layers_that_are_too_large_are_named() -> None:
    pictures, trainer = AttentionPictures(max_tokens=15), Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(Model())
    trainer.fit_loop.epoch_loop.val_loop._data_source.instance = DataLoader([1])
    (reason,) = pictures.skipped_parts(trainer)
    assert "16 tokens are more than max_tokens=15" in reason


def test_axes_have_plain_numbers() -> None:
    figure, (axis,) = make_panels(1, 1, (6.0, 4.0))
    axis.plot([10, 20_000], [0, 4_000])
    axis.set_xscale("log")
    plain_numbers(axis)
    figure.canvas.draw()
    across, up = ({label.get_text() for label in one.get_ticklabels()} for one in (axis.xaxis, axis.yaxis))
    assert {"10", "20", "50", "10,000", "20,000"} <= across
    assert {"0", "1,000", "2,000", "4,000"} <= up
