"""Samples of the video domain: clips with captions, of shards and folders, and encoded ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from lightning_mhla.data import BrokenSampleError, ShardReader
from lightning_mhla.data.shards import beside_shard
from lightning_mhla.system.untrusted import reason
from mhla_tasks.video.clips import read_clip, to_signed

VIDEO, TEXT, JSON = "mp4", "txt", "json"

LONGEST_CAPTION = 1 << 20
"""Bytes of a caption and what comes with it."""
LATENT, EMBEDDING = "latent.npy", "text.npy"
"""Members of an encoded sample: the clip's latent, and the embeddings of its caption's tokens."""


TRIED = 100
"""Samples that are read for the size of a set's latents."""


class CaptionedClips:
    """Clips of videos with captions as a source; where they lie is a derived class's matter.

    Args:
        frames: number of frames of a clip.
        height: in pixels.
        width: in pixels.
        fps: frames a second; None for every frame as it comes.
        caption_key: entry of a ``.json`` that is the caption.
        anywhere: whether a clip is cut out at a random position instead of the middle.
    """

    shard_sizes: Sequence[int]

    def __init__(
        self,
        frames: int,
        height: int,
        width: int,
        fps: float | None = None,
        caption_key: str = "caption",
        anywhere: bool = False,
    ) -> None:
        self.frames, self.height, self.width = frames, height, width
        self.fps, self.caption_key, self.anywhere = fps, caption_key, anywhere

    def describe(self, index: int) -> str:
        """Where a video lies, for messages."""
        raise NotImplementedError

    def member(self, index: int, wanted: Sequence[str]) -> tuple[str, bytes]:
        """The first of ``wanted`` extensions that a video has, and its bytes.

        Raises:
            BrokenSampleError: if it has none of them.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        """Number of videos."""
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``video`` ``[3, F, H, W]`` in -1 .. 1, ``caption`` and ``index``."""
        text = self.caption(index)
        position = float(torch.rand(())) if self.anywhere else 0.5
        data = self.member(index, (VIDEO,))[1]
        clip = read_clip(data, self.describe(index), self.frames, self.fps, position, (self.height, self.width))
        return {"video": to_signed(clip), "caption": text, "index": index}

    def caption(self, index: int) -> str:
        """The caption of a video.

        Raises:
            BrokenSampleError: if it has none.
        """
        extension, data = self.member(index, (TEXT, JSON))
        where = f"{self.describe(index)}: .{extension}"
        if len(data) > LONGEST_CAPTION:
            raise BrokenSampleError(f"{where} is no caption: {len(data)} bytes")
        try:
            text = data.decode() if extension == TEXT else json.loads(data)[self.caption_key]
            if isinstance(text, str):
                text.encode()  # a lone surrogate is no text
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            hint = "" if extension == TEXT else f" under {self.caption_key!r}; set caption_key"
            raise BrokenSampleError(f"{where} holds no caption{hint} ({reason(error)})") from error
        if not isinstance(text, str) or not text.strip():
            raise BrokenSampleError(f"{where} holds an empty caption")
        return text.strip()


class ShardClips(CaptionedClips):
    """Clips of the videos in shards; ``options`` as for :class:`CaptionedClips`."""

    def __init__(self, reader: ShardReader, frames: int, height: int, width: int, **options: Any) -> None:
        super().__init__(frames, height, width, **options)
        self.reader = reader
        self.shard_sizes = reader.shard_sizes

    @override
    def describe(self, index: int) -> str:
        return self.reader.describe(index)

    @override
    def member(self, index: int, wanted: Sequence[str]) -> tuple[str, bytes]:
        extension = self.reader.extension(index, wanted)
        return extension, self.reader.read(index, extension)


class ClipFolder(CaptionedClips):
    """Clips of the ``.mp4`` files below a folder, each with a caption beside it; ``options`` as for :class:`CaptionedClips`.

    Raises:
        FileNotFoundError: when there is no such folder or no video in it.
    """

    def __init__(self, folder: str | Path, frames: int, height: int, width: int, **options: Any) -> None:
        super().__init__(frames, height, width, **options)
        self.paths = sorted(Path(folder).rglob(f"*.{VIDEO}")) if Path(folder).is_dir() else []
        if not self.paths:
            raise FileNotFoundError(f"{folder} is no folder with .{VIDEO} files in it")
        self.shard_sizes = [len(self.paths)]

    @override
    def describe(self, index: int) -> str:
        return str(self.paths[index])

    @override
    def member(self, index: int, wanted: Sequence[str]) -> tuple[str, bytes]:
        paths = {name: self.paths[index].with_suffix(f".{name}") for name in wanted}
        for name, path in paths.items():
            if path.is_file():
                return name, path.read_bytes()
        raise BrokenSampleError(f"{self.paths[index]} has no .{' or .'.join(wanted)} beside it")


def empty_caption_file(shard: Path) -> Path:
    """Where the empty caption of a shard's set lies."""
    return beside_shard(shard, "empty-caption.npy")


class LatentClips:
    """Encoded clips of shards as a source.

    Args:
        reader: the shards.
        text_length: tokens that a caption is filled up to.

    Raises:
        ValueError: when none of the first samples is an encoded clip.
    """

    def __init__(self, reader: ShardReader, text_length: int) -> None:
        self.reader, self.text_length = reader, text_length
        self.shard_sizes: Sequence[int] = reader.shard_sizes
        for index in range(len(reader)):
            try:
                self.size = self._latent(index).shape
                break
            except BrokenSampleError as error:
                if index + 1 == min(len(reader), TRIED):
                    raise ValueError(f"{error}; these are no shards of lightning prepare clip-latents") from error

    def __len__(self) -> int:
        """Number of clips."""
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``latent`` ``[C, f, h, w]`` and ``text`` ``[text_length, D]`` float32, and ``index``."""
        latent, tokens = self._latent(index), self.reader.array(index, EMBEDDING)
        if latent.shape != self.size or tokens.ndim != 2:
            raise BrokenSampleError(
                f"{self.reader.describe(index)}: latent {latent.shape} among those of {self.size}, or text {tokens.shape} "
                "that is not [tokens, width]"
            )
        text = torch.zeros(self.text_length, tokens.shape[1])
        kept = torch.from_numpy(tokens[: self.text_length]).float()
        text[: len(kept)] = kept
        return {"latent": torch.from_numpy(latent).float(), "text": text, "index": index}

    def _latent(self, index: int) -> np.ndarray:
        latent = self.reader.array(index, LATENT)
        if latent.ndim != 4:
            raise BrokenSampleError(f"{self.reader.describe(index)}: .{LATENT} is {latent.shape}, not [C, f, h, w]")
        return latent
