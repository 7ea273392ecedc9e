"""Data of captioned images and clips: the prompts that predict draws, and shards of latents with encoded captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardSets
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from mhla_tasks.captioned.encoded import EncodedSamples, encoded_length, read_empty_caption
from mhla_tasks.captioned.requests import PromptRequest, RequestedSamples


class CaptionedData(ResumableDataModule):
    """Captioned samples or their latents; a kind of data implements :meth:`samples` for training and validation.

    Args:
        prompts: prompts that predict draws.
        options: as for :class:`ResumableDataModule`.
    """

    extension: ClassVar[str]
    """Extension of the files that predict writes."""
    known_prompts: Sequence[str] = ()
    """Prompts that predict draws where none are named."""

    def __init__(self, prompts: PromptRequest, **options: Any) -> None:
        super().__init__(**options)
        self.prompts = as_dataclass(PromptRequest, prompts)

    def empty_caption(self) -> Tensor | None:
        """Embeddings ``[l, D]`` of the empty caption's tokens, where captions come encoded; None where they are text."""
        return None

    def samples(self, stage: str) -> SampleSource:
        """The samples of ``"train"``, ``"validate"`` or ``"test"``."""
        raise NotImplementedError

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            return RequestedSamples(self.prompts, self.known_prompts, self.extension)
        return self.samples(stage)


class EncodedShards(CaptionedData):
    """Latents and encoded captions in shards, as a command of ``lightning prepare`` writes them.

    Args:
        train: shards to train on: a folder, DIR/train-{00000..01023}.tar, a glob, URLs, or a list of these.
        val: shards to validate on, in the same forms.
        text_length: tokens of a caption; shorter ones are filled up with zeros, longer ones cut. None takes the length that
            the shards were encoded with (their manifest says it).
        prompts: prompts that predict draws.
        options: as for :class:`ResumableDataModule`.
    """

    command: ClassVar[str]
    """Command that writes such shards."""
    axes: ClassVar[int]
    """Axes of a latent, channels included."""
    default_length: ClassVar[int]
    """Tokens of a caption where neither an option nor the manifest says it."""

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        text_length: int | None,
        prompts: PromptRequest,
        **options: Any,
    ) -> None:
        super().__init__(prompts, **options)
        self.save_hyperparameters(ignore=["prompts"])
        keep_plain(self)
        self._text_length = text_length
        self.shards: ShardSets = ShardSets(train, val, self.shard_options)

    @property
    def text_length(self) -> int:
        """Tokens of a caption: as given, as the shards' manifest says, or the default of the model."""
        if self._text_length is None:
            self._text_length = encoded_length(self.shards, self.default_length)
        return self._text_length

    @override
    def samples(self, stage: str) -> EncodedSamples:
        return EncodedSamples(self.shards.reader(stage), self.text_length, self.axes, self.command)

    @override
    def empty_caption(self) -> Tensor | None:
        return read_empty_caption(self.shards, self.command)
