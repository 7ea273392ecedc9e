"""Writing latents and embedded captions to tar shards once, and reading these shards in training."""

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
from lightning_mhla.data.encoded_by import ENCODERS
from lightning_mhla.data.loader import sample_groups
from lightning_mhla.data.origins import MODEL_FILES, Origin, model_digest, sample_key, shard_origins
from lightning_mhla.data.remote import LARGEST_SIDE_FILE
from lightning_mhla.data.shards import beside_shard, holds_shards
from lightning_mhla.data.write import Preparation, array_bytes, check_not_the_source, check_per_shard, readable
from lightning_mhla.system.files import written_whole
from lightning_mhla.system.untrusted import check_size, parse_array, read_json
from mhla_tasks.captioned.text import CaptionEncoder

LATENT, EMBEDDING = "latent.npy", "text.npy"
"""Names of the tar members of an encoded sample: its latent, and the embedded tokens of its caption.

If a set has latents of several sizes, their names begin with the numbers of rows and columns: ``16x12.latent.npy``. Additional
captions of a sample are named ``1.text.npy`` and so on.
"""

CAPTION_OPTIONS = ("text_length", "instruction")
"""Options in a manifest that the embeddings of captions depend on, apart from the model."""

AXES = {3: "[C, h, w]", 4: "[C, f, h, w]"}


def empty_caption_file(shard: Path) -> Path:
    """Return the path of the file in a shard's folder that holds the embedding of the empty caption."""
    return beside_shard(shard, "empty-caption.npy")


def read_manifest(sets: ShardSets) -> dict[str, Any]:
    """Read ``manifest.json``, the record of the options with which the training shards were written.

    Args:
        sets: locations of the training and validation shards. The manifest is in the folder of the first training shard.

    Returns:
        The options by name; an empty dict if the file does not exist.
    """
    manifest = beside_shard(sets.find("train")[0], "manifest.json")
    return read_json(manifest) if manifest.is_file() else {}


def encoded_length(sets: ShardSets, default: int) -> int:
    """Return the number of tokens per caption that the manifest of the training shards records.

    Args:
        sets: locations of the training and validation shards.
        default: value to return if there is no manifest, or its ``text_length`` is missing or not a positive integer.
    """
    length = read_manifest(sets).get("text_length")
    return length if isinstance(length, int) and length > 0 else default


def check_captions(sets: ShardSets, stage: str) -> None:
    """Check that the captions of all shards of a stage were embedded with the options of the first training shard.

    Args:
        sets: locations of the training and validation shards.
        stage: ``"train"``, ``"validate"`` or ``"test"``.

    Raises:
        ValueError: if a manifest records a different number of tokens, or a different instruction inserted before captions.
    """
    first = read_manifest(sets)
    for manifest in sets.manifests(stage):
        options = read_json(manifest) if manifest.is_file() else {}
        for name in CAPTION_OPTIONS:
            if name in first and name in options and options[name] != first[name]:
                raise ValueError(
                    f"captions have {name}={options[name]!r:.40} in {manifest}, and {name}={first[name]!r:.40} beside the "
                    "first training shard; prepare all shards with the same options"
                )


