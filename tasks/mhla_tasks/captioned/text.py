"""Encoders that embed the tokens of captions for cross-attention, and a reader of prompt lists."""

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

from lightning_mhla.data.lines import json_lines, parse_object, plain_suffix, read_lines, read_text, text_entry
from lightning_mhla.system.listing import is_visible
from lightning_mhla.system.ranges import check_range
from lightning_mhla.system.untrusted import reason

WORD_BYTES = 8
"""Number of hash bytes used to seed the vector of a word."""


@dataclass(frozen=True)
class TextConfig:
    """Options of the caption encoder.

    Args:
        encoder: folder or Hugging Face Hub name of a diffusers pipeline whose tokenizer and text encoder are used. The text
            encoder may be Gemma-2 (SANA), the encoder of UMT5 (Wan), T5 or mT5, or any other transformers model that is not an
            encoder-decoder. null for a fixed random vector for each word, which suits small models.
        length: number of tokens in a caption; shorter captions are padded with zeros, longer ones are cut.
        instruction: text to insert before each caption that is not empty, or "sana" for the instruction of SanaPipeline; null
            for no instruction. Only the embeddings of the instruction's first and last token are kept. It is ignored if encoder
            is null.
        carry: factor, at least 0 and below 1. The embedding of the previous word times this factor is added to the embedding of
            each word, if encoder is null. With 0, a transformer cannot distinguish captions that differ only in the order of
            their words.

    Raises:
        ValueError: if ``length`` or ``carry`` is out of range, or ``carry`` is combined with ``encoder``.
    """

    encoder: str | None = None
    length: int = 512
    instruction: str | None = None
    carry: float = 0.0

    def __post_init__(self) -> None:
        check_range("text.", least=1, length=self.length)
        check_range("text.", least=0, below=1, carry=self.carry)
        if self.carry and self.encoder is not None:
            raise ValueError(
                f"text.carry={self.carry} is for captions without an encoder, whose words do not see each other"
            )


class CaptionEncoder:
    """Base class of caption encoders, which convert captions to token embeddings.

    An encoder is not an ``nn.Module``, so it is neither trained nor saved in checkpoints.

    Args:
        config: options of the encoder.
        width: required width of the embeddings; None to accept the width of the text encoder.
    """

    def __init__(self, config: TextConfig, width: int | None) -> None:
        self.config, self._width = config, width

    @property
    def width(self) -> int:
        """Width of the token embeddings. If no width was required, it is known only after the text encoder is loaded."""
        assert self._width is not None, "the encoder is not loaded yet"
        return self._width

    def __deepcopy__(self, memo: dict[int, Any]) -> CaptionEncoder:
        return self  # the moving average of the weights copies the module

    def rest(self) -> None:
        """Move the weights of the encoder, if it has any, to the CPU to free GPU memory."""

    def encode(self, captions: Sequence[str], device: torch.device, instructed: bool = True) -> Tensor:
        """Embed the tokens of a batch of captions.

        Args:
            captions: captions to encode.
            device: device to compute on.
            instructed: whether to insert the configured instruction before each caption; false for negative prompts, as in
                diffusers.

        Returns:
            Embeddings ``[B, length, width]`` float32, padded with zeros, where ``length`` is the configured number of tokens.
        """
        rows = [self.tokens(caption, device, instructed) for caption in captions]
        out = torch.zeros(len(rows), self.config.length, self.width, device=device)
        for row, tokens in zip(out, rows, strict=True):
            row[: len(tokens)] = tokens
        return out

    def tokens(self, caption: str, device: torch.device, instructed: bool = True) -> Tensor:
        """Embed the tokens of one caption, without padding.

        Args:
            caption: caption to encode.
            device: device to compute on.
            instructed: whether to insert the configured instruction before the caption.

        Returns:
            Embeddings ``[L, width]`` float32 of the L tokens; L is at most the configured number of tokens.
        """
        raise NotImplementedError


class WordVectors(CaptionEncoder):
    """Caption encoder without learned weights: each word has a fixed random vector, seeded by the hash of the word.

    The vectors are standard normal, and the same on every machine. The embedding of a word is its vector plus the option
    ``carry`` times the embedding of the previous word.
    """

    @override
    def tokens(self, caption: str, device: torch.device, instructed: bool = True) -> Tensor:
        words = caption.lower().split()[: self.config.length]
        seeds = [int.from_bytes(hashlib.sha256(word.encode()).digest()[:WORD_BYTES], "big") for word in words]
        vectors = [np.random.default_rng(seed).standard_normal(self.width, dtype=np.float32) for seed in seeds]
        # In place and in order: `previous` already contains the words before it.
        for previous, vector in pairwise(vectors):
            vector += np.float32(self.config.carry) * previous
        return torch.from_numpy(np.stack(vectors) if vectors else np.zeros((0, self.width), np.float32)).to(device)


