"""Decoded frames are those that ffmpeg shows, and every video that cannot be shown so says why."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial

import av
import numpy as np
import pytest
import torch
from av.video.frame import PictureType
from mhla_tasks.video.clips import check_video, read_clip
from odd_videos import (
    MATRICES,
    encode,
    levels,
    moving,
    picture,
    remuxed,
    with_cover,
    with_matrix,
    with_pasp,
    with_shown_size,
)
from PIL import Image

from lightning_mhla.data import BrokenSampleError


def frames_of(video: bytes, count: int, fps: float | None = None, position: float = 0.0) -> np.ndarray:
    """Decode the frames ``[count, H, W, 3]`` of a video, and check that it passes the check of videos."""
    check_video(video, "video")
    return read_clip(video, "video", count, fps, position).permute(0, 2, 3, 1).numpy()


def shown_levels(video: bytes, count: int, fps: float | None = None, position: float = 0.0) -> list[int]:
    """Return the numbers of the frames of :func:`levels` that a clip contains."""
    return [round(level / 10) for level in frames_of(video, count, fps, position).mean((1, 2, 3)).tolist()]


def mapped(image: np.ndarray, entries: tuple[int, int, int, int]) -> np.ndarray:
    """Move each pixel of a picture to the place to which a display matrix maps it."""
    a, b, c, d = entries
    rows, columns = np.indices(image.shape[:2])
    x, y = a * columns + c * rows, b * columns + d * rows
    x, y = x - x.min(), y - y.min()
    shown = np.empty((y.max() + 1, x.max() + 1, 3), np.uint8)
    shown[y, x] = image
    return shown


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(
    ("scale", "x", "y"), [(1, 0, 0), (1, 96, 64), (1, -7.5, 4000), (2, 0, 0), (0.5, 3, 0)], ids=str
)
def test_frames_are_shown_as_the_display_matrix_says(name: str, scale: float, x: float, y: float) -> None:
    video, entries = moving(3), MATRICES[name]
    expected = [mapped(image, entries) for image in frames_of(video, 3)]
    entries_as_stored = [scale * entry for entry in entries]
    assert np.array_equal(frames_of(with_matrix(video, entries_as_stored, x, y), 3), expected)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(("height", "width"), [(63, 95), (64, 95), (63, 96)])
def test_odd_sizes_keep_their_edges(name: str, height: int, width: int) -> None:
    video, entries = moving(2, height, width), MATRICES[name]
    expected = [mapped(image, entries) for image in frames_of(video, 2)]
    assert np.array_equal(frames_of(with_matrix(video, entries), 2), expected)
    assert np.abs(frames_of(video, 1)[0].astype(int) - picture(height, width)).max() <= 3


@pytest.mark.parametrize("degrees", [45, 30, -10, 135, 2])
def test_other_rotations_are_errors(degrees: float) -> None:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    video = with_matrix(moving(2), (cos, sin, -sin, cos))
    for read in (check_video, lambda data, name: read_clip(data, name, 1, None, 0.0)):
        with pytest.raises(BrokenSampleError, match=rf"^video: the video is shown rotated by {degrees} degrees"):
            read(video, "video")


@pytest.mark.parametrize("entries", [(1, 0, 1, 1), (1, 1, 0, 1), (1, 0.5, 0.5, 1)], ids=str)
def test_skewed_videos_are_errors(entries: tuple[float, ...]) -> None:
    with pytest.raises(BrokenSampleError, match=r"skewed .* only multiples of 90 degrees and mirrored"):
        check_video(with_matrix(moving(2), entries), "video")


@pytest.mark.parametrize("degrees", [0.3, 90.3, -179.8])
def test_rotations_that_are_rounded_count_as_the_nearest(degrees: float) -> None:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    video, nearest = moving(2), {0: "as stored", 90: "rotated by 90", -180: "rotated by 180"}[round(degrees)]
    expected = frames_of(with_matrix(video, MATRICES[nearest]), 2)
    assert np.array_equal(frames_of(with_matrix(video, (cos, sin, -sin, cos)), 2), expected)


def test_a_display_matrix_of_zeros_is_none() -> None:
    video = moving(2)
    assert np.array_equal(frames_of(with_matrix(video, (0, 0, 0, 0)), 2), frames_of(video, 2))


WIDE = {"sample_aspect_ratio": 2}
"""Pixels twice as wide as high, in the stream and in the container."""


@pytest.mark.parametrize(
    ("change", "stream", "shape"),
    [
        pytest.param(lambda video: video, WIDE, (64, 192), id="2:1"),
        pytest.param(lambda video: with_pasp(video, 3, 4), WIDE, (64, 72), id="container against stream"),
        pytest.param(lambda video: with_pasp(video, 1, 1), WIDE, (64, 96), id="square in the container"),
        pytest.param(lambda video: with_pasp(video, 0, 1), WIDE, (64, 192), id="unknown in the container"),
        pytest.param(lambda video: video, {}, (64, 96), id="unknown in both"),
        pytest.param(lambda video: with_shown_size(video, 144, 64), {}, (64, 144), id="size of the track"),
        pytest.param(lambda video: with_matrix(video, (2, 0, 0, 1)), {}, (64, 192), id="scaled by the matrix"),
        pytest.param(lambda video: with_matrix(video, (-1, 0, 0, 1)), WIDE, (64, 192), id="mirrored"),
        pytest.param(lambda video: with_matrix(video, (0, 1, -1, 0)), WIDE, (96, 32), id="rotated"),
        pytest.param(lambda video: with_matrix(video, (0, 1, 1, 0)), WIDE, (96, 32), id="transposed"),
    ],
)
def test_pixels_become_square(change: Callable[[bytes], bytes], stream: dict[str, int], shape: tuple[int, int]) -> None:
    assert frames_of(change(moving(2, **stream)), 2).shape == (2, *shape, 3)


def test_wide_pixels_show_the_picture_they_were_made_of() -> None:
    """Cut out for training, an anamorphic video shows what the same video with square pixels shows."""
    wide = picture(64, 192)
    squeezed = np.asarray(Image.fromarray(wide).resize((96, 64), Image.Resampling.BOX))
    square, anamorphic = encode([wide] * 2), encode([squeezed] * 2, sample_aspect_ratio=2)
    as_square, as_anamorphic = (read_clip(video, "v", 1, None, 0.0, (32, 64)).float() for video in (square, anamorphic))
    assert (as_square - as_anamorphic).abs().mean() < 4
    assert (as_square - read_clip(encode([squeezed] * 2), "v", 1, None, 0.0, (32, 64)).float()).abs().mean() > 20


@pytest.mark.parametrize("ratio", [(1000, 1), (1, 1000), (17, 1)], ids=str)
def test_hostile_aspect_ratios_are_errors(ratio: tuple[int, int]) -> None:
    with pytest.raises(BrokenSampleError, match=r"frames of \d+ x \d+ are too large or too narrow"):
        check_video(with_pasp(moving(2, **WIDE), *ratio), "video")


TAILS = {
    "zeros": bytes(100),
    "a few zeros": bytes(7),
    "text": b"bytes that no box begins with, longer than a header",
    "noise": np.random.default_rng(0).bytes(5000),
    "ones": b"\xff" * 64,
    "an empty box and text": b"\0\0\0\x08free and more",
    "an incomplete free box": b"\0\1\0\0free",
    "an incomplete unknown box": b"\0\1\0\0mpvdabc",
    "a large box without its size": b"\0\0\0\1uuid\0",
    "an ID3 tag": b"TAG" + bytes(125),
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("muxer", [{}, {"movflags": "faststart"}, {"movflags": "frag_keyframe+empty_moov"}], ids=str)
def test_bytes_behind_the_last_box_change_nothing(tail: str, muxer: dict[str, str]) -> None:
    video = moving(12, options={"g": "4"}, muxer=muxer)
    assert np.array_equal(frames_of(video + TAILS[tail], 12), frames_of(video, 12))


@pytest.mark.parametrize("missing", [0, 300, 2000])
def test_another_video_behind_the_first_is_left_out(missing: int) -> None:
    video, other = moving(12), moving(3, height=32, width=32)
    assert np.array_equal(frames_of(video + other[: len(other) - missing], 12), frames_of(video, 12))


@pytest.mark.parametrize("missing", [1, 100, 700])
@pytest.mark.parametrize("movflags", ["", "faststart", "frag_keyframe+empty_moov+skip_trailer"])
def test_videos_that_are_cut_off_say_so(missing: int, movflags: str) -> None:
    video = moving(12, muxer={"movflags": movflags} if movflags else {})
    cut = f"^video: the video is cut off: {missing} bytes are missing"
    for read in (check_video, lambda data, name: read_clip(data, name, 2, None, 0.0)):
        with pytest.raises(BrokenSampleError, match=cut):
            read(video[:-missing], "video")


def test_a_video_cut_off_before_its_frames_has_none() -> None:
    video = moving(12, muxer={"movflags": "faststart"})
    for end in (video.index(b"mdat") - 4, video.index(b"mdat") + 4):
        with pytest.raises(BrokenSampleError, match=r"^video: "):
            check_video(video[:end], "video")
        with pytest.raises(BrokenSampleError, match=r"^video: "):
            read_clip(video[:end], "video", 2, None, 0.0)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
@pytest.mark.parametrize("seed", range(3))
def test_damaged_frames_are_errors(codec: str, seed: int) -> None:
    """Players patch them up with grey and with what was there before."""
    pix_fmt = "yuv444p" if codec == "libx264" else "yuv420p"
    video = bytearray(
        moving(20, codec=codec, pix_fmt=pix_fmt, options={"g": "20", "qp": "20"}, muxer={"movflags": "faststart"})
    )
    place = video.index(b"mdat") + 1000 + 300 * seed
    count = (len(video) - place) // 2
    video[place : place + count] = np.random.default_rng(seed).bytes(count)
    with pytest.raises(BrokenSampleError, match=r"^video: the video (is damaged|cannot be decoded|ends after)"):
        read_clip(bytes(video), "video", 20, None, 0.0)
    with pytest.raises(BrokenSampleError, match=r"^video: the video (is damaged|cannot be decoded)"):
        check_video(bytes(video), "video")


@pytest.mark.parametrize("place", [800, 1000, 1400, 1600])
def test_frames_that_a_decoder_patches_up_are_errors(place: int) -> None:
    """It gives them all, and only marks those of which it made up a part."""
    video = bytearray(
        moving(20, codec="mpeg4", pix_fmt="yuv420p", options={"g": "20"}, muxer={"movflags": "faststart"})
    )
    place += video.index(b"mdat")
    video[place : place + 60] = np.random.default_rng(0).bytes(60)
    with av.open(io.BytesIO(bytes(video))) as container:
        assert len(list(container.decode(video=0))) == 20
    for _ in range(50):  # several threads would give a frame before it is marked, now and then
        with pytest.raises(
            BrokenSampleError, match=r"^video: the video is damaged: a frame cannot be decoded completely"
        ):
            read_clip(bytes(video), "video", 20, None, 0.0)


@pytest.mark.parametrize("position", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("fps", [None, 16.0, 3.0])
@pytest.mark.parametrize("duration", [1.0, 0.04, 0.0], ids=lambda seconds: f"{seconds} s")
def test_videos_of_one_frame(position: float, fps: float | None, duration: float) -> None:
    video = encode([picture()], fps=1 if duration in (1.0, 0.0) else 25)
    if not duration:  # its only sample lasts for nothing
        at = video.index(b"stts") + 12
        video = video[:at] + bytes(4) + video[at + 4 :]
    assert np.abs(frames_of(video, 1, fps, position)[0].astype(int) - picture()).max() <= 3


def test_one_frame_stays_for_its_duration_and_no_longer() -> None:
    video = encode([picture()], fps=1)
    assert len(frames_of(video, 8, 8.0, 1.0)) == 8
    for frames, fps in ((2, None), (10, 8.0)):
        with pytest.raises(BrokenSampleError, match=rf"^v: 1\.00 s are too short for {frames} frames at"):
            read_clip(video, "v", frames, fps, 0.0)


@pytest.mark.parametrize(
    ("fps", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6]),
        (10, [0, 1, *[2] * 18, 3, 4, 5, 6]),
        (20, [0, 0, 1, 1, *[2] * 36, 3, 3, 4, 4, 5, 5, 6]),
        (2, [0, 2, 2, 2, 3]),
    ],
)
def test_frames_of_changing_rate_are_those_on_screen(fps: float | None, expected: list[int]) -> None:
    video = levels(7, [0, 0.1, 0.2, 2.0, 2.1, 2.2, 2.3], options={"bf": "0"})
    assert shown_levels(video, len(expected), fps) == expected


long_video = partial(moving, 40, options={"bf": "3", "g": "12", "qp": "20"})
SOURCES = {
    "B-frames": long_video,
    "open groups": partial(moving, 40, options={"bf": "3", "qp": "20", "x264-params": "keyint=12:open-gop=1"}),
    "without key frames": partial(moving, 40, options={"qp": "20", "x264-params": "intra-refresh=1:keyint=8"}),
    "key frames only": partial(moving, 40, options={"g": "1"}),
    "fragments": partial(long_video, muxer={"movflags": "frag_keyframe+empty_moov"}),
    "no edit list": lambda: remuxed(long_video(), muxer={"use_editlist": "0"}),
    "begins after its sound": lambda: remuxed(long_video(), shift=15, sound=True),
    "trimmed by an edit list": lambda: remuxed(long_video(), shift=-5),
    "trimmed behind its key frame": lambda: remuxed(long_video(), shift=-17),
    "negative offsets": lambda: remuxed(long_video(), muxer={"movflags": "negative_cts_offsets"}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_clips_are_runs_of_the_frames_wherever_they_begin(name: str) -> None:
    """From the first frame to the last, without a gap, and none of another place."""
    video = SOURCES[name]()
    with av.open(io.BytesIO(video)) as container:
        decoded = list(container.decode(video=0))
    reference = [frame.to_ndarray(format="rgb24") for frame in decoded]
    assert "key frames" in name or any(frame.pict_type == PictureType.B for frame in decoded)
    starts = set()
    for position in np.linspace(0, 1, 21):
        clip = frames_of(video, 4, None, float(position))
        found = [i for i in range(len(reference) - 3) if np.array_equal(clip, reference[i : i + 4])]
        assert found, position
        starts.add(found[0])
        timed = frames_of(video, 4, 10.0, float(position))
        assert any(np.array_equal(timed, reference[i : i + 4]) for i in (found[0], found[0] - 1)), position
    assert min(starts) == 0
    assert max(starts) >= len(reference) - 5
    assert len(starts) > 10
    assert np.array_equal(frames_of(video, 4, 10.0), reference[:4])


def test_frames_without_times_are_errors() -> None:
    video = moving(12, options={"bf": "3", "qp": "20"})
    at = video.index(b"stts") + 12
    with pytest.raises(BrokenSampleError, match=r"^video: the video has no valid times for its frames"):
        read_clip(video[:at] + bytes(4) + video[at + 4 :], "video", 6, None, 0.0)


@pytest.mark.parametrize(
    ("pix_fmt", "options"),
    [
        ("yuv444p", {}),
        ("yuvj444p", {}),
        ("yuv444p10le", {}),
        ("rgb24", {"codec": "png"}),
        ("rgba", {"codec": "png"}),
        ("yuvj420p", {"grey": True}),
        ("yuv420p10le", {"grey": True}),
    ],
)
def test_colours_come_back(pix_fmt: str, options: dict[str, object]) -> None:
    """Colors survive in limited and full range, with 8 and 10 bits, with and without transparency."""
    image = picture()
    if options.get("grey"):
        image = np.repeat(image[..., :1], 3, 2)
    image[:8, :8], image[:8, 8:16] = 0, 255
    stored = np.concatenate([image, np.full((64, 96, 1), 128, np.uint8)], 2) if pix_fmt == "rgba" else image
    video = encode([stored] * 2, pix_fmt=pix_fmt, **{k: str(v) for k, v in options.items() if k != "grey"})
    assert np.abs(frames_of(video, 2).astype(int) - image).max() <= 4


@pytest.mark.parametrize("field", ["tff", "bff"])
def test_fields_of_interlaced_frames_are_woven(field: str) -> None:
    image = picture()
    image[1::2] = 255 - image[1::2]
    video = encode([image] * 2, options={"x264-params": f"{field}=1"})
    with av.open(io.BytesIO(video)) as container:
        assert next(container.decode(video=0)).interlaced_frame
    assert np.abs(frames_of(video, 2).astype(int) - image).max() <= 3


def test_a_cover_is_not_the_video() -> None:
    cover, frames = np.full((128, 128, 3), 9, np.uint8), [picture(seed=number) for number in range(3)]
    assert np.abs(frames_of(with_cover(cover, frames), 3).astype(int) - frames).max() <= 3
    for read in (check_video, lambda data, name: read_clip(data, name, 1, None, 0.0)):
        with pytest.raises(BrokenSampleError, match=r"^song: no video stream in the file, only a cover picture"):
            read(with_cover(cover), "song")


def renamed(kind: str) -> bytes:
    """Write a file of a different format."""
    if kind in ("WebM or Matroska", "AVI"):
        codec, container = ("libvpx", "webm") if kind.startswith("WebM") else ("mpeg4", "avi")
        return moving(3, codec=codec, pix_fmt="yuv420p", container=container)
    buffer = io.BytesIO()
    images = [Image.fromarray(picture(seed=number)) for number in range(3)]
    images[0].save(buffer, kind, save_all=kind != "JPEG", append_images=images[1:])
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["GIF", "WebP", "PNG", "JPEG", "WebM or Matroska", "AVI"])
def test_files_of_other_formats_say_what_they_are(kind: str) -> None:
    with pytest.raises(BrokenSampleError, match=rf"^v\.mp4: .*\(it is {kind}, not MP4; convert it with ffmpeg"):
        check_video(renamed(kind), "v.mp4")


def test_an_empty_file_says_so() -> None:
    with pytest.raises(BrokenSampleError, match=r"^v: the video cannot be decoded \(the file is empty\)"):
        check_video(b"", "v")


def test_quicktime_files_without_a_type_are_read() -> None:
    video = moving(3, container="mov")
    assert torch.equal(read_clip(video, "v", 3, None, 0.0), read_clip(moving(3), "v", 3, None, 0.0))
