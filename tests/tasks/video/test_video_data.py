"""Clips in shards, encoded into latents, and read back; and every kind of sample that is broken."""

from __future__ import annotations

import io
import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from mhla_tasks.captioned.encoded import EncodedSamples
from mhla_tasks.captioned.text import TextConfig, make_encoder
from mhla_tasks.commandline import registry
from mhla_tasks.video.clips import check_video, read_clip
from mhla_tasks.video.data import PREPARE, MovingDigits, PromptRequest, VideoLatentShards, VideoShards
from mhla_tasks.video.digits import NAMES
from wan import folder_clips, make_shard, shard_clips, video_file

from lightning_mhla.data import BrokenSampleError, ResumableLoader, ShardOptions, ShardReader
from lightning_mhla.generative.codecs import ClipCodec

SIZE = {"frames": 5, "height": 16, "width": 24}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("videos")
    return [video_file(folder / f"{seed}.mp4", seed=seed).read_bytes() for seed in range(6)]


def test_shards_of_videos(videos: list[bytes], tmp_path: Path) -> None:
    captions = [{"txt": b"a cat\n"}, {"json": b'{"caption": "a dog", "text": "a wolf"}'}]
    shard = make_shard(
        tmp_path / "s.tar", [{"mp4": video, **text} for video, text in zip(videos, captions, strict=False)]
    )
    source = shard_clips(ShardReader([shard]), **SIZE)
    assert len(source) == 2
    assert [source[index]["caption"] for index in range(2)] == ["a cat", "a dog"]
    assert source[0]["video"].shape == (3, 5, 16, 24)
    assert torch.equal(source[0]["video"], source[0]["video"]), "validation takes the same clip each time"
    anywhere = shard_clips(ShardReader([shard]), **SIZE, anywhere=True)
    assert any(not torch.equal(anywhere[0]["video"], anywhere[0]["video"]) for _ in range(10))
    other = shard_clips(ShardReader([shard]), **SIZE, caption_key="text")
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
    command = [str(source), str(tmp_path / "out"), "--per-shard", "3", "--caption-key", "said"]
    registry.run("prepare clips", command)
    assert "; 2 videos skipped (" in " ".join(capsys.readouterr().out.split())
    assert f"skipped: {source}/mute.mp4 has no .txt or .json beside it" in caplog.text
    assert f"skipped: {source}/cut.mp4: the video is cut off: 200 bytes are missing" in caplog.text
    clips = shard_clips(ShardReader(sorted((tmp_path / "out").glob("*.tar"))), **SIZE, caption_key="said")
    assert {clips.files.caption(index): clips.files.member(index, ("mp4",))[1] for index in range(len(clips))} == {
        f"caption {number}": video for number, video in enumerate(videos)
    }
    assert [clips.files.caption(index) for index in range(6)] != sorted(
        clips.files.caption(index) for index in range(6)
    )
    data = VideoShards(
        str(tmp_path / "out"), str(tmp_path / "out"), **SIZE, batch_size=2, num_workers=0, caption_key="said"
    )
    assert next(iter(data.val_dataloader()))["video"].shape == (2, 3, 5, 16, 24)
    with pytest.raises(
        SystemExit, match=r"made from different files or options \(caption_key was 'said' and is 'caption'"
    ):
        registry.run("prepare clips", command[:-2])
    with pytest.raises(SystemExit, match="broken samples: 2, more than --max_skipped 1"):
        registry.run("prepare clips", [command[0], str(tmp_path / "none"), "--max_skipped", "1"])


