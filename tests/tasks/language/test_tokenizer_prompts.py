"""Prompts hold what a tokenizer puts in front and nothing that it appends; control tokens in a text stay text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from mhla_tasks.language import HubText
from mhla_tasks.language.documents import DocumentEncoder
from mhla_tasks.language.encoding import begin_tokens, control_tokens, encode_prompts, encode_texts
from mhla_tasks.language.evaluation.lm import MHLALM
from mhla_tasks.language.export import export
from mhla_tasks.language.generate import continue_prompts
from mhla_tasks.language.prompts import GenerationOptions
from mhla_tasks.language.streaming import TextPrinter
from mhla_tasks.language.token_shards import ShardRuns
from mhla_tasks.language.tokenizer import left_padded
from processes import fork_server
from small import SENTENCES, small_model
from tokenizer_kinds import ENDS, KINDS, made
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_mhla.data import ShardReader

GREEDY = GenerationOptions(max_new_tokens=6, temperature=0)


def command(*arguments: str, status: int = 0) -> str:
    found, said = fork_server().run(*arguments, module="mhla_tasks")
    assert found == status, said[-3000:]
    return said


def model_with(tokenizer: Any) -> Any:
    model = small_model(vocab_size=max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1))
    model.generation = GREEDY
    model.use_tokenizer(tokenizer)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_no_token_that_the_tokenizer_appends(kind: str) -> None:
    tokenizer, ends = made(kind), ENDS[kind]
    for text, row in zip(SENTENCES, encode_prompts(tokenizer, SENTENCES), strict=True):
        complete = tokenizer(text)["input_ids"]
        assert row == complete[: len(complete) - ends]
        assert len(complete) - ends == len(begin_tokens(tokenizer)) + len(
            tokenizer(text, add_special_tokens=False)["input_ids"]
        )


@pytest.mark.parametrize("kind", ["byte_level_two_ends", "llama", "unigram", "wordpiece", "byt5"])
def test_left_padded_rows_end_with_the_text(kind: str) -> None:
    tokenizer = made(kind)
    ids, mask = left_padded(tokenizer, [SENTENCES[0], "a"])
    assert mask[0].all()
    assert mask[1].tolist() == sorted(mask[1].tolist())
    for row, real, text in zip(ids, mask, [SENTENCES[0], "a"], strict=True):
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row[real.bool()].tolist() == begin_tokens(tokenizer) + plain


def test_an_empty_prompt_is_what_stands_in_front_or_an_error() -> None:
    assert left_padded(made("llama"), [""])[0].tolist() == [[1]]
    assert left_padded(made("wordpiece"), [""])[0].tolist() == [[2]]
    for kind in ("byt5", "unigram", "byte_level_end"):
        with pytest.raises(ValueError, match="the prompt '' is empty"):
            left_padded(made(kind), [""])


def printed(tokenizer: Any, ids: list[int], prompt: int, skip: bool, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the text that is printed after a prompt while tokens arrive one by one."""
    printer = TextPrinter(tokenizer, skip_prompt=skip)
    printer.put(torch.tensor([ids[:prompt]]))
    for token in ids[prompt:]:
        printer.put(torch.tensor([token]))
    printer.end()
    assert printer.tokens == ids[prompt:]
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_printed_as_it_comes_is_the_text_of_all_tokens(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = made(kind)
    texts = ["def f():\n    return 1\n\n  two  spaces\n", "naïve 你好 \U0001f600 \n x", " ".join(SENTENCES)]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] * 3
        assert printed(tokenizer, ids, 1, False, capsys) == tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    numbers = torch.Generator().manual_seed(0)
    for _ in range(5):  # as an untrained model draws them
        ids = torch.randint(len(tokenizer), (300,), generator=numbers).tolist()
        assert printed(tokenizer, ids, 2, False, capsys) == tokenizer.decode(ids, skip_special_tokens=True) + "\n"


def test_the_prompt_is_left_out_where_a_reply_alone_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = made("llama")
    ids = tokenizer("The river\n  runs on", add_special_tokens=False)["input_ids"]
    count = len(tokenizer("The river\n", add_special_tokens=False)["input_ids"])
    assert (
        printed(tokenizer, ids, count, True, capsys)
        == tokenizer.decode(ids)[len(tokenizer.decode(ids[:count])) :] + "\n"
    )


