"""Reading clips from MP4 and GIF files and writing clips to MP4 files, with PyAV."""

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
from lightning_mhla.generative.images import to_pixels
from lightning_mhla.system.files import written_whole
from mhla_tasks.video.decode import Video, open_video

EARLY = 0.25
"""Tolerance of frame times, as a share of the frame's duration: a frame counts as shown this long before its time."""


def read_clip(
    data: bytes,
    name: str,
    frames: int,
    fps: float | None,
    position: float,
    size: tuple[int, int] | None = None,
    extension: str = "mp4",
) -> Tensor:
    """Decode a clip with a given number of frames from an MP4 or GIF file.

    Args:
        data: contents of the file.
        name: name of the file, for messages.
        frames: number of frames in the clip.
        fps: number of frames to take per second of video; None to take consecutive frames.
        position: start of the clip within the video, from 0 (earliest) to 1 (latest). If the file has fewer frames than its
            metadata states, the clip may start at the beginning of the video instead.
        size: height and width in pixels to which each frame is scaled and center-cropped; None to keep the size of the video.
        extension: format of the file, ``"mp4"`` or ``"gif"``.

    Returns:
        Frames ``[frames, 3, H, W]`` uint8.

    Raises:
        BrokenSampleError: if the file cannot be read or is shorter than the clip, or if ``size`` is None and the frames differ
            in size.
    """
    with open_video(data, name, extension) as video:
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
            # The file says that it has more: an edit list trims it, or its last frame stays on screen. Retry from the start.
            return read_clip(data, name, frames, fps, 0.0, size, extension)
        if len(chosen) < frames:
            raise BrokenSampleError(f"{name}: the video ends after {len(chosen)} of {frames} frames")
        if len({image.shape for image in chosen}) > 1:
            raise BrokenSampleError(f"{name}: the size of the frames changes within the clip; set a size for all")
        return torch.stack(chosen)


def read_beginning(
    data: bytes, name: str, most: int, fps: float | None, size: tuple[int, int], extension: str = "mp4"
) -> Tensor:
    """Decode the first frames of an MP4 or GIF file, or all frames if the video has fewer.

    If ``fps`` is given, the last frame counts only if the video continues for at least a quarter of a frame interval after the
    time of this frame. A video with n frames at the rate ``fps`` therefore gives n frames.

    Args:
        data: contents of the file.
        name: name of the file, for messages.
        most: maximum number of frames.
        fps: number of frames to take per second of video; None to take consecutive frames.
        size: height and width in pixels to which each frame is scaled and center-cropped.
        extension: format of the file, ``"mp4"`` or ``"gif"``.

    Returns:
        Frames ``[F, 3, H, W]`` uint8, with F from 1 to ``most``.

    Raises:
        BrokenSampleError: if the file cannot be read, or has no frames.
    """
    with open_video(data, name, extension) as video:
        shown = _consecutive(video, 0.0, most) if fps is None else _frames_at(video, 0.0, 1 / fps, most, -EARLY)
        chosen = [_fitted(video.pixels(frame), size) for frame in shown]
    if not chosen:
        raise BrokenSampleError(f"{name}: the video has no frames")
    return torch.stack(chosen)


def check_video(data: bytes, name: str) -> None:
    """Check that a video is complete, by decoding only its first frame and the frames from its last key frame on.

    Args:
        data: contents of the MP4 file.
        name: name of the file, for messages.

    Raises:
        BrokenSampleError: if the file is truncated or cannot be decoded.
    """
    with open_video(data, name) as video:
        first = next(video.frames(), None)
        if first is None:
            raise BrokenSampleError(f"{name}: the video has no frames")
        video.pixels(first[2])
        decodable = False  # frames shown before the key frame may depend on frames that were not decoded
        for frame in video.last_frames():
            decodable = decodable or frame.key_frame
            if decodable:
                video.check_complete(frame)


def _too_short(video: Video, frames: int, fps: float | None, span: float) -> bool:
    """Return whether a video is too short for a clip, according to the frame count and the duration in its metadata.

    Args:
        video: opened video.
        frames: number of frames in the clip.
        fps: number of frames to take per second of video; None to take consecutive frames.
        span: time from the first to the last frame of the clip, in seconds.
    """
    if fps is None and video.count:
        return frames > video.count
    return video.last is not None and span > video.last + 1 / video.rate + 0.5 / (fps or video.rate)


def _consecutive(video: Video, start: float, count: int) -> Iterator[Any]:
    """Yield up to ``count`` consecutive PyAV frames of a video, fewer if the video ends before that.

    Args:
        video: opened video.
        start: time of the first frame, in seconds from the start of the video. The first frame may be up to about half a frame
            interval earlier, so that a clip at the end of the video is complete.
        count: number of frames.
    """
    start -= 0.5 / video.rate
    yielded = 0
    for at, _, frame in video.frames(start):
        if start <= 0 or at >= start - EARLY / video.rate:
            yield frame
            yielded += 1
        if yielded == count:
            return


