"""Unusual and broken videos through every way into a data set: commands, shards, folders, loaders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mhla_tasks.commandline import registry
from mhla_tasks.video.clips import to_frames
from mhla_tasks.video.data import VideoLatentShards, VideoShards
from odd_videos import MATRICES, encode, moving, picture, with_cover, with_matrix
from processes import run_in_turn
from wan import folder_clips, make_shard, shard_clips

from lightning_mhla.data import BrokenSampleError, ShardOptions, ShardReader

SIZE = {"frames": 5, "height": 16, "width": 24}


def good_videos() -> dict[str, bytes]:
    """Return videos that show :func:`moving`, each stored in an unusual way."""
    plain = moving(9)
    mirrored = encode([np.roll(picture(), number, 1)[:, ::-1] for number in range(9)])
    turned = encode([np.rot90(np.roll(picture(), number, 1), -1) for number in range(9)])
    squeezed = encode([np.repeat(np.roll(picture(), number, 1), 2, 0) for number in range(9)], sample_aspect_ratio=2)
    return {
        "plain": plain,
        "mirrored": with_matrix(mirrored, MATRICES["mirrored left to right"]),
        "tail": plain + b"bytes that a camera left behind the last box",
        "turned": with_matrix(turned, MATRICES["rotated by 270"]),
        "wide": squeezed,
    }


def bad_videos() -> dict[str, tuple[bytes, str]]:
    """Return videos that cannot be used, each with the reason."""
    plain = moving(9)
    slanted = with_matrix(plain, (0.5**0.5, 0.5**0.5, -(0.5**0.5), 0.5**0.5))
    return {
        "cut": (plain[:-40], "the video is cut off: 40 bytes are missing"),
        "slanted": (slanted, "the video is shown rotated by 45 degrees"),
        "song": (with_cover(picture()), "no video stream in the file, only a cover picture"),
        "renamed": (moving(9, codec="libvpx", pix_fmt="yuv420p", container="webm"), "it is WebM or Matroska, not MP4"),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with five good videos and four bad ones, each with a caption."""
    place = tmp_path / "videos"
    place.mkdir()
    for name, video in {**good_videos(), **{name: video for name, (video, _) in bad_videos().items()}}.items():
        (place / f"{name}.mp4").write_bytes(video)
        (place / f"{name}.txt").write_text(name)
    return place


def test_every_source_shows_the_same_upright_frames(folder: Path, tmp_path: Path) -> None:
    good = good_videos()
    shard = make_shard(tmp_path / "s.tar", [{"mp4": video, "txt": name.encode()} for name, video in good.items()])
    clips = folder_clips(folder, **SIZE)
    from_folder = {path.stem: index for index, path in enumerate(clips.files.paths)}
    data = VideoShards(str(shard), str(shard), **SIZE, fps=None, batch_size=5, num_workers=0)
    batch = next(iter(data.val_dataloader()))
    assert batch["caption"] == list(good)
    reference = to_frames(shard_clips(ShardReader([shard]), **SIZE)[0]["video"][None]).float()
    for index, name in enumerate(good):
        for video in (batch["video"][index], clips[from_folder[name]]["video"]):
            assert (to_frames(video[None]).float() - reference).abs().mean() < 2, name


def test_training_skips_and_names_them_validation_stops(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = sorted(folder.glob("*.mp4"))
    members = [{"mp4": path.read_bytes(), "txt": path.stem.encode()} for path in files]
    shard = str(make_shard(tmp_path / "s.tar", members))
    data = VideoShards(shard, shard, **SIZE, fps=None, batch_size=1, num_workers=0, seed=0)
    loader = data.train_dataloader()
    assert {caption for batch in loader for caption in batch["caption"]} == set(good_videos())
    assert len(loader.skipped) >= 4
    for name, (_, reason) in bad_videos().items():
        number = [path.stem for path in files].index(name)
        assert f"s.tar: sample {number:04d}: " in caplog.text
        assert reason in caplog.text, name
    strict = VideoShards(
        shard, shard, **SIZE, fps=None, batch_size=1, num_workers=0, seed=0, shards=ShardOptions(max_skipped=2)
    )
    with pytest.raises(BrokenSampleError, match="more than max_skipped=2"):
        list(strict.train_dataloader())
    with pytest.raises(BrokenSampleError, match="the video is cut off"):
        list(data.val_dataloader())


def in_a_line(text: str) -> str:
    return " ".join(text.split())


def test_prepare_clips_copies_the_good_and_names_the_bad(folder: Path, tmp_path: Path) -> None:
    (folder / "phone.mov").write_bytes(b"left out")
    (folder / ".hidden.mov").write_bytes(b"not mentioned")
    calls = [["prepare", "clips", str(folder), str(tmp_path / "shards")],
             ["prepare", "clips", str(folder), str(tmp_path / "few"), "--max_skipped", "3"]]  # fmt: skip
    (status, text), (few_status, few) = run_in_turn(*calls, folder=tmp_path)
    said = in_a_line(text)
    assert status == 0, said
    assert "Traceback" not in said
    assert "5 videos in 1 shard: " in said
    assert "4 videos skipped" in said
    assert "1 file left out, such as" in said
    assert "phone.mov: neither .mp4 nor captions" in said
    for name, (_, reason) in bad_videos().items():
        assert f"{name}.mp4: {reason}" in said or f"{name}.mp4: the video cannot be decoded ({reason}" in said, name
    shards = shard_clips(ShardReader([tmp_path / "shards/train-0000.tar"]), **SIZE)
    written = {shards.files.caption(index): shards.files.member(index, ("mp4",))[1] for index in range(len(shards))}
    assert written == good_videos(), "byte for byte"
    assert few_status
    assert "error: broken samples: 4, more than --max_skipped 3" in in_a_line(few)
    assert "Traceback" not in few


def test_prepare_clip_latents_encodes_the_good_and_names_the_bad(
    folder: Path, pipeline: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "latents"
    size = ["--frames", "5", "--height", "16", "--width", "24", "--fps", "10", "--text_length", "6"]
    arguments = [str(folder), str(target), "--model", str(pipeline), "--device", "cpu", *size]
    registry.run("prepare clip-latents", arguments)
    for name, (_, reason) in bad_videos().items():
        assert f"{folder}/{name}.mp4: " in caplog.text
        assert reason in caplog.text, name
    data = VideoLatentShards(str(target), str(target), text_length=6, batch_size=5, num_workers=0)
    latents = [data.samples("validate")[index]["latent"] for index in range(5)]
    names = sorted(good_videos())
    plain = latents[names.index("plain")]
    assert torch.equal(latents[names.index("tail")], plain)
    for name in ("mirrored", "turned", "wide"):
        assert (latents[names.index(name)] - plain).abs().mean() < 0.1 * plain.abs().mean(), name
    with pytest.raises(SystemExit, match="broken samples: 4, more than --max_skipped 3"):
        registry.run("prepare clip-latents", [*arguments, "--prefix", "few", "--max_skipped", "3"])


def test_shards_of_a_hidden_file_are_not_shards(tmp_path: Path) -> None:
    """macOS writes a hidden file next to each file on a foreign disk, which must be ignored."""
    place = tmp_path / "shards"
    place.mkdir()
    make_shard(place / "train-0000.tar", [{"mp4": moving(9), "txt": b"a"}])
    (place / "._train-0000.tar").write_bytes(b"\0\5\x16\7 attributes")
    data = VideoShards(str(place), str(place), **SIZE, fps=None, batch_size=1, num_workers=0)
    assert len(data.clips("validate")) == 1
