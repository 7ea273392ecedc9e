"""Clips: rendered, read from files and shards, encoded into latents; and every kind of input that is broken."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from mhla_tasks.video import prepare, prepare_latents
from mhla_tasks.video.clips import check_video, cover, read_clip, to_frames, to_signed, write_clip
from mhla_tasks.video.data import MovingDigits, PromptRequest, RequestedClips, VideoLatentShards, VideoShards
from mhla_tasks.video.digits import MOVES, NAMES, MovingDigitSamples, every_caption, render
from mhla_tasks.video.sources import ClipFolder, LatentClips, ShardClips
from wan import video_file

from lightning_mhla.data import BrokenSampleError, ResumableLoader, ShardReader
from lightning_mhla.data.digits import load_digits
from lightning_mhla.generative.codecs import ClipCodec
from lightning_mhla.generative.text import TextConfig, make_encoder, read_prompts

SIZE = {"frames": 5, "height": 16, "width": 24}


# moving digits


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


# text


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
    with pytest.raises(
        ValueError, match=r"embeddings of width 16, not 32; set --model.init_args.transformer\.text_dim"
    ):
        make_encoder(TextConfig(str(pipeline)), 32).encode(["a"], torch.device("cpu"))
    with pytest.raises(FileNotFoundError, match="no folder and no hub name of a Wan pipeline"):
        make_encoder(TextConfig(str(pipeline / "vae")), 16).encode(["a"], torch.device("cpu"))


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n dog \tA long prompt of a dog, seen from afar\n")
    assert read_prompts(path) == [("a cat", "a cat"), ("dog", "A long prompt of a dog, seen from afar")]
    source = RequestedClips(PromptRequest(str(path), per_prompt=2, seed=3), [])
    assert [source[index]["file"] for index in range(4)] == ["a cat-0.mp4", "a cat-1.mp4", "dog-0.mp4", "dog-1.mp4"]
    assert source[3] == {
        "index": 3,
        "caption": "A long prompt of a dog, seen from afar",
        "file": "dog-1.mp4",
        "seed": 3,
    }
    path.write_text("a cat\na dog\na cat \n")
    assert len(RequestedClips(PromptRequest(str(path)), [])) == 2, "VBench's list has some of its prompts twice"
    path.write_text("a cat\ta white cat\na cat\ta black cat\n")
    with pytest.raises(ValueError, match="two prompts have one name"):
        RequestedClips(PromptRequest(str(path)), [])
    path.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(path)
    with pytest.raises(FileNotFoundError, match="no file"):
        RequestedClips(PromptRequest(str(tmp_path / "none.txt")), [])
    with pytest.raises(ValueError, match="cannot be a file name"):
        RequestedClips(PromptRequest(["either/or"]), [])
    with pytest.raises(ValueError, match="there are no prompts; name a file of them"):
        RequestedClips(PromptRequest(), [])


# video files


def brightness(clip: torch.Tensor) -> list[int]:
    return [round(float(frame.float().mean())) for frame in clip]


@pytest.fixture(scope="module")
def ramp(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """24 frames, 8 a second, frame i of brightness 10 i."""
    path = tmp_path_factory.mktemp("ramp") / "ramp.mp4"
    write_clip(path, (10 * torch.arange(24).view(-1, 1, 1, 1).expand(-1, 3, 16, 24)).to(torch.uint8), 8)
    return path.read_bytes()


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
        (lambda data: data[: len(data) // 2], "video: the video cannot be decoded"),
        (lambda data: data.replace(b"avc1", b"zzzz"), "video: nothing here can decode the video"),
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
    """Frames of brightness 10 i at ``times``, rounded to ``1 / base`` of a second."""
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


# shards


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def make_shard(path: Path, samples: list[dict[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for number, members in enumerate(samples):
            for extension, data in members.items():
                add(archive, f"{number:04d}.{extension}", data)
    return path


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("videos")
    return [video_file(folder / f"{seed}.mp4", seed=seed).read_bytes() for seed in range(6)]


def test_shards_of_videos(videos: list[bytes], tmp_path: Path) -> None:
    captions = [{"txt": b"a cat\n"}, {"json": b'{"caption": "a dog", "text": "a wolf"}'}]
    shard = make_shard(
        tmp_path / "s.tar", [{"mp4": video, **text} for video, text in zip(videos, captions, strict=False)]
    )
    source = ShardClips(ShardReader([shard]), **SIZE)
    assert len(source) == 2
    assert [source[index]["caption"] for index in range(2)] == ["a cat", "a dog"]
    assert source[0]["video"].shape == (3, 5, 16, 24)
    assert torch.equal(source[0]["video"], source[0]["video"]), "validation takes the same clip each time"
    anywhere = ShardClips(ShardReader([shard]), **SIZE, anywhere=True)
    assert any(not torch.equal(anywhere[0]["video"], anywhere[0]["video"]) for _ in range(10))
    other = ShardClips(ShardReader([shard]), **SIZE, caption_key="text")
    assert other[1]["caption"] == "a wolf"


def test_the_command_makes_shards_of_a_folder(
    videos: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every good video with its own caption, byte for byte; a truncated one and one without a caption are named."""
    source = tmp_path / "clips"
    for number, video in enumerate(videos):
        place = source / f"part{number % 2}/{number}.mp4"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(video)
        text = f"caption {number}"
        if number % 2:
            place.with_suffix(".txt").write_text(text)
        else:
            place.with_suffix(".json").write_text(json.dumps({"said": text}))
    (source / "mute.mp4").write_bytes(videos[0])
    (source / "cut.mp4").write_bytes(in_front(videos[1], tmp_path / "stream.mp4")[:-200])
    (source / "cut.txt").write_text("cut at its end")
    command = ["shards", str(source), str(tmp_path / "out"), "--per-shard", "3", "--caption-key", "said"]
    monkeypatch.setattr(sys, "argv", command)
    prepare.main()
    assert "; 2 videos skipped (" in " ".join(capsys.readouterr().out.split())
    assert f"skipped: {source}/mute.mp4 has no .txt or .json beside it" in caplog.text
    assert f"skipped: {source}/cut.mp4: the video is cut off: 200 bytes are missing" in caplog.text
    clips = ShardClips(ShardReader(sorted((tmp_path / "out").glob("*.tar"))), **SIZE, caption_key="said")
    assert {clips.caption(index): clips.member(index, ("mp4",))[1] for index in range(len(clips))} == {
        f"caption {number}": video for number, video in enumerate(videos)
    }
    assert [clips.caption(index) for index in range(6)] != sorted(clips.caption(index) for index in range(6))
    data = VideoShards(
        str(tmp_path / "out"), str(tmp_path / "out"), **SIZE, batch_size=2, num_workers=0, caption_key="said"
    )
    assert next(iter(data.val_dataloader()))["video"].shape == (2, 3, 5, 16, 24)
    monkeypatch.setattr(sys, "argv", command[:-2])
    with pytest.raises(SystemExit, match=r"made otherwise \(train-manifest\.json: .*caption_key"):
        prepare.main()
    monkeypatch.setattr(sys, "argv", [*command[:2], str(tmp_path / "none"), "--max-skipped", "1"])
    with pytest.raises(SystemExit, match="error: broken samples: 2, more than --max-skipped 1"):
        prepare.main()


