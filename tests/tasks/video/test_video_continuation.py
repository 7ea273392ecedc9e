"""The model that continues videos frame by frame: its data, its network, and training and prediction by the command line."""

from __future__ import annotations

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning import Trainer
from mhla_tasks.commandline import parser, registry
from mhla_tasks.video import BouncingDigits, ContinuationPictures, FrameTransformer, MovingDigits, VideoContinuation
from mhla_tasks.video.bouncing import BouncingDigitSamples, bounce, positions
from mhla_tasks.video.clips import read_clip
from mhla_tasks.video.continuation import ErrorsConfig, FrameShape
from mhla_tasks.video.frames import relative_errors
from mhla_tasks.video.strips import draw_continuations, shown_frames, side_by_side
from PIL import Image
from processes import run_cli
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from wan import ROOT

from lightning_mhla import AttentionConfig
from lightning_mhla.data.sampling import sample_generator

EXPONENTIAL = AttentionConfig(mixing="exponential", mixing_per_head=True, normalize=False, gate=True)
KINDS = {
    "exponential": EXPONENTIAL,
    "dense": AttentionConfig(),
    "linear": AttentionConfig(kind="linear"),
    "softmax": AttentionConfig(kind="softmax", rotary=True),
}


def network(attention: AttentionConfig = EXPONENTIAL, **options: Any) -> FrameTransformer:
    torch.manual_seed(0)
    sizes = {"channels": 1, "frames": 6, "levels": 3, "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, **options}
    return FrameTransformer(8, 12, attention, **sizes).double().eval()


def config(folder: Path, **model: Any) -> Path:
    """Write a small version of the shipped configuration, which logs to a CSV file."""
    content = yaml.safe_load((ROOT / "configs/video/continue.yaml").read_text())
    content["model"]["init_args"] |= {"shape": {"dim": 16, "depth": 2, "heads": 2}, **model}
    content["data"]["init_args"] |= {"batch_size": 300, "clips": 3}  # 4 batches in an epoch
    content["trainer"] |= {"log_every_n_steps": 1, "accelerator": "cpu", "num_sanity_val_steps": 0}
    content["trainer"]["logger"] = {
        "class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": "", "version": "log"},
    }  # fmt: skip
    content["trainer"]["callbacks"] = [
        {"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(folder / "checkpoints"), "filename": "{step}",
                                                        "every_n_train_steps": 3, "save_top_k": -1}},
        {"class_path": "mhla_tasks.video.ContinuationPictures", "init_args": {"every_n_steps": 4, "frames": 12}},
    ]  # fmt: skip
    content["trainer"] |= {"max_steps": 8, "val_check_interval": 4, "limit_val_batches": 1}
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def losses(folder: Path) -> dict[int, str]:
    with (folder / "log/metrics.csv").open() as stream:
        return {int(row["step"]): row["train/loss"] for row in csv.DictReader(stream) if row.get("train/loss")}


@pytest.mark.parametrize(("start", "velocity", "space"), [(0, 1, 5), (3, -2, 5), (5, 2, 5), (1, -1, 1), (4, 7, 9)])
def test_digits_are_reflected_at_the_edges(start: int, velocity: int, space: int) -> None:
    expected, position, step = [], start, velocity
    for _ in range(40):
        expected.append(position)
        position += step
        while not 0 <= position <= space:
            position, step = (-position, -step) if position < 0 else (2 * space - position, -step)
    assert positions(start, velocity, space, 40) == expected


def test_a_longer_clip_continues_a_shorter_one_and_keeps_the_digit() -> None:
    digit = torch.rand(1, 3, 3) + 0.5
    long = bounce(digit, (50, 7, 9), 2, sample_generator(0, 3))
    assert torch.equal(bounce(digit, (8, 7, 9), 2, sample_generator(0, 3)), long[:, :8])
    places = []
    for frame in long[0]:
        rows, columns = (frame > -1).nonzero().unbind(1)
        assert (int(rows.max() - rows.min()), int(columns.max() - columns.min())) == (2, 2)
        top, left = int(rows.min()), int(columns.min())
        torch.testing.assert_close(frame[top : top + 3, left : left + 3], digit[0] * 2 - 1)
        places.append((top, left))
    assert {top for top, _ in places} == set(range(5))
    steps = {abs(after[axis] - before[axis]) for before, after in pairwise(places) for axis in (0, 1)}
    assert max(steps) <= 2