def read_empty_caption(sets: ShardSets, command: str) -> Tensor:
    """Read the embedding of the empty caption from a file in the folder of the first training shard.

    Args:
        sets: locations of the training and validation shards.
        command: command that writes the file, named in error messages.

    Returns:
        Embeddings ``[L, D]`` float32 of L tokens with D features.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if the file is too large, or does not contain a NumPy array of numbers.
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
    """Map-style data set of latents and embedded captions in shards.

    Args:
        reader: reader of the shards.
        text_length: number of tokens in a caption; shorter captions are padded with zeros, longer ones are cut.
        axes: number of axes of a latent, including the channel axis: 3 for images, 4 for videos.
        command: command that writes such shards, named in error messages.

    Attributes:
        groups: group number of each sample, ``[samples]`` int64; samples with the same number have latents of the same size.
            None if all latents have the same size.

    Raises:
        ValueError: if none of the first 100 samples has a latent with ``axes`` axes and an embedded caption.
    """

    def __init__(self, reader: ShardReader, text_length: int, axes: int, command: str) -> None:
        self.reader, self.text_length, self.axes = reader, text_length, axes
        self.shard_sizes: Sequence[int] = reader.shard_sizes
        names, groups = reader.sort_members(rf"\d+x\d+\.{re.escape(LATENT)}")
        self.names = names or [LATENT]
        self._captions = reader.count_members(rf"\d+\.{re.escape(EMBEDDING)}").tolist()
        self.groups = groups if names else None
        # Rows and columns that the member name of each group promises; None if all latents have one size.
        self._ends: list[tuple[int, ...] | None] = [None if name == LATENT else _side(name) for name in self.names]
        try:
            readable = reader.first_readable(
                lambda index: (self._latent(index).shape, self._tokens(index, EMBEDDING).shape[1])
            )
        except BrokenSampleError as error:
            raise ValueError(f"{error}; these are not shards of {command}") from error
        if readable is not None:
            self.size, self.width = readable[1]

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample as a dict.

        Returns:
            A dict with ``latent`` ``[C, ...]`` float32, with C channels; ``text`` ``[text_length, D]`` float32, the caption
            embeddings with D features; and the given ``index``.

        Raises:
            BrokenSampleError: if the latent or the embeddings are missing or are not arrays of numbers, if the latent has a
                different shape than others in its group, or if the embeddings have a different width than others.
        """
        latent, tokens = self._latent(index), self._tokens(index, self._embedding(index))
        end = self._ends[self._group(index)]
        size = self.size if end is None else (*self.size[: -len(end)], *end)
        if latent.shape != size:
            raise BrokenSampleError(
                f"{self.reader.describe(index)}: the latent has shape {latent.shape}, others {size}"
            )
        if tokens.shape[1] != self.width:
            raise BrokenSampleError(
                f"{self.reader.describe(index)}: the embedded captions have width {tokens.shape[1]}, others {self.width}"
            )
        text = torch.zeros(self.text_length, tokens.shape[1])
        embeddings = torch.from_numpy(tokens[: self.text_length]).float()
        text[: len(embeddings)] = embeddings
        return {"latent": torch.from_numpy(latent).float(), "text": text, "index": index}

    def _embedding(self, index: int) -> str:
        """Return the tar member name of a sample's caption embeddings, chosen at random if the sample has several captions."""
        count = self._captions[index] + 1
        return EMBEDDING if count == 1 else embedding_names(count)[int(torch.randint(count, ()))]

    def _group(self, index: int) -> int:
        return 0 if self.groups is None else int(self.groups[index])

    def _tokens(self, index: int, member: str) -> np.ndarray:
        tokens = self.reader.array(index, member)
        if tokens.ndim != 2:
            raise BrokenSampleError(f"{self.reader.describe(index)}: .{member} is {tokens.shape}, not [tokens, width]")
        return tokens

    def _latent(self, index: int) -> np.ndarray:
        latent = self.reader.array(index, self.names[self._group(index)])
        if latent.ndim != self.axes:
            raise BrokenSampleError(
                f"{self.reader.describe(index)}: .{LATENT} is {latent.shape}, not {AXES[self.axes]}"
            )
        return latent


def _side(name: str) -> tuple[int, int]:
    rows, _, columns = name.partition(".")[0].partition("x")
    return int(rows), int(columns)


def embedding_names(count: int) -> list[str]:
    """Return the tar member names for the ``count`` embedded captions of a sample: ``text.npy``, ``1.text.npy`` and so on."""
    return [EMBEDDING if number == 0 else f"{number}.{EMBEDDING}" for number in range(count)]


