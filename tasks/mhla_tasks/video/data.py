"""Data modules of video models: rendered moving digits, videos with and without captions, and latents of videos."""

# Longer than other modules because it contains the five data modules of videos, each with the help texts of its options.

from __future__ import annotations

from typing import ClassVar

from lightning import Trainer
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardSets
from lightning_mhla.data.captioned import SampleFiles, ShardFiles, UncaptionedFiles
from lightning_mhla.data.digits import Name
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.ranges import check_range
from mhla_tasks.captioned.data import CaptionedData, EncodedShards
from mhla_tasks.captioned.requests import PromptRequest
from mhla_tasks.video.continuation import VideoContinuation
from mhla_tasks.video.digits import MovingDigitSamples, every_caption
from mhla_tasks.video.sources import VIDEO, VIDEOS, Beginnings, CaptionedClips, UncaptionedClips

PREPARE = "lightning prepare clip-latents"

WAN_LENGTH = 512
"""Number of tokens of a caption in Wan."""


def continued_frames(trainer: Trainer | None) -> int:
    """Return the number of frames to which a trainer's model continues clips; 0 if there is no trainer or no such model."""
    model = getattr(trainer, "lightning_module", None)
    return model.sampling.frames if isinstance(model, VideoContinuation) else 0


def beginnings(
    trainer: Trainer | None,
    files: SampleFiles,
    size: tuple[int, int, int],
    fps: float | None,
    channels: int,
    clips: int | None,
) -> Beginnings:
    """Return a data set with the first frames of each video, for a model that continues them.

    Args:
        trainer: trainer of the model, which determines how many frames every video must have: those that the model copies.
            If it is None, or its model does not continue videos, every video must have at least one frame.
        files: video files.
        size: maximum number of frames, and height and width in pixels.
        fps: number of frames to take per second of video; None to take consecutive frames.
        channels: 3 for color, 1 for gray.
        clips: maximum number of videos; None for all.

    Raises:
        ValueError: if a video has too few frames, or ``clips`` is below 1.
        BrokenSampleError: if a video cannot be read.
    """
    model = getattr(trainer, "lightning_module", None)
    start = model.start if isinstance(model, VideoContinuation) else 1
    return Beginnings(files, size, fps, channels, start, clips)


class ClipData(CaptionedData):
    """Base class of data modules with captioned video clips. A subclass implements :meth:`clips`.

    Args:
        prompts: options of the predict command: the prompts, the number of samples for each prompt, and the seed.
        options: keyword arguments of :class:`ResumableDataModule`, such as ``batch_size`` and ``seed``.
    """

    extension = VIDEO

    def clips(self, stage: str) -> SampleSource:
        """Return the map-style data set of clips for a stage.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``.

        Returns:
            Data set whose samples are dicts with ``video``, ``[C, F, H, W]`` float32 in -1 .. 1, ``caption`` and ``index``.
        """
        raise NotImplementedError

    @override
    def samples(self, stage: str) -> SampleSource:
        return self.clips(stage)


class MovingDigits(ClipData):
    """Data module of clips in which a handwritten digit moves over a canvas, with captions such as "a seven moving right".

    The digits are those of scikit-learn and have 8 x 8 pixels.

    Args:
        frames: number of frames in a clip.
        height: height of the canvas, in pixels.
        width: width of the canvas, in pixels.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process; 0 is fastest for clips this small.
        prompts: options of the predict command: the prompts, the number of samples for each prompt, and the seed.
        seed: random seed for the order of the clips and for the start positions of the digits; null for the seed of
            seed_everything.
    """

    digits: ClassVar[Name] = "digits"

    def __init__(
        self,
        frames: int = 8,
        height: int = 16,
        width: int = 16,
        batch_size: int = 16,
        num_workers: int = 0,
        prompts: PromptRequest = PromptRequest(),
        seed: int | None = None,
    ) -> None:
        super().__init__(prompts, batch_size=batch_size, num_workers=num_workers, seed=seed)
        check_range(least=1, frames=frames, height=height, width=width)
        self.save_hyperparameters(ignore=["prompts"])
        self.known_prompts = every_caption()
        self.size = (frames, height, width)

    @override
    def clips(self, stage: str) -> SampleSource:
        return MovingDigitSamples(stage == "train", *self.size, self.digits)