def test_predicted_clips_are_as_long_as_the_model_draws(tmp_path: Path) -> None:
    data = BouncingDigits(frames=5, clips=4)
    assert data.source("predict")[0]["video"].shape == (1, 5, 16, 16)
    long = data.held_out(40, 4)
    assert len(long) == len(data.source("predict")) == 4
    assert torch.equal(long[2]["video"][:, :5], data.source("validate")[2]["video"])
    random = data.source("train")
    assert not torch.equal(random[0]["video"], random[0]["video"])


def test_every_pixel_has_its_place() -> None:
    """A network whose layers are the identity, and whose weights copy each pixel of a patch, returns the frame itself."""
    copying = network(patch_size=4, dim=32, channels=2)
    copying.backbone = nn.Identity()
    with torch.no_grad():
        for parameter in copying.parameters():
            parameter.zero_()
        for pixel in range(32):
            channel, row, column = pixel // 16, pixel // 4 % 4, pixel % 4
            copying.patches.weight[pixel, channel, row + 2, column + 2] = 1  # half a patch around it is visible, too
            # values -1, 0 and 1 of the levels 0, 1 and 2: the largest of -v, 0.4 - v ** 2 and v, without the square
            copying.head.weight[3 * pixel, pixel], copying.head.weight[3 * pixel + 2, pixel] = -1, 1
            copying.head.bias[3 * pixel + 1] = 0.5
    frames = torch.randint(3, (2, 5, 2, 8, 12))
    assert torch.equal(copying(frames).argmax(-1), frames)


