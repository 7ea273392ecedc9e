"""Encoders of captions into token embeddings for cross-attention."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_mhla.data.lines import json_lines, parse_object, read_lines, read_text, text_entry
from lightning_mhla.system.listing import is_visible

WORD_BYTES = 8
"""Number of hash bytes that seed a word's vector."""


@dataclass(frozen=True)
class TextConfig:
    """Options of the caption encoder.

    Args:
        encoder: folder or hub name of a diffusers pipeline, whose tokenizer and text encoder are used (UMT5 of Wan, Gemma-2
            of SANA, T5, mT5, or another model of transformers that is no encoder-decoder); null for a fixed random vector
            for each word, which small models learn to read.
        length: tokens of a caption; shorter ones are filled up with zeros, longer ones cut.
        instruction: text before each caption, except the empty one. The encoder reads it; the embeddings of its first and
            its last token are kept. sana for SanaPipeline's own.
        carry: without an encoder, share of a word's embedding that the next word's has added to it, below 1. With 0 the
            transformer sees a bag of words, and cannot tell a red three and a green seven from a green three and a red seven.
    """

    encoder: str | None = None
    length: int = 512
    instruction: str | None = None
    carry: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"text.length={self.length} must be at least 1")
        if not 0 <= self.carry < 1:
            raise ValueError(f"text.carry={self.carry} must be at least 0 and below 1")
        if self.carry and self.encoder is not None:
            raise ValueError(
                f"text.carry={self.carry} is for captions without an encoder, whose words do not see each other"
            )


class CaptionEncoder:
    """Encoder of captions. It is not a module, and thus neither trained nor saved in checkpoints.

    Args:
        config: see :class:`TextConfig`.
        width: width of an embedding; None for the encoder's own, whatever it is.
    """

    def __init__(self, config: TextConfig, width: int | None) -> None:
        self.config, self._width = config, width

    @property
    def width(self) -> int:
        """Width of the embeddings."""
        assert self._width is not None, "the encoder is not loaded yet"
        return self._width

    def __deepcopy__(self, memo: dict[int, Any]) -> CaptionEncoder:
        return self  # the weight average copies the module

    def rest(self) -> None:
        """Move the encoder off the GPU."""

    def encode(self, captions: Sequence[str], device: torch.device, instructed: bool = True) -> Tensor:
        """Encode captions into ``[B, length, width]`` float32 on ``device``, padded with zeros.

        Args:
            captions: the texts.
            device: where.
            instructed: whether the instruction stands before them; pipelines leave it out of negative prompts.
        """
        rows = [self.tokens(caption, device, instructed) for caption in captions]
        out = torch.zeros(len(rows), self.config.length, self.width, device=device)
        for row, tokens in zip(out, rows, strict=True):
            row[: len(tokens)] = tokens
        return out

    def tokens(self, caption: str, device: torch.device, instructed: bool = True) -> Tensor:
        """Encode the tokens of one caption, at most ``length``: ``[l, width]`` float32. Arguments as for :meth:`encode`."""
        raise NotImplementedError


class WordVectors(CaptionEncoder):
    """Encoder that draws a standard normal vector for each word from its hash: any vocabulary, the same on every machine.

    A word's embedding is its vector, and ``carry`` times the embedding of the word before.
    """

    @override
    def tokens(self, caption: str, device: torch.device, instructed: bool = True) -> Tensor:
        words = caption.lower().split()[: self.config.length]
        seeds = [int.from_bytes(hashlib.sha256(word.encode()).digest()[:WORD_BYTES], "big") for word in words]
        vectors = [np.random.default_rng(seed).standard_normal(self.width, dtype=np.float32) for seed in seeds]
        for before, vector in pairwise(vectors):
            vector += np.float32(self.config.carry) * before
        return torch.from_numpy(np.stack(vectors) if vectors else np.zeros((0, self.width), np.float32)).to(device)


