"""Map-style data sets of clips that are cut from videos in shards and folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torchvision.transforms import v2

from lightning_mhla.data import BrokenSampleError
from lightning_mhla.data.captioned import CaptionedFiles, SampleFiles
from lightning_mhla.system.numbers import plural
from lightning_mhla.system.ranges import check_range
from mhla_tasks.video.clips import read_beginning, read_clip, to_signed

VIDEO = "mp4"
VIDEOS = (VIDEO, "gif")
"""Extensions of the videos that can be read without captions."""

NAMED = 5
"""Maximum number of unusable videos that an error message names."""


class CaptionedClips:
    """Map-style data set of clips, one cut from each captioned video.

    Args:
        files: video files and their captions.
        frames: number of frames in a clip.
        height: height in pixels to which frames are scaled and cropped.
        width: width in pixels to which frames are scaled and cropped.
        fps: number of frames to take per second of video; None to take consecutive frames.
        anywhere: whether clips are cut from a random position instead of the middle of a video.

    Raises:
        ValueError: if ``fps`` is not positive.
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
        check_range(above=0, fps=fps)
        self.files, self.shard_sizes = files, files.shard_sizes
        self.frames, self.height, self.width = frames, height, width
        self.fps, self.anywhere = fps, anywhere

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a clip: a dict with ``video`` ``[3, frames, height, width]`` float32 in -1 .. 1, ``caption`` and ``index``.

        Raises:
            BrokenSampleError: if the video is damaged or too short, or its caption is missing.
        """
        text, name = self.files.caption(index), self.files.describe(index)
        position = _position(self.anywhere)
        data = self.files.member(index, (VIDEO,))[1]
        clip = read_clip(data, name, self.frames, self.fps, position, (self.height, self.width))
        return {"video": to_signed(clip), "caption": text, "index": index}


class UncaptionedClips:
    """Map-style data set of clips, one cut from each MP4 or GIF file.

    Args:
        files: video files.
        size: number of frames in a clip, and height and width in pixels to which frames are scaled and cropped.
        fps: number of frames to take per second of video; None to take consecutive frames.
        channels: 3 for color, 1 for gray.
        anywhere: whether clips are cut from a random position instead of the middle of a video.
    """

    def __init__(
        self, files: SampleFiles, size: tuple[int, int, int], fps: float | None, channels: int, anywhere: bool = False
    ) -> None:
        self.files, self.shard_sizes = files, files.shard_sizes
        self.size, self.fps, self.channels, self.anywhere = size, fps, channels, anywhere

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a clip: a dict with ``video`` ``[channels, frames, height, width]`` float32 in -1 .. 1, and ``index``.

        Raises:
            BrokenSampleError: if the video is damaged or too short.
        """
        try:
            clip = self._read(index, _position(self.anywhere))
        except BrokenSampleError as error:
            if self.anywhere:  # training skips the video
                raise
            raise BrokenSampleError(f"{error}; remove this held-out video") from error
        return {"video": to_signed(_with_channels(clip, self.channels)), "index": index}

    def check(self) -> None:
        """Check that no video is too short or damaged, by decoding only as many frames of each as a clip has.

        Raises:
            BrokenSampleError: if a video is too short or damaged. The message names up to five such videos.
        """
        reasons = []
        for index in track(range(len(self)), "checking videos", disable=len(self) < 100, console=Console(stderr=True)):
            try:
                self._read(index, 0.0)
            except BrokenSampleError as error:
                reasons.append(str(error))
        if reasons:
            more = f"; and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
            raise BrokenSampleError(
                f"{len(reasons)} of {plural(len(self), 'held-out video')} cannot be used: {'; '.join(reasons[:NAMED])}{more}. "
                f"Validation takes data.frames={self.size[0]} frames of each video. Remove these videos, or lower data.frames "
                "and model.frames if they are too short"
            )

    def _read(self, index: int, position: float) -> Tensor:
        frames, height, width = self.size
        extension, data = self.files.member(index, VIDEOS)
        name = self.files.describe(index)
        return read_clip(data, name, frames, self.fps, position, (height, width), extension)


class Beginnings:
    """Map-style data set of the beginnings of videos, for a model that copies the first frames and then continues them.

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
        files: SampleFiles,
        size: tuple[int, int, int],
        fps: float | None,
        channels: int,
        least: int,
        limit: int | None,
    ) -> None:
        check_range(least=1, clips=limit)
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
            A dict with these entries:

            * ``video``: clip ``[channels, frames, height, width]`` float32 in -1 .. 1. The last frame of a shorter video is
              repeated.
            * ``frames``: number of frames that are not such repetitions.
            * ``caption``: path of the video within its folder, or its shard and key.
            * ``index``: the given index.
        """
        clip = self._read(index, self.size[0])
        repeated = clip[-1:].expand(self.size[0] - len(clip), -1, -1, -1)
        video = to_signed(torch.cat([clip, repeated]))
        return {"video": video, "frames": len(clip), "caption": self.files.name(index), "index": index}

    def _read(self, index: int, most: int) -> Tensor:
        name, (_, height, width) = self.files.describe(index), self.size
        try:
            extension, data = self.files.member(index, VIDEOS)
            clip = read_beginning(data, name, most, self.fps, (height, width), extension)
        except BrokenSampleError as error:
            raise BrokenSampleError(f"{error}; remove this held-out video") from error
        return _with_channels(clip, self.channels)


def _position(anywhere: bool) -> float:
    """Return the position of a clip within its video, from 0 to 1: a random one, or else the middle, 0.5."""
    return float(torch.rand(())) if anywhere else 0.5


def _with_channels(clip: Tensor, channels: int) -> Tensor:
    """Convert frames ``[F, 3, H, W]`` uint8 to gray ``[F, 1, H, W]`` if ``channels`` is 1; keep them if it is 3."""
    return clip if channels == 3 else v2.functional.rgb_to_grayscale(clip)
