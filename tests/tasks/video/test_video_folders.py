"""Continuing a user's own videos: folders of MP4 and GIF files of different lengths, from a checkpoint, in a new process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from mhla_tasks.commandline import parser
from mhla_tasks.video import VideoFolders
from mhla_tasks.video.clips import read_beginning, read_clip, write_clip
from PIL import Image
from processes import fork_server, run_cli
from wan import ROOT

from lightning_mhla.data import BrokenSampleError

START, FRAMES = 2, 12


def moving_square(frames: int, seed: int) -> torch.Tensor:
    """A white square that moves to the right over a gray background, ``[frames, 3, 24, 40]`` uint8."""
    clip = torch.full((frames, 3, 24, 40), 40 + 10 * seed, dtype=torch.uint8)
    for frame in range(frames):
        left = (frame + seed) % 32
        clip[frame, :, 8:16, left : left + 8] = 255
    return clip


def write_gif(path: Path, clip: torch.Tensor) -> None:
    first, *rest = (Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in clip)
    first.save(path, save_all=True, append_images=rest, duration=125, loop=0)


def write_folder(folder: Path, kinds: dict[str, int]) -> Path:
    """Write a folder of videos with the given names and numbers of frames."""
    for number, (name, frames) in enumerate(kinds.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        clip = moving_square(frames, number)
        write_gif(path, clip) if path.suffix == ".gif" else write_clip(path, clip, 8)
    return folder


FOLDERS = {
    "mp4": {"one.mp4": 20, "two.mp4": 20, "three.mp4": 20},
    "gif": {"one.gif": 20, "two.gif": 16},
    "lengths": {"a/1.mp4": 30, "a/2.gif": 5, "b/1.mp4": 12, "start-only.mp4": 2},
}


def config(folder: Path, videos: Path, pictures: dict[str, Any] | None = None, **model: Any) -> Path:
    """Write a small version of the shipped configuration, which trains on a folder of videos.

    Args:
        folder: folder of the run.
        videos: folder of the videos, which are also the held-out ones.
        pictures: options of ContinuationPictures.
        model: options of the model.
    """
    content: dict[str, Any] = yaml.safe_load((ROOT / "configs/video/continue_folder.yaml").read_text())
    content["model"]["init_args"] |= {"shape": {"dim": 16, "depth": 1, "heads": 2, "levels": 4}, "frames": 5, **model}
    content["data"]["init_args"] |= {"train": str(videos), "val": str(videos), "frames": 5, "batch_size": 2}
    content["trainer"] |= {"max_steps": 2, "val_check_interval": 1, "accelerator": "cpu", "log_every_n_steps": 1}
    content["trainer"]["logger"] = {
        "class_path": "CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "", "version": "log"},
    }
    content["trainer"]["callbacks"] = [
        {"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(folder / "checkpoints"), "save_last": True}},
        {"class_path": "mhla_tasks.video.ContinuationPictures",
         "init_args": {"every_n_steps": None, "clips": 2, "frames": 9, **(pictures or {})}},
        {"class_path": "lightning_mhla.callbacks.RunReport"},
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a model that was trained on two videos."""
    folder = tmp_path_factory.mktemp("trained")
    parser.main(["fit", "--config", str(config(folder, write_folder(folder / "videos", {"x.mp4": 9, "y.mp4": 9})))])
    return folder / "checkpoints/last.ckpt"