def test_levels_are_rounded_and_shown_again() -> None:
    video = torch.linspace(-1, 1, 5).view(1, 1, 5, 1, 1).expand(1, 1, 5, 8, 12)
    levels = network().to_levels(video)
    assert levels.shape == (1, 5, 1, 8, 12)
    assert levels[0, :, 0, 0, 0].tolist() == [0, 0, 1, 2, 2]  # half a level is rounded to the even one
    assert network().to_bytes(torch.arange(3)).tolist() == [0, 128, 255]
    with pytest.raises(ValueError, match=r"channels, height and width \(1, 8, 16\), the model \(1, 8, 12\)"):
        network().to_levels(torch.zeros(1, 1, 2, 8, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_sees_all_of_itself_and_of_earlier_frames(kind: str) -> None:
    model, frames = network(KINDS[kind]), torch.randint(3, (1, 6, 1, 8, 12))
    changed = frames.clone()
    changed[:, 3, :, 7, 11] = (changed[:, 3, :, 7, 11] + 1) % 3
    out, other = model(frames), model(changed)
    assert torch.equal(out[:, :3], other[:, :3])
    assert ((out - other)[:, 3:].abs().amax((2, 5)) > 0).all(), "every pixel of the frame and of later ones"


@pytest.mark.parametrize("kind", KINDS)
def test_frame_by_frame_is_the_complete_pass(kind: str) -> None:
    """Every new frame is what the complete pass over all frames so far predicts, and only two kinds store more and more."""
    model, first = network(KINDS[kind], frames=20), torch.randint(3, (2, 2, 1, 8, 12))
    frames, sizes = first, []
    for newest, size in model.continue_clips(first, 20):
        assert torch.equal(newest, model(frames)[:, -1:].argmax(-1))
        frames, sizes = torch.cat([frames, newest], 1), [*sizes, size]
    assert len(sizes) == 18
    assert (len(set(sizes)) == 1) is (kind in ("exponential", "linear"))


def test_states_hold_as_many_numbers_after_any_number_of_frames() -> None:
    """In each layer and head: the sum of each of four terms, the newest frame, and their mixture, of Dk Dv + Dk numbers each."""
    model = network()
    for frames in (1, 2, 6, 40):
        cache = model.new_cache()
        model.next_frame(torch.randint(3, (1, frames, 1, 8, 12)), cache)
        values = [value for state in cache.layers for value in vars(state).values()]
        numbers = sum(value.numel() for value in values if isinstance(value, torch.Tensor))
        assert numbers == 2 * 2 * (4 + 2) * (8 * 8 + 8), f"after {frames} frames"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_does_not_grow_with_the_clip() -> None:
    model, first = network(frames=6, dim=64), torch.randint(3, (4, 2, 1, 8, 12))
    sizes, resident = set(), []
    for number, (_, size) in enumerate(model.continue_clips(first, 302)):
        sizes.add(size)
        if number in (50, 299):
            resident.append(resident_bytes())
    assert len(sizes) == 1
    assert sizes.pop() * 249 > 60e6, "kept states would be seen"
    assert resident[1] - resident[0] < 20e6


def test_only_frames_after_the_first_ones_count() -> None:
    module = VideoContinuation(
        EXPONENTIAL, 8, 12, frames=6, start=3, shape=FrameShape(levels=3, dim=16, depth=1, heads=2)
    )
    video = torch.rand(2, 1, 6, 8, 12) * 2 - 1
    frames = (video.transpose(1, 2) + 1).round().long()
    logits = module.network(frames[:, :-1]).double()
    expected = [
        F.cross_entropy(logits[clip, 2:].flatten(0, -2), frames[clip, 3:].flatten()).item() for clip in range(2)
    ]
    out = module.sample_losses({"video": video}, [])
    torch.testing.assert_close(out.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


def test_a_step_of_training_has_gradients_and_logs_its_loss(tmp_path: Path) -> None:
    shape = FrameShape(levels=3, dim=16, depth=1, heads=2, patch_size=2)
    module = VideoContinuation(EXPONENTIAL, 8, 12, frames=6, start=2, shape=shape)
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, DataLoader([{"video": torch.rand(1, 6, 8, 12) * 2 - 1}] * 2, batch_size=2))
    assert trainer.callback_metrics["train/loss"].isfinite()
    assert any(not torch.equal(value, initial[name]) for name, value in module.state_dict().items())


def test_training_sees_its_own_frames_and_noise() -> None:
    shape = FrameShape(levels=3, dim=16, depth=1, heads=2)
    module = VideoContinuation(EXPONENTIAL, 8, 12, frames=6, start=2, shape=shape, errors=ErrorsConfig(0.5, 0.0))
    frames = torch.randint(3, (64, 6, 1, 8, 12))
    seen = module._with_errors(frames)
    predicted = module(frames[:, :-1]).argmax(-1)
    own = (seen[:, 2:] == predicted[:, 1:]).flatten(1).all(1)
    true = (seen == frames).flatten(1).all(1)
    assert torch.equal(seen[:, :2], frames[:, :2])
    assert (own ^ true).all()
    assert 16 < own.sum() < 48
    module.errors = ErrorsConfig(0.0, 0.2)
    changed = (module._with_errors(frames) != frames).double().mean().item()
    assert changed == pytest.approx(0.2 * 2 / 3, abs=0.02), "a random level may be the true one"


def test_errors_are_relative_to_the_true_frame() -> None:
    truth = torch.zeros(3, 1, 4, 4)
    truth[:, :, 0, :2] = 3
    clip = truth.clone()
    clip[1], clip[2, 0, 3, 3] = 0, 6
    torch.testing.assert_close(relative_errors(clip, truth), torch.tensor([0.0, 1.0, 2**0.5]))
    black = torch.zeros_like(truth)
    assert relative_errors(black, black).tolist() == [0, 0, 0]
    assert relative_errors(clip, black).isnan().tolist() == [True, False, True]
    truth = torch.full((1, 3, 256, 256), 200.0)
    clip = truth.clone()
    clip[0, 0, 0, 0] = 201
    assert 0 < relative_errors(clip, truth) < 1e-4, "one wrong pixel is not exact"


def test_pictures_show_more_frames_of_longer_clips() -> None:
    assert shown_frames(8, 32) == [1, 3, 5, 7, 9, 11, 13, 15, 19, 23, 27, 31]
    assert shown_frames(3, 5) == [0, 1, 2, 3, 4]
    assert shown_frames(8, 6) == [1, 2, 3, 5]
    clips = [torch.full((6, 1, 4, 5), 200, dtype=torch.uint8)] * 2
    truth = [torch.full((4, 1, 4, 5), 50, dtype=torch.uint8)] * 2
    joined = side_by_side(truth, clips)
    assert joined.shape == (2, 6, 1, 4, 11)
    assert joined[0, 3, 0, 0].tolist() == [50] * 5 + [96] + [200] * 5
    assert joined[0, 4, 0, 0].tolist() == [96] * 6 + [200] * 5
    figure = draw_continuations(truth, clips, 2, 3)
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "2", "3", "4", "5", "6"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["1: truth", "continued", "2: truth", "continued"]


def test_fit_resume_and_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two epochs; a resumed run has the same losses; another process continues to eight times the trained length."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    parser.main(["fit", "--config", str(config(whole))])
    checkpoint = whole / "checkpoints/step=3.ckpt"
    parser.main(["fit", "--config", str(config(resumed)), f"--ckpt_path={checkpoint}"])
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step >= 3}
    assert len(losses(whole)) == 8
    drawn = sorted(path.name for path in (whole / "log/pictures").glob("*.*"))
    assert drawn == [f"continued-step{step:07d}.{kind}" for step in (4, 8) for kind in ("gif", "png")]

    last = whole / "checkpoints/step=6.ckpt"
    said = run_cli("predict", f"--ckpt_path={last}", "--frames=64", "--data.clips=3", folder=tmp_path)
    folder = whole / "predict"
    assert re.search(r"frame 8: error .*\n?frame 16: .*\n?frame 32: .*\n?frame 64: error", said), said
    by_frame = json.loads((folder / "videos-by-frame.json").read_text())
    assert (by_frame["first_frame"], by_frame["trained_frames"], by_frame["clips"]) == (3, 8, 3)
    assert len(by_frame["error"]) == len(by_frame["seconds"]) == len(by_frame["state_bytes"]) == 62
    assert len(set(by_frame["state_bytes"])) == 1
    with Image.open(folder / "videos.gif") as animation:
        assert animation.n_frames == 64
    assert (folder / "videos.png").exists()
    rows = [json.loads(line) for line in (folder / "videos.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]

    module = VideoContinuation.load_from_checkpoint(last, weights_only=True).eval()
    truth = module.network.to_levels(BouncingDigitSamples(False, 64, 16, 16)[1]["video"][None])
    frames = truth[:, :2]
    with torch.no_grad():
        while frames.shape[1] < 64:
            frames = torch.cat([frames, module(frames)[:, -1:].argmax(-1)], 1)
    clip = read_clip((folder / "videos" / rows[1]["file"]).read_bytes(), "clip", 64, None, 0.0)
    difference = (clip[:, :1].float() / 255 - frames[0]).abs()
    assert difference.mean() < 0.05, "but for compression, the file has the frames of complete passes"
    expected = relative_errors(module.network.to_bytes(frames[0]), module.network.to_bytes(truth[0]))[2:]
    torch.testing.assert_close(torch.tensor(rows[1]["error"]), expected, atol=1e-3, rtol=0)

    before = (folder / "videos.jsonl").read_text()
    parser.main(["predict", f"--ckpt_path={last}", f"--model.output={folder}", "--frames=64", "--data.clips=3"])
    assert (folder / "videos.jsonl").read_text() == before, "clips that exist are not drawn again"

    registry.run("export", [str(last), str(tmp_path / "out")])
    exported = FrameTransformer.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(exported(frames), module.network(frames))
    assert "FrameTransformer.from_pretrained" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 8}, r"start=8 must be at least 1 and below the number of frames, 8"),
        ({"channels": 4}, r"channels=4 must be 1 \(gray\) or 3 \(color\)"),
        ({"height": 18}, r"patch_size=4 must be an even number that divides the frames of 18 x 16"),
        ({"shape": {"levels": 1}}, r"levels=1 must lie between 2 and 256"),
        ({"errors": {"own": 1.0}}, r"errors.own=1.0 must be at least 0 and below 1"),
        ({"sampling": {"fps": 0.0}}, r"sampling.fps=0.0 must be above 0"),
        ({"sampling": {"crf": 52.0}}, r"sampling.crf=52.0 must lie between 0 and 51"),
        (
            {"attention": {"block_size": 8}},
            r"a block is one frame of 16 patches; leave block_grid=None and block_size=8 out",
        ),
        ({"attention": {"kind": "gla"}}, r"attention kind 'gla' is not block-causal"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VideoContinuation(**{"attention": {"mixing": "exponential"}, "height": 16, "width": 16, **options})


def test_clips_that_cannot_be_continued_are_errors() -> None:
    first = torch.zeros(1, 2, 1, 8, 12, dtype=torch.long)
    with pytest.raises(ValueError, match=r"clips of 7 frames are longer than the 6 .* mixing: exponential"):
        next(network(KINDS["dense"]).continue_clips(first, 7))
    with pytest.raises(ValueError, match=r"clips of 2 frames do not continue their 2 first frames"):
        next(network().continue_clips(first, 2))
    module = VideoContinuation(EXPONENTIAL, 8, 12, frames=6, start=3)
    with pytest.raises(ValueError, match=r"clips of 3 frames have none after the first start=3"):
        module.sample_losses({"video": torch.zeros(1, 1, 3, 8, 12)}, [])
    for options, message in (({"speed": 0}, "speed=0 must be"), ({"width": 8}, "no room to move on 16 x 8")):
        with pytest.raises(ValueError, match=message):
            BouncingDigits(**options).source("train")


def test_pictures_need_clips_of_any_length() -> None:
    module = VideoContinuation(EXPONENTIAL, 8, 12)
    with pytest.raises(
        ValueError,
        match="the data BouncingDigits or VideoFolders or VideoShards, not VideoContinuation and MovingDigits",
    ):
        ContinuationPictures().on_fit_start(SimpleNamespace(datamodule=MovingDigits()), module)
    with pytest.raises(ValueError, match="clips=0 must be at least 1"):
        ContinuationPictures(clips=0)
