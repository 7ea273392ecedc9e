"""``assistant_only_loss``: the user's messages are read and not trained on, wherever samples, shards and processes begin."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from mhla_tasks.language import HubText, TokenShards
from mhla_tasks.language.chat_template import CHATML, ChatTemplate
from mhla_tasks.language.dialogues import Dialogue
from mhla_tasks.language.documents import DocumentEncoder, ReplyEncoder
from mhla_tasks.language.networks import network_loss
from mhla_tasks.language.prepare import RunEncoder, write_token_shards
from mhla_tasks.language.sources import ArrayRuns, TokenWindows
from mhla_tasks.language.stream import PackedRows, RowPosition
from mhla_tasks.language.targets import mask_ranges
from mhla_tasks.language.token_shards import TARGETS, ShardRuns
from mhla_tasks.language.tokenizer import save_tokenizer, token_bytes, train_tokenizer
from processes import fork_server, run_cli
from small import small_model
from tokenizer_kinds import made
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[3]

TURNS = [
    [("user", "How are you?"), ("assistant", "I am fine, thanks.")],
    [
        ("system", "Answer in one word."), ("user", "2 + 2?"), ("assistant", "4"), ("user", "und 3 mal 3? Größe ß"),
        ("assistant", "neun"),
    ],
    [("user", "What does <|im_end|> mean?"), ("assistant", "<|endoftext|> ends a text, <|im_end|> a turn.")],
    [("user", " spaces  and\nlines\n"), ("assistant", "\n\n日本語 😀  \n"), ("assistant", " and more")],
    [("user", "Well?"), ("assistant", "<think>\nhm\n</think>\n\n  A tree. "), ("user", "And?"), ("assistant", "")],
]  # fmt: skip
SPELLED = TURNS[2]
MARKED = CHATML.replace(
    "{{ message.content }}<|im_end|>\n",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}",
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role | upper }}] {{ m.content.split('</think>')[-1] | trim }}{{ eos_token if m.role == 'assistant' }}\n"
    "{% endfor %}{% if add_generation_prompt %}[ASSISTANT] {% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
FORGETFUL = (  # earlier replies lose their reasoning, and the last one has an empty one in front, as with Qwen 3
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip() }}{% elif m.role == 'assistant' and '</think>' not in m.content %}"
    "<think>\n\n</think>\n\n{{ m.content }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_LAST = (  # the system message stands in the last question, as with Mistral
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ messages[0].content ~ ' ' if loop.index0 >= messages | length - 2 }}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GREETED = (  # a default system message, as with SmolLM2
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant<|im_end|>\n{% endif %}"
    + CHATML
)
FIRST_ROLE = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no') }}{% endif %}" + CHATML
QUIET_FIRST = CHATML.replace(
    "<|im_start|>{{ message.role }}\n", "{% if not loop.first %}<|im_start|>{{ message.role }}\n{% endif %}"
)
WITHOUT_PROMPT = (  # as with Llama 2, with a default system message
    "{% if messages[0].role != 'system' %}[SYS] Be helpful [/SYS] {% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST] {% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
THINKS_FIRST = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


def chat_tokenizer(template: str = CHATML) -> Any:
    texts = [content for turns in TURNS for _, content in turns]
    tokenizer = train_tokenizer(texts * 3, 340, chat=True)
    tokenizer.chat_template = template
    return tokenizer


def rows(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def replies(tokenizer: Any, turns: list[tuple[str, str]]) -> list[str]:
    tokens, _, _, mask = ReplyEncoder(tokenizer)([Dialogue(tuple(turns))])
    assert tokens.tolist() == DocumentEncoder(tokenizer)([Dialogue(tuple(turns))]).tokens.tolist()
    return [tokenizer.decode(tokens[first:stop]) for first, stop in mask_ranges(mask)]


def write_chats(path: Path) -> str:
    lines = [{"messages": rows(turns), "text": "x"} for turns in TURNS] + [{"messages": "A text between dialogues."}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines * 3))
    return str(path)


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_composed", "fallback", "llama", "unigram", "wordpiece"])
@pytest.mark.parametrize("template", [MARKED, CHATML], ids=["marked", "derived"])
def test_replies_are_those_that_transformers_marks(kind: str, template: str) -> None:
    tokenizer = made(kind)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    for turns in TURNS:
        # transformers marks spelled tokens by their place, and nothing where the first character of a reply has no token.
        if turns is SPELLED or (kind == "wordpiece" and any(content[:1].isspace() for _, content in turns)):
            continue
        wanted = tokenizer.apply_chat_template(
            rows(turns), chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, _, _, mask = ReplyEncoder(tokenizer)([Dialogue(tuple(turns))])
        assert tokens.tolist() == wanted["input_ids"]
        assert mask.astype(int).tolist() == wanted["assistant_masks"]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["derived", "marked"])
def test_control_tokens_that_a_message_spells_end_no_reply(template: str) -> None:
    assert replies(chat_tokenizer(template), SPELLED) == [f"{SPELLED[1][1]}<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (BRACKETS, [["I am fine, thanks.<|endoftext|>"], ["4<|endoftext|>", "neun<|endoftext|>"]]),
        (PLAIN, [["I am fine, thanks.\n"], ["4\n", "neun\n"]]),
        (
            FORGETFUL,
            [
                ["<think>\n\n</think>\n\nI am fine, thanks.<|im_end|>"],
                ["4<|im_end|>", "<think>\n\n</think>\n\nneun<|im_end|>"],
            ],
        ),
        (CHATML.replace("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", ""), [["<|im_start|>assistant\nI am fine, thanks.<|im_end|>"], ["<|im_start|>assistant\n4<|im_end|>", "<|im_start|>assistant\nneun<|im_end|>"]]),
    ],
    ids=["brackets", "no control token", "forgets reasoning", "no prompt for a reply"],
)  # fmt: skip
def test_replies_of_templates_without_marks(template: str, wanted: list[list[str]]) -> None:
    """A reply is what the model has to write after the text that it reads in a chat."""
    tokenizer = chat_tokenizer(template)
    assert [replies(tokenizer, turns) for turns in TURNS[:2]] == wanted
    if template == FORGETFUL:
        assert replies(tokenizer, TURNS[4])[0] == "A tree. <|im_end|>"


@pytest.mark.parametrize("template", [CHATML, MARKED, BRACKETS, PLAIN, FORGETFUL, GREETED, FIRST_ROLE])
def test_dialogues_may_begin_with_the_assistant(template: str) -> None:
    """The first reply begins after the prompt for a reply, as it does in a chat that has a question."""
    tokenizer = chat_tokenizer(template)
    question, reply = ("user", "How are you?"), ("assistant", "fine")
    (wanted,) = replies(tokenizer, [question, reply])
    other = wanted.removeprefix("<think>\n\n</think>\n\n")  # FORGETFUL has it in the last reply only
    assert replies(tokenizer, [reply]) == [wanted]
    assert replies(tokenizer, [reply, question]) == [other]
    assert replies(tokenizer, [reply, question, reply]) == [other, wanted]
    assert replies(tokenizer, [("assistant", "<|endoftext|>"), question, reply])[1].lstrip() == wanted.lstrip()


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        (THINKS_FIRST, [("assistant", "b"), ("user", "a"), ("assistant", "c")]),
        (QUIET_FIRST, [("assistant", "b"), ("user", "a"), ("assistant", "c")]),
        (WITHOUT_PROMPT, [("assistant", "b"), ("user", "a"), ("assistant", "c")]),
        (SYSTEM_LAST, [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]),
        (THINKS_FIRST, TURNS[0]),
        ("{% if messages[-1].role == 'user' %}{{ raise_exception('no') }}{% endif %}" + CHATML, TURNS[0]),
        ("{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}", TURNS[0]),
    ],
    ids=[
        "reasoning in the first prompt",
        "first reply without the prompt",
        "no prompt",
        "system message moves",
        "reasoning in the prompt",
        "rejects a question",
        "reversed",
    ],
)
def test_a_template_that_does_not_show_the_replies_is_an_error(
    template: str, turns: list[tuple[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = chat_tokenizer(template)
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": rows(turns)}) + "\n") * 4)
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    options: dict[str, Any] = {"batch_size": 1, "context": 8, "num_workers": 0, "seed": 0, "assistant_only_loss": True}
    data = HubText(
        str(tmp_path / "tokenizer"), "json", data_files=str(path), column="messages", val_documents=1, **options
    )
    with pytest.raises(ValueError, match=r"chats.jsonl: line 1: the chat template does not show.*put {% generation %}"):
        data.windows("validate")
    shards = write_token_shards(tmp_path / "shards", [str(path)], tokenizer, column="messages", run_characters=10)
    assert caplog.text.count("the shards do not support assistant_only_loss") == 1
    assert len(
        TokenShards(str(shards[0]), str(shards[0]), **{**options, "assistant_only_loss": False}).windows("train")
    )
    with pytest.raises(ValueError, match=r"no .targets.npy, so the assistant's messages are unknown"):
        TokenShards(str(shards[0]), str(shards[0]), **options).windows("train")


def test_shards_of_an_earlier_version_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = RunEncoder.members
    monkeypatch.setattr(
        RunEncoder, "members", lambda *args: {name: data for name, data in encode(*args).items() if name != TARGETS}
    )
    (shard,) = write_token_shards(tmp_path, [write_chats(tmp_path / "a.jsonl")], chat_tokenizer(), column="messages")
    for stage in ("train", "validate"):
        assert len(TokenShards(str(shard), str(shard), batch_size=1, context=8, num_workers=0).windows(stage))
        data = TokenShards(str(shard), str(shard), batch_size=1, context=8, num_workers=0, assistant_only_loss=True)
        with pytest.raises(
            ValueError, match=r"has no .targets.npy.*prepare the shards again with lightning prepare text --force"
        ):
            data.windows(stage)
    monkeypatch.undo()
    command = ["prepare", "text", str(tmp_path), str(tmp_path / "a.jsonl"), f"--tokenizer={tmp_path / 'tokenizer'}"]
    for options, has_replies in (([], False), (["--force"], True)):  # without it, the call keeps the shards
        status, said = fork_server().run(*command, "--column=messages", *options, module="mhla_tasks")
        assert status == 0, said
        assert ShardRuns(data.shards.reader("train")).has_targets(0) == has_replies
    data = TokenShards(str(shard), str(shard), batch_size=1, context=8, num_workers=0, assistant_only_loss=True)
    assert all(len(data.windows(stage)) for stage in ("train", "validate"))


def test_a_tokenizer_in_python_is_an_error() -> None:
    tokenizer = made("byt5")
    tokenizer.chat_template = PLAIN
    with pytest.raises(ValueError, match="is written in Python and does not report which characters"):
        ReplyEncoder(tokenizer)([Dialogue(tuple(TURNS[0]))])


@pytest.mark.parametrize("context", [5, 7, 16, 33])
@pytest.mark.parametrize("separate", [False, True])
def test_each_reply_token_is_a_target_once_from_any_place(context: int, separate: bool, tmp_path: Path) -> None:
    """In memory, in shards of several runs, and in a stream that resumes: replies cross the borders of samples."""
    tokenizer = chat_tokenizer()
    table = token_bytes(tokenizer)
    encoder = ReplyEncoder(tokenizer)
    documents = ["A text.", *(Dialogue(tuple(turns)) for turns in TURNS)]
    tokens, starts, missing, mask = encoder(documents)
    windows = TokenWindows(ArrayRuns(tokens, starts, "text", missing, mask), context, table, separate, True)
    samples = [windows[index] for index in range(len(windows))]
    wanted = mask[1 : len(samples) * context + 1]
    assert np.concatenate([sample["target_mask"] for sample in samples]).tolist() == wanted.tolist()
    counted = sum(int(table[token]) for token, counts in zip(tokens[1:], wanted, strict=False) if counts)
    assert sum(sample["bytes"] for sample in samples) == counted

    path = tmp_path / "chats.jsonl"
    lines = ["A text.", *(rows(turns) for turns in TURNS)]
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    options: dict[str, Any] = {"context": context, "separate_documents": separate, "assistant_only_loss": True}
    (shard,) = write_token_shards(tmp_path / "shards", [str(path)], tokenizer, column="messages")
    data = TokenShards(str(shard), str(shard), batch_size=1, num_workers=0, seed=0, **options)
    for sample, other in zip(samples, (data.windows("train")[index] for index in range(len(samples))), strict=True):
        assert sample.keys() == other.keys()
        assert all(np.array_equal(sample[key], other[key]) for key in sample)

    def stream(position: RowPosition) -> Iterator[dict[str, torch.Tensor]]:
        def endless() -> Iterator[Any]:
            while True:
                yield from documents

        return iter(PackedRows(endless, encoder.one, [position], range(1), context, table, separate))

    batches = list(islice(stream(RowPosition(0, 0)), len(samples)))
    for sample, batch in zip(samples, batches, strict=True):
        assert sample["target_mask"].tolist() == batch["target_mask"][0].tolist()
        assert sample["bytes"] == int(batch["bytes"][0])
    stop = len(samples) // 2
    for batch, again in zip(
        batches[stop + 1 :], stream(RowPosition(*batches[stop]["position"][0].tolist())), strict=False
    ):
        assert all(torch.equal(batch[key], again[key]) for key in batch)


@pytest.mark.parametrize(("kind", "error"), [("byte_level", 0), ("fallback", 0), ("llama", 0.02), ("wordpiece", 0.3)])
def test_bytes_are_those_of_the_replies(kind: str, error: float) -> None:
    """A tokenizer that changes a text has an estimate: the difference is spread over the dialogue, the same everywhere."""
    tokenizer, context = made(kind), 6
    tokenizer.chat_template = PLAIN.replace(": ", ":\n")  # no token crosses the border of a reply
    encoder, table = ReplyEncoder(tokenizer), token_bytes(tokenizer)
    documents = [Dialogue(tuple(turns)) for turns in TURNS[:2] * 4]
    tokens, starts, missing, mask = encoder(documents)
    assert missing.any() == (error > 0)
    windows = TokenWindows(ArrayRuns(tokens, starts, "text", missing, mask), context, table, False, True)
    packed = PackedRows(lambda: iter(documents), encoder.one, [RowPosition(0, 0)], range(1), context, table, False)
    sizes = [windows[index]["bytes"] for index in range(len(windows))]
    assert [int(batch["bytes"][0]) for batch in packed] == sizes
    template = ChatTemplate(tokenizer)
    wanted = 0
    for turns in TURNS[:2] * 4:
        text = template.render_messages(turns)
        wanted += sum(len(text[start:stop].encode()) for start, stop in template.reply_ranges(turns, text))
    end = len(windows) * context + 1
    wanted -= int(table[tokens[end:]][mask[end:]].sum())  # tokens that do not fill a sample
    assert sum(sizes) == pytest.approx(wanted, rel=error)


def test_validation_and_training_count_replies_alone(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    (shard,) = write_token_shards(tmp_path, [write_chats(tmp_path / "a.jsonl")], tokenizer, column="messages")
    data = TokenShards(
        str(shard), str(shard), batch_size=2, context=48, num_workers=0, seed=0, assistant_only_loss=True
    )
    model = small_model(vocab_size=400, context=48)
    windows = data.windows("validate")
    samples = [windows[index] for index in range(len(windows))]
    tokens, mask = (torch.stack([sample[key] for sample in samples]) for key in ("tokens", "target_mask"))
    with torch.no_grad():
        scores = model(tokens[:, :-1]).log_softmax(-1)
    losses = -scores.gather(2, tokens[:, 1:, None])[..., 0]
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    (metrics,) = trainer.validate(model, data, verbose=False)
    assert metrics["val/loss"] == pytest.approx(float(losses[mask].mean()), rel=1e-5)
    size = sum(sample["bytes"] for sample in samples)
    assert metrics["val/bits_per_byte"] == pytest.approx(float(losses[mask].sum() / np.log(2) / size), rel=1e-5)
    batch = {"tokens": tokens, "target_mask": mask}
    model.log_loss = lambda loss, size: loss  # type: ignore[method-assign]
    assert float(model.training_step(batch, 0)) == pytest.approx(float(losses[mask].mean()), rel=1e-5)
    assert float(model.training_step({"tokens": tokens}, 0)) == pytest.approx(float(losses.mean()), rel=1e-5)


@pytest.mark.parametrize("plain", [False, True])
def test_a_batch_without_a_reply_changes_nothing(plain: bool) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=330, **sizes))
    loss = network_loss(network, torch.ones(1, 4, dtype=torch.long), torch.full((1, 4), -100), True, plain)
    loss.backward()
    assert float(loss) == 0
    assert all(
        float(parameter.grad.abs().sum()) == 0 for parameter in network.parameters() if parameter.grad is not None
    )


def test_validation_without_a_reply_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": rows([("user", "How are you?")])}) + "\n") * 9)
    (shard,) = write_token_shards(tmp_path, [str(tmp_path / "a.jsonl")], chat_tokenizer(), column="messages")
    data = TokenShards(
        str(shard), str(shard), batch_size=2, context=16, num_workers=0, seed=0, assistant_only_loss=True
    )
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="the val batches have no token that counts toward the loss"):
        trainer.validate(small_model(vocab_size=400, context=16), data, verbose=False)


@pytest.mark.parametrize(("sanity", "questions"), [(2, 6), (1, 6), (-1, 20)])
def test_the_sanity_check_needs_no_reply(sanity: int, questions: int, tmp_path: Path) -> None:
    """Its few batches may have only questions; the metrics of the validation after it are those without the check."""
    long = [("user", "how are you " * 60), ("assistant", "fine")]
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": rows(long)}) + "\n") * questions)
    (shard,) = write_token_shards(tmp_path / "shards", [str(path)], chat_tokenizer(), column="messages")
    metrics = []
    for steps in (sanity, 0):
        data = TokenShards(
            str(shard), str(shard), batch_size=1, context=32, num_workers=0, seed=0, assistant_only_loss=True
        )
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, max_steps=1,
            num_sanity_val_steps=steps, val_check_interval=1, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(small_model(vocab_size=400, context=32), data)
        metrics.append({name: float(value) for name, value in trainer.callback_metrics.items() if "val/" in name})
    assert metrics[0]["val/samples"] == len(data.windows("validate"))
    assert metrics[0] == metrics[1]


def test_a_trial_needs_no_reply(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": rows([("user", "how are you " * 60), ("assistant", "fine")])}) + "\n")
    (shard,) = write_token_shards(tmp_path / "shards", [str(path)], chat_tokenizer(), column="messages")
    data = TokenShards(
        str(shard), str(shard), batch_size=1, context=32, num_workers=0, seed=0, assistant_only_loss=True
    )
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, fast_dev_run=True)
    trainer.fit(small_model(vocab_size=400, context=32), data)
    assert "val/loss" not in trainer.callback_metrics, "the only batch of a trial has no reply"


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 1, 3), (2, 1, 1, 1, 1)], ids=str)
def test_accumulated_batches_train_as_one_does(sizes: tuple[int, ...], clip: float | None) -> None:
    """Their numbers of reply tokens differ, one has none, and the last step of an epoch may have a single batch."""
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(340, (sum(sizes), 17), generator=source)
    mask = torch.rand(sum(sizes), 16, generator=source) < torch.linspace(0, 1, sum(sizes))[:, None]
    parts = list(zip(tokens.split(sizes), mask.split(sizes), strict=True))
    pairs = [
        [torch.cat(both) for both in zip(*parts[first : first + 2], strict=True)] for first in range(0, len(parts), 2)
    ]
    results = []
    for batches, count in ((parts, 2), (pairs, 1)):
        torch.manual_seed(1)
        model = small_model(vocab_size=340, context=16)
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, max_epochs=3,
            accumulate_grad_batches=count, gradient_clip_val=clip,
        )  # fmt: skip
        samples = [{"tokens": rows, "target_mask": counted} for rows, counted in batches]
        trainer.fit(model, DataLoader(samples, batch_size=None))
        assert trainer.global_step == 3 * len(pairs)
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=3e-5)


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """Their numbers of reply tokens differ, and a batch may have none in one process; with shared sequences, too."""
    write_token_shards(tmp_path / "shards", [write_chats(tmp_path / "a.jsonl")], chat_tokenizer(), column="messages")
    shards = f"{tmp_path}/shards/train-*.tar"
    options = [
        "fit", "--model=mhla_tasks.language.LanguageModel", "--data=mhla_tasks.language.TokenShards", f"--data.train={shards}",
        f"--data.val={shards}", "--data.context=16", "--data.batch_size=2", "--data.num_workers=0", "--data.seed=0",
        "--data.assistant_only_loss=true", "--model.vocab_size=340", "--model.context=16", "--model.shape.dim=16",
        "--model.shape.depth=1", "--model.shape.heads=2", "--model.shape.mlp_width=32", "--model.attention.block_size=8",
        "--trainer.max_steps=6", "--trainer.enable_progress_bar=false", "--trainer.limit_val_batches=4", "--seed_everything=1",
        "--trainer.logger=CSVLogger", "--trainer.log_every_n_steps=1", "--model.training.optimizer.warmup_steps=0",
        "--trainer.enable_checkpointing=false", "--trainer.val_check_interval=3", "--trainer.check_val_every_n_epoch=null",
    ]  # fmt: skip
    fsdp = ["--config", str(ROOT / "configs/trainer/fsdp.yaml"), "--trainer.strategy.sequence_parallel_size=2"]
    losses = {}
    for name, processes, overlay in (("one", 1, []), ("two", 2, []), ("shared", 2, fsdp)):
        folder = tmp_path / name
        folder.mkdir()
        words = [*options[:1], *overlay, *options[1:], "--trainer.accelerator=cpu", f"--trainer.devices={processes}"]
        run_cli(*words, f"--trainer.logger.save_dir={folder}", "--trainer.precision=32-true", folder=folder)
        with next(folder.rglob("metrics.csv")).open() as stream:
            logged = list(csv.DictReader(stream))
        losses[name] = [
            float(row[key]) for key in ("train/loss", "val/loss", "val/bits_per_byte") for row in logged if row.get(key)
        ]
    assert len(losses["one"]) > 7
    for name in ("two", "shared"):
        assert losses[name] == pytest.approx(losses["one"], rel=1e-4), name
