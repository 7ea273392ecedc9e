"""Clips out of video files and into them, by PyAV."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from lightning_mhla.data import BrokenSampleError
from lightning_mhla.system.files import written_whole
from mhla_tasks.video.decode import Video, open_video

EARLY = 0.25
"""Share of a frame's duration by which it may be shown before its time."""


def read_clip(
    data: bytes, name: str, frames: int, fps: float | None, position: float, size: tuple[int, int] | None = None
) -> Tensor:
    """Consecutive frames of a video, as :mod:`mhla_tasks.video.decode` shows them.

    Args:
        data: the mp4 file.
        name: for messages.
        frames: number of frames.
        fps: frames a second; None for every frame as it comes.
        position: start of the clip within the video, 0 (earliest) to 1 (latest); the beginning is taken
            where fewer frames are left than the file's duration and rate promise.
        size: height and width that each frame is made to cover, its middle cut out; None for the video's own.

    Returns:
        ``[frames, 3, H, W]`` uint8.

    Raises:
        BrokenSampleError: if the file cannot be read, or is shorter than the clip.
    """
    with open_video(data, name) as video:
        step = 1 / (fps or video.rate)
        last, span = video.last, (frames - 1) * step
        if last is not None and _too_short(video, frames, fps, span):
            raise BrokenSampleError(
                f"{name}: {last + 1 / video.rate:.2f} s are too short for {frames} frames at {1 / step:g} a second"
            )
        start = position * max(0.0, (span if last is None else last) - span)
        shown = _consecutive(video, start, frames) if fps is None else _frames_at(video, start, step, frames)
        chosen = [_fitted(video.pixels(frame), size) for frame in shown]
        if len(chosen) < frames and start > 0:
            # trimmed by an edit list, or its last frame stays: the file says too much
            return read_clip(data, name, frames, fps, 0.0, size)
        if len(chosen) < frames:
            raise BrokenSampleError(f"{name}: the video ends after {len(chosen)} of the {frames} frames asked")
        if len({image.shape for image in chosen}) > 1:
            raise BrokenSampleError(f"{name}: the size of the frames changes within the clip; give a size for all")
        return torch.stack(chosen)


def check_video(data: bytes, name: str) -> None:
    """Find truncated and damaged videos without decoding all of them: the first frame, and those after the last key frame.

    Args:
        data: the mp4 file.
        name: for messages.

    Raises:
        BrokenSampleError: if the file is cut off or cannot be decoded.
    """
    with open_video(data, name) as video:
        first = next(video.frames(), None)
        if first is None:
            raise BrokenSampleError(f"{name}: the video has no frames")
        video.pixels(first[2])
        decodable = False  # frames shown before the key frame may need others before it
        for frame in video.last_frames():
            decodable = decodable or frame.key_frame
            if decodable:
                video.check_complete(frame)


def _too_short(video: Video, frames: int, fps: float | None, span: float) -> bool:
    """Whether the file itself says that it has fewer frames, or ends before the last one that is asked for."""
    if fps is None and video.count:
        return frames > video.count
    return video.last is not None and span > video.last + 1 / video.rate + 0.5 / (fps or video.rate)


def _consecutive(video: Video, start: float, count: int) -> Iterator[Any]:
    """``count`` frames one after another, from about ``start`` on; half a frame earlier, so that they do not run out."""
    start -= 0.5 / video.rate
    taken = 0
    for at, _, frame in video.frames(start):
        if start <= 0 or at >= start - EARLY / video.rate:
            yield frame
            taken += 1
        if taken == count:
            return


def _frames_at(video: Video, start: float, step: float, count: int) -> Iterator[Any]:
    """The frames that are on screen at ``start`` and each ``step`` after it: each until the next, the last for its duration.

    Times of frames are rounded to the file's time base, and cameras are not exact: a frame counts from a little before its
    time, a quarter of itself, of the one before it or of a step, whichever is shortest.
    """
    taken, shown, at, end = 0, None, 0.0, 0.0
    for time, duration, frame in video.frames(start):
        early = EARLY * max(0.0, min(time - at, duration, step))
        while shown is not None and taken < count and start + taken * step < time - early:
            yield shown
            taken += 1
        if taken == count:
            return
        shown, at, end = frame, time, time + duration
    while shown is not None and taken < count and start + taken * step < end + EARLY * step:
        yield shown
        taken += 1


def _fitted(image: np.ndarray, size: tuple[int, int] | None) -> Tensor:
    """A frame ``[H, W, 3]`` as ``[3, H, W]``, made to cover ``size``."""
    pixels = torch.from_numpy(image).permute(2, 0, 1)
    return pixels if size is None else cover(pixels, *size)


def cover(image: Tensor, height: int, width: int) -> Tensor:
    """Image ``[3, H, W]`` uint8 scaled until it just covers ``height x width``, the middle cut out."""
    scale = max(height / image.shape[-2], width / image.shape[-1])
    size = [max(height, round(image.shape[-2] * scale)), max(width, round(image.shape[-1] * scale))]
    if size != list(image.shape[-2:]):
        image = v2.functional.resize(image, size, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    return v2.functional.center_crop(image, [height, width])


def to_signed(clip: Tensor) -> Tensor:
    """Frames ``[F, 3, H, W]`` uint8 as a clip ``[3, F, H, W]`` float32 in -1 .. 1."""
    return (clip.float() / 127.5 - 1).transpose(0, 1)


def write_clip(path: Path, clip: Tensor, fps: float, crf: float = 15.0) -> None:
    """Write frames ``[F, 3 or 1, H, W]`` uint8 as an H.264 mp4 file, atomically; odd sides are cut by one pixel.

    Only with ``crf=0`` do equal frames always give equal files: x264 (core 165) reads uninitialised memory where it chooses
    how to lose detail, and a level of difference in one pixel becomes ten after it.

    Args:
        path: the file.
        clip: the frames.
        fps: frames a second.
        crf: x264's constant rate factor: 0 loses nothing but colour resolution, 15 hardly anything that is visible, 51 most.
    """
    import av

    pixels = clip.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    # ffmpeg gets an open file, never its name, in which it would read 2026-11-25T10:30/a.mp4 as a protocol
    with (
        written_whole(path) as aside,
        aside.open("wb") as file,
        av.open(file, "w", format="mp4") as container,
    ):
        stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = (pixels.shape[1] // 2 * 2, pixels.shape[2] // 2 * 2)
        stream.pix_fmt, stream.options = "yuv420p", {"crf": str(crf)}
        for image in pixels:
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(image[: stream.height, : stream.width]), format="rgb24"
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def to_frames(clips: Tensor) -> Tensor:
    """Clips ``[B, C, F, H, W]`` in -1 .. 1 as frames ``[B, F, C, H, W]`` uint8."""
    return ((clips.float().transpose(1, 2) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
