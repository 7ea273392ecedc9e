"""Map-style data sets of clips that are cut from videos in shards and folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from lightning_mhla.data import ShardReader
from lightning_mhla.data.captioned import CaptionedFiles, FolderFiles, ShardFiles
from mhla_tasks.video.clips import read_beginning, read_clip, to_signed

VIDEO = "mp4"
VIDEOS = (VIDEO, "gif")
"""Extensions of the videos that can be read without captions."""


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
        position = _position(self.anywhere)
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


class UncaptionedClips:
    """Map-style data set of clips, one cut from each ``.mp4`` and ``.gif`` file in a folder and its subfolders.

    Args:
        folder: path of the folder.
        size: number of frames in a clip, and height and width in pixels to which frames are scaled and cropped.
        fps: number of frames to take per second of video; None to take consecutive frames.
        channels: 3 for color, 1 for gray.
        anywhere: whether clips are cut at a random position instead of from the middle.
    """

    def __init__(
        self, folder: str | Path, size: tuple[int, int, int], fps: float | None, channels: int, anywhere: bool = False
    ) -> None:
        self.files = FolderFiles(folder, VIDEOS, "caption")
        self.shard_sizes = self.files.shard_sizes
        self.size, self.fps, self.channels, self.anywhere = size, fps, channels, anywhere

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a clip: a dict with ``video`` ``[channels, frames, height, width]`` float32 in -1 .. 1, and ``index``."""
        frames, *size = self.size
        position = _position(self.anywhere)
        extension, data = self.files.member(index, VIDEOS)
        clip = read_clip(data, self.files.describe(index), frames, self.fps, position, (size[0], size[1]), extension)
        return {"video": to_signed(_with_channels(clip, self.channels)), "index": index}


class Beginnings:
    """Map-style data set of the first frames of videos, which a model copies before it continues them.

    Args:
        files: video files.
        size: maximum number of frames, and height and width in pixels to which frames are scaled and cropped.
        fps: number of frames to take per second of video; None to take consecutive frames.
        channels: 3 for color, 1 for gray.
        least: number of frames that every video must have, because the model copies them.
        limit: maximum number of videos; None for all.

    Raises:
        ValueError: if a video has fewer than ``least`` frames, or ``limit`` is below 1.
        BrokenSampleError: if a video cannot be read.
    """

    def __init__(
        self,
        files: CaptionedFiles,
        size: tuple[int, int, int],
        fps: float | None,
        channels: int,
        least: int,
        limit: int | None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"clips={limit} must be at least 1")
        count = sum(files.shard_sizes)
        self.shard_sizes: Sequence[int] = [count if limit is None else min(limit, count)]
        self.files, self.size, self.fps, self.channels = files, size, fps, channels
        for index in range(len(self)):  # before the first clip is continued, which may take long
            if (frames := len(self._read(index, least))) < least:
                raise ValueError(
                    f"{files.describe(index)} has {frames} of the {least} frames that the model copies before it continues a "
                    "clip (model.start); remove the video, or take more of its frames per second (data.fps)"
                )

    def __len__(self) -> int:
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the beginning of a video as a dict.

        Returns:
            ``video`` ``[channels, frames, height, width]`` float32 in -1 .. 1, in which the last frame of a shorter video is
            repeated; ``frames``, the number of frames that the video has; ``caption``, its file name; and ``index``.
        """
        clip = self._read(index, self.size[0])
        repeated = clip[-1:].expand(self.size[0] - len(clip), -1, -1, -1)
        name = Path(self.files.describe(index)).name
        return {"video": to_signed(torch.cat([clip, repeated])), "frames": len(clip), "caption": name, "index": index}

    def _read(self, index: int, most: int) -> Tensor:
        extension, data = self.files.member(index, VIDEOS)
        name, (_, height, width) = self.files.describe(index), self.size
        return _with_channels(read_beginning(data, name, most, self.fps, (height, width), extension), self.channels)


def _position(anywhere: bool) -> float:
    """Return the position of a clip within its video: a random one, or the middle."""
    return float(torch.rand(())) if anywhere else 0.5


def _with_channels(clip: Tensor, channels: int) -> Tensor:
    """Convert frames ``[F, 3, H, W]`` uint8 to gray ``[F, 1, H, W]`` if ``channels`` is 1."""
    return clip if channels == 3 else v2.functional.rgb_to_grayscale(clip)
