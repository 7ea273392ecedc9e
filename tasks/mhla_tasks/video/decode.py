"""Video files as ffmpeg shows them: whatever decodes a video here does it through :func:`open_video`.

Upright and mirrored as the display matrix says, with square pixels, in RGB of 8 bits. libavfilter does it, with the filters
and in the order of the ``ffmpeg`` command. Like that command, it weaves the fields of interlaced frames, drops transparency,
and does not map high dynamic range. Damaged frames, which ffmpeg patches up, are errors here.
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

LARGEST_FRAME, NARROWEST = 8192 * 4320, 16
"""Pixels of a frame, and the ratio of its sides, beyond which a file is taken for a broken or a hostile one."""

BOXES = (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide", b"pnot")
"""Boxes that an MP4 or QuickTime file begins with (ISO 14496-12)."""

NEEDED = (b"moov", b"moof", b"mdat")
"""Boxes without whose end frames are missing. Anything else behind them may be cut off, or not be a box at all."""

OTHER_FORMATS = {
    b"GIF8": "GIF",
    b"WEBP": "WebP",
    b"AVI ": "AVI",
    b"\x1a\x45\xdf\xa3": "WebM or Matroska",
    b"\x00\x00\x01\xba": "MPEG-PS",
    b"FLV\x01": "FLV",
    b"OggS": "Ogg",
    b"\x89PNG": "PNG",
    b"\xff\xd8\xff\xe0": "JPEG",
}
"""Files that people rename to .mp4, by their first four bytes, or those after ``RIFF`` and a size."""

COVER = 0x0400
"""FFmpeg's ``AV_DISPOSITION_ATTACHED_PIC``: a stream that is the cover picture of a song or film."""

DEFAULT, DEFAULT_BONUS = 0x0001, 5_000_000
"""FFmpeg's ``AV_DISPOSITION_DEFAULT``, and the pixels that it is worth where ffmpeg chooses among streams."""

TOLERANCE = math.tan(math.radians(1))
"""Slope up to which an axis of a display matrix counts as straight; ffmpeg rounds rotations by a degree too."""

ASSUMED_RATE = 25
"""Frames a second of a video of one frame that does not say how long it is shown: ffmpeg's value."""


class Video:
    """An open video file.

    Args:
        container: PyAV's container.
        stream: its video stream.
        name: for messages.

    Attributes:
        rate: frames a second, on average.
        count: frames that the file says it has; 0 where it does not say.
        last: time of the last frame in seconds, as far as the file says it; None where it does not.
    """

    def __init__(self, container: Any, stream: Any, name: str) -> None:
        self.container, self.stream, self.name = container, stream, name
        self.count: int = stream.frames
        rate = stream.average_rate or stream.guessed_rate or (ASSUMED_RATE if self.count == 1 else None)
        if not rate:
            raise BrokenSampleError(f"{name}: the video does not say its frame rate")
        self.rate = float(rate)
        self.last = self._last()
        self._origin = float((stream.start_time or 0) * stream.time_base)
        self._aspect = Fraction(stream.sample_aspect_ratio or 1)
        self._graph: Any = None
        self._graph_of: tuple[Any, ...] = ()

    def frames(self, start: float = 0.0) -> Iterator[tuple[float, float, Any]]:
        """The frames in the order in which they are shown: time and duration in seconds, and PyAV's frame.

        Args:
            start: seconds after the first frame; what is decoded begins at or before it.
        """
        if start > 0:
            self._seek(int((start + self._origin) / self.stream.time_base))
            first = next(decoded := self._decoded(), None)
            if first is not None and first[0] <= start:
                yield first
                yield from decoded
                return
            self._seek(
                min(0, self.stream.start_time or 0)
            )  # frames may need others before the key frame that was found
        yield from self._decoded()

    def last_frames(self) -> Iterator[Any]:
        """PyAV's frames from the last key frame on, where the file says how long it is; all that are left otherwise."""
        if self.stream.duration:
            self._seek((self.stream.start_time or 0) + self.stream.duration - 1)
        for _, _, frame in self._decoded():
            yield frame

    def pixels(self, frame: Any) -> np.ndarray:
        """A frame ``[H, W, 3]`` uint8 as ffmpeg shows it.

        Raises:
            BrokenSampleError: for a damaged frame, and one that is shown in a way that is not supported.
        """
        self.check_complete(frame)
        layout = (frame.width, frame.height, frame.format.name, int(frame.colorspace), int(frame.color_range))
        matrix = self._matrix(frame)
        if self._graph_of != (layout, matrix):  # a stream may change in the middle
            self._graph, self._graph_of = self._build(layout, matrix), (layout, matrix)
        self._graph.push(frame)
        return self._graph.pull().to_ndarray(format="rgb24")

    def check_complete(self, frame: Any) -> None:
        """Reject a frame of which ffmpeg had to make up a part.

        Raises:
            BrokenSampleError: for a damaged frame.
        """
        if frame.is_corrupt:
            raise BrokenSampleError(f"{self.name}: the video is damaged: a frame cannot be decoded completely")

    def _seek(self, timestamp: int) -> None:
        self.container.seek(timestamp, stream=self.stream)

    def _decoded(self) -> Iterator[tuple[float, float, Any]]:
        previous, unit = -math.inf, float(self.stream.time_base)
        for frame in self.container.decode(self.stream):
            if frame.pts is None or frame.pts < previous:
                raise BrokenSampleError(f"{self.name}: the video does not say when its frames are shown")
            previous = frame.pts
            duration = (getattr(frame, "duration", 0) or 0) * unit  # PyAV 14 does not have it
            yield frame.pts * unit - self._origin, duration or 1 / self.rate, frame

    def _last(self) -> float | None:
        """The earliest of what the file says: an edit list shortens the duration, but not the number of frames."""
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
        """The filters that turn decoded frames of one layout and display matrix into what is shown."""
        import av.filter

        width, height, format_name, colorspace, color_range = layout
        filters, swapped = orientation(matrix, self.name)
        shape = (height, width) if swapped else (width, height)
        aspect = 1 / self._aspect if swapped else self._aspect
        shown = max(1, int(shape[0] * aspect)), shape[1]  # rounded down, as by ffmpeg's scale=iw*sar:ih
        self.check_size(*shown)
        graph = av.filter.Graph()
        if hasattr(graph, "threads"):  # data workers are processes already
            graph.threads = 1
        source = graph.add(
            "buffer",
            f"video_size={width}x{height}:pix_fmt={format_name}:time_base={self.stream.time_base}"
            f":colorspace={colorspace}:range={color_range}",
        )
        chain = [source, *(graph.add(*each) for each in filters)]
        chain.append(graph.add("scale", f"{shown[0]}:{shown[1]}:flags=bicubic"))
        chain += [graph.add("format", "pix_fmts=rgb24"), graph.add("buffersink")]
        graph.link_nodes(*chain).configure()
        return graph

    def check_size(self, width: int, height: int) -> None:
        """Reject frames that only a broken or hostile file has, before memory is taken for them."""
        if width * height > LARGEST_FRAME or max(width, height) > NARROWEST * min(width, height):
            raise BrokenSampleError(f"{self.name}: frames of {width} x {height} are too large or too narrow")