def _frames_at(video: Video, start: float, step: float, count: int, late: float = EARLY) -> Iterator[Any]:
    """Yield the PyAV frames that a player shows at ``start`` and every ``step`` seconds after it, up to ``count`` frames.

    Times are in seconds from the start of the video. A frame is shown until the next one begins, and the last frame for its
    duration. Timestamps are not exact, because files round them and the frame rates of cameras vary. A frame therefore counts
    as shown slightly before its timestamp. The tolerance is a quarter of its duration, of the previous frame's duration or of
    ``step``, whichever is shortest.

    Args:
        video: opened video.
        start: time for which the first frame is yielded, in seconds.
        step: interval between the times, in seconds.
        count: number of frames.
        late: how long after the end of the video the last frame is still taken, as a share of ``step``. If it is
            negative, the last frame is taken only if the video shows it for longer than ``-late * step`` after the requested
            time.
    """
    yielded, shown, at, end = 0, None, 0.0, 0.0
    for time, duration, frame in video.frames(start):
        # The frame in ``shown`` is on screen until now: it is yielded once for each requested time before this frame's.
        early = EARLY * max(0.0, min(time - at, duration, step))
        while shown is not None and yielded < count and start + yielded * step < time - early:
            yield shown
            yielded += 1
        if yielded == count:
            return
        shown, at, end = frame, time, time + duration
    while shown is not None and yielded < count and start + yielded * step < end + late * step:
        yield shown
        yielded += 1


def _fitted(image: np.ndarray, size: tuple[int, int] | None) -> Tensor:
    """Convert a frame ``[H, W, 3]`` uint8 to a tensor ``[3, H, W]`` of a given size.

    Args:
        image: frame.
        size: height and width in pixels to which the frame is scaled and center-cropped; None to keep its size.
    """
    pixels = torch.from_numpy(image).permute(2, 0, 1)
    return pixels if size is None else cover(pixels, *size)


def cover(image: Tensor, height: int, width: int) -> Tensor:
    """Scale an image until it just covers a given size, then center-crop it to this size.

    Args:
        image: image ``[3, H, W]`` uint8.
        height: height of the result, in pixels.
        width: width of the result, in pixels.

    Returns:
        Image ``[3, height, width]`` uint8.
    """
    scale = max(height / image.shape[-2], width / image.shape[-1])
    size = [max(height, round(image.shape[-2] * scale)), max(width, round(image.shape[-1] * scale))]
    if size != list(image.shape[-2:]):
        image = v2.functional.resize(image, size, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    return v2.functional.center_crop(image, [height, width])


def to_signed(clip: Tensor) -> Tensor:
    """Convert frames ``[F, C, H, W]`` uint8 to a clip ``[C, F, H, W]`` float32 with values in -1 .. 1."""
    return (clip.float() / 127.5 - 1).transpose(0, 1)


def write_clip(path: Path, clip: Tensor, fps: float, crf: float = 15.0) -> None:
    """Write frames to an H.264 MP4 file atomically. An odd height or width is cropped by one pixel.

    Only ``crf=0`` guarantees that the same frames always give the same file. With other values, x264 (core 165) reads
    uninitialized memory when it chooses which detail to drop. A pixel may then differ by one level out of 255, and by ten in
    later frames.

    Args:
        path: path of the MP4 file.
        clip: frames ``[F, C, H, W]`` uint8 with one or three channels.
        fps: number of frames per second.
        crf: constant rate factor of x264, from 0 to 51. 0 loses only color resolution, 15 loses hardly anything visible, and 51
            loses the most.
    """
    import av

    pixels = clip.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    # ffmpeg gets an open file instead of a path, because it would take the part of a path before a colon for a protocol.
    with (
        written_whole(path) as aside,
        aside.open("wb") as file,
        av.open(file, "w", format="mp4") as container,
    ):
        stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        # 4:2:0 stores one color for 2 x 2 pixels, so both sides must be even.
        stream.height, stream.width = (pixels.shape[1] // 2 * 2, pixels.shape[2] // 2 * 2)
        stream.pix_fmt, stream.options = "yuv420p", {"crf": str(crf)}
        for image in pixels:
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(image[: stream.height, : stream.width]), format="rgb24"
            )
            container.mux(stream.encode(frame))
        # without a frame: the encoder hands out the frames that it still holds
        container.mux(stream.encode())


def to_frames(clips: Tensor) -> Tensor:
    """Convert clips ``[B, C, F, H, W]`` with values in -1 .. 1 to frames ``[B, F, C, H, W]`` uint8."""
    return to_pixels(clips.transpose(1, 2))
