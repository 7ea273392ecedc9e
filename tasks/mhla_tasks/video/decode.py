"""Decoding of MP4 and GIF files to RGB frames that equal those of the ``ffmpeg`` command.

:func:`open_video` opens a file. Its frames are rotated and mirrored according to the display matrix of the file, and scaled to
square pixels in 8-bit RGB. libavfilter converts them with the same filters in the same order as the ``ffmpeg`` command. Like
that command, it interleaves the fields of interlaced frames, drops transparency, and does not tone-map high dynamic range.
Damaged frames, whose damage ffmpeg conceals, raise an error here.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np

from lightning_mhla.data import BrokenSampleError
from lightning_mhla.system.untrusted import reason
from mhla_tasks.video.containers import check_format, missing_bytes

LARGEST_FRAME, NARROWEST = 8192 * 4320, 16
"""Maximum number of pixels of a frame, and maximum ratio of its sides. Files beyond these limits are treated as hostile."""

COVER = 0x0400
"""FFmpeg's ``AV_DISPOSITION_ATTACHED_PIC``, which marks a stream as the cover picture of a song or film."""

DEFAULT, DEFAULT_BONUS = 0x0001, 5_000_000
"""FFmpeg's ``AV_DISPOSITION_DEFAULT``, and the number of pixels that it is worth when ffmpeg chooses among streams."""

TOLERANCE = math.tan(math.radians(1))
"""Maximum slope of an axis of a display matrix that counts as straight; ffmpeg also ignores rotations below one degree."""

ASSUMED_RATE = 25
"""Frame rate in frames per second that ffmpeg assumes for a video of one frame without a duration."""


