"""Errors beyond learned positions; one warning where softmax layers read more than they were trained on, and none for attention that works at any length."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mhla_tasks.language import MHLAConfig, MHLAForCausalLM
from mhla_tasks.language.chat import Chat
from mhla_tasks.language.encoding import encode_texts
from mhla_tasks.language.generate import continue_prompts
from mhla_tasks.language.lengths import generate_tokens, softmax_context, warn_of_untrained_far_attention
from mhla_tasks.language.tokenizer import train_tokenizer
from small import SENTENCES, small_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from lightning_mhla import AttentionConfig, swap_attention

OURS = "softmax layers of the model were trained on at most 32"
THEIRS = ("exceeded the model's predefined", "longer than the specified maximum")


def mhla(*kinds: str) -> Any:
    torch.manual_seed(0)
    layers = [
        {"kind": kind, "mixing": "exponential", "block_size": 8, "normalize": False, "rotary": True} for kind in kinds
    ]
    sizes = {"vocab_size": 340, "dim": 32, "depth": len(kinds), "heads": 2, "mlp_width": 64, "context": 32}
    return MHLAForCausalLM(MHLAConfig(**sizes, attention=layers)).eval()


def llama(*layer_kinds: str, kind: str = "mhla", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=340, max_position_embeddings=32, **sizes))
    if layer_kinds:
        config = AttentionConfig(kind=kind, block_size=8, mixing="exponential", **options)
        swap_attention(model, config, layer_kinds=layer_kinds)
    return model.eval()


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(vocab_size=340, hidden_size=32, num_hidden_layers=1, state_size=4)).eval()


MODELS: dict[str, tuple[Any, bool]] = {
    "mhla": (lambda: mhla("mhla", "linear"), False),
    "window": (lambda: mhla("mhla_window", "mhla_window"), False),
    "recurrent": (lambda: mhla("retention", "gated_deltanet"), False),
    "softmax": (lambda: mhla("softmax", "softmax"), True),
    "hybrid": (lambda: mhla("mhla", "softmax"), True),
    "llama": (llama, True),
    "replaced": (lambda: llama("replace"), False),
    "partly replaced": (lambda: llama("keep", "replace"), True),
    "replaced by softmax": (lambda: llama("replace", kind="softmax"), True),
    "mamba": (mamba, False),
}


@pytest.mark.parametrize(
    ("build", "context", "warns"),
    [
        (lambda: mhla("mhla_window", "linear"), 16, True),
        (lambda: mhla("mhla_window", "linear"), 17, False),
        (lambda: mhla("mhla", "linear"), 16, False),
        (lambda: llama("replace", kind="mhla_window"), 16, True),
        (lambda: llama("keep", "replace", kind="mhla_window"), 8, True),
        (lambda: llama("replace", kind="mhla_window"), 17, False),
        (lambda: llama("replace", kind="mhla_window", options={"far_init": float("-inf")}), 16, False),
    ],
)
def test_samples_within_the_window_train_no_far_attention(
    build: Any, context: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_untrained_far_attention(build(), context)
    assert ("attention to earlier tokens is not trained" in caplog.text) == warns


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = train_tokenizer(SENTENCES * 4, 340, chat=True)
    tokenizer.model_max_length = 32  # as those of the hub have it
    return tokenizer


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_one_warning_exactly_where_quality_is_lost(
    name: str, command: str, tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, loses = MODELS[name]
    model = make()
    monkeypatch.setattr("mhla_tasks.language.generate.load_model", lambda path: (model, tokenizer))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    logging.getLogger("transformers.generation.stopping_criteria").warning_once.cache_clear()  # type: ignore[attr-defined]
    greedy = {"temperature": 0}
    prompt = "The river"
    size = len(encode_texts(tokenizer, [prompt])[0])
    assert softmax_context(model) == (32 if loses else None)
    if command == "generate":
        fits, longer = 33 - size, 60
        for count in (fits, longer, longer):
            continue_prompts("model", prompt, count, greedy, 0, "cpu")
            assert caplog.text.count(OURS) == int(loses and count == longer)
    else:
        tokenizer.eos_token = None
        chat = Chat(model, tokenizer, None, 30, greedy)
        chat._stops = list  # type: ignore[method-assign]  # replies have their full length
        chat.answer(prompt)
        chat.answer("The old town and two stone bridges")
        assert caplog.text.count(OURS) == int(loses)
    assert not any(text in caplog.text for text in THEIRS)


@pytest.mark.parametrize("options", [{"top_p": 2.0}, {"temperature": -1.0}, {"top_k": -3}], ids=str)
def test_a_wrong_option_is_an_error_before_the_first_prompt_is_typed(
    options: dict[str, Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mhla_tasks.language.generate.load_model", lambda path: (mhla("softmax"), tokenizer))
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("asked for a prompt"))
    with pytest.raises(ValueError, match=next(iter(options))):
        continue_prompts("model", None, 4, options, 0, "cpu")


def test_a_long_prompt_alone_passes_the_context(caplog: pytest.LogCaptureFixture) -> None:
    model = mhla("softmax")
    ids = torch.randint(2, 300, (2, 40))
    ids[1, :30] = 1
    model.generate(ids[1:, 30:], max_new_tokens=4, do_sample=False)
    assert OURS not in caplog.text
    mask = (ids != 1).long()
    model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
    assert caplog.text.count(OURS) == 1


def test_predict_warns_too(tokenizer: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    for kind, count in (("exponential", 0), ("softmax", 1)):
        module = small_model(kind, context=32, vocab_size=340)
        module.use_tokenizer(tokenizer)
        module.continue_prompts(["The river", "The river runs through the old town"])
        assert caplog.text.count(OURS) == count


def test_a_long_text_to_encode_is_no_warning(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert len(encode_texts(tokenizer, [" ".join(SENTENCES)])[0]) > 32
    assert not any(text in caplog.text for text in THEIRS)


def gpt2(vocabulary: int = 340) -> Any:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, n_positions=32, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0)
    ).eval()


def gpt2_replaced() -> Any:
    network = gpt2()
    swap_attention(network, AttentionConfig(kind="linear"))
    return network


def gpt_neo() -> Any:
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
    return GPTNeoForCausalLM(GPTNeoConfig(vocab_size=340, max_position_embeddings=32, **sizes)).eval()


def opt() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16}
    return OPTForCausalLM(OPTConfig(vocab_size=340, max_position_embeddings=32, word_embed_proj_dim=16, **sizes)).eval()


def roberta() -> Any:
    """Its positions begin after the row for padding: 34 rows are for 32 tokens."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return RobertaForCausalLM(
        RobertaConfig(vocab_size=340, max_position_embeddings=34, is_decoder=True, **sizes)
    ).eval()


