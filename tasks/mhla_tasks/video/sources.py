"""Map-style data sets of captioned clips that are cut from videos in shards and folders."""

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
    """Map-style data set of clips, one cut from each captioned video.

    Args:
        files: video files and their captions.
        frames: number of frames in a clip.
        height: height in pixels to which frames are scaled and cropped.
        width: width in pixels to which frames are scaled and cropped.
        fps: number of frames to take per second of video; None to take consecutive frames.
        anywhere: whether clips are cut at a random position instead of from the middle.
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
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a clip: a dict with ``video`` ``[3, frames, height, width]`` float32 in -1 .. 1, ``caption`` and ``index``."""
        text, name = self.files.caption(index), self.files.describe(index)
        position = float(torch.rand(())) if self.anywhere else 0.5
        data = self.files.member(index, (VIDEO,))[1]
        clip = read_clip(data, name, self.frames, self.fps, position, (self.height, self.width))
        return {"video": to_signed(clip), "caption": text, "index": index}


class ShardClips(CaptionedClips):
    """Map-style data set of clips, one cut from each video in WebDataset shards.

    Args:
        reader: reader of the shards.
        frames: number of frames in a clip.
        height: height in pixels to which frames are scaled and cropped.
        width: width in pixels to which frames are scaled and cropped.
        caption_key: key of the caption in JSON files.
        options: keyword arguments ``fps`` and ``anywhere`` of :class:`CaptionedClips`.
    """

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
    """Map-style data set of clips, one cut from each ``.mp4`` file in a folder and its subfolders.

    Args:
        folder: path of the folder.
        frames: number of frames in a clip.
        height: height in pixels to which frames are scaled and cropped.
        width: width in pixels to which frames are scaled and cropped.
        caption_key: key of the caption in JSON files.
        options: keyword arguments ``fps`` and ``anywhere`` of :class:`CaptionedClips`.
    """

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
