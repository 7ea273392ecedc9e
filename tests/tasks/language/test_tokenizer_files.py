"""Tokenizers in checkpoints and exports: complete, the same in another process, and harmless."""

from __future__ import annotations

import base64
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from mhla_tasks.language.export import REPLACED, export, load_checkpoint
from mhla_tasks.language.module import LanguageModel
from mhla_tasks.language.tokenizer import (
    load_tokenizer,
    pack_tokenizer,
    save_tokenizer,
    token_bytes,
    train_tokenizer,
    unpack_tokenizer,
)
from mhla_tasks.tools.export import _is_replaced
from processes import fork_server
from small import SENTENCES, small_model
from tokenizer_kinds import KINDS, made
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from lightning_mhla.system.files import rebuilt_folder

CHAT = [{"role": "user", "content": "The river"}, {"role": "assistant", "content": "runs"}]
TEMPLATES = {
    "default": "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}",
    "rag": "RAG {{ messages[0]['content'] }}é",
    "tool_use": "{{ messages | tojson }}",
}
ASK = """
import json, sys
chat, texts = json.loads(sys.argv[3])
from mhla_tasks.language.export import load_checkpoint
from transformers import AutoTokenizer
for tokenizer in (load_checkpoint(sys.argv[1]).tokenizer, AutoTokenizer.from_pretrained(sys.argv[2], trust_remote_code=False)):
    named = tokenizer.chat_template
    print(json.dumps([
        [tokenizer(text)["input_ids"] for text in texts],
        {name: tokenizer.apply_chat_template(chat, chat_template=name, tokenize=False) for name in named},
        tokenizer.apply_chat_template(chat, return_dict=False),
        tokenizer.decode(tokenizer(texts[0])["input_ids"]),
    ]))
"""


def answers(tokenizer: Any, texts: list[str]) -> list[Any]:
    return [
        [tokenizer(text)["input_ids"] for text in texts],
        {name: tokenizer.apply_chat_template(CHAT, chat_template=name, tokenize=False) for name in TEMPLATES},
        tokenizer.apply_chat_template(CHAT, return_dict=False),
        tokenizer.decode(tokenizer(texts[0])["input_ids"]),
    ]


def answers_elsewhere(texts: list[str], checkpoint: Path, exported: Path) -> list[Any]:
    """Return the results of the tokenizers in a checkpoint and in an export, computed by a separate process."""
    status, said = fork_server().program(ASK, checkpoint, exported, json.dumps([CHAT, texts]))
    assert status == 0, said[-3000:]
    return [json.loads(line) for line in said.splitlines()[-2:]]


def templated(kind: str) -> Any:
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = dict(TEMPLATES)
    tokenizer.add_tokens(["<think>", AddedToken("<call>", lstrip=True, rstrip=True)])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    return tokenizer


@pytest.mark.parametrize("kind", ["byte_level_end", "llama", "unigram", "byt5"])
def test_a_checkpoint_and_an_export_keep_the_complete_tokenizer(kind: str, tmp_path: Path) -> None:
    tokenizer = templated(kind)
    texts = [*SENTENCES, "a<think>b <call> c<|turn|>"]
    wanted = answers(tokenizer, texts)
    model = small_model(vocab_size=600)
    model.use_tokenizer(tokenizer)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    restored = load_checkpoint(tmp_path / "last.ckpt").tokenizer
    assert answers(restored, texts) == wanted
    assert restored.chat_template == TEMPLATES
    assert fork_server().run("export", str(tmp_path / "last.ckpt"), str(tmp_path / "out"), module="mhla_tasks")[0] == 0
    assert answers_elsewhere(texts, tmp_path / "last.ckpt", tmp_path / "out") == [wanted, wanted]


@pytest.mark.parametrize(
    "templates", [None, "{{ messages }}\n", {"default": "{{ messages }}"}, {"rag": "R"}, TEMPLATES]
)
def test_templates_come_back_as_they_were(templates: Any) -> None:
    tokenizer = train_tokenizer(SENTENCES, 300)
    tokenizer.chat_template = templates
    folder = unpack_tokenizer(pack_tokenizer(tokenizer))
    wanted = "{{ messages }}" if templates == {"default": "{{ messages }}"} else templates
    assert folder.chat_template == wanted or folder.chat_template == templates


