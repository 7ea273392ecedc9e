"""Data of the video domain: the embedded moving digits, clips in shards, latents in shards; and the prompts to sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardSets
from lightning_mhla.data.digits import Name
from lightning_mhla.data.shards import beside_shard
from lightning_mhla.generative.text import read_prompts
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.untrusted import read_json
from mhla_tasks.video.digits import MovingDigitSamples, every_caption
from mhla_tasks.video.sources import LatentClips, ShardClips, empty_caption_file


@dataclass(frozen=True)
class PromptRequest:
    """Clips that predict draws.

    Args:
        prompts: text file with a prompt on each line, name<TAB>prompt where files are to be named otherwise; or a list of
            prompts; null for all captions of the embedded digits.
        per_prompt: clips of each; VBench wants 5.
        seed: seed of the noise; clip i always starts from the same.
    """

    prompts: str | list[str] | None = None
    per_prompt: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.per_prompt < 1:
            raise ValueError(f"per_prompt={self.per_prompt} must be at least 1")


class RequestedClips:
    """Clips that predict draws, as a source: all clips of a prompt one after another.

    Args:
        request: see :class:`PromptRequest`.
        known: prompts to take where it names none.

    Raises:
        FileNotFoundError: when there is no such file of prompts.
        ValueError: for no prompts, or such as cannot be file names.
    """

    def __init__(self, request: PromptRequest, known: Sequence[str]) -> None:
        if isinstance(request.prompts, str):
            self.prompts = read_prompts(request.prompts)
        else:
            plain = known if request.prompts is None else request.prompts
            self.prompts = [(prompt, prompt) for prompt in plain]
        self.prompts = list(dict.fromkeys(self.prompts))  # VBench's list has two of its prompts twice
        if not self.prompts:
            raise ValueError("there are no prompts; name a file of them: --data.init_args.prompts.prompts=FILE")
        if len({name for name, _ in self.prompts}) < len(self.prompts):
            raise ValueError("two prompts have one name, so that their clips would overwrite each other")
        for name, _ in self.prompts:
            if "/" in name or name.startswith(".") or len(file_name(name, request.per_prompt).encode()) > 250:
                raise ValueError(
                    f"the prompt {name[:60]!r} cannot be a file name (a slash, a leading dot, or too long); write "
                    "name<TAB>prompt into the file of prompts"
                )
        self.per_prompt, self.seed = request.per_prompt, request.seed
        self.shard_sizes: Sequence[int] = [len(self.prompts) * request.per_prompt]

    def __len__(self) -> int:
        """Number of clips."""
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``index``, ``caption``, ``file`` (its name) and ``seed``."""
        name, prompt = self.prompts[index // self.per_prompt]
        file = file_name(name, index % self.per_prompt)
        return {"index": index, "caption": prompt, "file": file, "seed": self.seed}


def file_name(name: str, number: int) -> str:
    """As VBench wants it: ``prompt-number.mp4``."""
    return f"{name}-{number}.mp4"


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
        return RequestedClips(self.prompts, self.known_prompts) if stage == "predict" else self.clips(stage)


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
        self.shards: ShardSets = ShardSets(train, val, cache_dir)

    @override
    def clips(self, stage: str) -> SampleSource:
        reader = self.shards.reader(stage)
        return ShardClips(reader, *self.size, fps=self.fps, caption_key=self.caption_key, anywhere=stage == "train")


class VideoLatentShards(ClipData):
    """Latents and encoded captions in shards, as ``lightning prepare clip-latents`` writes them.

    Args:
        train: shards to train on: a folder, DIR/train-{00000..01023}.tar, a glob, or a list of these.
        val: shards to validate on, in the same forms.
        text_length: tokens of a caption; shorter ones are filled up with zeros, longer ones cut. null takes the length that
            the shards were encoded with (their manifest says it).
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process.
        prompts: prompts that predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
        max_skipped: broken training samples that one process skips before it stops.
        shuffle_window: shards whose samples are shuffled together; null shuffles everything with everything.
        cache_dir: folder for member tables of read-only folders; null for the user's cache.
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
        self.shards: ShardSets = ShardSets(train, val, cache_dir)

    @property
    def text_length(self) -> int:
        """Tokens of a caption: as given, as the shards' manifest says, or Wan's 512."""
        if self._text_length is None:
            manifest = beside_shard(self.shards.find("train")[0], "manifest.json")
            length = read_json(manifest).get("text_length") if manifest.is_file() else None
            self._text_length = length if isinstance(length, int) and length > 0 else 512
        return self._text_length

    @override
    def clips(self, stage: str) -> SampleSource:
        return LatentClips(self.shards.reader(stage), self.text_length)

    def empty_caption(self) -> Tensor | None:
        """See :meth:`ClipData.empty_caption`.

        Raises:
            FileNotFoundError: when it is not beside the shards.
        """
        path = empty_caption_file(self.shards.find("train")[0])
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: it is the empty caption, for caption_dropout; copy it along with the shards that "
                "lightning prepare clip-latents wrote, or set caption_dropout to 0"
            )
        return torch.from_numpy(np.load(path, allow_pickle=False)).float()