@dataclass(frozen=True)
class EncodedSource:
    """Captioned images or videos that are to be encoded, with the files that contain them.

    Attributes:
        samples: map-style data set of dicts. The entry named by :attr:`key` holds the pixels ``[3, ...]`` in -1 .. 1. If the
            samples have several sizes, the data set has an attribute ``groups`` with the group number of each sample,
            ``[samples]`` int64. All samples of a group have the same size.
        key: name of the entry with the pixels: ``image`` or ``video``.
        files: reader that returns the captions of a sample, given the index of the sample.
        origins: record of the source files, by which a later call of :func:`encode_samples` detects changed files. It has an
            entry for each sample or for each shard.
        per_sample: whether ``origins`` has an entry for each sample; false if it has an entry for each shard.
    """

    samples: SampleSource
    key: str
    files: CaptionedFiles
    origins: Sequence[Origin]
    per_sample: bool


def open_source(
    name: str,
    target: Path,
    kind: str,
    extensions: Sequence[str],
    caption_key: str,
    make_samples: Callable[[CaptionedFiles], SampleSource],
) -> EncodedSource:
    """Open captioned images or videos, in a folder or in shards, to encode them.

    Args:
        name: path of a folder of files; or location of shards: a folder, a glob, a brace pattern or a URL.
        target: path of the folder to which encoded samples will be written.
        kind: name of the sample entry that holds the pixels: ``image`` or ``video``.
        extensions: extensions of the image or video files, without dots.
        caption_key: key of the caption in the JSON files that belong to images or videos.
        make_samples: function that builds the map-style data set of pixels from the opened files.

    Returns:
        The samples to encode, with the files that contain them.

    Raises:
        FileNotFoundError: if the location has no files with one of the extensions, and no shards.
        ValueError: if ``target`` is the folder of the files or shards.
    """
    check_not_the_source(target, Path(name))
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
    """Encode samples as latents, embed their captions, and write both to shards ``target/prefix-00000.tar`` and so on.

    Several processes can divide the shards among them. Each process calls this function with its own ``share``.

    Args:
        source: samples to encode.
        options: options that the latents and embeddings depend on, such as the image size. They are recorded in
            ``manifest.json``, so JSON must be able to represent the values. The entry ``model`` is required: the folder or
            Hugging Face Hub name of the pipeline.
        target: path of the folder of shards, created if missing.
        encode: function that encodes a batch of pixels ``[B, 3, ...]`` as latents ``[B, C, ...]``. It is called with ``B = 1``.
        captions: encoder of the captions.
        prefix: prefix of the shards' file names.
        per_shard: number of samples per shard. A shard has fewer if some of its samples cannot be decoded.
        device: device on which pixels and captions are encoded.
        max_skipped: number of samples that this process may skip because they cannot be decoded.
        share: index of this process, counted from 0, and number of processes that the shards are divided among.
        force: whether to first delete shards that an earlier call of this function wrote.

    Returns:
        Paths of the shards of all processes, and the number of samples that this process skipped.

    Raises:
        ValueError: if there are no samples, ``per_shard`` is below 1, ``force`` is set for several processes, or the folder
            holds shards that were written with different options or from source files that have changed since.
        BrokenSampleError: if more than ``max_skipped`` samples cannot be decoded, or if a single process encodes all shards and
            can decode no sample.
    """
    check_per_shard(per_shard)  # before force deletes the existing shards
    if not len(source.samples):
        raise ValueError("the source has no samples, so there is nothing to encode")
    made_with = {"per_shard": per_shard, **options, MODEL_FILES: model_digest(options["model"], ENCODERS)}
    with Preparation(
        target, prefix, made_with, source.origins, per_shard if source.per_sample else None, max_skipped, force, share
    ) as call:
        order = call.order if source.per_sample else range(len(source.samples))
        empty = empty_caption_file(target / f"{prefix}-00000.tar")
        # Without shards, an existing file may belong to an earlier set with a different text encoder.
        if not (call.shards.finished() and empty.exists()):
            with written_whole(empty) as aside:
                aside.write_bytes(array_bytes(captions.tokens("", device).half()))
        sizes = sample_groups(source.samples)

        def encoded(shard_range: range) -> Iterator[dict[str, Any]]:
            for number, sample in readable(source.samples, order, shard_range, call.skipped):
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
