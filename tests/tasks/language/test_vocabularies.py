"""Data, weights and replacements whose tokenizer gives other text to the tokens are never used in silence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mhla_tasks.language import LinearizedTextEncoder, TokenShards
from mhla_tasks.language.export import export, load_model, write
from mhla_tasks.language.linearized import LinearizedModel
from mhla_tasks.language.prepare import write_token_shards
from mhla_tasks.language.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from mhla_tasks.language.vocabularies import pretrained_tokenizer, vocabulary_conflict
from small import SENTENCES, small_model
from transformers import BertConfig, BertModel, BertTokenizer, LlamaConfig, LlamaForCausalLM

TEXTS = [text * 3 for text in SENTENCES]
OTHER_TEXTS = ["weights of attention are summed over blocks of tokens", "a kernel writes its results to shared memory"]


@pytest.fixture(scope="module")
def other() -> Any:
    """Train a tokenizer with as many tokens as the one of the fixtures, but with other text behind most of them."""
    return train_tokenizer(OTHER_TEXTS * 8, 320)


def shards(folder: Path, tokenizer: Any, prefix: str) -> str:
    (folder.parent / "text.txt").write_text("\n".join(TEXTS))
    write_token_shards(folder, [str(folder.parent / "text.txt")], tokenizer, prefix=prefix)
    return str(folder / f"{prefix}-*.tar")


def with_token(tokenizer: Any, folder: Path) -> Any:
    """Return a copy of a tokenizer with one more token."""
    save_tokenizer(tokenizer, folder)
    copy = load_tokenizer(folder)
    copy.add_tokens(["<note>"], special_tokens=True)
    return copy


def test_only_tokens_of_the_trained_vocabulary_conflict(tokenizer: Any, other: Any, tmp_path: Path) -> None:
    assert vocabulary_conflict(tokenizer, tokenizer) is None
    larger = with_token(tokenizer, tmp_path / "larger")
    assert len(larger) == len(tokenizer) + 1
    assert vocabulary_conflict(tokenizer, larger) is None
    assert vocabulary_conflict(larger, tokenizer) is None
    renamed = train_tokenizer(SENTENCES * 4, 320)
    renamed.add_tokens(["<note>"])
    larger.add_tokens(["<remark>"])
    assert vocabulary_conflict(larger, renamed) is None
    assert str(vocabulary_conflict(tokenizer, other)).startswith("token ")


@pytest.mark.parametrize("reserved", ["[unused1]", "<unused1>", "<|reserved_special_token_1|>", "<extra_id_1>"])
def test_reserved_tokens_may_be_renamed(reserved: str, tmp_path: Path) -> None:
    """BERT's vocabulary has such tokens for the words of a domain, and they are not special tokens."""
    tokenizers = []
    for name, words in {
        "one": [reserved, "<left>"],
        "two": ["<protein>", "<left>"],
        "three": [reserved, "<right>"],
    }.items():
        lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, "word"]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        tokenizers.append(BertTokenizer(str(tmp_path / f"{name}.txt")))
    assert vocabulary_conflict(tokenizers[0], tokenizers[1]) is None
    assert vocabulary_conflict(tokenizers[0], tokenizers[2]) == "token 6 is '<left>' in one and '<right>' in the other"


def test_added_tokens_that_are_not_special_conflict(tokenizer: Any) -> None:
    one, two = train_tokenizer(SENTENCES * 4, 320), train_tokenizer(SENTENCES * 4, 320)
    one.add_tokens(["foo", "bar"])
    two.add_tokens(["bar", "foo"])
    assert "'foo' in one and 'bar' in the other" in str(vocabulary_conflict(one, two))