def test_trimmed_and_held_videos_are_whole(ramp: bytes, tmp_path: Path) -> None:
    """Trimmed without encoding anew (an edit list), and with a last frame that stays for long; garbage inside is not."""
    for name, earlier, last in (("trimmed", 6, 1), ("held", 0, 40)):
        with av.open(io.BytesIO(ramp)) as given, av.open(str(tmp_path / f"{name}.mp4"), "w") as out:
            copy = out.add_stream_from_template(given.streams.video[0])
            packets = [packet for packet in given.demux(video=0) if packet.dts is not None]
            step = packets[-1].duration
            packets[-1].duration *= last
            for packet in packets:
                packet.stream, packet.pts, packet.dts = copy, packet.pts - earlier * step, packet.dts - earlier * step
                out.mux(packet)
        assert (b"elst" in (tmp_path / f"{name}.mp4").read_bytes()) or name == "held"
        data = (tmp_path / f"{name}.mp4").read_bytes()
        check_video(data, name)
        for place in (0.0, 0.5, 1.0):
            for fps in (None, 8.0):
                assert len(read_clip(data, name, 5, fps, place)) == 5
    with pytest.raises(BrokenSampleError, match="cut off: 100 bytes are missing"):
        check_video(ramp[:-100], "cut")
    with pytest.raises(BrokenSampleError, match="cannot be decoded"):
        check_video(b"no video at all, but long enough for a box", "other")


