"""Clips: rendered, decoded from files at the times asked, described by captions; and every kind of file that is broken."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from mhla_tasks.captioned.requests import PromptRequest, RequestedSamples
from mhla_tasks.captioned.text import TextConfig, make_encoder, read_prompts
from mhla_tasks.text_to_image.callbacks import SceneScores
from mhla_tasks.video import ContinuationPictures
from mhla_tasks.video.callbacks import ClipPictures
from mhla_tasks.video.clips import check_video, cover, read_clip, to_frames, to_signed, write_clip
from mhla_tasks.video.continuation import ContinuationSampling
from mhla_tasks.video.digits import MOVES, NAMES, MovingDigitSamples, every_caption, render
from mhla_tasks.video.sampling import WanSamplingConfig
from mhla_tasks.video.sources import CaptionedClips
from wan import make_shard, shard_clips

from lightning_mhla.data import BrokenSampleError, ShardReader
from lightning_mhla.data.digits import load_digits

SIZE = {"frames": 5, "height": 16, "width": 24}


@pytest.mark.parametrize("move", MOVES)
def test_a_digit_moves_as_its_caption_says(move: str) -> None:
    image = load_digits(True)[0][3]
    clip = render(image, move, 6, 12, 14, torch.Generator().manual_seed(0))
    assert clip.shape == (1, 6, 12, 14)
    mass = (clip[0] + 1).double()
    rows, columns = (
        (mass.sum(axis) * torch.arange(mass.shape[3 - axis]).double()).sum(-1) / mass.sum((1, 2)) for axis in (2, 1)
    )
    steps = {"up": -rows.diff(), "down": rows.diff(), "left": -columns.diff(), "right": columns.diff()}
    travel = 4 if move in ("up", "down") else 5
    assert steps[move].sum().item() == pytest.approx(travel)
    assert all((steps[move] >= -1e-9).tolist())
    across = columns if move in ("up", "down") else rows
    assert across.diff().abs().max() < 1e-9, "it moves along one axis only"
    assert mass.sum((1, 2)).allclose((2 * image.double()).sum()), "the whole digit stays on the canvas"


def test_digits_as_samples() -> None:
    train, held_out = MovingDigitSamples(True, 4, 12, 12), MovingDigitSamples(False, 4, 12, 12)
    assert (len(train), len(held_out)) == (1437 * 4, 360)
    _, labels = load_digits(True)
    for index in (0, 5, 5747):
        assert train[index]["caption"].split()[:2] == ["a", NAMES[labels[index // 4]]]
    assert torch.equal(held_out[7]["video"], held_out[7]["video"])
    assert any(not torch.equal(train[9]["video"], train[9]["video"]) for _ in range(20))
    assert {train[index]["caption"] for index in range(600)} == set(every_caption())
    with pytest.raises(ValueError, match="at least 1 frame and 8 x 8 pixels"):
        MovingDigitSamples(True, 4, 7, 12)


def test_words_have_vectors_of_their_own() -> None:
    encoder = make_encoder(TextConfig(length=3), 16)
    out = encoder.encode(["a seven", "A seven moving right", ""], torch.device("cpu"))
    assert out.shape == (3, 3, 16)
    assert torch.equal(out[0, :2], out[1, :2]), "the same words have the same vectors"
    assert not out[0, 2].any(), "nothing beyond the caption"
    assert not out[2].any()
    assert not torch.equal(out[0, 0], out[0, 1])
    assert out[1, 0, 0].item() == pytest.approx(-0.7853, abs=1e-4), "drawn from a hash, so the same on every machine"


def test_captions_as_the_pipeline_encodes_them(pipeline: Path) -> None:
    encoder = make_encoder(TextConfig(str(pipeline), 6), 16)
    wan = WanPipeline.from_pretrained(pipeline, torch_dtype=torch.bfloat16)
    prompts = ["a seven moving right", "one"]
    expected, empty = wan.encode_prompt(prompts, ["", ""], max_sequence_length=6)
    for texts, theirs in ((prompts, expected), (["", ""], empty)):  # bfloat16, there with padding
        torch.testing.assert_close(encoder.encode(texts, torch.device("cpu")), theirs.float(), atol=0.02, rtol=0.02)
    with pytest.raises(ValueError, match=r"embeddings of width 16, not 32; set --model.transformer\.text_dim"):
        make_encoder(TextConfig(str(pipeline)), 32).encode(["a"], torch.device("cpu"))
    with pytest.raises(FileNotFoundError, match="not a folder or hub name of a pipeline"):
        make_encoder(TextConfig(str(pipeline / "vae")), 16).encode(["a"], torch.device("cpu"))


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n dog \tA long prompt of a dog, seen from afar\n")
    assert read_prompts(path) == [("a cat", "a cat"), ("dog", "A long prompt of a dog, seen from afar")]
    source = RequestedSamples(PromptRequest(str(path), per_prompt=2, seed=3), [], "mp4")
    assert [source[index]["file"] for index in range(4)] == ["a cat-0.mp4", "a cat-1.mp4", "dog-0.mp4", "dog-1.mp4"]
    assert source[3] == {
        "index": 3,
        "caption": "A long prompt of a dog, seen from afar",
        "file": "dog-1.mp4",
        "seed": 3,
    }
    path.write_text("a cat\na dog\na cat \n")
    assert len(RequestedSamples(PromptRequest(str(path)), [], "mp4")) == 2, (
        "VBench's list has some of its prompts twice"
    )
    path.write_text("a cat\ta white cat\na cat\ta black cat\n")
    with pytest.raises(ValueError, match="two prompts have the same name"):
        RequestedSamples(PromptRequest(str(path)), [], "mp4")
    path.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(path)
    with pytest.raises(FileNotFoundError, match="is not a file"):
        RequestedSamples(PromptRequest(str(tmp_path / "none.txt")), [], "mp4")
    with pytest.raises(ValueError, match="cannot be a file name"):
        RequestedSamples(PromptRequest(["either/or"]), [], "mp4")
    with pytest.raises(ValueError, match="there are no prompts; name a file of them"):
        RequestedSamples(PromptRequest(), [], "mp4")


@pytest.mark.parametrize("name", ["2026-11-25T10:30", "file:a", "concat:a|b", "pipe:1", "-o", "%03d", "http:"])
def test_no_name_is_a_protocol(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    for path in (Path(name) / "clip.mp4", Path(f"{name}.mp4")):
        write_clip(path, torch.zeros(3, 3, 16, 16, dtype=torch.uint8), 8)
        check_video(path.read_bytes(), str(path))
    assert sorted(str(path) for path in Path().rglob("*.mp4")) == sorted([f"{name}/clip.mp4", f"{name}.mp4"])


def brightness(clip: torch.Tensor) -> list[int]:
    return [round(float(frame.float().mean())) for frame in clip]


@pytest.mark.parametrize(
    ("frames", "fps", "place", "expected"),
    [
        (4, None, 0.0, [0, 10, 20, 30]),
        (4, None, 1.0, [200, 210, 220, 230]),
        (4, 4.0, 0.0, [0, 20, 40, 60]),
        (4, 4.0, 1.0, [170, 190, 210, 230]),
        (4, 16.0, 0.0, [0, 0, 10, 10]),
        (24, None, 0.5, list(range(0, 240, 10))),
        (1, None, 0.0, [0]),
    ],
)
def test_frames_at_the_times_asked(
    ramp: bytes, frames: int, fps: float | None, place: float, expected: list[int]
) -> None:
    clip = read_clip(ramp, "ramp", frames, fps, place)
    assert clip.shape == (frames, 3, 16, 24)
    assert all(abs(found - wanted) <= 3 for found, wanted in zip(brightness(clip), expected, strict=True)), brightness(
        clip
    )


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    frames = (
        torch.arange(0, 256, 16)
        .view(8, 2)
        .repeat_interleave(8, 1)
        .view(8, 1, 1, 16)
        .expand(8, 1, 10, 16)
        .to(torch.uint8)
    )
    write_clip(tmp_path / "grey.mp4", frames, 4.5)
    read = read_clip((tmp_path / "grey.mp4").read_bytes(), "grey", 8, None, 0.0)
    assert (read.float() - frames.float()).abs().mean() < 6
    write_clip(tmp_path / "exact.mp4", frames, 4.5, crf=0)
    read = read_clip((tmp_path / "exact.mp4").read_bytes(), "exact", 8, None, 0.0)
    assert (read.float() - frames.float()).abs().max() <= 1, "grey loses nothing but what YUV rounds"
    with av.open(str(tmp_path / "grey.mp4")) as container:
        assert float(container.streams.video[0].average_rate) == 4.5
    write_clip(tmp_path / "odd.mp4", frames[:, :, :9, :15], 4)
    assert read_clip((tmp_path / "odd.mp4").read_bytes(), "odd", 8, None, 0.0).shape[2:] == (8, 14)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "video: the video cannot be decoded"),
        (lambda data: b"no video at all" * 50, "video: the video cannot be decoded"),
        (lambda data: data[: len(data) // 2], "video: the video is cut off"),
        (lambda data: data.replace(b"avc1", b"zzzz"), "video: no installed decoder can read the video"),
    ],
)
def test_unreadable_videos(ramp: bytes, damage: Any, message: str) -> None:
    with pytest.raises(BrokenSampleError, match=message):
        read_clip(damage(ramp), "video", 4, None, 0.0)


def test_short_videos(ramp: bytes) -> None:
    with pytest.raises(BrokenSampleError, match=r"3\.00 s are too short for 25 frames at 8 a second"):
        read_clip(ramp, "video", 25, None, 0.0)
    with pytest.raises(BrokenSampleError, match=r"3\.00 s are too short for 9 frames at 2 a second"):
        read_clip(ramp, "video", 9, 2.0, 0.5)


def test_a_sound_file_is_no_video(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "sound.mp4"), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(BrokenSampleError, match="no video stream"):
        read_clip((tmp_path / "sound.mp4").read_bytes(), "sound", 1, None, 0.0)


@pytest.mark.parametrize("size", [(20, 30), (31, 17), (8, 8)], ids=str)
def test_clips_cover_the_size_asked(size: tuple[int, int]) -> None:
    clip = torch.full((3, 3, *size), 200, dtype=torch.uint8)
    covered = torch.stack([cover(frame, 16, 16) for frame in clip])
    signed = to_signed(covered)
    assert signed.shape == (3, 3, 16, 16)
    torch.testing.assert_close(signed, torch.full_like(signed, 200 / 127.5 - 1))
    assert torch.equal(to_frames(signed[None])[0], covered)


def uneven_video(path: Path, times: list[float], base: int) -> bytes:
    """Encode frames of brightness 10 i at ``times``, rounded to ``1 / base`` of a second."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.height, stream.width, stream.pix_fmt = 16, 16, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, base)
        stream.options = {"crf": "10", "bf": "0"}
        for number, at in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 10 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(at * base), Fraction(1, base)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path.read_bytes()


