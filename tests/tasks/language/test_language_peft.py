"""Decisions of Trainer and peft about a causal language model: they are those that fall for Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mhla_tasks.language import MHLAConfig, MHLAForCausalLM
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from small import small_model
from transformers import Cache, DataCollatorWithFlattening, DynamicCache, LlamaConfig, Trainer, TrainingArguments

IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
GREEDY: dict[str, Any] = {
    "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip
COUNTING = [{"input_ids": (row := [(start + i) % 90 + 3 for i in range(24)]), "labels": row} for start in range(64)]
"""Rows in which each token is the one before it plus 1."""


def counter(kind: str = "mhla") -> MHLAForCausalLM:
    torch.manual_seed(0)
    config = MHLAConfig(
        vocab_size=97, dim=32, depth=2, heads=2, mlp_width=64, context=512,
        attention={"kind": kind, "mixing": "exponential", "block_size": 8, "normalize": False, "rotary": True},
    )  # fmt: skip
    return MHLAForCausalLM(config)


def continued(model: Any, folder: Path, collator: Any = None) -> list[int]:
    """Return the tokens that a model generates after 10 to 14, after training with smoothed labels."""
    arguments = TrainingArguments(
        str(folder), max_steps=100, per_device_train_batch_size=16, learning_rate=1e-2, label_smoothing_factor=0.1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=COUNTING, data_collator=collator).train()
    prompt = torch.arange(10, 15)[None]
    return model.eval().generate(input_ids=prompt, max_new_tokens=3, do_sample=False)[0, 5:].tolist()


@pytest.mark.parametrize("kind", ["mhla", "softmax", "gla"])
def test_smoothed_labels_are_those_of_the_next_token(kind: str, tmp_path: Path) -> None:
    assert continued(counter(kind), tmp_path) == [15, 16, 17]


def test_smoothed_labels_of_packed_rows(tmp_path: Path) -> None:
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    assert continued(counter(), tmp_path, collator) == [15, 16, 17]


def test_smoothed_labels_under_adapters(tmp_path: Path) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=16, modules_to_save=["embedding", "head"])
    assert continued(get_peft_model(counter(), config), tmp_path) == [15, 16, 17]


@pytest.mark.parametrize("kind", ["dense", "softmax", "gla", "window"])
@pytest.mark.parametrize("config", [PromptTuningConfig, PromptEncoderConfig])
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_begins_with_the_trained_prompt(kind: str, config: Any, beams: int) -> None:
    """The first logits are those of the forward pass, with padding too, and without a state they are the same."""
    network = small_model(kind).network
    options = {} if config is PromptTuningConfig else {"encoder_hidden_size": 16}
    model = get_peft_model(network, config(task_type="CAUSAL_LM", num_virtual_tokens=5, **options)).eval()
    with torch.no_grad():
        model.prompt_encoder["default"].embedding.weight.normal_()
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    out = model.generate(input_ids=IDS, attention_mask=mask, max_new_tokens=4, num_beams=beams, **GREEDY)
    want = model(input_ids=IDS, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(out.logits[0][::beams], want, rtol=1e-4, atol=1e-4)
    if beams == 1:
        whole = model.generate(input_ids=IDS, attention_mask=mask, max_new_tokens=4, use_cache=False, **GREEDY)
        assert torch.equal(whole.sequences, out.sequences)


@pytest.mark.parametrize("kind", ["dense", "softmax", "mamba2"])
def test_prefixes_of_keys_and_values_are_rejected(kind: str) -> None:
    model = get_peft_model(small_model(kind).network, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    with pytest.raises(ValueError, match="Prefix tuning, which trains keys and values, is not supported"):
        model(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    with pytest.raises(ValueError, match="Prefix tuning, which trains keys and values, is not supported"):
        model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2)
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache"):
        small_model(kind).network(IDS, past_key_values=DynamicCache())


@pytest.mark.parametrize("config", [LoraConfig(task_type="CAUSAL_LM"), IA3Config(task_type="CAUSAL_LM")])
def test_adapters_find_the_layers_without_being_told(config: Any) -> None:
    model = get_peft_model(small_model().network, config)
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("qkv" in name or "fc2" in name for name in trained)
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_the_configuration_lists_the_sizes_that_llama_lists() -> None:
    ours = MHLAConfig(vocab_size=99, dim=32, depth=3, heads=4, key_value_heads=2, mlp_width=48, context=77)
    sizes = {
        "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 77,
    }  # fmt: skip
    llama = LlamaConfig(**sizes)
    for name in (*sizes, "head_dim"):
        assert ours.to_dict()[name] == llama.to_dict()[name] == getattr(ours, name)
    assert MHLAConfig(**ours.to_dict()).to_dict() == ours.to_dict()
    assert MHLAConfig(**{name: value for name, value in llama.to_dict().items() if name in sizes}).dim == 32
    assert "hidden_size" not in ours.to_json_string()
    with pytest.raises(ValueError, match="dim=64 and hidden_size=32 are the same size"):
        MHLAConfig(**{**ours.to_dict(), "dim": 64})
    assert MHLAConfig(dim=32, heads=4).num_key_value_heads == 4


@pytest.mark.parametrize("kind", ["dense", "softmax", "mamba2", "window"])
def test_the_state_is_a_cache_that_the_configuration_asks_for(kind: str) -> None:
    model = small_model(kind).network
    cache = model(IDS).past_key_values
    assert isinstance(cache, Cache)
    assert cache.get_seq_length() == 9
    assert model(IDS, use_cache=False).past_key_values is None
    assert model(IDS, labels=IDS).past_key_values is None
    assert isinstance(model(IDS, labels=IDS, use_cache=True).past_key_values, Cache)
    next_token = torch.full((2, 1), 7)
    after = model(next_token, past_key_values=cache).logits[:, -1]
    whole = model(torch.cat([IDS, next_token], 1), use_cache=False).logits[:, -1]
    torch.testing.assert_close(after, whole, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="cannot remove tokens"):
        cache.crop(-1)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.reset()
    assert cache.get_seq_length() == 0
    assert model.train()(IDS).past_key_values is None
    model.eval().config.use_cache = False
    assert model(IDS).past_key_values is None
