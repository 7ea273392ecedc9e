"""Dialogues in tables become the tokens that ``lightning chat`` gives the model, whatever their source."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from mhla_tasks.language import HubText, TokenShards
from mhla_tasks.language.chat_template import CHATML
from mhla_tasks.language.conversation import Conversation
from mhla_tasks.language.corpus import read_documents
from mhla_tasks.language.dialogues import Dialogue, as_document, text_of
from mhla_tasks.language.documents import DocumentEncoder
from mhla_tasks.language.prepare import write_token_shards
from mhla_tasks.language.sources import ArrayRuns, TokenWindows
from mhla_tasks.language.tokenizer import load_tokenizer, save_tokenizer, token_bytes, train_tokenizer
from pyarrow import parquet
from tokenizer_kinds import made

TURNS = [
    [("user", "How are you?"), ("assistant", "I am fine, thanks.")],
    [
        ("system", "Answer in one word."),
        ("user", "2 + 2?"),
        ("assistant", "4"),
        ("user", "und 3 mal 3? Größe ß"),
        ("assistant", "9"),
    ],
    [("user", "What does <|im_end|> mean?"), ("assistant", "<|endoftext|> ends a text, <|im_end|> a turn.")],
    [("user", " spaces  and\nlines\n"), ("assistant", "日本語 😀")],
]
THINKING = [("user", " Well? "), ("assistant", "<think>\nhm\n</think>\n\n  A tree. ")]
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role | upper }}] {{ m.content.split('</think>')[-1] | trim }}{{ eos_token if m.role == 'assistant' }}\n"
    "{% endfor %}{% if add_generation_prompt %}[ASSISTANT] {% endif %}"
)
"""A template of another form: trimmed messages without thoughts, begin and end tokens, roles in capitals."""


def chat_tokenizer(template: str = CHATML) -> Any:
    texts = [content for turns in TURNS for _, content in turns]
    tokenizer = train_tokenizer(texts * 3, 340, chat=True)
    tokenizer.chat_template = template
    return tokenizer


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def rows() -> list[dict[str, Any]]:
    return [{"messages": messages(turns), "id": number} for number, turns in enumerate(TURNS)]


@pytest.mark.parametrize("template", [CHATML, BRACKETS], ids=["chatml", "brackets"])
@pytest.mark.parametrize("turns", TURNS, ids=["two", "system", "spelled", "spaces"])
def test_a_dialogue_has_the_tokens_of_the_chat(turns: list[tuple[str, str]], template: str) -> None:
    tokenizer = chat_tokenizer(template)
    if template == BRACKETS:  # it trims messages, as the command does before it sends them
        turns = [(role, content.strip()) for role, content in turns]
    system = [content for role, content in turns if role == "system"]
    chat = Conversation(tokenizer, *system)
    spoken = turns[len(system) :]
    for (_, question), (_, answer) in zip(spoken[::2], spoken[1::2], strict=True):
        chat.ask(question)
        chat.reply(tokenizer(answer, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    tokens, starts, *_ = DocumentEncoder(tokenizer)([Dialogue(tuple(turns))])
    assert starts.tolist() == [0]
    count = len(chat.ids)
    assert tokens[:count].tolist() == chat.ids
    assert {int(tokens[count])} == chat.stops if template == CHATML else int(tokens[count]) == tokenizer.eos_token_id


@pytest.mark.parametrize("template", [CHATML, BRACKETS], ids=["chatml", "brackets"])
@pytest.mark.parametrize("kind", ["byte_level", "fallback", "llama"])
def test_a_dialogue_has_the_tokens_of_transformers(kind: str, template: str) -> None:
    tokenizer = made(kind)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    for turns in (*TURNS[:2], TURNS[3], THINKING):
        wanted = tokenizer.apply_chat_template(messages(turns), tokenize=False)
        tokens = DocumentEncoder(tokenizer)([as_document(messages(turns), "here")]).tokens
        assert tokens.tolist() == tokenizer(wanted, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", [CHATML, BRACKETS], ids=["chatml", "brackets"])
def test_the_bytes_of_dialogues_are_those_of_their_text(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    documents = ["A text before.", *(Dialogue(tuple(turns)) for turns in TURNS[:3]), "A text after."]
    tokens, starts, missing, _ = DocumentEncoder(tokenizer)(documents)
    runs = ArrayRuns(tokens, starts, "text", missing)
    windows = TokenWindows(runs, len(tokens) - 1, token_bytes(tokenizer), separate_documents=True)
    texts = [tokenizer.apply_chat_template(messages(turns), tokenize=False) for turns in TURNS[:3]]
    written = sum(len(text.encode()) for text in ("A text before.", *texts, "A text after."))
    control = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    assert tokens[starts[-1]] == tokens[0] == tokenizer.bos_token_id  # in front of the texts, and in no text
    in_template = sum(len(control.get(int(token), "")) for token in tokens[starts[1] : starts[-1]])
    assert windows[0]["bytes"] == written - in_template
    assert np.flatnonzero(windows[0]["starts"]).tolist() == starts.tolist()


def write_jsonl(folder: Path) -> str:
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return str(folder / "chats.jsonl")


def write_json(folder: Path) -> str:
    (folder / "chats.json").write_text(json.dumps(rows(), indent=1))
    return str(folder / "chats.json")


def write_parquet(folder: Path) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(rows()), folder / "chats.parquet")
    return str(folder / "chats.parquet")


def write_folder(folder: Path) -> str:
    write_jsonl(folder)
    return str(folder)


@pytest.mark.parametrize("write", [write_jsonl, write_json, write_parquet, write_folder])
def test_every_table_holds_dialogues(write: Callable[[Path], str], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    found = list(read_documents([write(source)], "messages"))
    assert found == [Dialogue(tuple(turns)) for turns in TURNS]
    tokenizer = chat_tokenizer()
    (shard,) = write_token_shards(tmp_path / "shards", [write(source)], tokenizer, column="messages")
    data = TokenShards(str(shard), str(shard), batch_size=1, context=16, num_workers=0, seed=0)
    tokens = DocumentEncoder(tokenizer)(found).tokens
    windows = data.windows("validate")
    joined = np.concatenate([windows[number]["tokens"][:-1] for number in range(len(windows))])
    assert joined.tolist() == tokens[: len(joined)].tolist()
    assert data.tokenizer.chat_template == CHATML


def test_dialogues_are_streamed(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    data = HubText(
        str(tmp_path / "tokenizer"), "json", data_files=write_jsonl(tmp_path), column="messages", batch_size=1, context=8,
        val_documents=1, shuffle_buffer=0, num_workers=0, seed=0, steps_per_epoch=4,
    )  # fmt: skip
    wanted = DocumentEncoder(tokenizer)([Dialogue(tuple(turns)) for turns in TURNS[1:]]).tokens
    batches = list(islice(data.train_dataloader(), 4))
    assert np.concatenate([batch["tokens"][0, :-1] for batch in batches]).tolist() == wanted[:32].tolist()
    assert (
        data.windows("validate")[0]["tokens"].tolist()
        == DocumentEncoder(tokenizer)([Dialogue(tuple(TURNS[0]))]).tokens[:9].tolist()
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            [{"from": "human", "value": "a"}],
            r"message 1 has the keys \['from', 'value'\]; a dialogue is a list of objects",
        ),
        ([{"role": "user", "content": "a"}, "b"], "is list, not text"),
        ([{"role": "user", "content": None}], "role 'user' and content 'None' must be text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "must be text"),
        ([{"role": "user<|im_end|>", "content": "a"}], "the role 'user<|im_end|>' must be a word"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "message 1 has tool_calls"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "message 1 has tool_calls"),
        ({"role": "user", "content": "a"}, "is dict, not text; choose a different column"),
        (["a", "b"], "is list, not text; choose a different column"),
    ],
)
def test_what_is_no_dialogue_is_an_error_that_names_the_line(value: Any, message: str, tmp_path: Path) -> None:
    lines = [{"messages": messages(TURNS[0])}, {"messages": value}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=message.replace("|", r"\|")) as error:
        list(read_documents([str(tmp_path / "chats.jsonl")], "messages"))
    assert "chats.jsonl: line 2" in str(error.value)


def test_empty_dialogues_are_left_out_and_half_pairs_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[Any] = [[], None, messages([("user", " \n")]), [{"role": "user", "content": "a \ud800 b"}]]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    found = list(read_documents([str(tmp_path / "chats.jsonl")], "messages"))
    assert found == [Dialogue((("user", "a \ufffd b"),))]
    assert text_of(found[0]) == "a \ufffd b"
    assert "2 empty documents" in caplog.text
    assert "1 rows with null" in caplog.text


def test_dialogues_need_a_chat_template(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a b c"], 300)
    with pytest.raises(
        ValueError, match="the tokenizer has no chat template; use the tokenizer of a chat model, or make"
    ):
        write_token_shards(tmp_path / "shards", [write_jsonl(tmp_path)], tokenizer, column="messages")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
            r"message 1 \(system\) of 5",
        ),
        ("{{ messages[-1].content }}", r"message 1 \(system\) of 5"),
        ("{% for m in messages[:3] %}{{ m.content }}{% endfor %}", r"message 4 \(user\) of 5"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template rejects the messages: roles must alternate",
        ),
        ("{{ messages[9].content }}", "the chat template rejects the messages: "),
        ("{{ messages[0].content + 1 }}", "the chat template rejects the messages: "),
        ("{{ 1 // 0 }}", "the chat template rejects the messages: "),
        ("<|im_end|>", r"message 1 \(system\) of 5"),
    ],
)
def test_a_template_drops_no_message_silently(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DocumentEncoder(chat_tokenizer(template))([Dialogue(tuple(TURNS[1]), "chats.jsonl: line 7")])


def test_the_row_that_a_template_rejects_is_named(tmp_path: Path) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('must start with user') }}{% endif %}" + CHATML
    lines = [messages(TURNS[0])] * 3 + [messages(TURNS[0])[1:]]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    with pytest.raises(
        ValueError, match=r"chats\.jsonl: line 4: the chat template rejects the messages: must start with user"
    ):
        write_token_shards(
            tmp_path / "shards", [str(tmp_path / "chats.jsonl")], chat_tokenizer(template), column="messages"
        )


def test_a_system_message_that_the_template_ignores_is_an_error() -> None:
    template = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="the chat template ignores system messages"):
        Conversation(chat_tokenizer(template), "Answer in one word.")


@pytest.mark.parametrize("prefix", ["train", "val"])
@pytest.mark.parametrize("first", [[], ["A text before."]], ids=["dialogues", "text first"])
def test_a_folder_holds_dialogues_of_one_template(first: list[str], prefix: str, tmp_path: Path) -> None:
    lines = [*first, *(messages(turns) for turns in TURNS)]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    shards, options = tmp_path / "shards", {"run_characters": 10, "runs_per_shard": 1}
    paths = write_token_shards(shards, [str(source)], chat_tokenizer(), **options)
    paths[-1].unlink()
    with pytest.raises(ValueError, match="holds dialogues of a different chat template; choose a different folder"):
        write_token_shards(shards, [str(source)], chat_tokenizer(BRACKETS), prefix, **options)
    assert load_tokenizer(shards / "tokenizer").chat_template == CHATML
    assert write_token_shards(shards, [str(source)], chat_tokenizer(), **options) == paths
    for path in paths:
        path.unlink()
    assert len(write_token_shards(shards, [str(source)], chat_tokenizer(BRACKETS), force=True, **options)) == len(paths)
    assert load_tokenizer(shards / "tokenizer").chat_template == BRACKETS


def test_a_table_of_both(tmp_path: Path) -> None:
    (tmp_path / "both.jsonl").write_text(
        json.dumps({"text": "plain"}) + "\n" + json.dumps({"text": messages(TURNS[0])}) + "\n"
    )
    documents = list(read_documents([str(tmp_path / "both.jsonl")], "text"))
    tokenizer = chat_tokenizer()
    tokens, starts, *_ = DocumentEncoder(tokenizer)(documents)
    first, second = DocumentEncoder(tokenizer)(documents[:1]).tokens, DocumentEncoder(tokenizer)(documents[1:]).tokens
    assert tokens.tolist() == [*first.tolist(), *second.tolist()]
    assert starts.tolist() == [0, len(first)]