@pytest.mark.parametrize("kind", FOLDERS)
def test_held_out_videos_are_continued(kind: str, tmp_path: Path) -> None:
    """Training on some videos, then predict on others in another process: the copied frames are those of the videos."""
    train = write_folder(tmp_path / "train", {"x.mp4": 9, "y.gif": 9})
    held_out = write_folder(tmp_path / "held-out", FOLDERS[kind])
    parser.main(["fit", "--config", str(config(tmp_path / "run", train))])
    assert (tmp_path / "run/log/pictures/continued-step0000002.gif").exists()
    (report,) = (tmp_path / "run").rglob("report.html")
    assert "The same clips in motion at step 2, truth on the left." in report.read_text()
    usage = json.loads(report.with_name("run.json").read_text())["usage"]
    assert usage == {"Continue held-out clips": "lightning predict {run}"}, "as long as the checkpoint says"
    said = run_cli(
        "predict", f"--ckpt_path={tmp_path / 'run/checkpoints/last.ckpt'}", f"--data.val={held_out}",
        f"--frames={FRAMES}", f"--model.output={tmp_path / 'out'}", folder=tmp_path,
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "out/videos.jsonl").read_text().splitlines()]
    lengths = FOLDERS[kind]
    assert {row["prompt"]: len(row["error"]) for row in rows} == {
        name: min(frames, FRAMES) - START for name, frames in lengths.items()
    }
    for row in rows:
        source = held_out / row["prompt"]
        truth = read_beginning(source.read_bytes(), "truth", START, None, (32, 32), source.suffix[1:]).float().mean(1)
        clip = read_clip((tmp_path / "out/videos" / row["file"]).read_bytes(), "clip", FRAMES, None, 0.0)
        in_levels = (truth / 255 * 3).round() * 85
        assert (clip[:START].float().mean(1) - in_levels).abs().mean() < 8, "but for compression, frames are copied"
    with Image.open(tmp_path / "out/videos.gif") as animation:
        assert animation.n_frames == FRAMES
    by_frame = json.loads((tmp_path / "out/videos-by-frame.json").read_text())
    assert by_frame["clips"] == len(rows)
    expected = [sum(count > frame for count in lengths.values()) for frame in range(START, FRAMES)]
    assert by_frame["compared"] == expected[: len(by_frame["error"])]
    assert not any(expected[len(by_frame["error"]) :])
    for frame, error in enumerate(by_frame["error"]):
        errors = [row["error"][frame] for row in rows if len(row["error"]) > frame]
        assert error == pytest.approx(sum(errors) / len(errors), abs=1e-4)
    assert f"of {expected[10 - START - 1]} clips exact" in said.partition("frame 10: error")[2].partition("\n")[0]


@pytest.mark.parametrize("fps", ["null", "8"])
def test_a_clip_shorter_than_the_copied_frames_is_an_error_before_anything_is_drawn(
    fps: str, checkpoint: Path, tmp_path: Path
) -> None:
    held_out = write_folder(tmp_path / "held-out", {"a.mp4": 9, "still.gif": 1})
    status, said = fork_server().run(
        "predict", f"--ckpt_path={checkpoint}", f"--data.val={held_out}", f"--data.fps={fps}",
        f"--model.output={tmp_path / 'out'}", folder=tmp_path,
    )  # fmt: skip
    assert status != 0
    assert "still.gif has 1 of the 2 frames that the model copies before it continues a clip" in " ".join(said.split())
    assert not list((tmp_path / "out/videos").glob("*")) if (tmp_path / "out").exists() else True


def test_clips_of_different_videos_are_not_mixed(checkpoint: Path, tmp_path: Path) -> None:
    """Videos of the same names in a different folder, or at a different rate, are different videos."""
    for seed in (6, 7):
        (tmp_path / f"va{seed}").mkdir()
        write_clip(tmp_path / f"va{seed}/same.mp4", moving_square(20, seed), 8)

    def predict(*options: str) -> tuple[int, str]:
        arguments = [f"--ckpt_path={checkpoint}", f"--frames={FRAMES}", f"--model.output={tmp_path / 'out'}", *options]
        status, said = fork_server().run("predict", *arguments, folder=tmp_path)
        return status, " ".join(said.split())

    assert predict(f"--data.val={tmp_path / 'va7'}")[0] == 0
    drawn = (tmp_path / "out/videos.jsonl").read_text(), (tmp_path / "out/videos/0000.mp4").stat().st_mtime_ns
    for options in ([f"--data.val={tmp_path / 'va6'}"], [f"--data.val={tmp_path / 'va7'}", "--data.fps=4"]):
        status, said = predict(*options)
        assert status != 0
        assert "0000.mp4 was drawn for a different video (see videos.jsonl); choose a different --model.output" in said
    (tmp_path / "va7").rename(tmp_path / "moved")
    assert predict(f"--data.val={tmp_path / 'moved'}")[0] == 0, "the same video"
    assert drawn == ((tmp_path / "out/videos.jsonl").read_text(), (tmp_path / "out/videos/0000.mp4").stat().st_mtime_ns)


