"""Data modules of captioned images and clips: prompts that predict draws, and shards of latents with encoded captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardSets
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from mhla_tasks.captioned.encoded import EncodedSamples, encoded_length, read_empty_caption
from mhla_tasks.captioned.requests import PromptRequest, RequestedSamples


class CaptionedData(ResumableDataModule):
    """Base class of data modules with captioned images or videos, or their latents.

    A subclass implements :meth:`samples`.

    Args:
        prompts: prompts for which the predict command draws samples.
        options: further options of :class:`ResumableDataModule`.
    """

    extension: ClassVar[str]
    """Extension of the files that predict writes."""
    known_prompts: Sequence[str] = ()
    """Prompts that predict draws if none are given."""

    def __init__(self, prompts: PromptRequest, **options: Any) -> None:
        super().__init__(**options)
        self.prompts = as_dataclass(PromptRequest, prompts)

    def empty_caption(self) -> Tensor | None:
        """Return token embeddings ``[l, D]`` of the empty caption if the captions are embeddings; None if they are text."""
        return None

    def samples(self, stage: str) -> SampleSource:
        """Return the sample source of a stage: ``"train"``, ``"validate"`` or ``"test"``."""
        raise NotImplementedError

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            return RequestedSamples(self.prompts, self.known_prompts, self.extension)
        return self.samples(stage)


class EncodedShards(CaptionedData):
    """Base class of data modules that read latents and embedded captions from shards that ``lightning prepare`` wrote.

    Args:
        train: shards to train on: a folder, DIR/train-{00000..01023}.tar, a glob, URLs, or a list of these.
        val: shards for validation, in the same forms.
        text_length: number of tokens of a caption; shorter captions are padded with zeros, longer ones cut. null for the length
            recorded in the manifest of the shards.
        batch_size: samples per batch, over all processes together.
        num_workers: worker processes for each training process.
        prompts: prompts for which the predict command draws samples.
        seed: seed of the order and the random numbers of the samples; null to use seed_everything.
        shards: options for reading shards and for storing downloads.
    """

    command: ClassVar[str]
    """Command that writes these shards, for messages."""
    axes: ClassVar[int]
    """Number of axes of a latent, including channels."""
    default_length: ClassVar[int]
    """Number of tokens of a caption if neither an option nor the manifest gives it."""

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        text_length: int | None = None,
        batch_size: int = 32,
        num_workers: int = 4,
        prompts: PromptRequest = PromptRequest(),
        seed: int | None = None,
        shards: ShardOptions = ShardOptions(),
    ) -> None:
        super().__init__(prompts, batch_size=batch_size, num_workers=num_workers, seed=seed, shards=shards)
        self.save_hyperparameters(ignore=["prompts"])
        keep_plain(self)
        self._text_length = text_length
        self.shards: ShardSets = ShardSets(train, val, self.shard_options)

    @property
    def text_length(self) -> int:
        """Number of tokens per caption: the option if it is set, else the length that the shards record, else a default."""
        if self._text_length is None:
            self._text_length = encoded_length(self.shards, self.default_length)
        return self._text_length

    @override
    def samples(self, stage: str) -> EncodedSamples:
        return EncodedSamples(self.shards.reader(stage), self.text_length, self.axes, self.command)

    @override
    def empty_caption(self) -> Tensor | None:
        return read_empty_caption(self.shards, self.command)
