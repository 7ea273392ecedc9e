"""Shards of latents and caption embeddings, written once and read in training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mhla.data import BrokenSampleError, SampleSource, ShardReader, ShardSets, find_shards
from lightning_mhla.data.captioned import CaptionedFiles, FolderFiles, ShardFiles, caption_members
from lightning_mhla.data.loader import sample_groups
from lightning_mhla.data.origins import Origin, sample_key, shard_origins
from lightning_mhla.data.remote import LARGEST_SIDE_FILE
from lightning_mhla.data.shards import beside_shard, holds_shards
from lightning_mhla.data.write import Preparation, array_bytes, readable
from lightning_mhla.system.files import written_whole
from lightning_mhla.system.untrusted import check_size, parse_array, read_json
from mhla_tasks.captioned.text import CaptionEncoder

LATENT, EMBEDDING = "latent.npy", "text.npy"
"""Members of an encoded sample: its latent, and the embeddings of the tokens of its caption.

In a set of several sizes, the latent's rows and columns stand before its name: ``16x12.latent.npy``. Further captions of a
sample are ``1.text.npy`` and so on.
"""

TRIED = 100
"""Number of samples that are read to determine the sizes of latents."""

AXES = {3: "[C, h, w]", 4: "[C, f, h, w]"}


def empty_caption_file(shard: Path) -> Path:
    """Path of the empty caption that belongs to a shard."""
    return beside_shard(shard, "empty-caption.npy")


def read_manifest(sets: ShardSets) -> dict[str, Any]:
    """Read the manifest of the training shards; empty if there is none."""
    manifest = beside_shard(sets.find("train")[0], "manifest.json")
    return dict(read_json(manifest)) if manifest.is_file() else {}


def encoded_length(sets: ShardSets, default: int) -> int:
    """Return the number of tokens of a caption from the manifest of the training shards, or a default."""
    length = read_manifest(sets).get("text_length")
    return length if isinstance(length, int) and length > 0 else default


def read_empty_caption(sets: ShardSets, command: str) -> Tensor:
    """Read the embeddings ``[l, D]`` of the empty caption beside the training shards.

    Raises:
        FileNotFoundError: when it is not there; ``command`` is what writes it.
    """
    path = empty_caption_file(sets.find("train")[0])
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: it is the empty caption, for caption_dropout; copy it along with the shards that "
            f"{command} wrote, or set caption_dropout to 0"
        )
    check_size(path, LARGEST_SIDE_FILE)
    try:
        values = parse_array(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not an array of numbers ({error}); copy or write it again") from error
    return torch.from_numpy(values).float()


class EncodedSamples:
    """Source of encoded samples in shards.

    Attributes:
        groups: ``[samples]`` int64, number of the size of each latent; None where there is one.

    Args:
        reader: the shards.
        text_length: tokens that a caption is filled up to.
        axes: axes of a latent, channels included.
        command: command that writes such shards, for errors.

    Raises:
        ValueError: when none of the first samples is encoded so.
    """

    def __init__(self, reader: ShardReader, text_length: int, axes: int, command: str) -> None:
        self.reader, self.text_length, self.axes = reader, text_length, axes
        self.shard_sizes: Sequence[int] = reader.shard_sizes
        names, groups = reader.sort_members(rf"\d+x\d+\.{re.escape(LATENT)}")
        self.names = names or [LATENT]
        self._captions = reader.count_members(rf"\d+\.{re.escape(EMBEDDING)}").tolist()
        self.groups = groups if names else None
        self._ends: list[tuple[int, ...] | None] = [None if name == LATENT else _side(name) for name in self.names]
        for index in range(len(reader)):
            try:
                self.size = self._latent(index).shape
                break
            except BrokenSampleError as error:
                if index + 1 == min(len(reader), TRIED):
                    raise ValueError(f"{error}; these are no shards of {command}") from error

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read ``latent`` ``[C, ...]`` float32, ``text`` ``[text_length, D]`` float32 and ``index``."""
        latent, tokens = self._latent(index), self.reader.array(index, self._embedding(index))
        end = self._ends[self._group(index)]
        size = self.size if end is None else (*self.size[: -len(end)], *end)
        if latent.shape != size or tokens.ndim != 2:
            raise BrokenSampleError(
                f"{self.reader.describe(index)}: latent {latent.shape} among those of {size}, or text {tokens.shape} "
                "that is not [tokens, width]"
            )
        text = torch.zeros(self.text_length, tokens.shape[1])
        kept = torch.from_numpy(tokens[: self.text_length]).float()
        text[: len(kept)] = kept
        return {"latent": torch.from_numpy(latent).float(), "text": text, "index": index}

    def _embedding(self, index: int) -> str:
        """Name the member of the sample's caption, chosen at random if there are several."""
        count = self._captions[index] + 1
        return EMBEDDING if count == 1 else embedding_names(count)[int(torch.randint(count, ()))]

    def _group(self, index: int) -> int:
        return 0 if self.groups is None else int(self.groups[index])

    def _latent(self, index: int) -> np.ndarray:
        latent = self.reader.array(index, self.names[self._group(index)])
        if latent.ndim != self.axes:
            raise BrokenSampleError(
                f"{self.reader.describe(index)}: .{LATENT} is {latent.shape}, not {AXES[self.axes]}"
            )
        return latent


