"""Real tokenizers of the usual families, small, built here and loaded from their files as users load theirs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mhla_tasks.language.tokenizer import load_tokenizer, train_tokenizer
from small import SENTENCES
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast

LETTERS = sorted({sign for sentence in SENTENCES for sign in sentence} - {" "})
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _template(before: list[str], after: list[str], ids: dict[str, int]) -> processors.TemplateProcessing:
    single = " ".join([*before, "$A", *after])
    return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=sorted(ids.items()))


def byte_level(after: tuple[str, ...] = ()) -> Any:
    """GPT-2's kind; with tokens after the text like the embedding models of Qwen."""
    tokenizer = train_tokenizer(SENTENCES * 4, 320)
    if after:
        template = _template([], list(after), {"<|endoftext|>": 0, "<|pad|>": 1})
        tokenizer.backend_tokenizer.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), template]
        )
    return tokenizer


def byte_level_composed() -> Any:
    """Like Qwen 2's: bytes of text in composed characters."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _fallback(signs: list[str], normalizer: Any) -> Any:
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *BYTES, *signs])}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ids = {"<s>": 1, "</s>": 2}
    tokenizer.post_processor = _template(["<s>"], ["</s>"], ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def fallback() -> Any:
    """Like Gemma's: spaces become ▁, nothing is put in front."""
    return _fallback([*LETTERS, "▁"], normalizers.Replace(" ", "▁"))


def fallback_prefixed() -> Any:
    """Build a tokenizer like the first files of Llama 2, with a ▁ before every text."""
    return _fallback([*LETTERS, "▁"], normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def llama(add_eos_token: bool = True) -> Any:
    """transformers' own class; a ▁ in front unless the text begins with a space."""
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *BYTES, *LETTERS, "▁", "▁T", "th"])}
    merges = [("▁", "T"), ("t", "h")]
    return LlamaTokenizer(vocab=words, merges=merges, add_bos_token=True, add_eos_token=add_eos_token)


def unigram() -> Any:
    """Build a tokenizer like that of T5: the end token is an ordinary entry, and unknown characters are lost."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False,
        initial_alphabet=["<", "/", ">", "|", "é"],
    )  # fmt: skip
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.post_processor = _template([], ["</s>"], {"</s>": 1})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def wordpiece() -> Any:
    """Build a tokenizer like that of BERT: [CLS] before, [SEP] after, lower case, no spaces, no accents."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        bos_token="[CLS]", eos_token="[SEP]",
    )  # fmt: skip


def words() -> Any:
    """Words between spaces; the control tokens are words of the vocabulary."""
    known = sorted({word for sentence in SENTENCES for word in sentence.split()})
    ids = {word: number for number, word in enumerate(["<unk>", "<end>", *known])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = _template(["<end>"], ["<end>", "<end>"], {"<end>": 1})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")


KINDS: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "byte_level_end": lambda: byte_level(("<|endoftext|>",)),
    "byte_level_two_ends": lambda: byte_level(("<|endoftext|>", "<|pad|>")),
    "byte_level_composed": byte_level_composed,
    "fallback": fallback,
    "fallback_prefixed": fallback_prefixed,
    "llama": llama,
    "llama_without_end": lambda: llama(add_eos_token=False),
    "unigram": unigram,
    "wordpiece": wordpiece,
    "words": words,
    "byt5": ByT5Tokenizer,
}

ENDS = {
    "byte_level": 0, "byte_level_end": 1, "byte_level_two_ends": 2, "byte_level_composed": 0, "fallback": 1,
    "fallback_prefixed": 1, "llama": 1, "llama_without_end": 0, "unigram": 1, "wordpiece": 1, "words": 2, "byt5": 1,
}  # fmt: skip
"""Tokens that each kind appends to a text."""


@cache
def made(kind: str) -> Any:
    """A tokenizer, saved and loaded."""
    folder = mkdtemp()
    KINDS[kind]().save_pretrained(folder)
    return load_tokenizer(Path(folder))
