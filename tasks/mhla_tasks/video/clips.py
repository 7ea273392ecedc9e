"""Clips out of video files and into them, by PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from lightning_mhla.data import BrokenSampleError

LARGEST_FRAME = 8192 * 8192
"""Pixels of a frame, beyond which a file is taken for a broken or a hostile one."""

CRF = 15
"""Constant rate factor of x264: hardly any visible loss."""


def read_clip(data: bytes, name: str, frames: int, fps: float | None, place: float) -> Tensor:
    """Consecutive frames of a video.

    Args:
        data: the file.
        name: for messages.
        frames: how many.
        fps: frames a second; None for every frame as it comes.
        place: where the clip lies in what the video has room for, 0 (its beginning) to 1 (its end).

    Returns:
        ``[frames, 3, H, W]`` uint8.

    Raises:
        BrokenSampleError: when the file cannot be read, or is shorter than the clip.
    """
    import av

    try:
        with av.open(io.BytesIO(data), metadata_errors="ignore") as container:
            if not container.streams.video:
                raise BrokenSampleError(f"{name}: no video stream in the file")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise BrokenSampleError(f"{name}: nothing here can decode the video")
            if stream.width * stream.height > LARGEST_FRAME:
                raise BrokenSampleError(f"{name}: frames of {stream.width} x {stream.height} are too large")
            stream.thread_type = "AUTO"
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            step = 1 / (fps or rate) if fps or rate else 0.0
            if not step:
                raise BrokenSampleError(f"{name}: the video does not say its frame rate")
            length = _seconds(container, stream, rate)
            span = (frames - 1) * step
            if length is not None and span > length + step / 2:
                raise BrokenSampleError(
                    f"{name}: {length + 1 / rate if rate else length:.2f} s are too short for {frames} frames at "
                    f"{1 / step:g} a second"
                )
            start = place * max(0.0, (length or span) - span)
            chosen = list(_frames_at(container, stream, start, step, frames))
    except (av.FFmpegError, OSError, ValueError, EOFError) as error:
        if isinstance(error, BrokenSampleError):
            raise
        raise BrokenSampleError(f"{name}: the video cannot be decoded ({error})") from error
    if len(chosen) < frames:
        raise BrokenSampleError(f"{name}: the video ends after {len(chosen)} of the {frames} frames asked")
    return torch.from_numpy(np.stack(chosen)).permute(0, 3, 1, 2)


def _seconds(container: Any, stream: Any, rate: float) -> float | None:
    """Time from the first frame to the last, where the file says it."""
    if stream.frames and rate:
        return (stream.frames - 1) / rate
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base) - (1 / rate if rate else 0.0)
    return None if container.duration is None else container.duration / 1e6 - (1 / rate if rate else 0.0)


def _frames_at(container: Any, stream: Any, start: float, step: float, count: int) -> Iterator[np.ndarray]:
    """Frames shown at ``start``, ``start + step``, ..., as RGB ``[H, W, 3]``; a frame stays until the next one's time."""
    offset = float((stream.start_time or 0) * stream.time_base)
    if start > 0:
        container.seek(int((start + offset) / stream.time_base), stream=stream)
    taken, shown = 0, None
    for frame in container.decode(stream):
        if frame.pts is None:
            continue
        at = float(frame.pts * stream.time_base) - offset
        while shown is not None and taken < count and start + taken * step < at - 1e-4:
            yield shown
            taken += 1
        if taken == count:
            return
        image = frame.to_ndarray(format="rgb24") if at + 1e-4 >= start - step else None
        shown = image if image is not None else shown
    while shown is not None and taken < count and start + taken * step < at + step:
        yield shown
        taken += 1


def fit_clip(clip: Tensor, height: int, width: int) -> Tensor:
    """A clip ``[F, 3, H, W]`` uint8 shrunk until it just covers ``height x width``, the middle cut out, in -1 .. 1.

    Returns:
        ``[3, F, height, width]`` float32.
    """
    scale = max(height / clip.shape[-2], width / clip.shape[-1])
    size = [max(height, round(clip.shape[-2] * scale)), max(width, round(clip.shape[-1] * scale))]
    if size != list(clip.shape[-2:]):
        clip = v2.functional.resize(clip, size, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    return (v2.functional.center_crop(clip, [height, width]).float() / 127.5 - 1).transpose(0, 1)


def write_clip(path: Path, clip: Tensor, fps: float) -> None:
    """Write frames ``[F, 3 or 1, H, W]`` uint8 as an H.264 mp4 file, whole or not at all; odd sides are cut by one pixel."""
    import av

    pixels = clip.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    aside = path.with_name(path.name + ".part")
    with av.open(str(aside), "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = (pixels.shape[1] // 2 * 2, pixels.shape[2] // 2 * 2)
        stream.pix_fmt, stream.options = "yuv420p", {"crf": str(CRF)}
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