def orientation(matrix: tuple[int, ...], name: str) -> tuple[list[tuple[str, ...]], bool]:
    """The filters that show a frame as its display matrix says, and whether they swap height and width.

    The matrix maps column x and row y of a stored frame to ``a x + c y`` and ``b x + d y``, apart from a translation, which
    shows the same picture, and a scale, which is part of the pixels' aspect ratio.

    Args:
        matrix: nine numbers, row by row, as libavutil has them; empty for none.
        name: for messages.

    Raises:
        BrokenSampleError: when it does anything else than rotate by a multiple of 90 degrees and mirror.
    """
    if not any(matrix):  # without one, or with one that nobody filled in: as stored
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
def open_video(data: bytes, name: str) -> Iterator[Video]:
    """Open an MP4 file.

    Args:
        data: the file.
        name: for messages.

    Yields:
        The video: of several streams the one that ffmpeg takes. Cover pictures are not videos.

    Raises:
        BrokenSampleError: naming the file and the reason, when it cannot be decoded, here or later inside the ``with``.
    """
    import av

    check_format(data, name)
    if missing := missing_bytes(data):
        raise BrokenSampleError(f"{name}: the video is cut off: {missing} bytes are missing")
    try:
        with av.open(io.BytesIO(data), format="mp4", metadata_errors="ignore") as container:
            stream = _chosen_stream(container, name)
            # Frame threads would give a damaged frame before it is marked as such, so that a part of them would pass. Data are
            # read by several processes anyway.
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


def check_format(data: bytes, name: str) -> None:
    """Reject empty files and those of other formats.

    Raises:
        BrokenSampleError: saying what the file is.
    """
    if not data:
        raise BrokenSampleError(f"{name}: the video cannot be decoded (the file is empty)")
    other = OTHER_FORMATS.get(data[8:12] if data.startswith(b"RIFF") else data[:4])
    if other and data[4:8] not in BOXES:
        raise BrokenSampleError(
            f"{name}: the video cannot be decoded (it is {other}, not MP4; convert it with ffmpeg -i FILE new.mp4)"
        )


def missing_bytes(data: bytes) -> int:
    """Bytes by which the file ends before the end of a box that frames need; 0 for a complete file, whatever follows it."""
    position = 0  # of a box: a size of 4 bytes and a name, or a size of 8 bytes after that (ISO 14496-12)
    while data[4:8] in BOXES and position + 8 <= len(data):
        size, kind = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size < 8 or (kind == b"ftyp" and position):  # up to the end; or not a box, or another file behind this one
            return 0
        if position + size > len(data):
            return position + size - len(data) if kind in NEEDED else 0
        position += size
    return 0


def _chosen_stream(container: Any, name: str) -> Any:
    """The video stream that ffmpeg takes by default: the largest, those marked as default first."""
    streams = [stream for stream in container.streams.video if not _disposition(stream) & COVER]
    if not streams:
        only = ", only a cover picture" if container.streams.video else ""
        raise BrokenSampleError(f"{name}: no video stream in the file{only}")
    stream = max(streams, key=_score)
    if stream.codec_context is None:
        raise BrokenSampleError(f"{name}: nothing here can decode the video")
    return stream


def _score(stream: Any) -> int:
    if stream.codec_context is None:
        return 0
    return stream.width * stream.height + DEFAULT_BONUS * bool(_disposition(stream) & DEFAULT)


def _disposition(stream: Any) -> int:
    return int(getattr(stream, "disposition", 0))  # PyAV 14 does not have it
