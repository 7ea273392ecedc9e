"""Clips out of video files and into them, by PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from lightning_mhla.data import BrokenSampleError

LARGEST_FRAME, NARROWEST = 8192 * 4320, 16
"""Pixels of a frame, and the ratio of its sides, beyond which a file is taken for a broken or a hostile one."""

EARLY = 0.25
"""Of a frame's duration, by which it may be shown before its time."""


def read_clip(
    data: bytes, name: str, frames: int, fps: float | None, position: float, size: tuple[int, int] | None = None
) -> Tensor:
    """Consecutive frames of a video.

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
        BrokenSampleError: when the file cannot be read, or is shorter than the clip.
    """
    with _opened(data, name) as (container, stream, rate):
        step = 1 / (fps or rate)
        length, span = _seconds(container, stream, rate), (frames - 1) * step
        if length is not None and span > length + step / 2:
            raise BrokenSampleError(
                f"{name}: {length + 1 / rate:.2f} s are too short for {frames} frames at {1 / step:g} a second"
            )
        start = position * max(0.0, (length or span) - span)
        if fps is None:
            shown = _consecutive(container, stream, start, frames, rate)
        else:
            shown = _frames_at(container, stream, [start + number * step for number in range(frames)], rate)
        chosen = [_pixels(frame, size) for frame in shown]
        if (
            len(chosen) < frames and start > 0
        ):  # trimmed by an edit list, or its last frame stays: the file says too much
            return read_clip(data, name, frames, fps, 0.0, size)
        if len(chosen) < frames:
            raise BrokenSampleError(f"{name}: the video ends after {len(chosen)} of the {frames} frames asked")
        return torch.stack(chosen)


def check_video(data: bytes, name: str) -> None:
    """Find truncated and damaged videos without decoding all of them: the first frame, and those after the last key frame.

    Args:
        data: the mp4 file.
        name: for messages.

    Raises:
        BrokenSampleError: when the file is cut off or cannot be decoded.
    """
    position = 0  # of a box: a size of 4 bytes and a name, or a size of 8 bytes after that (ISO 14496-12)
    while data[4:8] == b"ftyp" and position + 8 <= len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size < 8:  # 0: to the end of the file; others are no box
            break
        position += size
    if position > len(data):
        raise BrokenSampleError(f"{name}: the video is cut off: {position - len(data)} bytes are missing")
    with _opened(data, name) as (container, stream, _):
        if next(container.decode(stream), None) is None:
            raise BrokenSampleError(f"{name}: the video has no frames")
        if stream.duration:
            container.seek((stream.start_time or 0) + stream.duration - 1, stream=stream)
            for _ in container.decode(stream):
                pass


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[tuple[Any, Any, float]]:
    """Container, video stream and frames a second of an mp4 file; what goes wrong inside is a BrokenSampleError."""
    import av

    try:
        with av.open(io.BytesIO(data), format="mp4", metadata_errors="ignore") as container:
            if not container.streams.video:
                raise BrokenSampleError(f"{name}: no video stream in the file")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise BrokenSampleError(f"{name}: nothing here can decode the video")
            sides = stream.width, stream.height
            if sides[0] * sides[1] > LARGEST_FRAME or max(sides) > NARROWEST * min(sides):
                raise BrokenSampleError(f"{name}: frames of {sides[0]} x {sides[1]} are too large or too narrow")
            stream.thread_type = "AUTO"
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            if not rate:
                raise BrokenSampleError(f"{name}: the video does not say its frame rate")
            yield container, stream, rate
    except (av.FFmpegError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, BrokenSampleError):
            raise
        raise BrokenSampleError(f"{name}: the video cannot be decoded ({error})") from error


def _seconds(container: Any, stream: Any, rate: float) -> float | None:
    """Time from the first frame to the last, where the file says it."""
    if stream.frames:
        return (stream.frames - 1) / rate
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base) - 1 / rate
    return None if container.duration is None else container.duration / 1e6 - 1 / rate


def _seek(container: Any, stream: Any, seconds: float) -> float:
    """Go to the last key frame before ``seconds``; the time of the first frame, from which seconds count."""
    offset = float((stream.start_time or 0) * stream.time_base)
    if seconds > 0:
        container.seek(int((seconds + offset) / stream.time_base), stream=stream)
    return offset


def _consecutive(container: Any, stream: Any, start: float, count: int, rate: float) -> Iterator[Any]:
    """``count`` frames one after another, from about ``start`` on; half a frame earlier, so that they do not run out."""
    start -= 0.5 / rate
    offset, taken = _seek(container, stream, start), 0
    for frame in container.decode(stream):
        if frame.pts is not None and float(frame.pts * stream.time_base) - offset >= start - EARLY / rate:
            yield frame
            taken += 1
        if taken == count:
            return


def _frames_at(container: Any, stream: Any, times: list[float], rate: float) -> Iterator[Any]:
    """The frame that is on screen at each of ``times``: it stays until the next one's time, and the last one a while.

    Times of frames are rounded to the file's time base, and cameras are not exact: a frame counts from a quarter of a
    frame before its time.
    """
    offset, early = _seek(container, stream, times[0]), EARLY / rate
    taken, shown, at = 0, None, 0.0
    for frame in container.decode(stream):
        if frame.pts is None:
            continue
        at = float(frame.pts * stream.time_base) - offset
        while shown is not None and taken < len(times) and times[taken] < at - early:
            yield shown
            taken += 1
        if taken == len(times):
            return
        shown = frame
    while shown is not None and taken < len(times) and times[taken] < at + 1 / rate + early:
        yield shown
        taken += 1


def _pixels(frame: Any, size: tuple[int, int] | None) -> Tensor:
    """``[3, H, W]`` uint8 of a decoded frame, upright, fitted to ``size``."""
    image = np.rot90(frame.to_ndarray(format="rgb24"), round(getattr(frame, "rotation", 0) / 90))
    pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
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
    aside = path.with_name(path.name + ".part")
    with av.open(str(aside), "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = (pixels.shape[1] // 2 * 2, pixels.shape[2] // 2 * 2)
        stream.pix_fmt, stream.options = "yuv420p", {"crf": str(crf)}
        for image in pixels:
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(image[: stream.height, : stream.width]), format="rgb24"
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    aside.replace(path)


def to_frames(clips: Tensor) -> Tensor:
    """Clips ``[B, C, F, H, W]`` in -1 .. 1 as frames ``[B, F, C, H, W]`` uint8."""
    return ((clips.float().transpose(1, 2) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