def _side(name: str) -> tuple[int, int]:
    """Parse rows and columns from the name of a latent."""
    rows, _, columns = name.partition(".")[0].partition("x")
    return int(rows), int(columns)


def embedding_names(count: int) -> list[str]:
    """Name the members of a sample's captions: ``text.npy``, ``1.text.npy`` and so on."""
    return [EMBEDDING if number == 0 else f"{number}.{EMBEDDING}" for number in range(count)]


@dataclass(frozen=True)
class EncodedSource:
    """Samples to encode, and their origins.

    Attributes:
        samples: give a sample ``[3, ...]`` in -1 .. 1 under ``key``; of several sizes where they have ``groups``.
        key: entry of the sample.
        files: give the captions of each sample.
        origins: of each sample, or of the shards that hold them.
        per_sample: whether each sample has an origin of its own.
    """

    samples: SampleSource
    key: str
    files: CaptionedFiles
    origins: Sequence[Origin]
    per_sample: bool


def open_source(
    name: str,
    kind: str,
    extensions: Sequence[str],
    caption_key: str,
    make_samples: Callable[[CaptionedFiles], SampleSource],
) -> EncodedSource:
    """Open the captioned samples of a folder or of shards for encoding.

    Args:
        name: folder of files, or shards in any of the forms that data modules take.
        kind: entry of a sample that is encoded.
        extensions: of the files that are samples, without dots.
        caption_key: entry of a JSON file that is the caption.
        make_samples: samples of the files.
    """
    files: CaptionedFiles
    if Path(name).is_dir() and not holds_shards(Path(name)):
        files = folder = FolderFiles(name, extensions, caption_key)
        return EncodedSource(make_samples(files), kind, files, folder.origins(), per_sample=True)
    shards = find_shards(name)
    files = ShardFiles(ShardReader(shards), caption_key)
    return EncodedSource(make_samples(files), kind, files, shard_origins(shards), per_sample=False)


def encode_samples(
    source: EncodedSource,
    options: dict[str, Any],
    target: Path,
    encode: Callable[[Tensor], Tensor],
    captions: CaptionEncoder,
    prefix: str,
    per_shard: int,
    device: torch.device,
    max_skipped: int = 100,
    share: tuple[int, int] = (0, 1),
    force: bool = False,
) -> tuple[list[Path], int]:
    """Write the encoded samples to ``target/prefix-00000.tar`` and so on, each process its share of the shards.

    Args:
        source: the samples.
        options: plain values that the samples depend on.
        target: made if missing.
        encode: latents of samples ``[B, 3, ...]``.
        captions: encodes captions.
        prefix: prefix of the file names.
        per_shard: samples for a shard; it holds fewer where some are broken.
        device: device of the encoders.
        max_skipped: broken samples that this process skips before it stops.
        share: index and number of the parts that the shards are divided into.
        force: delete the shards of an earlier call first.

    Returns:
        Paths of all shards, of every process, and how many samples this one skipped.

    Raises:
        ValueError: when the folder holds shards of samples that have changed since, or made with other options.
        BrokenSampleError: when more samples are broken than ``max_skipped``.
    """
    made_with = {"per_shard": per_shard, **options}
    with Preparation(
        target, prefix, made_with, source.origins, per_shard if source.per_sample else None, max_skipped, force, share
    ) as call:
        order = call.order if source.per_sample else range(len(source.samples))
        empty = empty_caption_file(target / f"{prefix}-00000.tar")
        if not (call.shards.finished() and empty.exists()):
            with written_whole(empty) as aside:
                aside.write_bytes(array_bytes(captions.tokens("", device).half()))
        sizes = sample_groups(source.samples)

        def encoded(here: range) -> Iterator[dict[str, Any]]:
            for number, sample in readable(source.samples, order, here, call.skipped):
                index = order[number]
                assert index is not None
                texts = source.files.captions(index)
                latent = encode(sample[source.key][None].to(device))[0].half()
                name = LATENT if sizes is None else f"{latent.shape[-2]}x{latent.shape[-1]}.{LATENT}"
                tokens = [array_bytes(captions.tokens(text, device).half()) for text in texts]
                members = {name: array_bytes(latent), **dict(zip(embedding_names(len(texts)), tokens, strict=True))}
                yield {"__key__": sample_key(number), **members, **caption_members(texts)}

        paths = call.fill(len(order), per_shard, encoded, f"encoding {prefix} shards")
    return paths, call.skipped.count