class MovingMnist(MovingDigits):
    """Data module of clips in which an MNIST digit moves over a canvas, with captions such as "a seven moving right".

    The digits are scaled to 20 x 20 pixels.

    Args:
        frames: number of frames in a clip.
        height: height of the canvas, in pixels.
        width: width of the canvas, in pixels.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process; 0 is fastest for clips this small.
        prompts: options of the predict command: the prompts, the number of samples for each prompt, and the seed.
        seed: random seed for the order of the clips and for the start positions of the digits; null for the seed of
            seed_everything.
    """

    digits = "mnist"

    def __init__(
        self,
        frames: int = 8,
        height: int = 28,
        width: int = 28,
        batch_size: int = 16,
        num_workers: int = 0,
        prompts: PromptRequest = PromptRequest(),
        seed: int | None = None,
    ) -> None:
        super().__init__(frames, height, width, batch_size, num_workers, prompts, seed)


class VideoShards(ClipData):
    """Data module of videos with captions in WebDataset tar shards.

    The caption of a video such as 17.mp4 is in 17.txt or 17.json. In each epoch, training uses one clip from a random position
    of each video. Validation uses a clip from the middle of each video. In training, videos that cannot be read, are too short
    or lack a caption are skipped with a warning.

    Args:
        train: training shards: a folder, a brace pattern such as DIR/train-{0000..1023}.tar, a glob, a URL, or a list of these.
        val: validation data, specified in the same ways as train.
        frames: number of frames in a clip. For Wan's VAE, it must be one more than a multiple of 4.
        height: height in pixels to which frames are scaled and center-cropped.
        width: width in pixels to which frames are scaled and center-cropped.
        fps: number of frames to take per second of video; null to take consecutive frames.
        caption_key: key of the caption in JSON files.
        clips: number of held-out videos that the predict command continues, for a model that continues videos.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process.
        prompts: options of the predict command: the prompts, the number of samples for each prompt, and the seed.
        seed: random seed for the order of the videos and for the positions of the clips; null for the seed of seed_everything.
        shards: options for reading shards and for caching downloaded ones.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        frames: int = 81,
        height: int = 480,
        width: int = 800,
        fps: float | None = 16.0,
        caption_key: str = "caption",
        clips: int = 16,
        batch_size: int = 8,
        num_workers: int = 8,
        prompts: PromptRequest = PromptRequest(),
        seed: int | None = None,
        shards: ShardOptions = ShardOptions(),
    ) -> None:
        super().__init__(prompts, batch_size=batch_size, num_workers=num_workers, seed=seed, shards=shards)
        check_range(least=1, frames=frames, height=height, width=width, clips=clips)
        check_range(above=0, fps=fps)
        self.save_hyperparameters(ignore=["prompts", "clips"])
        keep_plain(self)
        self.size, self.fps, self.caption_key, self.continued = (frames, height, width), fps, caption_key, clips
        self.shards: ShardSets = ShardSets(train, val, self.shard_options)

    def held_out(self, frames: int, clips: int | None) -> Beginnings:
        """Return the beginnings of held-out videos, for a model that continues them.

        Args:
            frames: maximum number of frames of a beginning.
            clips: maximum number of videos; None for all.

        Raises:
            ValueError: if a video has fewer frames than the model copies, or ``clips`` is below 1.
            BrokenSampleError: if a video cannot be read.
        """
        files = ShardFiles(self.shards.reader("validate"), self.caption_key)
        return beginnings(self.trainer, files, (frames, *self.size[1:]), self.fps, 3, clips)

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict" and (frames := continued_frames(self.trainer)):
            return self.held_out(max(self.size[0], frames), self.continued)
        return super().source(stage)

    @override
    def clips(self, stage: str) -> SampleSource:
        files = ShardFiles(self.shards.reader(stage), self.caption_key)
        return CaptionedClips(files, *self.size, fps=self.fps, anywhere=stage == "train")


class VideoFolders(ResumableDataModule):
    """Data module of videos without captions, for a model that continues videos: MP4 and GIF files in two folders.

    In each epoch, training uses one clip from a random position of each video. Validation uses a clip from the middle of each
    video. In training, videos that cannot be read or are too short are skipped with a warning. Held-out videos that cannot be
    read, or have fewer than ``frames`` frames, raise an error before training or validation starts. The predict command
    continues the beginnings of held-out videos of any length. Captions in the folders are not read.

    Args:
        train: folder of the training videos; its subfolders are searched, too.
        val: folder of the held-out videos.
        frames: number of frames in a clip.
        height: height in pixels to which frames are scaled and center-cropped.
        width: width in pixels to which frames are scaled and center-cropped.
        channels: number of channels, 3 for color or 1 for gray.
        fps: number of frames to take per second of video; null to take consecutive frames.
        clips: number of held-out videos that the predict command continues.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process.
        seed: random seed for the order of the videos and for the positions of the clips; null for the seed of seed_everything.

    Raises:
        ValueError: if ``channels`` is neither 1 nor 3, if ``frames``, ``height``, ``width`` or ``clips`` is below 1, or if
            ``fps`` is not positive.
    """

    def __init__(
        self,
        train: str,
        val: str,
        frames: int = 8,
        height: int = 16,
        width: int = 16,
        channels: int = 1,
        fps: float | None = None,
        clips: int = 16,
        batch_size: int = 8,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        check_range(least=1, frames=frames, height=height, width=width, clips=clips)
        check_range(above=0, fps=fps)
        self.save_hyperparameters(ignore=["clips"])
        if channels not in (1, 3):
            raise ValueError(f"channels={channels} must be 1 (gray) or 3 (color)")
        self.folders, self.size = {"train": train, "validate": val, "test": val}, (frames, height, width)
        self.fps, self.channels, self.clips = fps, channels, clips
        self._files: dict[str, UncaptionedFiles] = {}

    @override
    def setup(self, stage: str) -> None:
        """Check the held-out videos before training or validation starts.

        Raises:
            BrokenSampleError: if a video is damaged or has fewer frames than a clip.
        """
        super().setup(stage)
        # With limit_val_batches=0, no held-out video is read.
        if stage in ("validate", "test") or (stage == "fit" and getattr(self.trainer, "limit_val_batches", 1) != 0):
            self._clips("validate").check()

    def held_out(self, frames: int, clips: int | None) -> Beginnings:
        """Return the beginnings of held-out videos, for a model that continues them.

        Args:
            frames: maximum number of frames of a beginning.
            clips: maximum number of videos; None for all.

        Raises:
            ValueError: if a video has fewer frames than the model copies, or ``clips`` is below 1.
            BrokenSampleError: if a video cannot be read.
        """
        files = self._listed("validate")
        return beginnings(self.trainer, files, (frames, *self.size[1:]), self.fps, self.channels, clips)

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            return self.held_out(max(self.size[0], continued_frames(self.trainer)), self.clips)
        return self._clips(stage)

    def _clips(self, stage: str) -> UncaptionedClips:
        return UncaptionedClips(self._listed(stage), self.size, self.fps, self.channels, anywhere=stage == "train")

    def _listed(self, stage: str) -> UncaptionedFiles:
        """Return the videos of a stage. Each folder is listed only once, so that warnings about its files are not repeated."""
        folder = self.folders[stage]
        if folder not in self._files:
            self._files[folder] = UncaptionedFiles(folder, VIDEOS)
        return self._files[folder]


class VideoLatentShards(EncodedShards):
    """Data module of clip latents and embedded captions, in shards that ``lightning prepare clip-latents`` wrote.

    Args:
        train: training shards: a folder, a brace pattern such as DIR/train-{00000..01023}.tar, a glob, a URL, or a list of
            these.
        val: validation data, specified in the same ways as train.
        text_length: number of tokens in a caption; shorter captions are padded with zeros, longer ones are cut. null for the
            length that lightning prepare recorded in the manifest.json of the shards.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process.
        prompts: options of the predict command: the prompts, the number of samples for each prompt, and the seed.
        seed: random seed for the order of the samples, and for choosing one of several captions of a sample; null for the seed
            of seed_everything.
        shards: options for reading shards and for caching downloaded ones.
    """

    extension = VIDEO
    command = PREPARE
    axes = 4
    default_length = WAN_LENGTH

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        text_length: int | None = None,
        batch_size: int = 8,
        num_workers: int = 4,
        prompts: PromptRequest = PromptRequest(),
        seed: int | None = None,
        shards: ShardOptions = ShardOptions(),
    ) -> None:
        super().__init__(train, val, text_length, batch_size, num_workers, prompts, seed, shards)