@pytest.mark.parametrize(("rate", "base"), [(30, 1000), (16, 1000), (24, 600), (23.976, 1000)])
def test_rounded_times_neither_double_nor_lose_frames(tmp_path: Path, rate: float, base: int) -> None:
    data = uneven_video(tmp_path / "v.mp4", [number / rate for number in range(24)], base)
    for place, first in ((0.0, 0), (1.0, 12)):
        shown = [round(level / 10) for level in brightness(read_clip(data, "v", 12, None, place))]
        assert shown == list(range(first, first + 12)), shown
    shown = [round(level / 10) for level in brightness(read_clip(data, "v", 12, rate, 0.0))]
    assert shown == list(range(12)), shown


def test_shaky_times_and_more_frames_than_there_are(tmp_path: Path, ramp: bytes) -> None:
    generator = torch.Generator().manual_seed(0)
    shake = (torch.rand(24, generator=generator) - 0.5) * 0.3
    data = uneven_video(
        tmp_path / "v.mp4", [(number + float(shake[number])) / 30 if number else 0.0 for number in range(24)], 15360
    )
    assert [round(level / 10) for level in brightness(read_clip(data, "v", 20, None, 0.0))] == list(range(20))
    shown = [round(level / 10) for level in brightness(read_clip(data, "v", 20, 30.0, 0.0))]
    assert shown == list(range(20)), shown
    clip = read_clip(ramp, "ramp", 4, 16.0, 0.166)  # from 0.447 s on, 8 frames a second
    assert [round(level / 10) for level in brightness(clip)] == [3, 4, 4, 5]