@pytest.mark.parametrize("model", [gpt2, gpt2_replaced, gpt_neo, opt, roberta])
def test_more_tokens_than_learned_positions_are_an_error_before_generation(model: Any) -> None:
    network, ids = model(), torch.full((1, 30), 5)
    options = {"min_new_tokens": 3, "pad_token_id": 0, "do_sample": False}
    assert generate_tokens(network, ids, torch.ones_like(ids), max_new_tokens=3, **options).shape == (1, 33)
    with pytest.raises(ValueError, match="30 tokens and max_new_tokens=4 exceed the 32 positions"):
        generate_tokens(network, ids, torch.ones_like(ids), max_new_tokens=4, **options)


def test_generate_and_chat_stop_at_learned_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer(SENTENCES, 340)
    tokenizer.save_pretrained(tmp_path)
    network = gpt2(len(tokenizer))
    network.save_pretrained(tmp_path)
    continue_prompts(str(tmp_path), "a b", None, {}, 0, "cpu")
    with pytest.raises(ValueError, match="max_new_tokens=60 exceed the 32 positions"):
        continue_prompts(str(tmp_path), "a b", 60, {}, 0, "cpu")
    talk = Chat(network, tokenizer, None, 100, {"temperature": 0})
    talk.answer("a")
    talk.answer("a b c d e f g h i j k l m n o p q r s t u v w x y z")
    assert "the model reads at most 32" in capsys.readouterr().err
