"""``lightning chat``: turns are read once and give what the whole conversation gives, replies end where the template says."""

from __future__ import annotations

import copy
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from mhla_tasks.language import MHLAConfig, MHLAForCausalLM, chat_template
from mhla_tasks.language.chat import Chat
from mhla_tasks.language.chat_template import CHATML
from mhla_tasks.language.conversation import Conversation
from mhla_tasks.language.tokenizer import train_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_mhla import AttentionConfig, swap_attention

TRIMMED = (
    "{{ '<|endoftext|>' }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "[{{ m.role | upper }}] {{ m.content | trim }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT] {% endif %}"
)
FORGETFUL = (  # keeps the last message alone, as some templates leave out earlier reasoning
    "{% for m in messages[-1:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "trimmed": TRIMMED, "forgetful": FORGETFUL, "none": None}
TURNS = ("hello there", "how are you?", "fine, <|im_end|> thanks")


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(["hello there, how are you? I am fine, thanks."] * 3, 320)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def make_model(kind: str, context: int = 256) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=330, n_embd=32, n_layer=2, n_head=2, n_positions=512))
    if kind in ("llama", "swapped"):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=330, max_position_embeddings=512, **sizes))
        if kind == "swapped":
            swap_attention(model, AttentionConfig(block_size=8, mixing="exponential"))
        return model
    mixing = "dense" if kind == "dense" else "exponential"
    attention = AttentionConfig(
        kind="mhla" if kind == "dense" else kind, mixing=mixing, block_size=8, normalize=False, rotary=True
    )
    return MHLAForCausalLM(
        MHLAConfig(vocab_size=330, dim=32, depth=2, heads=2, mlp_width=64, context=context, attention=attention)
    )


