"""Bytes of text add up with every tokenizer: by token where that is possible, else from the text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from mhla_tasks.language import HubText, TokenShards
from mhla_tasks.language.documents import DocumentEncoder
from mhla_tasks.language.encoding import encode_texts
from mhla_tasks.language.prepare import RunEncoder, write_token_shards
from mhla_tasks.language.sources import ArrayRuns, TokenWindows
from mhla_tasks.language.stream import PackedRows, RowPosition
from mhla_tasks.language.text_bytes import counts_exactly
from mhla_tasks.language.token_shards import MISSING, ShardRuns
from mhla_tasks.language.tokenizer import token_bytes
from small import SENTENCES, small_model
from tokenizer_kinds import BYTES, KINDS, made
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_mhla.data import ShardReader

TEXTS = [
    *SENTENCES, "naïve café €", " a space in front", "two  spaces,\n\n\tlines ", "日本語 😀 한국어", "", "x",
    "e\u0301 \ufb01 \u2460 \uff12", "NOT SMALL", "</s><s>", "   ",
]  # fmt: skip
EXACT = ("byte_level", "byte_level_end", "byte_level_two_ends", "fallback", "byt5")


def size(texts: list[str]) -> int:
    return len("".join(texts).encode())


@pytest.mark.parametrize("kind", EXACT)
def test_tokens_have_the_bytes_of_every_text(kind: str) -> None:
    tokenizer = made(kind)
    table = token_bytes(tokenizer)
    assert counts_exactly(tokenizer)
    for text in TEXTS:
        assert table[encode_texts(tokenizer, [text])[0]].sum() == len(text.encode()), text
        assert table[tokenizer(text)["input_ids"]].sum() == len(text.encode()) or "</s>" in text, text
    assert not table[tokenizer.all_special_ids].any()


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(EXACT)))
def test_tokenizers_that_change_a_text_are_known(kind: str) -> None:
    assert not counts_exactly(made(kind))


@pytest.mark.parametrize("spaced", [True, False])
def test_fallback_without_a_token_for_the_space(spaced: bool) -> None:
    words = {word: number for number, word in enumerate(["<unk>", *BYTES, *"abcdef"])}
    base = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    if spaced:
        base.normalizer = normalizers.Replace(" ", "▁")
    else:
        base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>", eos_token="</s>")
    for text in ("a bc d ef", "naïve café €", "  two“quotes” "):
        assert token_bytes(tokenizer)[encode_texts(tokenizer, [text])[0]].sum() == len(text.encode())


def test_characters_split_over_tokens() -> None:
    """Most characters of this text are several tokens of the byte-level vocabulary."""
    text = "日本語 😀 한국어 עברית"
    (row,) = encode_texts(made("byte_level"), [text])
    assert len(row) > 2 * len(text)
    assert token_bytes(made("byte_level"))[row].sum() == len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [1, 7, 64])
def test_windows_have_the_bytes_of_their_text(kind: str, context: int) -> None:
    tokenizer = made(kind)
    texts = (TEXTS * 3)[:40]
    tokens, starts, missing, _ = DocumentEncoder(tokenizer)(texts)
    runs = ArrayRuns(tokens, starts, "text", missing)
    windows = TokenWindows(runs, context, token_bytes(tokenizer), separate_documents=False)
    found = sum(windows[index]["bytes"] for index in range(len(windows)))
    left = len(tokens) - 1 - len(windows) * context
    last = TokenWindows(runs, max(1, left), token_bytes(tokenizer), separate_documents=False)
    rest = int(token_bytes(tokenizer)[tokens[len(tokens) - left :]].sum()) if left else 0
    rest += runs.missing_bytes(0, len(tokens) - left, len(tokens))
    assert len(last) > 0
    assert found + rest == size(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_rows_have_the_bytes_of_their_text(kind: str) -> None:
    """Whatever the context, and from any place that a run resumes at."""
    tokenizer, context, rows = made(kind), 9, 2
    encoder, table = DocumentEncoder(tokenizer), token_bytes(tokenizer)

    def read(positions: list[RowPosition], batches: int) -> list[Any]:
        packed = PackedRows(lambda: iter(TEXTS * 20), encoder.one, positions, range(rows), context, table, False)
        return [batch for batch, _ in zip(packed, range(batches), strict=False)]

    batches = read([RowPosition(row, 0) for row in range(rows)], 30)
    for row in range(rows):
        texts = (TEXTS * 20)[row::rows]
        tokens, starts, missing, _ = encoder(texts)
        runs = ArrayRuns(tokens, starts, "text", missing)
        windows = TokenWindows(runs, context, table, separate_documents=False)
        assert [int(batch["bytes"][row]) for batch in batches] == [windows[index]["bytes"] for index in range(30)]
    position = [RowPosition(*place) for place in batches[10]["position"].tolist()]
    again = read(position, 5)
    assert [batch["bytes"].tolist() for batch in again] == [batch["bytes"].tolist() for batch in batches[11:16]]


@pytest.mark.parametrize("kind", ["byte_level_end", "llama", "unigram", "wordpiece", "byt5"])
def test_bits_per_byte_of_prepared_shards_are_those_of_the_text(kind: str, tmp_path: Path) -> None:
    """One window holds everything, so that the figure is the loss of the text over its bytes."""
    tokenizer = made(kind)
    texts = [text for text in TEXTS if text.strip()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (shard,) = write_token_shards(tmp_path / "out", [str(tmp_path / "rows.jsonl")], tokenizer)
    tokens = DocumentEncoder(tokenizer)(texts).tokens
    context = len(tokens) - 1
    data = TokenShards(str(shard), str(shard), batch_size=1, context=context, num_workers=0, seed=0)
    model = small_model(vocab_size=max(400, len(tokenizer)), context=context)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    (found,) = trainer.validate(model, data, verbose=False)
    with torch.no_grad():
        inputs = torch.from_numpy(tokens)[None]
        logits = model.network(inputs[:, :-1]).logits[0].double()
    nats = torch.nn.functional.cross_entropy(logits, inputs[0, 1:], reduction="sum")
    assert found["val/bits_per_byte"] == pytest.approx(float(nats) / math.log(2) / size(texts), rel=1e-4)


def test_shards_without_bytes_are_an_error_for_tokenizers_that_change_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("The river runs. " * 9)
    encode = RunEncoder.members
    monkeypatch.setattr(
        RunEncoder, "members", lambda *args: {name: data for name, data in encode(*args).items() if name != MISSING}
    )
    for kind, fine in (("byte_level", True), ("byt5", True), ("llama", False), ("wordpiece", False)):
        (shard,) = write_token_shards(tmp_path / kind, [str(tmp_path / "a.txt")], made(kind))
        data = TokenShards(str(shard), str(shard), batch_size=1, context=8, num_workers=0, seed=0)
        data.windows("train")
        if fine:
            assert data.windows("validate")[0]["bytes"] > 0
            continue
        with pytest.raises(ValueError, match=r"train-00000.tar.* has no \.missing\.npy.*prepare the validation shards"):
            data.windows("validate")


def test_shards_hold_missing_bytes_only_where_tokens_do_not_count_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve café")
    for kind, more in (("byte_level", []), ("byt5", []), ("unigram", [MISSING])):  # byt5 is written in Python
        (shard,) = write_token_shards(tmp_path / kind, [str(tmp_path / "a.txt")], made(kind))
        reader = ShardReader([shard])
        assert set(reader.tables[0].extensions) == {"tokens.npy", "starts.npy", "targets.npy", *more}
        assert ShardRuns(reader).has_missing(0) == bool(more)


def test_control_tokens_that_were_asked_for_have_no_bytes(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path / "tokenizer")
    rows = [{"text": "The river</s>one"}, {"text": "The <s>town"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {}
    for asked in (False, True):
        data = HubText(
            str(tmp_path / "tokenizer"), path="json", data_files=str(tmp_path / "rows.jsonl"), batch_size=1, context=1,
            val_documents=2, num_workers=0, seed=0, control_tokens=asked,
        )  # fmt: skip
        windows = data.windows("validate")
        sizes[asked] = sum(windows[index]["bytes"] for index in range(len(windows)))
    assert sizes == {False: size([row["text"] for row in rows]), True: len("The riveroneThe town")}