def in_front(video: bytes, place: Path) -> bytes:
    """The same video with its table of frames before them, as for streaming: it can be opened when its end is missing."""
    with av.open(io.BytesIO(video)) as given, av.open(str(place), "w", options={"movflags": "faststart"}) as out:
        copy = out.add_stream_from_template(given.streams.video[0])
        for packet in given.demux(video=0):
            if packet.dts is not None:
                packet.stream = copy
                out.mux(packet)
    return place.read_bytes()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"mp4": b"nothing"}, r"s\.tar: sample 0000 has no \.txt or \.json, only \['mp4'\]"),
        ({"mp4": b"nothing", "txt": b"a cat"}, r"s\.tar: sample 0000: the video cannot be decoded"),
        ({"txt": b"a cat"}, r"sample 0000 has no \.mp4, only \['txt'\]"),
        ({"mp4": b"", "txt": b"  "}, r"sample 0000: \.txt holds an empty caption"),
        ({"mp4": b"", "txt": b"\xff\xfe\x00"}, r"\.txt holds no caption"),
        ({"mp4": b"", "json": b'{"text": "a cat"}'}, r"\.json holds no caption under 'caption'; set caption_key"),
        ({"mp4": b"", "json": b"{"}, r"\.json holds no caption under 'caption'"),
        ({"mp4": b"", "json": b'{"caption": 3}'}, r"\.json holds an empty caption"),
    ],
)  # fmt: skip
def test_broken_samples_say_where_and_what(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    source = ShardClips(ShardReader([make_shard(tmp_path / "s.tar", [members])]), **SIZE)
    with pytest.raises(BrokenSampleError, match=message):
        source[0]


def test_training_skips_broken_videos_and_counts_them(
    videos: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"mp4": video, "txt": b"a cat"} for video in videos]
    bad = [{"mp4": videos[0][:300], "txt": b"broken"}, {"mp4": videos[0]}]
    shard = make_shard(tmp_path / "s.tar", [good[0], bad[0], good[1], bad[1], *good[2:]])
    data = VideoShards(str(shard), str(shard), **SIZE, fps=None, batch_size=4, num_workers=0, seed=0)
    loader = data.train_dataloader()
    assert sum(len(batch["caption"]) for batch in loader) == 8
    assert loader.skipped == 2
    assert "the video cannot be decoded" in caplog.text
    assert "has no .txt or .json" in caplog.text
    strict = VideoShards(str(shard), str(shard), **SIZE, fps=None, batch_size=4, num_workers=0, max_skipped=1, seed=0)
    with pytest.raises(BrokenSampleError, match="more than max_skipped=1"):
        list(strict.train_dataloader())
    with pytest.raises(BrokenSampleError, match="cannot be decoded"):
        list(data.val_dataloader())


def test_prediction_needs_prompts(videos: list[bytes], tmp_path: Path) -> None:
    shard = str(make_shard(tmp_path / "s.tar", [{"mp4": videos[0], "txt": b"a cat"}]))
    with pytest.raises(ValueError, match="there are no prompts"):
        VideoShards(shard, shard).predict_dataloader()
    batch = next(iter(MovingDigits(batch_size=3, prompts=PromptRequest(per_prompt=2)).predict_dataloader()))
    assert batch["file"] == ["a zero moving left-0.mp4", "a zero moving left-1.mp4", "a zero moving right-0.mp4"]


# latents


def test_codec_is_the_pipelines(pipeline: Path) -> None:
    """Encoding gives what the pipeline decodes again: the mean of the posterior, normalised channel by channel."""
    codec = ClipCodec(str(pipeline))
    clips = torch.rand(2, 3, 5, 16, 24) * 2 - 1
    latents = codec.encode(clips)
    assert latents.shape == (2, 4, *codec.latent_size(5, 16, 24)) == (2, 4, 2, 2, 3)
    vae = codec.model(torch.device("cpu"))
    raw = vae.encode(clips).latent_dist.mode()
    back = latents * torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    back = back + torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    torch.testing.assert_close(back, raw, atol=1e-5, rtol=1e-4)
    assert torch.equal(ClipCodec(str(pipeline / "vae")).encode(clips), latents)
    for size in ((4, 16, 24), (5, 12, 24)):
        with pytest.raises(ValueError, match="1 frame more than a multiple of 4, and sides that are multiples of 8"):
            codec.encode(torch.zeros(1, 3, *size))
    with pytest.raises(FileNotFoundError, match="no folder and no name on the hub"):
        ClipCodec(str(pipeline / "none")).encode(clips)


