"""Base classes of data modules for captioned images and videos, as pixels with text or as latents with embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardSets
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from mhla_tasks.captioned.encoded import EncodedSamples, check_captions, encoded_length, read_empty_caption
from mhla_tasks.captioned.requests import PromptRequest, RequestedSamples


class CaptionedData(ResumableDataModule):
    """Base class of data modules for captioned images or videos, as pixels or as latents.

    A subclass implements :meth:`samples`.

    Args:
        prompts: options of the predict command: the prompts, the number of samples for each prompt, and the seed.
        options: keyword arguments of :class:`ResumableDataModule`, such as ``batch_size`` and ``seed``.
    """

    extension: ClassVar[str]
    """Extension of the files that the predict command writes, without a dot."""
    known_prompts: Sequence[str] = ()
    """Prompts for which the predict command draws samples if the user gives none."""

    def __init__(self, prompts: PromptRequest, **options: Any) -> None:
        super().__init__(**options)
        self.prompts = as_dataclass(PromptRequest, prompts)

    def samples(self, stage: str) -> SampleSource:
        """Return the samples for a stage as a map-style data set.

        Each sample is a dict with pixels or a latent, and with a caption or its embeddings.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``.
        """
        raise NotImplementedError

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            return RequestedSamples(self.prompts, self.known_prompts, self.extension)
        return self.samples(stage)


class EncodedShards(CaptionedData):
    """Base class of data modules that read latents and embedded captions from shards that ``lightning prepare`` wrote.

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
        check_range(least=1, text_length=text_length)
        self.save_hyperparameters(ignore=["prompts"])
        keep_plain(self)
        self._text_length = text_length
        self.shards: ShardSets = ShardSets(train, val, self.shard_options)

    @property
    def text_length(self) -> int:
        """Number of tokens per caption.

        The option ``text_length`` takes precedence over the length recorded in the manifest of the shards. If neither exists,
        the value is the default of the subclass.
        """
        if self._text_length is None:
            self._text_length = encoded_length(self.shards, self.default_length)
        return self._text_length

    @override
    def samples(self, stage: str) -> EncodedSamples:
        self.shards.compare_encoders(stage)
        check_captions(self.shards, stage)
        return EncodedSamples(self.shards.reader(stage), self.text_length, self.axes, self.command)

    def empty_caption(self) -> Tensor:
        """Return the token embeddings of the empty caption, ``[L, D]`` float32, of L tokens with D features."""
        return read_empty_caption(self.shards, self.command)