def test_files_in_folders_and_bytes_come_back(tmp_path: Path) -> None:
    class Nested(ByT5Tokenizer):
        def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
            path = Path(save_directory) / "vocabulary" / "small" / "pieces.model"
            path.parent.mkdir(parents=True)
            path.write_bytes(bytes(range(256)))
            (path.parent / "lines.txt").write_bytes("é\r\n\u2028x".encode())
            return (str(path),)

    files = pack_tokenizer(Nested())
    binary = files["vocabulary/small/pieces.model"]
    assert isinstance(binary, dict)
    assert base64.b64decode(binary["base64"]) == bytes(range(256))
    assert files["vocabulary/small/lines.txt"] == "é\r\n\u2028x"
    torch.save({"tokenizer": files}, tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["tokenizer"] == files
    config = json.loads(str(files["tokenizer_config.json"]))
    plain = {**files, "tokenizer_config.json": json.dumps({**config, "tokenizer_class": "ByT5Tokenizer"})}
    assert unpack_tokenizer(plain)("é")["input_ids"] == ByT5Tokenizer()("é")["input_ids"]


def export_again(model: LanguageModel, folder: Path) -> None:
    """Export as ``lightning export`` does, in place of an earlier export."""
    with rebuilt_folder(folder, partial(_is_replaced, REPLACED)) as aside:
        export(model, aside)


def test_a_second_export_leaves_no_templates_of_the_first(tmp_path: Path) -> None:
    for templates in (TEMPLATES, {"default": "D", "rag": "R"}, "one", None):
        model = small_model(vocab_size=600)
        tokenizer = train_tokenizer(SENTENCES, 300)
        tokenizer.chat_template = templates
        model.use_tokenizer(tokenizer)
        export_again(model, tmp_path / "out")
        assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == templates
    (tmp_path / "out/notes.txt").write_text("mine")
    export_again(model, tmp_path / "out")
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    [
        "../escaped.txt", "a/../../escaped.txt", "/tmp/escaped-by-a-tokenizer.txt", "..", "", ".", "a//b", "./a", "a\\b",
        "C:escaped.txt", "a/b/", "nul\0", "/".join("a" * 40), 7,
    ],
)  # fmt: skip
def test_names_that_lead_out_of_the_folder_are_an_error(name: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "inner").mkdir()
    files = {**pack_tokenizer(made("byte_level")), name: "x"}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "inner"))
    with pytest.raises(ValueError, match="not a path inside a folder"):
        unpack_tokenizer(files)
    assert [path.name for path in tmp_path.rglob("*")] == ["inner"]


@pytest.mark.parametrize(
    "files",
    [
        {}, ["a"], None, {"a": 1}, {"a": {"base64": "§"}}, {"a": {"base64": 3}}, {"a": {"other": "x"}}, {"a": b"x"},
        {"a": "x", "a/b": "y"}, {f"{number}": "" for number in range(5000)}, {"tokenizer.json": "{"}, {"a": "\ud800"},
    ],
)  # fmt: skip
def test_what_is_not_files_of_a_tokenizer_is_an_error(files: Any) -> None:
    with pytest.raises(ValueError, match="the checkpoint's tokenizer"):
        unpack_tokenizer(files)


@pytest.mark.parametrize("name", ["../rag", "a/b", "", "a\\b", "C:rag"])
def test_a_template_without_the_name_of_a_file_is_an_error(name: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(SENTENCES, 300)
    tokenizer.chat_template = {"default": "D", name: "escaped"}
    with pytest.raises(ValueError, match=r"the chat template .* has no name for a file"):
        save_tokenizer(tokenizer, tmp_path / "inner")
    assert not list(tmp_path.rglob("*"))


def bomb(folder: Path, part: str, steps: list[dict[str, Any]], pre: bool = False) -> Path:
    train_tokenizer(SENTENCES, 300).save_pretrained(folder)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    key = {"normalizer": "normalizers", "decoder": "decoders", "pre_tokenizer": "pretokenizers"}[part]
    if pre:
        steps = [*steps, state[part]]
    state[part] = {"type": "Sequence", key: steps}
    path.write_text(json.dumps(state))
    return folder


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("normalizer", [replacing({"String": "a"}, "a" * 10)] * 9),
        ("normalizer", [replacing({"Regex": "[☃a]"}, "☃" * 10)] * 9),
        ("normalizer", [replacing({"String": "☃"}, "x" * 10_000_000)]),
        ("normalizer", [{"type": "Sequence", "normalizers": [replacing({"String": "ab"}, "abab")] * 20}]),
        ("decoder", [replacing({"String": "a"}, "a" * 10)] * 9),
    ],
)
def test_replacements_that_blow_a_text_up_are_an_error(part: str, steps: Any, tmp_path: Path) -> None:
    folder = bomb(tmp_path / "bomb", part, steps)
    with pytest.raises(ValueError, match=r"bomb is not safe to use: the replacements of its"):
        load_tokenizer(folder)
    files = {path.name: path.read_text() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="is not safe to use"):
        unpack_tokenizer(files)