class TransformersText(CaptionEncoder):
    """Text encoder of transformers with its tokenizer, from a pipeline of diffusers, loaded on first use."""

    def __init__(self, config: TextConfig, width: int | None) -> None:
        super().__init__(config, width)
        self._parts: tuple[Any, Any] | None = None

    @torch.no_grad()
    @override
    def tokens(self, caption: str, device: torch.device, instructed: bool = True) -> Tensor:
        """Clean and tokenize the text like the encoder's pipeline in diffusers (Wan's for UMT5, else SANA's)."""
        tokenizer, model = self._load(device)
        if model.config.model_type == "umt5":
            from diffusers.pipelines.wan.pipeline_wan import prompt_clean

            text = prompt_clean(caption)
        else:
            text = caption.lower().strip()
        instruction = self._instruction() if text and instructed else ""
        before = len(tokenizer.encode(instruction)) if instruction else 0
        length = before + self.config.length - 2 if before else self.config.length
        words = tokenizer(instruction + text, truncation=True, max_length=length, return_tensors="pt").to(device)
        if not words.input_ids.shape[1]:  # the empty caption, where a tokenizer adds nothing
            return torch.zeros(0, self.width, device=device)
        with torch.autocast(device.type, enabled=False):
            hidden = model(words.input_ids, attention_mask=words.attention_mask).last_hidden_state[0].float()
        return torch.cat([hidden[:1], hidden[before - 1 :]]) if before else hidden

    @override
    def rest(self) -> None:
        if self._parts is not None:
            self._parts[1].cpu()

    def _instruction(self) -> str:
        if self.config.instruction != "sana":
            return self.config.instruction or ""
        from diffusers import SanaPipeline

        lines = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
        return "\n".join(lines)

    def _load(self, device: torch.device) -> tuple[Any, Any]:
        if self._parts is None:
            from transformers import (
                AutoConfig,
                AutoModel,
                AutoTokenizer,
                MT5EncoderModel,
                T5EncoderModel,
                UMT5EncoderModel,
            )

            from lightning_mhla.system.tokenizer_rules import check_folder, check_tokenizer

            path, dtype = str(self.config.encoder), torch.bfloat16
            check_folder(Path(path) / "tokenizer")
            try:
                tokenizer = AutoTokenizer.from_pretrained(path, subfolder="tokenizer", trust_remote_code=False)
                config = AutoConfig.from_pretrained(path, subfolder="text_encoder", trust_remote_code=False)
                kind: Any = {"umt5": UMT5EncoderModel, "t5": T5EncoderModel, "mt5": MT5EncoderModel}.get(
                    config.model_type, AutoModel
                )
                model = kind.from_pretrained(path, subfolder="text_encoder", dtype=dtype, trust_remote_code=False)
            except (OSError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise FileNotFoundError(
                    f"text.encoder {path} is no folder and no hub name of a pipeline with tokenizer and text_encoder "
                    f"({reason})"
                ) from error
            check_tokenizer(tokenizer, path)
            width = model.config.hidden_size
            if self._width not in (None, width):
                raise ValueError(
                    f"the text encoder {path} gives embeddings of width {width}, not {self._width}; set "
                    "--model.transformer.text_dim (of SANA: caption_channels) in training, --text_width of "
                    "lightning prepare clip-latents"
                )
            self._width = width
            self._parts = tokenizer, model.eval().requires_grad_(False)
        tokenizer, model = self._parts
        return tokenizer, model.to(device)


def make_encoder(config: TextConfig, width: int | None) -> CaptionEncoder:
    """Create the encoder of a configuration, for embeddings of ``width``, or of the encoder's own width if None.

    Raises:
        ValueError: for fixed vectors without a width.
    """
    if config.encoder is not None:
        return TransformersText(config, width)
    if width is None:
        raise ValueError("word vectors need a width; name a text encoder, or give the width")
    return WordVectors(config, width)


def read_prompts(path: str | Path) -> list[tuple[str, str]]:
    """Read the name and the prompt of each sample.

    Args:
        path: a text file with a prompt on each line, ``name<TAB>prompt``, or the prompt, which is then its name too; a
            ``.jsonl`` with a ``prompt`` on each line, named ``00000`` and so on (GenEval); a ``.json`` of names with a
            ``prompt`` each (MJHQ-30K); or a folder of ``NAME.txt`` (DPG-Bench).

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: naming the file and the line, when it holds no prompt, or an entry without one.
    """
    file = Path(path)
    if file.is_dir():
        files = sorted(each for each in file.glob("*.txt") if is_visible(each.name))
        pairs = [(each.stem, read_text(each).strip()) for each in files]
    elif not file.is_file():
        raise FileNotFoundError(f"prompts {file} is not a file; give a text file with a prompt on each line")
    elif file.suffix == ".jsonl":
        rows = enumerate(json_lines(file))
        pairs = [(f"{row:05d}", text_entry(line, "prompt", f"{file}: line {number}")) for row, (number, line) in rows]
    elif file.suffix == ".json":
        pairs = [
            (name, _prompt_of(entry, f"{file}: {name!r}"))
            for name, entry in parse_object(read_text(file), str(file)).items()
        ]
    else:
        lines = [line.strip() for _, line in read_lines(file)]
        pairs = [(line.split("\t", 1)[0].strip(), line.split("\t", 1)[-1].strip()) for line in lines]
    if not pairs:
        raise ValueError(f"prompts {file} is empty; write a prompt on each line")
    return [(name, prompt.strip()) for name, prompt in pairs]


def _prompt_of(entry: Any, where: str) -> str:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not a JSON object with a prompt")
    return text_entry(entry, "prompt", where)