class TransformersText(CaptionEncoder):
    """Caption encoder that uses the tokenizer and the text encoder of a diffusers pipeline, loaded on first use.

    Args:
        config: options of the encoder, of which ``encoder`` names the pipeline.
        width: required width of the embeddings; None to accept the width of the text encoder.
    """

    def __init__(self, config: TextConfig, width: int | None) -> None:
        super().__init__(config, width)
        self._parts: tuple[Any, Any] | None = None

    @torch.no_grad()
    @override
    def tokens(self, caption: str, device: torch.device, instructed: bool = True) -> Tensor:
        """Embed the tokens of one caption, without padding.

        The caption is cleaned first: for UMT5 as in diffusers' Wan pipeline, otherwise as in diffusers' SANA pipeline.

        Args:
            caption: caption to encode.
            device: device to compute on.
            instructed: whether to insert the configured instruction before the caption.

        Returns:
            Embeddings ``[L, width]`` float32 of the L tokens; L is at most the configured number of tokens.

        Raises:
            FileNotFoundError: if the tokenizer or the text encoder cannot be loaded.
            ValueError: if the embeddings of the text encoder do not have the required width.
        """
        tokenizer, model = self._load(device)
        if model.config.model_type == "umt5":
            from diffusers.pipelines.wan.pipeline_wan import prompt_clean

            text = prompt_clean(caption)
        else:
            text = caption.lower().strip()
        instruction = self._instruction() if text and instructed else ""
        instruction_length = len(tokenizer.encode(instruction)) if instruction else 0
        # As in SanaPipeline: the first and the last token of the instruction stay, and count toward config.length.
        length = instruction_length + self.config.length - 2 if instruction_length else self.config.length
        encoded = tokenizer(instruction + text, truncation=True, max_length=length, return_tensors="pt").to(device)
        if not encoded.input_ids.shape[1]:  # the empty caption, if the tokenizer adds no tokens
            return torch.zeros(0, self.width, device=device)
        # Embeddings must not depend on the precision of training: those in prepared data were computed without autocast.
        with torch.autocast(device.type, enabled=False):
            hidden = model(encoded.input_ids, attention_mask=encoded.attention_mask).last_hidden_state[0].float()
        return torch.cat([hidden[:1], hidden[instruction_length - 1 :]]) if instruction_length else hidden

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
                raise FileNotFoundError(
                    f"text.encoder {path} is not a folder or hub name of a pipeline with tokenizer and text_encoder "
                    f"({reason(error)})"
                ) from error
            check_tokenizer(tokenizer, path)
            width = model.config.hidden_size
            if self._width not in (None, width):
                raise ValueError(
                    f"the text encoder {path} gives embeddings of width {width}, not {self._width}; set "
                    "--model.transformer.text_dim (caption_channels for SANA) in training, or --text_width of "
                    "lightning prepare clip-latents"
                )
            self._width = width
            self._parts = tokenizer, model.eval().requires_grad_(False)
        tokenizer, model = self._parts
        return tokenizer, model.to(device)


def make_encoder(config: TextConfig, width: int | None) -> CaptionEncoder:
    """Build the caption encoder that a configuration describes.

    Args:
        config: options of the encoder.
        width: required width of the embeddings; None to accept the width of the text encoder.

    Raises:
        ValueError: if the configuration names no text encoder and ``width`` is None.
    """
    if config.encoder is not None:
        return TransformersText(config, width)
    if width is None:
        raise ValueError("word vectors need a width; name a text encoder, or give the width")
    return WordVectors(config, width)


def read_prompts(path: str | Path) -> list[tuple[str, str]]:
    """Read named prompts from a file or a folder.

    The file names of a prompt's samples begin with the name of the prompt.

    Args:
        path: path of the prompts, in one of these formats:

            * text file: each line is a prompt, optionally preceded by its name and a tab. Without a name, the prompt itself is
              the name. A line with only a name and a tab stands for the empty prompt.
            * ``.jsonl`` file (GenEval): each line is a JSON object with an entry ``prompt``. The names are ``00000``, ``00001``
              and so on.
            * ``.json`` file (MJHQ-30K): a JSON object that maps each name to an object with an entry ``prompt``.
            * folder (DPG-Bench): each ``.txt`` file contains a prompt. The name is the file name without its extension.

    Returns:
        A tuple ``(name, prompt)`` for each prompt, in the order of the file; for a folder, sorted by file name.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if there are no prompts, the file is a table of a different format, or an entry has no prompt; the message
            names the file, and the line or the entry.
    """
    file = Path(path)
    if file.is_dir():
        files = sorted(entry for entry in file.iterdir() if entry.suffix.lower() == ".txt" and is_visible(entry.name))
        pairs = [(text_file.stem, read_text(text_file).strip()) for text_file in files]
    elif not file.is_file():
        raise FileNotFoundError(f"prompts {file} is not a file; give a text file with a prompt on each line")
    elif plain_suffix(file) == ".jsonl":
        rows = enumerate(json_lines(file))
        pairs = [(f"{row:05d}", text_entry(line, "prompt", f"{file}: line {number}")) for row, (number, line) in rows]
    elif plain_suffix(file) == ".json":
        pairs = [
            (name, _prompt_of(entry, f"{file}: {name!r}"))
            for name, entry in parse_object(read_text(file), str(file)).items()
        ]
    elif plain_suffix(file) in (".csv", ".parquet"):
        raise ValueError(
            f"prompts {file} is a table, which is not read; write a text file with a prompt on each line, or a .jsonl file "
            "with an entry prompt"
        )
    else:
        # A tab at the end separates a name from the empty prompt, so only the beginning is stripped before the split.
        parts = [line.lstrip().split("\t", 1) for _, line in read_lines(file)]
        pairs = [(part[0].strip(), part[-1]) for part in parts]
    if not pairs:
        raise ValueError(f"prompts {file} is empty; write a prompt on each line")
    return [(name, prompt.strip()) for name, prompt in pairs]


def _prompt_of(entry: Any, where: str) -> str:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not a JSON object with a prompt")
    return text_entry(entry, "prompt", where)
