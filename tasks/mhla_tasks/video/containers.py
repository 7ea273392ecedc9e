"""Checks of video files before they are decoded: the format of the file, and whether it is complete."""

from __future__ import annotations

from lightning_mhla.data import BrokenSampleError

BOXES = (b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide", b"pnot")
"""Types of the boxes that an MP4 or QuickTime file can begin with (ISO 14496-12)."""

NEEDED = (b"moov", b"moof", b"mdat")
"""Types of the MP4 boxes that must be complete, because frames are missing otherwise. Data of other types may be cut off."""

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
"""Formats of files that are often renamed to .mp4, by their first four bytes, or the four bytes after ``RIFF`` and a size."""


def check_format(data: bytes, name: str, extension: str) -> None:
    """Reject a video file that is empty, or whose first bytes are those of a different format.

    Args:
        data: contents of the file.
        name: name of the file, for messages.
        extension: expected format, ``"mp4"`` or ``"gif"``.

    Raises:
        BrokenSampleError: if the file is empty or has a different format; the message gives the reason.
    """
    if not data:
        raise BrokenSampleError(f"{name}: the video cannot be decoded (the file is empty)")
    if extension == "gif" and not data.startswith(b"GIF8"):
        raise BrokenSampleError(f"{name}: the video cannot be decoded (it is not GIF, although it is named .gif)")
    other = OTHER_FORMATS.get(data[8:12] if data.startswith(b"RIFF") else data[:4])
    if other and extension == "mp4" and data[4:8] not in BOXES:
        raise BrokenSampleError(
            f"{name}: the video cannot be decoded (it is {other}, not MP4; convert it with ffmpeg -i FILE new.mp4)"
        )


def missing_bytes(data: bytes) -> int:
    """Return the number of bytes that are missing at the end of a truncated MP4 file.

    An MP4 file is a sequence of sections (boxes), each of which begins with its size. Sections that decoding does not use may
    be truncated.

    Args:
        data: contents of the file.

    Returns:
        The number of missing bytes; 0 if all sections that decoding uses are complete.
    """
    # A box begins with a size of 4 bytes and its type; size 1 means that a size of 8 bytes follows (ISO 14496-12).
    position = 0
    while data[4:8] in BOXES and position + 8 <= len(data):
        size, kind = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        # Size 0 means up to the end of the file. Other small sizes are not boxes, and a second ftyp begins another file.
        if size < 8 or (kind == b"ftyp" and position):
            return 0
        if position + size > len(data):
            return position + size - len(data) if kind in NEEDED else 0
        position += size
    return 0