class Video:
    """Opened video file, which yields its frames and converts them to RGB pixels.

    Args:
        container: PyAV container of the file.
        stream: video stream of the container.
        name: name of the file, for messages.

    Attributes:
        rate: average number of frames per second.
        count: number of frames according to the file's metadata; 0 if unknown.
        last: time of the last frame according to the file's metadata, in seconds after the first frame; None if unknown.

    Raises:
        BrokenSampleError: if the file does not state a frame rate and has more than one frame.
    """

    def __init__(self, container: Any, stream: Any, name: str) -> None:
        self.container, self.stream, self.name = container, stream, name
        self.count: int = stream.frames
        rate = stream.average_rate or stream.guessed_rate or (ASSUMED_RATE if self.count == 1 else None)
        if not rate:
            raise BrokenSampleError(f"{name}: the video has no frame rate")
        self.rate = float(rate)
        self.last = self._last()
        self._origin = float((stream.start_time or 0) * stream.time_base)
        self._aspect = Fraction(stream.sample_aspect_ratio or 1)
        self._graph: Any = None
        self._graph_of: tuple[Any, ...] = ()

    def frames(self, start: float = 0.0) -> Iterator[tuple[float, float, Any]]:
        """Decode and yield frames in display order, to the end of the video.

        Args:
            start: time in seconds after the first frame of the video. The first yielded frame begins at or before this time,
                possibly much earlier, because decoding begins at a key frame.

        Yields:
            A tuple for each frame: its time in seconds after the first frame of the video, its duration in seconds, and the
            PyAV frame.
        """
        if start > 0:
            self._seek(int((start + self._origin) / self.stream.time_base))
            first = next(decoded := self._decoded(), None)
            if first is not None and first[0] <= start:
                yield first
                yield from decoded
                return
            # Nothing at or before the start was decoded: frames may depend on frames before the key frame that was found.
            self._seek(min(0, self.stream.start_time or 0))
        yield from self._decoded()

    def last_frames(self) -> Iterator[Any]:
        """Yield the PyAV frames from the last key frame to the end of the video.

        If the duration of the video is unknown, decoding starts at the current position in the file instead.
        """
        if self.stream.duration:
            self._seek((self.stream.start_time or 0) + self.stream.duration - 1)
        for _, _, frame in self._decoded():
            yield frame

    def pixels(self, frame: Any) -> np.ndarray:
        """Convert a PyAV frame to RGB pixels, rotated and scaled for display as in ffmpeg.

        Args:
            frame: decoded PyAV frame of this video.

        Returns:
            Pixels ``[H, W, 3]`` uint8.

        Raises:
            BrokenSampleError: if the frame is damaged, or its orientation or size is not supported.
        """
        self.check_complete(frame)
        layout = (frame.width, frame.height, frame.format.name, int(frame.colorspace), int(frame.color_range))
        matrix = self._matrix(frame)
        if self._graph_of != (layout, matrix):  # the layout of frames may change within a stream
            self._graph, self._graph_of = self._build(layout, matrix), (layout, matrix)
        self._graph.push(frame)
        return self._graph.pull().to_ndarray(format="rgb24")

    def check_complete(self, frame: Any) -> None:
        """Check that a decoded PyAV frame is not damaged.

        ffmpeg marks damaged frames, but conceals the damage in their pixels.

        Raises:
            BrokenSampleError: if the frame is damaged.
        """
        if frame.is_corrupt:
            raise BrokenSampleError(f"{self.name}: the video is damaged: a frame cannot be decoded completely")

    def _seek(self, timestamp: int) -> None:
        self.container.seek(timestamp, stream=self.stream)

    def _decoded(self) -> Iterator[tuple[float, float, Any]]:
        previous, unit = -math.inf, float(self.stream.time_base)
        for frame in self.container.decode(self.stream):
            if frame.pts is None or frame.pts < previous:
                raise BrokenSampleError(f"{self.name}: the video has no valid times for its frames")
            previous = frame.pts
            duration = (getattr(frame, "duration", 0) or 0) * unit  # not in PyAV 14
            yield frame.pts * unit - self._origin, duration or 1 / self.rate, frame

    def _last(self) -> float | None:
        """Return the time of the last frame in seconds according to the metadata; None if unknown.

        The duration and the number of frames in the metadata may disagree: an edit list, which selects the part of an MP4 file
        to play, shortens only the duration. The earlier of the two resulting times is returned.
        """
        ends = [self.count / self.rate] if self.count else []
        if self.stream.duration:
            ends.append(float(self.stream.duration * self.stream.time_base))
        if not ends and self.container.duration is not None:
            ends.append(self.container.duration / 1e6)
        return min(ends) - 1 / self.rate if ends else None

    def _matrix(self, frame: Any) -> tuple[int, ...]:
        data = frame.side_data.get("DISPLAYMATRIX")
        return () if data is None else tuple(np.frombuffer(bytes(data), np.int32).tolist())

    def _build(self, layout: tuple[Any, ...], matrix: tuple[int, ...]) -> Any:
        """Build the filter graph, a PyAV ``Graph``, that converts frames to RGB pixels.

        Args:
            layout: width, height, pixel format, color space and color range of the frames.
            matrix: display matrix of the frames, see :func:`orientation`; empty if there is none.
        """
        import av.filter

        width, height, format_name, colorspace, color_range = layout
        filters, swapped = orientation(matrix, self.name)
        shape = (height, width) if swapped else (width, height)
        aspect = 1 / self._aspect if swapped else self._aspect
        shown = max(1, int(shape[0] * aspect)), shape[1]  # rounded down, as by ffmpeg's scale=iw*sar:ih
        self.check_size(*shown)
        graph = av.filter.Graph()
        if hasattr(graph, "threads"):  # data workers run in parallel already
            graph.threads = 1
        source = graph.add(
            "buffer",
            f"video_size={width}x{height}:pix_fmt={format_name}:time_base={self.stream.time_base}"
            f":colorspace={colorspace}:range={color_range}",
        )
        chain = [source, *(graph.add(*arguments) for arguments in filters)]
        chain.append(graph.add("scale", f"{shown[0]}:{shown[1]}:flags=bicubic"))
        chain += [graph.add("format", "pix_fmts=rgb24"), graph.add("buffersink")]
        graph.link_nodes(*chain).configure()
        return graph

    def check_size(self, width: int, height: int) -> None:
        """Check the width and height of frames, in pixels, before memory is allocated for them.

        Raises:
            BrokenSampleError: if frames are so large or so narrow that the file must be broken or malicious.
        """
        if width * height > LARGEST_FRAME or max(width, height) > NARROWEST * min(width, height):
            raise BrokenSampleError(f"{self.name}: frames of {width} x {height} are too large or too narrow")