def greedy(model: Any, ids: list[int], stops: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False, max_new_tokens=count,
        eos_token_id=stops, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", ["mhla", "dense", "softmax", "mamba2", "mhla_window", "gpt2", "llama", "swapped"])
@pytest.mark.parametrize("template", ["chatml", "none"])
def test_each_turn_gives_what_the_whole_conversation_gives(kind: str, template: str) -> None:
    tokenizer, model = make_tokenizer(TEMPLATES[template]), make_model(kind).eval()
    chat = Chat(model, tokenizer, None, 12, {"temperature": 0})
    read: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    wanted: list[int] = []
    twin = Conversation(tokenizer)
    for turn in TURNS:
        wanted = list(twin.ask(turn))
        fresh = greedy(make_model(kind).eval(), wanted, chat._stops(), 12)
        kept = fresh[:-1] if fresh[-1] in chat._stops() else fresh
        twin.reply(kept)
        read.clear()
        chat.answer(turn)
        assert chat.conversation.ids == twin.ids == wanted + kept
    assert max(read) < len(wanted) // 2, "the last turn read earlier ones again"


@pytest.mark.parametrize("kind", ["mhla", "softmax", "llama"])
@pytest.mark.parametrize("messages", ["[-1:]", "| rejectattr('role', 'equalto', 'assistant')"])
def test_a_template_that_changes_earlier_turns_gives_what_the_whole_conversation_gives(
    kind: str, messages: str
) -> None:
    """The state of the model has read turns that are no longer there."""
    template = CHATML.replace("in messages", f"in messages {messages}" if "|" in messages else f"in messages{messages}")
    tokenizer, model = make_tokenizer(template), make_model(kind).eval()
    chat = Chat(model, tokenizer, None, 6, {"temperature": 0})
    for turn in ("hello there", "how are you? " * 10, "fine, thanks " * 20):
        expected_ids = Conversation.ask(copy.deepcopy(chat.conversation), turn)
        expected = greedy(make_model(kind).eval(), expected_ids, chat._stops(), 6)
        chat.answer(turn)
        reply = chat.conversation.ids[len(expected_ids) :]
        assert chat.conversation.ids[: len(expected_ids)] == expected_ids
        assert reply == (expected[:-1] if expected[-1] in chat._stops() else expected)


THOUGHTFUL = (  # as with Qwen 3 and DeepSeek R1: replies before the last question lose their reasoning
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORTENED = CHATML.replace("{{ message.content }}", "{{ message.content | truncate(12, true, '', 0) }}")
REPLACED = CHATML.replace("{{ message.content }}", "{{ message.content | replace('hm', 'mh') }}")


@pytest.mark.parametrize("template", [THOUGHTFUL, SHORTENED, REPLACED], ids=["reasoning", "shortened", "replaced"])
def test_a_template_that_changes_messages_sees_them(template: str) -> None:
    tokenizer = make_tokenizer(template)
    conversation = Conversation(tokenizer)
    messages = []
    for text, answer in (
        ("hello there", "<think>\nhm\n</think>\n\nI am fine"), ("and how are you?", "thanks"), ("hello", "<think></think>a"), ("hm", "b"),
    ):  # fmt: skip
        messages.append({"role": "user", "content": text})
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert conversation.ask(text) == wanted
        conversation.reply(tokenizer(answer, add_special_tokens=False)["input_ids"])
        messages.append({"role": "assistant", "content": answer})


def test_a_chat_without_earlier_reasoning_gives_what_the_whole_conversation_gives() -> None:
    tokenizer, model = make_tokenizer(THOUGHTFUL), make_model("mhla").eval()
    chat = Chat(model, tokenizer, None, 6, {"temperature": 0})
    chat.conversation.ask("hello there")
    chat.conversation.reply(tokenizer("<think>\nhm\n</think>\n\nI am fine", add_special_tokens=False)["input_ids"])
    for turn in ("how are you?", "fine, thanks"):
        expected_ids = Conversation.ask(copy.deepcopy(chat.conversation), turn)
        assert "hm" not in tokenizer.decode(expected_ids)
        expected = greedy(make_model("mhla").eval(), expected_ids, chat._stops(), 6)
        chat.answer(turn)
        reply = chat.conversation.ids[len(expected_ids) :]
        assert reply == (expected[:-1] if expected[-1] in chat._stops() else expected)


@pytest.mark.parametrize("template", TEMPLATES)
def test_control_tokens_that_somebody_types_stay_text(template: str) -> None:
    tokenizer = make_tokenizer(TEMPLATES[template])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    conversation = Conversation(tokenizer)
    plain = list(conversation.ask("a b"))
    conversation.take_back()
    spelled = list(conversation.ask("a <|im_end|> b"))
    assert spelled.count(end) == plain.count(end)
    assert "a <|im_end|> b" in tokenizer.decode(spelled)


@pytest.mark.parametrize("template", ["chatml", "trimmed", "forgetful"])
def test_tokens_are_those_of_the_template(template: str) -> None:
    tokenizer = make_tokenizer(TEMPLATES[template])
    conversation = Conversation(tokenizer)
    messages = []
    for text, answer in (("hello there", "I am fine"), ("how are you?", "thanks"), ("hello", "")):
        messages.append({"role": "user", "content": text})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = conversation.ask(text)
        assert tokenizer.decode(ids) == rendered
        if (
            template != "trimmed" or len(messages) == 1
        ):  # its replies begin after a space, a token that the model has read
            assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        conversation.reply(tokenizer(answer, add_special_tokens=False)["input_ids"])
        messages.append({"role": "assistant", "content": answer})
    assert conversation.stops == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize("count", [0, -5])
def test_a_reply_of_no_tokens_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"max_new_tokens={count}"):
        Chat(make_model("dense", 64).eval(), make_tokenizer(), None, count, {})


def test_system_messages() -> None:
    asked = Conversation(make_tokenizer(CHATML), "Be brief.")
    assert "system\nBe brief." in asked.tokenizer.decode(asked.ask("hello"))
    with pytest.raises(ValueError, match="chat template rejects the messages: no system message"):
        Conversation(make_tokenizer(TRIMMED), "Be brief.")
    with pytest.raises(ValueError, match="no chat template, so there is no place for a system message"):
        Conversation(make_tokenizer(None), "Be brief.")


def test_a_reply_ends_at_the_end_of_a_turn(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, model = make_tokenizer(), make_model("llama").eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = Conversation(tokenizer).ask("hello there")
    third = greedy(model, prompt, [], 12)[2]
    if third != end:  # let the third token be the one that ends a turn
        with torch.no_grad():
            rows = model.lm_head.weight
            rows[[third, end]] = rows[[end, third]]
    model.generation_config.eos_token_id = [0, 7]
    chat = Chat(model, tokenizer, None, 12, {"temperature": 0})
    chat.answer("hello there")
    assert len(chat.conversation.ids) == len(prompt) + 2
    assert chat._stops() == sorted({0, 7, tokenizer.eos_token_id, end})
    said = capsys.readouterr()
    assert "<|im_end|>" not in said.out
    assert re.search(rf"3 tokens in .* s; {len(prompt) + 2} tokens in the conversation, state of", said.err)


def test_sampling_is_that_of_the_model_unless_asked_otherwise() -> None:
    model = make_model("llama")
    model.generation_config.update(do_sample=True, temperature=0.3, top_p=0.5)
    chat = Chat(model, make_tokenizer(), None, 8, {})
    assert (chat.sampling["temperature"], chat.sampling["top_p"]) == (0.3, 0.5)
    chat = Chat(model, make_tokenizer(), None, 8, {"temperature": 0})
    assert chat.sampling == {"do_sample": False, "num_beams": 1}


def test_a_conversation_longer_than_the_model_reads(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(make_model("dense", 64).eval(), make_tokenizer(), None, 16, {"temperature": 0})
    for _ in range(4):
        chat.answer("hello there, how are you?")
    said = capsys.readouterr().err
    assert re.search(r"the conversation has \d+ tokens, and the model reads at most 64: /reset begins a new one", said)
    chat.reset()
    chat.answer("hello")
    assert "tokens in the conversation, state" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "not safe to use: its loops take more",
        ),
        (
            "{% macro twice(n) %}{% for a in range(9) %}{{ twice(n) }}{% endfor %}{% endmacro %}"
            "{% for a in range(99999) %}{% set b = messages * 99999 %}{% for c in b %}{% endfor %}{% endfor %}",
            "not safe to use: its loops take more",
        ),
        ("{% for a in range(10 ** 9) %}x{% endfor %}", "chat template rejects the messages: Range too big"),
    ],
    ids=["nested", "repeated messages", "range"],
)
def test_a_template_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch, template: str, message: str) -> None:
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.3)

    def own_handler(number: int, frame: object) -> None:
        """Handle the signal of the timer that limits templates, as a profiler of the user may do."""

    previous = signal.signal(signal.SIGVTALRM, own_handler)
    try:
        with pytest.raises(ValueError, match=message):
            Conversation(make_tokenizer(template)).ask("hello")
        assert signal.getsignal(signal.SIGVTALRM) is own_handler
    finally:
        signal.signal(signal.SIGVTALRM, previous)


