"""Samples that a VAE encoded, with the embeddings of their captions: written once, read in training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mhla.data import BrokenSampleError, SampleSource, ShardReader, ShardSets
from lightning_mhla.data.loader import sample_groups
from lightning_mhla.data.shards import beside_shard
from lightning_mhla.data.write import Skipped, array_bytes, check_manifest, fill_shards, shard_ranges
from lightning_mhla.generative.text import CaptionEncoder
from lightning_mhla.system.untrusted import read_json

LATENT, EMBEDDING = "latent.npy", "text.npy"
"""Members of an encoded sample: its latent, and the embeddings of its caption's tokens.

In a set of several sizes, the latent's rows and columns stand before its name: ``16x12.latent.npy``.
"""

TRIED = 100
"""Samples that are read for the size of a set's latents."""

AXES = {3: "[C, h, w]", 4: "[C, f, h, w]"}


def empty_caption_file(shard: Path) -> Path:
    """Where the empty caption of a shard's set lies."""
    return beside_shard(shard, "empty-caption.npy")


def read_manifest(sets: ShardSets) -> dict[str, Any]:
    """The manifest of the training shards, written by the command that encoded them; empty if there is none."""
    manifest = beside_shard(sets.find("train")[0], "manifest.json")
    return dict(read_json(manifest)) if manifest.is_file() else {}


def encoded_length(sets: ShardSets, default: int) -> int:
    """Tokens of a caption as the training shards' manifest says, or a default."""
    length = read_manifest(sets).get("text_length")
    return length if isinstance(length, int) and length > 0 else default


def read_empty_caption(sets: ShardSets, command: str) -> Tensor:
    """Embeddings ``[l, D]`` of the empty caption beside the training shards.

    Raises:
        FileNotFoundError: when it is not there; ``command`` is what writes it.
    """
    path = empty_caption_file(sets.find("train")[0])
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: it is the empty caption, for caption_dropout; copy it along with the shards that "
            f"{command} wrote, or set caption_dropout to 0"
        )
    return torch.from_numpy(np.load(path, allow_pickle=False)).float()


class EncodedSamples:
    """Encoded samples of shards as a source.

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
        """``latent`` ``[C, ...]`` and ``text`` ``[text_length, D]`` float32, and ``index``."""
        latent, tokens = self._latent(index), self.reader.array(index, EMBEDDING)
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
    """Rows and columns in the name of a latent."""
    rows, _, columns = name.partition(".")[0].partition("x")
    return int(rows), int(columns)


def encode_samples(
    source: SampleSource,
    key: str,
    identity: dict[str, Any],
    target: Path,
    encode: Callable[[Tensor], Tensor],
    captions: CaptionEncoder,
    prefix: str,
    per_shard: int,
    device: torch.device,
    max_skipped: int = 100,
    share: tuple[int, int] = (0, 1),
) -> tuple[list[Path], int]:
    """Write ``target/prefix-00000.tar`` and so on; the shards of this process of ``share``, rank and number.

    Args:
        source: gives a sample ``[3, ...]`` in -1 .. 1 and its ``caption``; of several sizes where it has ``groups``.
        key: entry of the sample.
        identity: description of the samples, so that shards of others are not mixed with these.
        target: made if missing.
        encode: latents of samples ``[B, 3, ...]``.
        captions: encodes captions.
        prefix: prefix of the file names.
        per_shard: samples for a shard; it holds fewer where some are broken.
        device: where.
        max_skipped: broken samples that this process skips before it stops.
        share: index and number of the parts that the shards are divided into.

    Returns:
        Paths of all shards, of every process, and how many samples this one skipped.

    Raises:
        ValueError: when the folder holds shards of other samples, or made otherwise.
        BrokenSampleError: when more samples are broken than ``max_skipped``.
    """
    manifest = {"samples": len(source), "per_shard": per_shard, **identity}
    begun = bool(list(target.glob(f"{prefix}-*.tar")))
    check_manifest(target / f"{prefix}-manifest.json", manifest)
    shards = shard_ranges(target, prefix, len(source), per_shard)
    empty = empty_caption_file(shards[0][0])
    if not (begun and empty.exists()):
        aside = empty.with_name(f"{empty.name}.{share[0]}.part")
        aside.write_bytes(array_bytes(captions.tokens("", device).half()))
        aside.replace(empty)
    mine, skipped = shards[share[0] :: share[1]], Skipped(max_skipped)
    sizes = sample_groups(source)

    def samples(here: range) -> Iterator[dict[str, Any]]:
        for index in here:
            try:
                sample = source[index]
            except BrokenSampleError as error:
                skipped.add(error)
                continue
            latent = encode(sample[key][None].to(device))[0].half()
            tokens = captions.tokens(sample["caption"], device).half()
            name = LATENT if sizes is None else f"{latent.shape[-2]}x{latent.shape[-1]}.{LATENT}"
            members = {name: array_bytes(latent), EMBEDDING: array_bytes(tokens), "txt": sample["caption"].encode()}
            yield {"__key__": f"{index:08d}", **members}

    fill_shards(
        ((path, len(here), samples(here)) for path, here in mine),
        f"encoding {prefix} shards",
        sum(len(here) for _, here in mine),
        quiet=share[0] > 0,
    )
    return [path for path, _ in shards], skipped.count