def test_a_tokenizer_that_cannot_be_read_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{")

    def fail(_: Any) -> Any:
        raise ValueError("it would run code")

    monkeypatch.setattr("mhla_tasks.language.vocabularies.load_tokenizer", fail)
    assert pretrained_tokenizer(str(tmp_path)) is None
    assert "is not compared" in caplog.text


@pytest.mark.parametrize("place", ["validation", "second folder", "option"])
def test_shards_of_a_different_tokenizer(place: str, tokenizer: Any, other: Any, tmp_path: Path) -> None:
    train, val = shards(tmp_path / "data", tokenizer, "train"), shards(tmp_path / "data", tokenizer, "val")
    foreign = shards(tmp_path / "foreign", other, "val")
    save_tokenizer(other, tmp_path / "named")
    data = {
        "validation": lambda: TokenShards(train, foreign, context=16),
        "second folder": lambda: TokenShards([train, foreign], val, context=16),
        "option": lambda: TokenShards(train, val, str(tmp_path / "named"), context=16),
    }[place]()
    wrong = "data" if place == "option" else "foreign"
    with pytest.raises(
        ValueError, match=rf"the shards in .*/{wrong} were made with a different tokenizer .* token \d+ is"
    ):
        data.windows("validate" if place == "validation" else "train")


def test_shards_of_one_tokenizer_in_several_folders(tokenizer: Any, tmp_path: Path) -> None:
    train = shards(tmp_path / "data", tokenizer, "train")
    val = shards(tmp_path / "held-out", with_token(tokenizer, tmp_path / "larger"), "val")
    data = TokenShards([train, val], val, context=16)
    assert len(data.windows("train")) > len(data.windows("validate")) > 0
    save_tokenizer(with_token(tokenizer, tmp_path / "again"), tmp_path / "named")
    assert len(TokenShards(train, val, str(tmp_path / "named"), context=16).windows("train")) > 0


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_different_tokenizer_lend_no_embedding(
    tied: bool, tokenizer: Any, other: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = small_model(tie_embeddings=tied)
    with torch.no_grad():
        for parameter in trained.network.parameters():
            parameter.add_(1)
    trained.use_tokenizer(tokenizer)
    export(trained, tmp_path / "exported")
    for data_tokenizer, is_taken in ((other, False), (tokenizer, True)):
        model = small_model(tie_embeddings=tied)
        model.use_tokenizer(data_tokenizer)
        initial = {name: weight.clone() for name, weight in model.network.state_dict().items()}
        caplog.clear()
        model.start_from(str(tmp_path / "exported"))
        for name, weight in model.network.state_dict().items():
            expected = trained.network.state_dict() if is_taken or "backbone" in name else initial
            assert torch.equal(weight, expected[name]), name
        assert ("was trained with a different tokenizer" in caplog.text) is not is_taken


@pytest.mark.parametrize("source", ["exported folder", "checkpoint"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_shared_embedding_is_taken_for_both_ends(
    source: str, tied: bool, exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = small_model()
    path = exported
    if source == "checkpoint":
        path = save_checkpoint(shared, tmp_path / "last.ckpt")
    model = small_model(tie_embeddings=tied)
    with caplog.at_level("INFO"):
        model.start_from(str(path))
    head, embedding = model.network.get_output_embeddings().weight, model.network.get_input_embeddings().weight
    assert (head is embedding) is tied
    assert torch.equal(head, embedding)
    assert torch.equal(embedding, shared.network.get_input_embeddings().weight)
    assert "0 newly initialized" in caplog.text


@pytest.mark.parametrize("source", ["exported folder", "checkpoint"])
def test_two_ends_do_not_fit_a_shared_embedding(source: str, tokenizer: Any, tmp_path: Path) -> None:
    model = small_model(tie_embeddings=False)
    model.use_tokenizer(tokenizer)
    path = tmp_path / "exported"
    if source == "checkpoint":
        path = save_checkpoint(model, tmp_path / "last.ckpt")
    else:
        export(model, path)
    with pytest.raises(ValueError, match=r"different weights .*, which this model shares; .*tie_embeddings=false"):
        small_model().start_from(str(path))


def test_a_head_that_was_not_saved_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_model(tie_embeddings=False).network.base_model.save_pretrained(tmp_path / "headless")
    with caplog.at_level("INFO"):
        small_model(tie_embeddings=False).start_from(str(tmp_path / "headless"))
    assert "1 newly initialized (head.weight)" in caplog.text


def save_checkpoint(model: Any, path: Path) -> Path:
    weights = {f"network.{name}": weight for name, weight in model.network.state_dict().items()}
    torch.save({"state_dict": weights, "global_step": 0, "pytorch-lightning_version": "2.6.0"}, path)
    return path


def llama(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=320, max_position_embeddings=2048, **sizes)).save_pretrained(folder)


def bert(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=320, attention_probs_dropout_prob=0.0, **sizes)).save_pretrained(folder)


@pytest.mark.parametrize(("save", "kind"), [(llama, LinearizedModel), (bert, LinearizedTextEncoder)])
def test_linearized_models_need_the_tokenizer_of_the_original(
    save: Any, kind: Any, tokenizer: Any, other: Any, tmp_path: Path
) -> None:
    save(tmp_path / "original")
    save_tokenizer(tokenizer, tmp_path / "original")
    model = kind(str(tmp_path / "original"))
    model.tokenizer = other
    with pytest.raises(
        ValueError, match=r"original was trained with a different tokenizer than that of the data: token"
    ):
        model.configure_model()
    model.tokenizer = tokenizer
    model.configure_model()
    for file in (tmp_path / "original").glob("tokenizer*"):
        file.unlink()
    model = kind(str(tmp_path / "original"))
    model.tokenizer = other
    model.configure_model()  # nothing says which tokenizer the weights were trained with


def test_a_replaced_tokenizer_keeps_the_meaning_of_tokens(
    exported: Path, tokenizer: Any, other: Any, tmp_path: Path
) -> None:
    model = small_model()
    model.use_tokenizer(tokenizer)
    save_tokenizer(other, tmp_path / "other")
    chat = train_tokenizer(SENTENCES * 4, 320)
    chat.chat_template = "{{ messages }}"
    save_tokenizer(chat, tmp_path / "chat")
    with pytest.raises(ValueError, match=r"other is not a tokenizer for this model, .*: token \d+ is"):
        write(model, tmp_path / "wrong", tokenizer=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="other is not a tokenizer for this model"):
        load_model(exported, str(tmp_path / "other"))
    write(model, tmp_path / "right", tokenizer=str(tmp_path / "chat"))
    assert load_model(tmp_path / "right")[1].chat_template == "{{ messages }}"
    assert load_model(exported, str(tmp_path / "chat"))[1].chat_template == "{{ messages }}"
    shutil.copytree(exported, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert pretrained_tokenizer(str(tmp_path / "bare")) is None