def test_unusable_held_out_videos_are_named_before_training(tmp_path: Path) -> None:
    videos = write_folder(
        tmp_path / "videos", {"good.mp4": 9, "long.gif": 9, "short.mp4": 3, "short.gif": 4, "z-cut.mp4": 9}
    )
    (videos / "z-cut.mp4").write_bytes((videos / "z-cut.mp4").read_bytes()[:-40])
    arguments = ["--config", str(config(tmp_path / "run", videos))]
    for command in ("fit", "validate"):
        status, said = fork_server().run(command, *arguments, folder=tmp_path)
        said = " ".join(said.split())
        assert status != 0
        assert "3 of 5 held-out videos cannot be used" in said
        assert "z-cut.mp4: the video is cut off: 40 bytes are missing" in said
        assert "short.mp4: 0.38 s are too short for 5 frames" in said
        assert "short.gif: 0.48 s are too short for 5 frames" in said
        assert "Validation takes data.frames=5 frames of each video. Remove these videos, or lower data.frames" in said
        assert "good.mp4" not in said
        assert not [path for name in ("metrics.csv", "*.ckpt") for path in tmp_path.rglob(name)], "not one step"
    held_out = VideoFolders(str(videos), str(videos), frames=5)
    with pytest.raises(BrokenSampleError, match=r"z-cut.mp4: the video is cut off.*; remove this held-out video"):
        held_out.source("validate")[4]
    assert fork_server().run("fit", *arguments, "--trainer.limit_val_batches=0", folder=tmp_path)[0] == 0


def test_captions_in_folders_of_videos_are_not_read(tmp_path: Path) -> None:
    """Files that are neither videos nor captions are mentioned once, although a picture is drawn at each of two steps."""
    videos = write_folder(tmp_path / "videos", {"0.mp4": 9, "1.mp4": 9})
    (videos / "metadata.csv").write_text("file_name,caption\n0.mp4,a square\n")
    (videos / "orphan.txt").write_text("a caption of nothing")
    (videos / "1.json").write_text("not JSON")
    arguments = ["--config", str(config(tmp_path / "run", videos, {"every_n_steps": 1}))]
    status, said = fork_server().run("fit", *arguments, folder=tmp_path)
    said = " ".join(said.split())
    assert status == 0, said
    assert said.count("left out") == 1
    assert "1 file left out, such as" in said
    assert "metadata.csv: neither .mp4, .gif nor captions" in said
    assert "orphan" not in said
    assert len(list((tmp_path / "run/log/pictures").glob("*.gif"))) == 2
    (videos / "metadata.csv").rename(videos / "metadata.jsonl")
    assert VideoFolders(str(videos), str(videos)).source("train")[0]["video"].shape == (1, 8, 16, 16)


def test_the_next_command_has_as_many_frames_as_the_model_allows(tmp_path: Path) -> None:
    """Dense mixing coefficients end at the trained length, although clips of 64 frames are the default."""
    videos = write_folder(tmp_path / "videos", {"x.mp4": 9, "y.mp4": 9})
    written = config(tmp_path / "run", videos, {"frames": 5}, attention={"kind": "mhla"})
    parser.main(["fit", "--config", str(written)])
    (record,) = (tmp_path / "run").rglob("run.json")
    (command,) = json.loads(record.read_text())["usage"].values()
    name, *arguments = command.replace("{run}", f"--ckpt_path={tmp_path / 'run/checkpoints/last.ckpt'}").split()
    assert name == "lightning"
    status, said = fork_server().run(*arguments, f"--model.output={tmp_path / 'out'}", folder=tmp_path)
    assert status == 0, said
    assert {json.loads(line)["frames"] for line in (tmp_path / "out/videos.jsonl").read_text().splitlines()} == {5}


