"""Unusual but valid videos, and broken ones, written by PyAV."""

from __future__ import annotations

import io
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

ONE = 1 << 16
"""Fixed-point representation of the number 1 in a track's header."""

MATRICES = {
    "as stored": (1, 0, 0, 1),
    "rotated by 90": (0, 1, -1, 0),
    "rotated by 180": (-1, 0, 0, -1),
    "rotated by 270": (0, -1, 1, 0),
    "mirrored left to right": (-1, 0, 0, 1),
    "mirrored top to bottom": (1, 0, 0, -1),
    "transposed": (0, 1, 1, 0),
    "transposed the other way": (0, -1, -1, 0),
}
"""Entries a, b, c, d of display matrices: column x and row y are shown at a x + c y and b x + d y."""


@contextmanager
def written(container: str, muxer: dict[str, str] | None) -> Iterator[tuple[Any, list[bytes]]]:
    """Open a temporary video file of PyAV in a ``with`` block; a real file, which ``faststart`` needs.

    Yields:
        The open file, and a list to which its bytes are added at the end of the block.
    """
    data: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video"
        with av.open(str(path), "w", format=container, options=muxer or {}) as out:
            yield out, data
        data.append(path.read_bytes())


def picture(height: int = 64, width: int = 96, seed: int = 0) -> np.ndarray:
    """Return a picture of colored squares, ``[H, W, 3]``, without any symmetry."""
    colours = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3))
    return np.kron(colours, np.ones((8, 8, 1)))[:height, :width].astype(np.uint8)


def encode(
    frames: Sequence[np.ndarray],
    codec: str = "libx264",
    pix_fmt: str = "yuv444p",
    fps: float = 10,
    options: dict[str, str] | None = None,
    container: str = "mp4",
    muxer: dict[str, str] | None = None,
    times: Sequence[float] | None = None,
    **context: Any,
) -> bytes:
    """Encode frames as a video, without loss if the codec is x264, and return the bytes of the file.

    Args:
        frames: frames ``[H, W, 3]``.
        codec: name of the encoder.
        pix_fmt: pixel format of the video.
        fps: frames per second.
        options: options of the encoder.
        container: format of the file.
        muxer: options of the container.
        times: time of each frame in seconds; None for equal intervals.
        context: attributes of the codec context, such as ``sample_aspect_ratio``.
    """
    with written(container, muxer) as (out, data):
        stream: Any = out.add_stream(codec, rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], pix_fmt
        stream.options = ({"qp": "0"} if codec == "libx264" else {}) | (options or {})
        for name, value in context.items():
            setattr(stream.codec_context, name, value)
        if times is not None:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for number, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24" if image.shape[2] == 3 else "rgba")
            if times is not None:
                frame.pts, frame.time_base = round(times[number] * 1000), Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return data[0]


def moving(count: int = 10, height: int = 64, width: int = 96, **options: Any) -> bytes:
    """Encode a video of colored squares that move to the right. Options are those of :func:`encode`."""
    return encode([np.roll(picture(height, width), number, 1) for number in range(count)], **options)


def levels(count: int, times: Sequence[float] | None = None, **options: Any) -> bytes:
    """Encode a video whose frame i has brightness 10 i."""
    return encode([np.full((16, 16, 3), 10 * number, np.uint8) for number in range(count)], times=times, **options)


def with_matrix(video: bytes, entries: Sequence[float], x: float = 0, y: float = 0) -> bytes:
    """Return a video with a changed display matrix.

    Args:
        video: bytes of the file.
        entries: entries a, b, c, d of the matrix.
        x: horizontal translation.
        y: vertical translation.
    """
    a, b, c, d = (round(entry * ONE) for entry in entries)
    translation = (round(x * ONE), round(y * ONE), 1 << 30)
    return _patched(video, video.index(b"tkhd") + 44, struct.pack(">9i", a, b, 0, c, d, 0, *translation))


def with_shown_size(video: bytes, width: int, height: int) -> bytes:
    """Return a video with a changed width and height in the header of its track."""
    return _patched(video, video.index(b"tkhd") + 80, struct.pack(">2I", width * ONE, height * ONE))


def with_pasp(video: bytes, horizontal: int, vertical: int) -> bytes:
    """Return a video with a changed pixel aspect ratio in its container, but not in its stream."""
    return _patched(video, video.index(b"pasp") + 4, struct.pack(">2I", horizontal, vertical))


def remuxed(video: bytes, shift: int = 0, sound: bool = False, muxer: dict[str, str] | None = None) -> bytes:
    """Write the encoded frames of a video to a new file, and return its bytes.

    Args:
        video: bytes of the file.
        shift: number of frames by which all frames are shown later, or earlier if negative.
        sound: whether to add a sound track before the video track; it begins at time 0.
        muxer: options of the container.
    """
    with av.open(io.BytesIO(video)) as given, written("mp4", muxer) as (out, data):
        if sound:
            track: Any = out.add_stream("aac", rate=8000)
        copy = out.add_stream_from_template(given.streams.video[0])
        if sound:
            mux_silence(out, track)
        packets = [packet for packet in given.demux(video=0) if packet.dts is not None]
        step = packets[0].duration
        for packet in packets:
            packet.stream, packet.pts, packet.dts = copy, packet.pts + shift * step, packet.dts + shift * step
            out.mux(packet)
    return data[0]


def mux_silence(out: Any, track: Any) -> None:
    """Write one second of silence to a track."""
    for _ in range(8):
        frame = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        frame.sample_rate = 8000
        out.mux(track.encode(frame))
    out.mux(track.encode())


def with_cover(cover: np.ndarray, frames: Sequence[np.ndarray] = ()) -> bytes:
    """Return a file with sound and a cover picture, and with a video if there are frames."""
    with written("mp4", None) as (out, data):
        track: Any = out.add_stream("aac", rate=8000)
        still: Any = out.add_stream("png", rate=1)
        still.height, still.width, still.pix_fmt = *cover.shape[:2], "rgb24"
        still.disposition = av.stream.Disposition.attached_pic
        streams = [(still, [cover])]
        if frames:
            film: Any = out.add_stream("libx264", rate=10)
            film.height, film.width, film.pix_fmt, film.options = *frames[0].shape[:2], "yuv444p", {"qp": "0"}
            streams.append((film, list(frames)))
        mux_silence(out, track)
        for stream, images in streams:
            for image in images:
                out.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            out.mux(stream.encode())
    return data[0]


def _patched(video: bytes, at: int, replacement: bytes) -> bytes:
    return video[:at] + replacement + video[at + len(replacement) :]