LETTERS = [replacing({"String": chr(0x4E00 + number)}, chr(0x4E01 + number) * 10) for number in range(9)]


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("normalizer", [replacing({"Regex": r"\p{Han}"}, "b" * 999), replacing({"String": "b"}, "c" * 999)]),
        ("normalizer", [replacing({"Regex": r"\p{Thai}"}, "x" * 200)]),
        ("normalizer", [replacing({"String": "q"}, "z" * 500)]),
        ("normalizer", LETTERS),
        ("normalizer", [{"type": "Prepend", "prepend": "x" * 1001}]),
        ("normalizer", [{"type": "Prepend", "prepend": "x" * 900}, replacing({"String": "x"}, "y" * 900)]),
        ("normalizer", [replacing({"String": "ab"}, "abab")] * 1001),
        ("normalizer", [replacing({"Regex": ""}, "x" * 150)]),
        ("decoder", [replacing({"Regex": "[^a]"}, "b" * 150)]),
    ],
    ids=["two scripts", "one script", "one letter", "letters", "long", "prepended", "many", "nothing", "decoder"],
)
def test_growth_does_not_depend_on_the_text_that_is_tried(part: str, steps: Any, tmp_path: Path) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match=r"bomb is not safe to use"):
        load_tokenizer(bomb(tmp_path / "bomb", part, steps))
    assert time.process_time() - begun < 2


def test_many_replacements_that_do_not_feed_each_other_are_read(tmp_path: Path) -> None:
    steps = [replacing({"String": sign}, "ff") for sign in "ﬀﬁﬂﬃﬄœæ…€№™©®"]
    assert load_tokenizer(bomb(tmp_path / "ligatures", "normalizer", steps)).encode("a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padding": {"strategy": {"Fixed": 10**9}}}, "pads each text to 1000000000 tokens"),
        ({"padding": {"strategy": "BatchLongest", "pad_to_multiple_of": 10**9}}, "pads each text to 1000000000 tokens"),
        ({"post_processor": {"single": 5000, "ids": 1}}, r"adds \d+ tokens around each text"),
        ({"post_processor": {"single": 50, "ids": 500}}, r"adds \d+ tokens around each text"),
    ],
    ids=["fixed", "multiple", "template", "ids"],
)
def test_a_tokenizer_adds_no_more_than_a_few_tokens(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    train_tokenizer(SENTENCES, 300).save_pretrained(tmp_path / "bomb")
    path = tmp_path / "bomb/tokenizer.json"
    state = json.loads(path.read_text())
    for name, value in changes.items():
        if name == "padding":
            pad = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
            state[name] = {**pad, **value}
        else:
            token = {"SpecialToken": {"id": "x", "type_id": 0}}
            texts = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
            single = [token] * value["single"] + texts[:1]
            special = {"id": "x", "ids": [0] * value["ids"], "tokens": ["x"] * value["ids"]}
            template = {"type": "TemplateProcessing", "single": single, "pair": single + texts[1:]}
            state[name] = {**template, "special_tokens": {"x": special}}
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=rf"bomb is not safe to use: it {message}"):
        load_tokenizer(tmp_path / "bomb")


def test_a_tokenizer_of_many_megabytes_is_named_and_not_read(tmp_path: Path) -> None:
    train_tokenizer(SENTENCES, 300).save_pretrained(tmp_path / "large")
    with (tmp_path / "large/tokenizer.json").open("r+b") as stream:
        stream.truncate(1 << 30)  # sparse on the disk
    with pytest.raises(ValueError, match=r"large/tokenizer.json has 1073741824 bytes"):
        load_tokenizer(tmp_path / "large")


def test_a_regular_expression_without_end_is_one_line(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+a+)+b"}, "behavior": "Isolated", "invert": False}
    folder = bomb(tmp_path / "bomb", "pre_tokenizer", [split], pre=True)
    (tmp_path / "a.txt").write_text("a" * 60)
    status, said = fork_server().run(
        "prepare", "text", str(tmp_path / "out"), str(tmp_path / "a.txt"), f"--tokenizer={folder}", module="mhla_tasks"
    )
    assert status == 1
    assert "Traceback" not in said
    assert "fails on a text" in said


def test_usual_replacements_are_not_bombs() -> None:
    for kind in KINDS:
        assert made(kind) is not None


def test_further_end_tokens_of_a_model_stay() -> None:
    """A chat model also ends a turn; the tokenizer knows one of its end tokens."""
    tokenizer = train_tokenizer(SENTENCES, 300)
    for ends, wanted in (([0, 7], [0, 7]), ([5, 7], 0), (7, 0), (None, 0)):
        model = small_model(vocab_size=300)
        model.network.config.eos_token_id = model.network.generation_config.eos_token_id = ends
        model.use_tokenizer(tokenizer)
        assert model.network.config.eos_token_id == wanted
        assert model.network.generation_config.eos_token_id == wanted


def test_a_prefix_of_continued_words_that_is_a_token_itself_has_its_bytes() -> None:
    vocabulary = {"[UNK]": 0, "##": 1, "##ab": 2, "ab": 3}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert token_bytes(tokenizer)[1:].tolist() == [2, 2, 2]
