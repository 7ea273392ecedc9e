"""Sources of captioned clips in shards and folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_mhla.data import ShardReader
from lightning_mhla.data.captioned import CaptionedFiles, FolderFiles, ShardFiles
from mhla_tasks.video.clips import read_clip, to_signed

VIDEO = "mp4"


class CaptionedClips:
    """Source of clips from captioned videos.

    Args:
        files: the videos.
        frames: number of frames of a clip.
        height: in pixels.
        width: in pixels.
        fps: frames a second; None for every frame as it comes.
        anywhere: whether a clip is cut out at a random position instead of the middle.
    """

    def __init__(
        self,
        files: CaptionedFiles,
        frames: int,
        height: int,
        width: int,
        fps: float | None = None,
        anywhere: bool = False,
    ) -> None:
        self.files, self.shard_sizes = files, files.shard_sizes
        self.frames, self.height, self.width = frames, height, width
        self.fps, self.anywhere = fps, anywhere

    def __len__(self) -> int:
        """Number of videos."""
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read ``video`` ``[3, F, H, W]`` in -1 .. 1, ``caption`` and ``index``."""
        text, name = self.files.caption(index), self.files.describe(index)
        position = float(torch.rand(())) if self.anywhere else 0.5
        data = self.files.member(index, (VIDEO,))[1]
        clip = read_clip(data, name, self.frames, self.fps, position, (self.height, self.width))
        return {"video": to_signed(clip), "caption": text, "index": index}


class ShardClips(CaptionedClips):
    """Source of clips from videos in shards; ``options`` as for :class:`CaptionedClips`."""

    def __init__(
        self,
        reader: ShardReader,
        frames: int,
        height: int,
        width: int,
        caption_key: str = "caption",
        **options: Any,
    ) -> None:
        super().__init__(ShardFiles(reader, caption_key), frames, height, width, **options)


class ClipFolder(CaptionedClips):
    """Source of clips from the ``.mp4`` files below a folder; ``options`` as for :class:`CaptionedClips`."""

    def __init__(
        self,
        folder: str | Path,
        frames: int,
        height: int,
        width: int,
        caption_key: str = "caption",
        **options: Any,
    ) -> None:
        files = FolderFiles(folder, (VIDEO,), caption_key)
        self.paths: Sequence[Path] = files.paths
        super().__init__(files, frames, height, width, **options)