def test_frames_are_made_small_while_decoding(ramp: bytes) -> None:
    assert read_clip(ramp, "ramp", 3, None, 0.0, (8, 10)).shape == (3, 3, 8, 10)


def test_without_chance_a_clip_is_the_middle_of_its_video(ramp: bytes, tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "s.tar", [{"mp4": ramp, "txt": b"a ramp"}])
    clip = shard_clips(ShardReader([shard]), 4, 16, 24)[0]["video"]
    shown = [round(level / 10) for level in brightness(to_frames(clip[None])[0])]
    assert shown == [10, 11, 12, 13]


def test_held_out_digits_start_at_different_places() -> None:
    held_out = MovingDigitSamples(False, 4, 24, 24)
    frames = torch.stack([held_out[index]["video"][0, 0] for index in range(0, 80, 4)])  # all of one direction
    assert len({tuple((frame > -1).nonzero().min(0).values.tolist()) for frame in frames}) > 8


@pytest.mark.parametrize("fps", [0, -4.0, float("nan"), float("inf")])
def test_impossible_rates_are_refused(fps: float) -> None:
    nothing: Any = None
    for make in (
        lambda: CaptionedClips(nothing, 4, 8, 8, fps),
        lambda: WanSamplingConfig(fps=fps),
        lambda: ContinuationSampling(fps=fps),
    ):
        with pytest.raises(ValueError, match=r"fps=.* must be above 0"):
            make()


def test_pictures_of_no_frames_are_refused() -> None:
    for make in (lambda: ClipPictures(["one"], frames=0), lambda: ContinuationPictures(frames=0)):
        with pytest.raises(ValueError, match="frames=0 must be at least 1"):
            make()
    least = ContinuationPictures(clips=1, frames=1)
    assert (least.clips, least.frames, ClipPictures(["one"], frames=1).frames) == (1, 1, 1)
    with pytest.raises(ValueError, match="per_prompt=0 must be at least 1"):
        SceneScores(per_prompt=0)
