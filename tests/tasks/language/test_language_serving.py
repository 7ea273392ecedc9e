"""``transformers serve`` answers from exports: our own language model, and a Llama whose attention was swapped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import torch
from mhla_tasks.language import MHLAConfig, MHLAForCausalLM
from mhla_tasks.language.tokenizer import train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mhla import AttentionConfig, swap_attention

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def save(kind: str, folder: Path) -> Any:
    """Save an export with its tokenizer, and return the model."""
    tokenizer = train_tokenizer(["Where does the river run? To the sea."] * 3, 300)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model: Any
    if kind == "own":
        attention = AttentionConfig(mixing="exponential", block_size=8, normalize=False, rotary=True)
        model = MHLAForCausalLM(
            MHLAConfig(vocab_size=300, dim=32, depth=2, heads=2, mlp_width=64, context=256, attention=attention)
        )
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=256, **sizes))
        swap_attention(model, AttentionConfig(block_size=8, mixing="exponential"))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Start a server of one model, and return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    log = folder.parent / "server.log"
    program = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"
    options = ["serve", folder.name, "--trust-remote-code", "--device", "cpu", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *options],
            cwd=folder.parent,
            stdout=output,
            stderr=output,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    try:
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urlopen(f"{address}/health", timeout=10)
                break
            except HTTPError:
                break  # it answers
            except URLError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def ask(address: str, path: str, **request: Any) -> dict[str, Any]:
    data = json.dumps({"max_tokens": 8, "temperature": 0, "stream": False, **request}).encode()
    with urlopen(Request(f"{address}{path}", data, {"Content-Type": "application/json"}), timeout=120) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


@pytest.mark.parametrize("kind", ["own", "swapped"])
def test_the_server_answers_what_the_model_says(kind: str, tmp_path: Path) -> None:
    model, tokenizer = save(kind, tmp_path / "exported")

    def continued(text: str) -> str:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    with serving(tmp_path / "exported") as address:
        messages = [{"role": "user", "content": "Where does the river run?"}]
        chat = ask(address, "/v1/chat/completions", model="exported", messages=messages)
        plain = ask(address, "/v1/completions", model="exported", prompt="The river")
    assert chat["choices"][0]["message"]["content"] == continued("user: Where does the river run?\nassistant: ")
    assert plain["choices"][0]["text"] == continued("The river")