@pytest.mark.parametrize("frames", [1, 2, 5])
@pytest.mark.parametrize("extension", ["mp4", "gif"])
def test_a_video_begins_with_as_many_frames_as_it_has(extension: str, frames: int, tmp_path: Path) -> None:
    """At its own rate, and consecutively; at twice the rate, every frame is shown twice."""
    write_folder(tmp_path, {f"clip.{extension}": frames})
    data = (tmp_path / f"clip.{extension}").read_bytes()
    for fps, expected in ((None, frames), (8, frames), (16, 2 * frames)):
        assert len(read_beginning(data, "clip", 20, fps, (16, 16), extension)) == expected


def test_packed_videos_are_continued(tmp_path: Path) -> None:
    """A checkpoint that was trained on shards continues the first held-out videos of the shards."""
    videos = write_folder(tmp_path / "videos", FOLDERS["mp4"])
    for path in videos.iterdir():
        path.with_suffix(".txt").write_text("a square moving right")
    status, said = fork_server().run("prepare", "clips", str(videos), "shards", module="mhla_tasks", folder=tmp_path)
    assert status == 0, said
    written = yaml.safe_load(config(tmp_path / "run", videos).read_text())
    shards = str(tmp_path / "shards/train-*.tar")
    sizes = {"train": shards, "val": shards, "frames": 5, "height": 32, "width": 32, "fps": None, "num_workers": 0}
    written["data"] = {
        "class_path": "mhla_tasks.video.VideoShards",
        "init_args": {**sizes, "batch_size": 2, "clips": 2},
    }
    written["model"]["init_args"]["channels"] = 3
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(written))
    parser.main(["fit", "--config", str(tmp_path / "run/config.yaml")])
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    run_cli(
        "predict",
        f"--ckpt_path={checkpoint}",
        "--frames=9",
        "--data.clips=2",
        f"--model.output={tmp_path / 'out'}",
        folder=tmp_path,
    )
    rows = [json.loads(line) for line in (tmp_path / "out/videos.jsonl").read_text().splitlines()]
    assert [len(row["error"]) for row in rows] == [7, 7]


def test_gif_frames_are_those_that_pillow_shows(tmp_path: Path) -> None:
    """From any position, although GIF files store most frames as changes of the one before."""
    clip = moving_square(20, 1)
    write_gif(tmp_path / "clip.gif", clip)
    data = (tmp_path / "clip.gif").read_bytes()
    with Image.open(tmp_path / "clip.gif") as image:
        shown = []
        for frame in range(image.n_frames):
            image.seek(frame)
            shown.append(torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1))
    for position, first in ((0.0, 0), (0.5, 8), (1.0, 16)):
        frames = read_clip(data, "clip.gif", 4, None, position, None, "gif")
        torch.testing.assert_close(frames, torch.stack(shown[first : first + 4]), atol=2, rtol=0)
    for broken, message in (
        (b"", "the file is empty"),
        (b"no video", "it is not GIF"),
        (data[:400], "cannot be decoded"),
    ):
        with pytest.raises(BrokenSampleError, match=message):
            read_beginning(broken, "clip.gif", 20, None, (24, 40), "gif")


def test_wrong_options_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"channels=2 must be 1 \(gray\) or 3 \(color\)"):
        VideoFolders("train", "val", channels=2)
    with pytest.raises(FileNotFoundError, match=r"is not a folder with .mp4 or .gif files in it"):
        VideoFolders(str(tmp_path), str(tmp_path)).source("train")
    write_folder(tmp_path, {"a.gif": 3})
    with pytest.raises(ValueError, match="clips=0 must be at least 1"):
        VideoFolders(str(tmp_path), str(tmp_path), clips=0).source("predict")
    assert VideoFolders(str(tmp_path), str(tmp_path), channels=3).source("predict")[0]["video"].shape == (3, 8, 16, 16)