@pytest.mark.parametrize("kind", ["byte_level_end", "llama", "unigram", "byt5"])
def test_generate_and_samples_continue_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = made(kind)
    model = model_with(tokenizer)
    ids = torch.tensor([begin_tokens(tokenizer) + tokenizer("The river", add_special_tokens=False)["input_ids"]])
    tokens = model.network.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    wanted = tokenizer.decode(tokens, skip_special_tokens=True)
    assert model.continue_prompts(["The river"]) == [wanted]
    export(model, tmp_path / "exported")
    said = command(
        "generate", str(tmp_path / "exported"), "The river", "--max_new_tokens=6", "--temperature=0", "--device=cpu"
    )
    both = tokenizer.decode([*ids[0].tolist(), *tokens.tolist()], skip_special_tokens=True)
    assert said.strip().endswith(both.strip())


CHAT = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"


def test_a_chat_template_brings_the_begin_token_once() -> None:
    tokenizer = made("llama")
    chat = [{"role": "user", "content": "The river"}]
    text = tokenizer.apply_chat_template(chat, chat_template=CHAT, tokenize=False)
    wanted = tokenizer.apply_chat_template(chat, chat_template=CHAT, return_dict=False)
    assert encode_prompts(tokenizer, [text], read_control_tokens=True) == [wanted]
    assert wanted.count(tokenizer.bos_token_id) == 1
    asked = model_with(tokenizer)
    asked.generation = GenerationOptions(max_new_tokens=6, temperature=0, control_tokens=True)
    tokens = asked.network.generate(torch.tensor([wanted]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert asked.continue_prompts([text]) == [tokenizer.decode(tokens[0, len(wanted) :], skip_special_tokens=True)]


def scored(model: Any, context: list[int], continuation: list[int]) -> float:
    tokens = torch.tensor([context + continuation])
    with torch.no_grad():
        logits = model.network(tokens[:, :-1]).logits[0, len(context) - 1 :].log_softmax(-1)
    return float(logits.gather(-1, torch.tensor(continuation)[:, None]).sum())


@pytest.mark.parametrize("kind", ["byte_level_end", "byte_level_two_ends", "llama", "unigram", "byt5"])
def test_the_harness_scores_continuations_of_unended_contexts(kind: str) -> None:
    tokenizer = made(kind)
    model = model_with(tokenizer)
    lm = MHLALM(model.network, tokenizer, batch_size=2)
    pairs = [("The river runs", " through the old town"), ("A prime number", " has"), ("", "one")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    found = [value for value, _ in lm.loglikelihood(requests, disable_tqdm=True)]
    begin = begin_tokens(tokenizer)
    for (context, continuation), value in zip(pairs, found, strict=True):
        head = begin + tokenizer(context, add_special_tokens=False)["input_ids"]
        both = begin + tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        if not context:
            head = [lm.prefix_token_id]
            both = head + tokenizer(continuation, add_special_tokens=False)["input_ids"]
        assert value == pytest.approx(scored(model, both[: len(head)], both[len(head) :]), rel=1e-4)
    ids, mask = lm.tok_batch_encode([context for context, _ in pairs[:2]])
    assert [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)] == encode_prompts(
        tokenizer, [context for context, _ in pairs[:2]]
    )


def test_the_harness_reads_control_tokens_of_chat_templates() -> None:
    tokenizer = made("llama")
    lm = MHLALM(model_with(tokenizer).network, tokenizer)
    assert lm.tok_encode("<s>a</s>") == tokenizer("<s>a</s>", add_special_tokens=False)["input_ids"]
    assert lm.tok_encode("a", add_special_tokens=False) == tokenizer("a", add_special_tokens=False)["input_ids"]
    plain = made("byte_level")
    stock = MHLALM(model_with(plain).network, plain)
    for text in (*SENTENCES, "<|endoftext|>a", "a<|endoftext|>"):
        assert stock.tok_encode(text) == plain.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_in_a_text_stay_text(kind: str) -> None:
    tokenizer = made(kind)
    control = control_tokens(tokenizer)
    text = "The river" + "".join(f" {token} town{token}" for token in control.values())
    (row,) = encode_texts(tokenizer, [text])
    assert control.keys().isdisjoint(row)
    tokens, starts, *_ = DocumentEncoder(tokenizer)([text, "town"])
    assert control.keys().isdisjoint(tokens[1 : starts[1] - 1].tolist())
    assert control.keys().isdisjoint(encode_prompts(tokenizer, [text])[0][len(begin_tokens(tokenizer)) :])
    lossy = ("wordpiece", "words", "unigram")
    if kind not in lossy:
        assert tokenizer.decode(row).strip() == text
    (asked,) = encode_texts(tokenizer, [text], read_control_tokens=True)
    assert set(control) <= set(asked)
    assert asked == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_other_texts_have_the_tokens_that_transformers_gives(kind: str) -> None:
    texts = [*SENTENCES, "", " ", "  two\n\tlines ", "<b>bold</b>"]
    assert encode_texts(made(kind), texts) == made(kind)(texts, add_special_tokens=False)["input_ids"]


def test_html_that_looks_like_an_end_token_keeps_its_pieces() -> None:
    """T5's vocabulary holds </s> as a piece, which closes struck text in HTML."""
    tokenizer = made("unigram")
    (row,) = encode_texts(tokenizer, ["<s>the old</s> town"])
    pieces = tokenizer.convert_ids_to_tokens(row)
    assert "".join(pieces) == "▁<s>the▁old</s>▁town"
    assert "</s>" not in pieces
    assert "</s>" in tokenizer.tokenize("<s>the old</s> town", split_special_tokens=True)


def test_an_unknown_token_that_ends_texts_is_an_error() -> None:
    base = Tokenizer(models.WordLevel({"<end>": 0, "the": 1}, unk_token="<end>"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<end>", eos_token="<end>")
    assert encode_texts(tokenizer, ["the the"]) == [[1, 1]]
    with pytest.raises(ValueError, match=r"no tokens for a part of 'the river'.*'<end>'"):
        encode_texts(tokenizer, ["the river"])


def test_prepare_reads_control_tokens_only_where_asked(tmp_path: Path) -> None:
    made("byte_level").save_pretrained(tmp_path / "tokenizer")
    text = "GPT-2 ends a text with <|endoftext|> and pads with <|pad|>, they say"
    (tmp_path / "a.txt").write_text(text)
    common = [
        "prepare",
        "text",
        str(tmp_path / "out"),
        str(tmp_path / "a.txt"),
        f"--tokenizer={tmp_path / 'tokenizer'}",
    ]
    for options, inside in (([], []), (["--control_tokens", "--prefix=asked"], [0, 1])):
        command(*common, *options)
        prefix = "asked" if options else "train"
        runs = ShardRuns(ShardReader([tmp_path / f"out/{prefix}-00000.tar"]))
        tokens = runs.read(0, 0, runs.lengths[0])[0].tolist()
        assert [token for token in tokens[1:] if token < 2] == inside
        assert made("byte_level").decode(tokens[1:]) == text
    said = command(*common, "--control_tokens", status=1)
    assert "made from different files or options (control_tokens was False and is True)" in said.replace("\n", " ")


@pytest.mark.parametrize("asked", [False, True])
def test_streamed_text_reads_control_tokens_only_where_asked(asked: bool, tmp_path: Path) -> None:
    made("byte_level").save_pretrained(tmp_path / "tokenizer")
    rows = [{"text": f"row {number} <|endoftext|> and the river"} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = HubText(
        str(tmp_path / "tokenizer"), path="json", data_files=str(tmp_path / "rows.jsonl"), batch_size=1, context=16,
        val_documents=2, shuffle_buffer=0, num_workers=0, seed=0, control_tokens=asked,
    )  # fmt: skip
    tokens = data.windows("validate").runs.read(0, 0, 1000)[0]
    assert (tokens == 0).sum() == (4 if asked else 2)
    streamed = data._encoder.one(rows[0]["text"])[0]
    assert (streamed == 0).sum() == (2 if asked else 1)


def test_generate_reads_control_tokens_only_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(model_with(made("byte_level")), tmp_path)
    common = ["generate", str(tmp_path), "a<|pad|>b", "--max_new_tokens=1", "--temperature=0", "--device=cpu"]
    assert "a<|pad|>b" in command(*common)
    said = command(*common, "--control_tokens")  # control tokens are not printed
    assert "ab" in said
    assert "<|pad|>" not in said
    capsys.readouterr()
    continue_prompts(str(tmp_path), "a<|pad|>b", 1, {"temperature": 0.0}, 0, "cpu")
    assert capsys.readouterr().out.startswith("a<|pad|>b")
