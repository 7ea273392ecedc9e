"""Data of the video domain: the embedded moving digits, clips in shards, latents in shards; and the prompts to sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardSets
from lightning_mhla.data.digits import Name
from lightning_mhla.system.options import as_dataclass
from mhla_tasks.captioned.encoded import EncodedSamples, encoded_length, read_empty_caption
from mhla_tasks.captioned.requests import PromptRequest, RequestedSamples
from mhla_tasks.video.digits import MovingDigitSamples, every_caption
from mhla_tasks.video.sources import VIDEO, ShardClips

PREPARE = "lightning prepare clip-latents"


class ClipData(ResumableDataModule):
    """Data of clips or their latents; a kind of data implements :meth:`source` for training and validation.

    Args:
        prompts: prompts that predict draws.
        options: as for :class:`ResumableDataModule`.
    """

    known_prompts: Sequence[str] = ()

    def __init__(self, prompts: PromptRequest, **options: Any) -> None:
        super().__init__(**options)
        self.prompts = as_dataclass(PromptRequest, prompts)

    def empty_caption(self) -> Tensor | None:
        """Embeddings ``[l, D]`` of the empty caption's tokens, where captions come encoded; None where they are text."""
        return None

    def clips(self, stage: str) -> SampleSource:
        """The samples of ``"train"``, ``"validate"`` or ``"test"``."""
        raise NotImplementedError

    @override
    def source(self, stage: str) -> SampleSource:
        return RequestedSamples(self.prompts, self.known_prompts, VIDEO) if stage == "predict" else self.clips(stage)


class MovingDigits(ClipData):
    """Handwritten digits of scikit-learn that move over a canvas, with captions such as "a seven moving right".

    Args:
        frames: number of frames of a clip.
        height: height of the canvas, in pixels.
        width: width of the canvas, in pixels.
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process; 0 is fastest for clips this small.
        prompts: prompts that predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
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
        self.save_hyperparameters(ignore=["prompts"])
        self.known_prompts = every_caption()
        self.size = (frames, height, width)

    @override
    def clips(self, stage: str) -> SampleSource:
        return MovingDigitSamples(stage == "train", *self.size, self.digits)


class MovingMnist(MovingDigits):
    """Handwritten digits of MNIST, 20 x 20 pixels, that move over a canvas, with captions such as "a seven moving right".

    Args:
        frames: number of frames of a clip.
        height: height of the canvas, in pixels.
        width: width of the canvas, in pixels.
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process; 0 is fastest for clips this small.
        prompts: prompts that predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
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
    """Videos with captions in WebDataset tar shards: NNN.mp4 with NNN.txt, or with NNN.json.

    Each epoch cuts another clip out of a training video; validation takes the middle. Videos that cannot be read, are too
    short or lack a caption are skipped in training, with a warning each, and counted.

    Args:
        train: shards to train on: a folder, DIR/train-{0000..1023}.tar, a glob, URLs, or a list of these.
        val: shards to validate on, in the same forms.
        frames: number of frames of a clip; 1 more than a multiple of 4 for Wan's VAE.
        height: in pixels; videos are shrunk to cover it, and the middle is cut out.
        width: in pixels; videos are shrunk to cover it, and the middle is cut out.
        fps: frames a second that are taken; null for every frame as it comes.
        caption_key: entry of NNN.json that is the caption.
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process.
        prompts: prompts that predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
        max_skipped: broken training samples that one process skips before it stops.
        shuffle_window: shards whose samples are shuffled together; null shuffles everything with everything.
        cache_dir: folder for downloaded shards and for member tables of read-only folders; null for the user's cache.
        cache_bytes: limit in bytes of the shards behind URLs that lie in cache_dir at a time: they are fetched ahead, and
            removed when done. null downloads all and keeps them.
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
        batch_size: int = 8,
        num_workers: int = 8,
        prompts: PromptRequest = PromptRequest(),
        seed: int | None = None,
        max_skipped: int = 100,
        shuffle_window: int | None = 16,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        super().__init__(
            prompts,
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
            max_skipped=max_skipped,
            shuffle_window=shuffle_window,
        )
        self.save_hyperparameters(ignore=["prompts"])
        self.size, self.fps, self.caption_key = (frames, height, width), fps, caption_key
        self.shards: ShardSets = ShardSets(train, val, cache_dir, cache_bytes)

    @override
    def clips(self, stage: str) -> SampleSource:
        reader = self.shards.reader(stage)
        return ShardClips(reader, *self.size, fps=self.fps, caption_key=self.caption_key, anywhere=stage == "train")


class VideoLatentShards(ClipData):
    """Latents and encoded captions in shards, as ``lightning prepare clip-latents`` writes them.

    Args:
        train: shards to train on: a folder, DIR/train-{00000..01023}.tar, a glob, URLs, or a list of these.
        val: shards to validate on, in the same forms.
        text_length: tokens of a caption; shorter ones are filled up with zeros, longer ones cut. null takes the length that
            the shards were encoded with (their manifest says it).
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process.
        prompts: prompts that predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
        max_skipped: broken training samples that one process skips before it stops.
        shuffle_window: shards whose samples are shuffled together; null shuffles everything with everything.
        cache_dir: folder for downloaded shards and for member tables of read-only folders; null for the user's cache.
        cache_bytes: limit in bytes of the shards behind URLs that lie in cache_dir at a time: they are fetched ahead, and
            removed when done. null downloads all and keeps them.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        text_length: int | None = None,
        batch_size: int = 8,
        num_workers: int = 4,
        prompts: PromptRequest = PromptRequest(),
        seed: int | None = None,
        max_skipped: int = 100,
        shuffle_window: int | None = 16,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        super().__init__(
            prompts,
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
            max_skipped=max_skipped,
            shuffle_window=shuffle_window,
        )
        self.save_hyperparameters(ignore=["prompts"])
        self._text_length = text_length
        self.shards: ShardSets = ShardSets(train, val, cache_dir, cache_bytes)

    @property
    def text_length(self) -> int:
        """Tokens of a caption: as given, as the shards' manifest says, or Wan's 512."""
        if self._text_length is None:
            self._text_length = encoded_length(self.shards, 512)
        return self._text_length

    @override
    def clips(self, stage: str) -> SampleSource:
        return EncodedSamples(self.shards.reader(stage), self.text_length, 4, PREPARE)

    @override
    def empty_caption(self) -> Tensor | None:
        return read_empty_caption(self.shards, PREPARE)