def encode_command(monkeypatch: pytest.MonkeyPatch, source: Path, target: Path, pipeline: Path, *options: str) -> None:
    sizes = [
        "--frames",
        "5",
        "--height",
        "16",
        "--width",
        "24",
        "--fps",
        "8",
        "--text-width",
        "16",
        "--text-length",
        "6",
    ]
    arguments = ["encode", str(source), str(target), "--model", str(pipeline), "--per-shard", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*arguments, *sizes, *options])
    prepare_latents.main()


@pytest.fixture
def folder(videos: list[bytes], tmp_path: Path) -> Path:
    """Five videos with captions, one of them broken."""
    place = tmp_path / "clips"
    place.mkdir()
    for number, video in enumerate(videos[:5]):
        (place / f"{number}.mp4").write_bytes(video if number != 3 else video[:200])
        (place / f"{number}.txt").write_text(f"a {NAMES[number]} moving up")
    return place


def test_encode_and_train_on_it(
    folder: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "latents"
    encode_command(monkeypatch, folder, target, pipeline)
    assert "5 videos in 3 shards" in capsys.readouterr().out.replace("\n", " ")
    data = VideoLatentShards(str(target / "train-*.tar"), str(target), text_length=6, batch_size=2, num_workers=0)
    source = data.clips("validate")
    assert len(source) == 4, "the broken video was passed over"
    codec, captions = ClipCodec(str(pipeline)), make_encoder(TextConfig(str(pipeline), 6), 16)
    clips = ClipFolder(folder, **SIZE, fps=8)
    kept = [clips[index] for index in (0, 1, 2, 4)]
    for index, clip in enumerate(kept):
        torch.testing.assert_close(source[index]["latent"], codec.encode(clip["video"][None])[0], atol=2e-3, rtol=2e-3)
        text = captions.encode([clip["caption"]], torch.device("cpu"))[0]
        torch.testing.assert_close(source[index]["text"], text, atol=2e-3, rtol=2e-3)
    empty = data.empty_caption()
    assert empty is not None
    torch.testing.assert_close(empty, captions.tokens("", torch.device("cpu")), atol=2e-3, rtol=2e-3)
    assert len(list(data.train_dataloader())) == 2


def test_encode_goes_on_where_it_was_stopped(
    folder: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, target = tmp_path / "whole", tmp_path / "latents"
    encode_command(monkeypatch, folder, whole, pipeline)
    calls = []
    encode_once = ClipCodec.encode

    def stopping(self: ClipCodec, clips: torch.Tensor) -> torch.Tensor:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        return encode_once(self, clips)

    with monkeypatch.context() as patch:
        patch.setattr(ClipCodec, "encode", stopping)
        with pytest.raises(KeyboardInterrupt):
            encode_command(patch, folder, target, pipeline)
    assert sorted(path.name for path in target.glob("*.tar")) == ["train-00000.tar"]
    calls.clear()
    monkeypatch.setattr(ClipCodec, "encode", lambda self, clips: calls.append(1) or encode_once(self, clips))
    encode_command(monkeypatch, folder, target, pipeline)
    assert len(calls) == 2, "what was done is not done again"
    for path in whole.glob("*.tar"):
        assert path.read_bytes() == (target / path.name).read_bytes()


def test_encode_refuses_to_mix_and_to_skip_too_much(
    folder: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="broken samples: 1, more than --max-skipped 0"):
        encode_command(monkeypatch, folder, tmp_path / "few", pipeline, "--max-skipped", "0")
    encode_command(monkeypatch, folder, tmp_path / "latents", pipeline)
    with pytest.raises(SystemExit, match=r"made otherwise \(train-manifest\.json: frames\)"):
        encode_command(monkeypatch, folder, tmp_path / "latents", pipeline, "--frames", "9")
    with pytest.raises(SystemExit, match="the VAE wants 1 frame more than a multiple of 4"):
        encode_command(monkeypatch, folder, tmp_path / "odd", pipeline, "--frames", "6")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"is no folder with \.mp4 files in it"):
        encode_command(monkeypatch, tmp_path / "empty", tmp_path / "none", pipeline)


def test_encode_shards_by_several_processes(
    videos: list[bytes], pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = make_shard(tmp_path / "s.tar", [{"mp4": video, "txt": b"a zero moving up"} for video in videos])
    for rank in ("0", "1"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        encode_command(monkeypatch, shard, tmp_path / "shared", pipeline)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    encode_command(monkeypatch, shard, tmp_path / "alone", pipeline)
    for path in sorted((tmp_path / "alone").glob("*.tar")):
        assert path.read_bytes() == (tmp_path / "shared" / path.name).read_bytes()


def test_wrong_latent_shards(videos: list[bytes], tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "videos.tar", [{"mp4": videos[0], "txt": b"a"}])
    with pytest.raises(
        ValueError, match=r"has no \.latent\.npy.*these are no shards of python -m mhla_tasks\.video\.prepare_latents"
    ):
        LatentClips(ShardReader([shard]), 6)

    def array(*shape: int) -> bytes:
        stream = io.BytesIO()
        np.save(stream, np.zeros(shape, np.float16))
        return stream.getvalue()

    good, text = {"latent.npy": array(4, 2, 2, 3)}, {"text.npy": array(2, 16)}
    other = {"latent.npy": array(4, 2, 2, 4)}
    reader = ShardReader([make_shard(tmp_path / "train-0.tar", [{**good, **text}, {**other, **text}, good])])
    source = LatentClips(reader, 6)
    assert source[0]["text"].shape == (6, 16)
    with pytest.raises(BrokenSampleError, match=r"latent \(4, 2, 2, 4\) among those of \(4, 2, 2, 3\)"):
        source[1]
    with pytest.raises(BrokenSampleError, match=r"has no \.text\.npy"):
        source[2]
    data = VideoLatentShards(str(tmp_path / "train-0.tar"), str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"train-empty-caption\.npy is missing"):
        data.empty_caption()


def test_the_reader_meets_every_clip_once(videos: list[bytes], tmp_path: Path) -> None:
    shard = make_shard(
        tmp_path / "s.tar", [{"mp4": v, "json": json.dumps({"caption": str(i)}).encode()} for i, v in enumerate(videos)]
    )
    loader = ResumableLoader(ShardClips(ShardReader([shard]), **SIZE), 4, train=False, seed=0)
    seen = [text for batch in loader for text, counts in zip(batch["caption"], batch["valid"], strict=True) if counts]
    assert seen == [str(number) for number in range(6)]


def test_without_chance_a_clip_is_the_middle_of_its_video(ramp: bytes, tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "s.tar", [{"mp4": ramp, "txt": b"a ramp"}])
    clip = ShardClips(ShardReader([shard]), 4, 16, 24)[0]["video"]
    shown = [round(level / 10) for level in brightness(to_frames(clip[None])[0])]
    assert shown == [10, 11, 12, 13]


@pytest.mark.parametrize("turns", [0, 1, 2, -1])
def test_videos_of_phones_are_turned_upright(turns: int) -> None:
    """A frame says by how many degrees against the clock it is to be turned."""
    from types import SimpleNamespace

    from mhla_tasks.video.clips import _pixels

    upright = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    stored = np.rot90(upright, -turns)
    frame = SimpleNamespace(to_ndarray=lambda format: stored, rotation=90 * turns)
    assert torch.equal(_pixels(frame, None), torch.from_numpy(upright).permute(2, 0, 1))


def test_held_out_digits_start_at_different_places() -> None:
    held_out = MovingDigitSamples(False, 4, 24, 24)
    frames = torch.stack([held_out[index]["video"][0, 0] for index in range(0, 80, 4)])  # all of one direction
    assert len({tuple((frame > -1).nonzero().min(0).values.tolist()) for frame in frames}) > 8


def test_the_length_of_captions_is_the_shards(tmp_path: Path) -> None:
    make_shard(tmp_path / "train-00000.tar", [{"txt": b"a"}])
    place, found = str(tmp_path / "train-00000.tar"), []
    for content in (None, {"text_length": 6}, {"text_length": "six"}):
        if content is not None:
            (tmp_path / "train-manifest.json").write_text(json.dumps(content))
        found.append(VideoLatentShards(place, place).text_length)
    assert found == [512, 6, 512]
    assert VideoLatentShards(place, place, text_length=9).text_length == 9