def test_trimmed_and_held_videos_are_whole(ramp: bytes, tmp_path: Path) -> None:
    """Videos trimmed by an edit list, or with a long last frame, are complete; a video with garbage inside is not."""
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
    """Move a video's table of frames before them, as for streaming, so that it opens even if its end is missing."""
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
        ({"mp4": b"", "txt": b"\xff\x41"}, r"\.txt is not text in UTF-8: 0xff, byte 0 in line 1"),
        ({"mp4": b"", "json": b'{"text": "a cat"}'}, r"\.json holds no caption under 'caption'; set caption_key"),
        ({"mp4": b"", "json": b"{"}, r"\.json is not JSON"),
        ({"mp4": b"", "json": b'{"caption": 3}'}, r"\.json holds a caption that is not text: '3'"),
    ],
)  # fmt: skip
def test_broken_samples_say_where_and_what(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    source = shard_clips(ShardReader([make_shard(tmp_path / "s.tar", [members])]), **SIZE)
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
    assert len(loader.skipped) == 2
    assert "the video is cut off" in caplog.text
    assert "has no .txt or .json" in caplog.text
    strict = VideoShards(
        str(shard),
        str(shard),
        **SIZE,
        fps=None,
        batch_size=4,
        num_workers=0,
        shards=ShardOptions(max_skipped=1),
        seed=0,
    )
    with pytest.raises(BrokenSampleError, match="more than max_skipped=1"):
        list(strict.train_dataloader())
    with pytest.raises(BrokenSampleError, match="is cut off"):
        list(data.val_dataloader())


def test_prediction_needs_prompts(videos: list[bytes], tmp_path: Path) -> None:
    shard = str(make_shard(tmp_path / "s.tar", [{"mp4": videos[0], "txt": b"a cat"}]))
    with pytest.raises(ValueError, match="there are no prompts"):
        VideoShards(shard, shard).predict_dataloader()
    batch = next(iter(MovingDigits(batch_size=3, prompts=PromptRequest(per_prompt=2)).predict_dataloader()))
    assert batch["file"] == ["a zero moving left-0.mp4", "a zero moving left-1.mp4", "a zero moving right-0.mp4"]


def test_codec_is_the_pipelines(pipeline: Path) -> None:
    """Encoding gives what the pipeline decodes again: the mean of the posterior, normalized channel by channel."""
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
    with pytest.raises(FileNotFoundError, match="neither a folder nor a model on the hub"):
        ClipCodec(str(pipeline / "none")).encode(clips)


def encode_command(source: Path, target: Path, pipeline: Path, *options: str) -> None:
    sizes = [
        "--frames",
        "5",
        "--height",
        "16",
        "--width",
        "24",
        "--fps",
        "8",
        "--text_width",
        "16",
        "--text_length",
        "6",
    ]
    arguments = [str(source), str(target), "--model", str(pipeline), "--per_shard", "2", "--device", "cpu"]
    registry.run("prepare clip-latents", [*arguments, *sizes, *options])


@pytest.fixture
def folder(videos: list[bytes], tmp_path: Path) -> Path:
    """Folder with five videos with captions, one of them broken."""
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
    encode_command(folder, target, pipeline)
    assert "4 videos in 3 shards" in capsys.readouterr().out.replace("\n", " ")
    data = VideoLatentShards(str(target / "train-*.tar"), str(target), text_length=6, batch_size=2, num_workers=0)
    source = data.samples("validate")
    assert len(source) == 4, "the broken video was passed over"
    codec, captions = ClipCodec(str(pipeline)), make_encoder(TextConfig(str(pipeline), 6), 16)
    clips = folder_clips(folder, **SIZE, fps=8)
    kept = [clips[index] for index in (0, 1, 2, 4)]
    for index, clip in enumerate(kept):
        torch.testing.assert_close(source[index]["latent"], codec.encode(clip["video"][None])[0], atol=2e-3, rtol=2e-3)
        text = captions.encode([clip["caption"]], torch.device("cpu"))[0]
        torch.testing.assert_close(source[index]["text"], text, atol=2e-3, rtol=2e-3)
    empty = data.empty_caption()
    torch.testing.assert_close(empty, captions.tokens("", torch.device("cpu")), atol=2e-3, rtol=2e-3)
    assert len(list(data.train_dataloader())) == 2


def test_encode_goes_on_where_it_was_stopped(
    folder: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, target = tmp_path / "whole", tmp_path / "latents"
    encode_command(folder, whole, pipeline)
    calls = []
    encode_once = ClipCodec.encode

    def stopping(self: ClipCodec, clips: torch.Tensor) -> torch.Tensor:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        return encode_once(self, clips)

    with monkeypatch.context() as patch:
        patch.setattr(ClipCodec, "encode", stopping)
        with pytest.raises(SystemExit):
            encode_command(folder, target, pipeline)
    assert sorted(path.name for path in target.glob("*.tar")) == ["train-00000.tar"]
    calls.clear()
    monkeypatch.setattr(ClipCodec, "encode", lambda self, clips: calls.append(1) or encode_once(self, clips))
    encode_command(folder, target, pipeline)
    assert len(calls) == 2, "what was done is not done again"
    for path in whole.glob("*.tar"):
        assert path.read_bytes() == (target / path.name).read_bytes()


def test_encode_refuses_to_mix_and_to_skip_too_much(
    folder: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="broken samples: 1, more than --max_skipped 0"):
        encode_command(folder, tmp_path / "few", pipeline, "--max-skipped", "0")
    encode_command(folder, tmp_path / "latents", pipeline)
    with pytest.raises(SystemExit, match=r"made from different files or options \(frames was \d+ and is 9\)"):
        encode_command(folder, tmp_path / "latents", pipeline, "--frames", "9")
    with pytest.raises(SystemExit, match="the VAE requires 1 frame more than a multiple of 4"):
        encode_command(folder, tmp_path / "odd", pipeline, "--frames", "6")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"is not a folder with \.mp4 files in it"):
        encode_command(tmp_path / "empty", tmp_path / "none", pipeline)


def test_encode_shards_by_several_processes(
    videos: list[bytes], pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = make_shard(tmp_path / "s.tar", [{"mp4": video, "txt": b"a zero moving up"} for video in videos])
    for rank in ("0", "1"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        encode_command(shard, tmp_path / "shared", pipeline)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    encode_command(shard, tmp_path / "alone", pipeline)
    for path in sorted((tmp_path / "alone").glob("*.tar")):
        assert path.read_bytes() == (tmp_path / "shared" / path.name).read_bytes()


def test_wrong_latent_shards(videos: list[bytes], tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "videos.tar", [{"mp4": videos[0], "txt": b"a"}])
    with pytest.raises(
        ValueError, match=r"has no \.latent\.npy.*these are not shards of lightning prepare clip-latents"
    ):
        EncodedSamples(ShardReader([shard]), 6, 4, PREPARE)

    def array(*shape: int) -> bytes:
        stream = io.BytesIO()
        np.save(stream, np.zeros(shape, np.float16))
        return stream.getvalue()

    good, text = {"latent.npy": array(4, 2, 2, 3)}, {"text.npy": array(2, 16)}
    other = {"latent.npy": array(4, 2, 2, 4)}
    wider = {**good, "text.npy": array(2, 17)}
    reader = ShardReader([make_shard(tmp_path / "train-0.tar", [{**good, **text}, {**other, **text}, good, wider])])
    source = EncodedSamples(reader, 6, 4, PREPARE)
    assert source[0]["text"].shape == (6, 16)
    with pytest.raises(BrokenSampleError, match=r"latent has shape \(4, 2, 2, 4\), others \(4, 2, 2, 3\)"):
        source[1]
    with pytest.raises(BrokenSampleError, match=r"has no \.text\.npy"):
        source[2]
    with pytest.raises(BrokenSampleError, match=r"embedded captions have width 17, others 16"):
        source[3]
    data = VideoLatentShards(str(tmp_path / "train-0.tar"), str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"train-empty-caption\.npy is missing"):
        data.empty_caption()


def test_the_reader_meets_every_clip_once(videos: list[bytes], tmp_path: Path) -> None:
    shard = make_shard(
        tmp_path / "s.tar", [{"mp4": v, "json": json.dumps({"caption": str(i)}).encode()} for i, v in enumerate(videos)]
    )
    loader = ResumableLoader(shard_clips(ShardReader([shard]), **SIZE), 4, train=False, seed=0)
    seen = [text for batch in loader for text, counts in zip(batch["caption"], batch["valid"], strict=True) if counts]
    assert seen == [str(number) for number in range(6)]


def test_the_length_of_captions_is_the_shards(tmp_path: Path) -> None:
    make_shard(tmp_path / "train-00000.tar", [{"txt": b"a"}])
    place, found = str(tmp_path / "train-00000.tar"), []
    for content in (None, {"text_length": 6}, {"text_length": "six"}):
        if content is not None:
            (tmp_path / "train-manifest.json").write_text(json.dumps(content))
        found.append(VideoLatentShards(place, place).text_length)
    assert found == [512, 6, 512]
    assert VideoLatentShards(place, place, text_length=9).text_length == 9