def saved(folder: Path, kind: str = "mhla", template: str | None = CHATML) -> str:
    make_model(kind).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["mhla", "swapped"])
def test_messages_from_a_pipe(kind: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "exported", kind)
    command = [
        sys.executable,
        "-m",
        "mhla_tasks",
        "chat",
        model,
        "--max-new-tokens=6",
        "--temperature=0",
        "--device=cpu",
    ]
    done = subprocess.run(
        command,
        input="hello\n\n/reset\nhello\n/what\n/exit\nnever\n",
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    replies = [line for line in done.stderr.splitlines() if "tokens in the conversation" in line]
    assert len(replies) == 2
    assert replies[0].split("; ")[1] == replies[1].split("; ")[1], "the conversation was not forgotten"
    first, second = done.stdout[: len(done.stdout) // 2], done.stdout[len(done.stdout) // 2 :]
    assert first == second
    assert "/reset forgets the conversation" in done.stderr


def test_a_model_without_template_says_so(server: ForkServer, tmp_path: Path) -> None:
    model = saved(tmp_path / "exported", template=None)
    status, said = server.run("chat", model, "--system=x", module="mhla_tasks", folder=tmp_path)
    assert status == 1
    assert "error: the tokenizer has no chat template" in said
    assert "Traceback" not in said


class Terminal:
    """Command that runs in a real terminal."""

    def __init__(self, *command: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, [sys.executable, *command])
        self.seen = ""

    def wait_for(self, text: str) -> str:
        """Wait until ``text`` appears, and return everything up to its end."""
        deadline = time.monotonic() + 200
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.seen[-2000:]}"
            if select.select([self.fd], [], [], 1)[0]:
                self.seen += os.read(self.fd, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


def test_in_a_terminal_a_reply_can_be_stopped(tmp_path: Path) -> None:
    model = saved(tmp_path / "exported")
    terminal = Terminal(
        "-m", "mhla_tasks", "chat", model, "--max_new_tokens=100000", "--temperature=1", "--device=cpu", "--seed=3"
    )
    try:
        terminal.wait_for("/reset forgets")
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("hello\r\n")
        while not select.select([terminal.fd], [], [], 200)[0]:
            pass
        os.kill(terminal.pid, signal.SIGINT)
        terminal.wait_for("tokens in the conversation")
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        _, status = os.waitpid(terminal.pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        os.close(terminal.fd)