def orientation(matrix: tuple[int, ...], name: str) -> tuple[list[tuple[str, ...]], bool]:
    """Choose the ffmpeg filters that rotate and mirror a frame as the display matrix of a video requires.

    The matrix maps column x and row y of a stored frame to ``a x + c y`` and ``b x + d y``. Its translation is ignored, since
    it does not change the picture. Its scale is ignored, too, because the aspect ratio of the pixels includes it.

    Args:
        matrix: the nine entries ``a, b, u, c, d, v, tx, ty, w`` of the display matrix, as libavutil stores them; empty if the
            video has none.
        name: name of the file, for messages.

    Returns:
        A list of filters, each as a tuple of its name and its arguments; and whether the filters swap height and width.

    Raises:
        BrokenSampleError: if the matrix rotates by an angle that is not a multiple of 90 degrees, or skews.
    """
    if not any(matrix):  # without a matrix, or with zeros only, frames are shown as stored
        return [], False
    a, b, _, c, d = matrix[:5]
    if max(abs(b), abs(c)) <= TOLERANCE * min(abs(a), abs(d)):
        return [(name,) for name, mirrored in (("hflip", a < 0), ("vflip", d < 0)) if mirrored], False
    if max(abs(a), abs(d)) <= TOLERANCE * min(abs(b), abs(c)):
        directions = {(True, True): "cclock_flip", (True, False): "clock", (False, True): "cclock"}
        return [("transpose", directions.get((b > 0, c > 0), "clock_flip"))], True
    degrees = math.degrees(math.atan2(b, a))
    raise BrokenSampleError(
        f"{name}: the video is shown rotated by {degrees:.0f} degrees or skewed (its display matrix); only multiples of 90 "
        "degrees and mirrored videos are supported"
    )


@contextmanager
def open_video(data: bytes, name: str, extension: str = "mp4") -> Iterator[Video]:
    """Context manager that opens the contents of an MP4 or GIF file for decoding.

    Args:
        data: contents of the file.
        name: name of the file, for error messages.
        extension: expected format, ``"mp4"`` or ``"gif"``.

    Yields:
        The opened video. If the file has several video streams, the one that ffmpeg would choose is used, and never a
        cover picture.

    Raises:
        BrokenSampleError: if the file cannot be decoded, on opening or later inside the ``with`` block; the message names the
            file and the reason.
    """
    import av

    check_format(data, name, extension)
    if missing := missing_bytes(data):
        raise BrokenSampleError(f"{name}: the video is cut off: {missing} bytes are missing")
    try:
        with av.open(io.BytesIO(data), format=extension, metadata_errors="ignore") as container:
            stream = _chosen_stream(container, name)
            # Frame threads return a damaged frame before it is marked as damaged, so that some would pass unnoticed. Data
            # workers run in parallel anyway.
            stream.codec_context.thread_type, stream.codec_context.thread_count = "NONE", 1
            video = Video(container, stream, name)
            video.check_size(stream.width, stream.height)
            yield video
    except av.FFmpegError as error:
        raise BrokenSampleError(f"{name}: the video cannot be decoded ({error.strerror})") from error
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, BrokenSampleError):
            raise
        raise BrokenSampleError(f"{name}: the video cannot be decoded ({reason(error)})") from error


def _chosen_stream(container: Any, name: str) -> Any:
    """Choose the PyAV video stream with the largest frames, like ffmpeg, with a bonus for streams marked as default.

    Raises:
        BrokenSampleError: if there is no video stream, or no decoder for it.
    """
    streams = [stream for stream in container.streams.video if not _disposition(stream) & COVER]
    if not streams:
        only = ", only a cover picture" if container.streams.video else ""
        raise BrokenSampleError(f"{name}: no video stream in the file{only}")
    stream = max(streams, key=_score)
    if stream.codec_context is None:
        raise BrokenSampleError(f"{name}: no installed decoder can read the video")
    return stream


def _score(stream: Any) -> int:
    if stream.codec_context is None:
        return 0
    return stream.width * stream.height + DEFAULT_BONUS * bool(_disposition(stream) & DEFAULT)


def _disposition(stream: Any) -> int:
    return int(getattr(stream, "disposition", 0))  # not in PyAV 14
