"""Attention swapped into transformers' language models: the definition, generation, saving, and transformers' own tools."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_mhla import AttentionConfig, load_swapped, swap_attention
from lightning_mhla.attention import MHLA, BlockLayout, build_attention
from lightning_mhla.swap import original_attention, swapped_layers
from lightning_mhla.swap.transformers import DECODERS

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
OTHER: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": None},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "layer_types": ["full_attention"] * 4, "attn_logit_softcapping": None},
    "Gemma3": {"head_dim": 16, "layer_types": ["full_attention"] * 4, "query_pre_attn_scalar": 24},
    "Olmo": {"clip_qkv": 0.5},
    "Phi": {"qk_layernorm": True},
    "Phi3": {"sliding_window": None},
    "GPT2": {"attn_pdrop": 0.0},
}
TYPES = {"Gemma3": "gemma3_text", "GPTNeoX": "gpt_neox"}
BLOCKS = AttentionConfig(block_size=4, mixing="exponential", mixing_per_head=True)
WINDOW = AttentionConfig(kind="mhla_window", block_size=4, mixing="exponential", feature_map="learned")


def tiny(family: str = "Llama", **more: Any) -> Any:
    """Build a small random model of a family, with changed weights of norms and biases."""
    torch.manual_seed(0)
    sizes = {**SIZES, **OTHER.get(family, {}), **more}
    config = AutoConfig.for_model(TYPES.get(family, family.lower()), **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def swapped(model: Any, config: AttentionConfig = BLOCKS, **options: Any) -> Any:
    """Return a copy with swapped attention, whose coefficients differ from their initial values."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    for layer in swap_attention(other, config, **options).values():
        if isinstance(layer, MHLA):
            for parameter in layer.mixing.parameters():
                nn.init.uniform_(parameter, 0.1, 1.0)
    return other


def tokens(rows: int = 2, columns: int = 22) -> Tensor:
    return torch.randint(1, 64, (rows, columns), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("mixing", ["dense", "exponential"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_swapped_model_is_its_definition(family: str, mixing: Any) -> None:
    """Every pair of tokens written out in float64, in the model's own code around it: 1e-9 (in float32 1e-4)."""
    model = tiny(family).double()
    other = swapped(model, AttentionConfig(block_size=4, mixing=mixing))
    layers, x = swapped_layers(other), tokens()
    assert len(layers) == 4

    def definition(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        count, repeats = query.shape[2], query.shape[1] // key.shape[1]
        block = torch.arange(count) // 4
        mixing = layers[module.layer_idx].coefficients(query)[0]
        mixing = mixing.double() if isinstance(mixing, Tensor) else mixing.to(torch.float64).matrix(-(-count // 4))
        scaled = query * options["scaling"] * query.shape[-1] ** 0.5
        weights = torch.stack([_weights(scaled[b], key[b].repeat_interleave(repeats, 0)) for b in range(len(query))])
        weights = weights * mixing[..., block[:, None], block].expand(weights.shape[1:]) * (block[:, None] >= block)
        weights = weights.tril()
        out = (weights / (weights.sum(-1, keepdim=True) + 1e-6)) @ value.repeat_interleave(repeats, 1)
        return out.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("definition", definition)
    written = copy.deepcopy(model)
    written.config._attn_implementation = "definition"
    with torch.no_grad():
        expected = written(x).logits
        assert not torch.allclose(expected, model(x).logits, atol=1e-2)
        torch.testing.assert_close(other(x).logits, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other.float()(x).logits.double(), expected, rtol=1e-4, atol=1e-4)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    """Compute the products ``[H, N, N]`` of queries and keys ``[H, N, D]`` after the feature map."""
    return (q.relu() + 1e-6) @ (k.relu() + 1e-6).transpose(1, 2)


@pytest.mark.parametrize("family", DECODERS)
def test_softmax_swapped_for_softmax_and_nothing_swapped_change_nothing(family: str) -> None:
    model, x = tiny(family), tokens()
    with torch.no_grad():
        expected = model(x).logits
        same = swapped(model, AttentionConfig(kind="softmax"))
        torch.testing.assert_close(same(x).logits, expected, rtol=1e-5, atol=1e-5)
        window = swapped(model, replace(WINDOW, block_size=11))  # no token is farther away than the block before
        torch.testing.assert_close(window(x).logits, expected, rtol=1e-4, atol=1e-4)
        untouched = swapped(model, layers=[])
        assert torch.equal(untouched(x).logits, expected)
    assert untouched.config.to_dict() == model.config.to_dict()


@pytest.mark.parametrize("kind", ["mhla", "dense", "learned", "window", "linear", "gla", "hybrid"])
def test_generation_is_that_without_a_cache(kind: str) -> None:
    """Greedy and beams, rows padded at their left, as the row alone."""
    config = {
        "mhla": BLOCKS,
        "dense": AttentionConfig(block_size=4),
        "learned": replace(BLOCKS, feature_map="learned"),
        "window": WINDOW,
        "linear": AttentionConfig(kind="linear"),
        "gla": AttentionConfig(kind="gla"),
        "hybrid": BLOCKS,
    }[kind]
    options = {"layer_kinds": ["keep", "replace"]} if kind == "hybrid" else {}
    model, x = swapped(tiny("Qwen3"), config, **options), tokens()
    mask = torch.ones_like(x)
    mask[0, :7] = 0
    for beams in (1, 3):
        how = {"max_new_tokens": 9, "do_sample": False, "num_beams": beams}
        out = model.generate(x, attention_mask=mask, **how)[:, 22:]
        assert torch.equal(out, model.generate(x, attention_mask=mask, use_cache=False, **how)[:, 22:])
        assert torch.equal(out[:1], model.generate(x[:1, 7:], **how)[:, 15:])


@pytest.mark.parametrize("config", [BLOCKS, WINDOW], ids=["mhla", "window"])
def test_the_state_does_not_grow(config: AttentionConfig) -> None:
    """With exponential mixing; and reading in parts, one token among them, is reading at once."""
    model, x = swapped(tiny(), config), tokens(2, 40)
    cache, sizes, parts = DynamicCache(config=model.config), [], []
    with torch.no_grad():
        for part in x.split([11, 1, 8, 20], dim=1):
            parts.append(model(part, past_key_values=cache).logits)
            sizes.append([layer.state.bytes for layer in cache.layers])
        torch.testing.assert_close(torch.cat(parts, 1), model(x, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    assert sizes[0] == sizes[-1]
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_seen(side: str, implementation: str) -> None:
    """With every form of mask that transformers makes, cached or not; softmax layers among the others.

    Positions are those that ``generate`` gives: features of turned queries depend on the positions themselves.
    """
    model = tiny("Qwen2")
    model.set_attn_implementation(implementation)
    model, x = swapped(model, layers=[0, 2]), tokens()
    mask = torch.ones_like(x)
    real = slice(9, None) if side == "left" else slice(0, 13)
    mask[0] = 0
    mask[0, real] = 1
    with torch.no_grad():
        alone = model(x[:1, real], use_cache=False).logits
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for cached in (False, True):
            out = model(x, attention_mask=mask, position_ids=positions, use_cache=cached).logits
            torch.testing.assert_close(out[:1, real], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kept", "given"), [(None, "positions"), (None, "mask"), (None, "flash"), ([0, 2], "positions"), ([0, 2], "mask")]
)
def test_packed_documents_do_not_see_each_other(kept: list[int] | None, given: str) -> None:
    """By the mask that transformers makes of positions, one that is given, and by positions alone; softmax layers too."""
    model, x = swapped(tiny(), layers=kept), tokens(1)
    options: dict[str, Any] = {"position_ids": torch.cat([torch.arange(9), torch.arange(13)])[None]}
    if given == "mask":
        blocks = torch.block_diag(torch.ones(9, 9), torch.ones(13, 13)).bool().tril()
        options["attention_mask"] = blocks[None, None]
    with torch.no_grad():
        parts = [model(part, use_cache=False).logits for part in x.split([9, 13], dim=1)]
        if given == "flash":
            model.config._attn_implementation_internal = "flash_attention_2"
        packed = model(x, use_cache=False, **options).logits
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_positions_mean_what_they_mean_before_the_swap(implementation: str) -> None:
    """Starting again or a gap parts documents where no mask and no cache is given, and only there; a gap not in flash attention."""
    model, x = tiny(), tokens(1)
    model.set_attn_implementation(implementation)
    same = swapped(model, AttentionConfig(kind="softmax"))
    again, gap = (torch.cat([torch.arange(9), torch.arange(start, start + 13)])[None] for start in (0, 30))
    calls: list[dict[str, Any]] = [
        {"use_cache": False},
        {"use_cache": True},
        {"attention_mask": torch.ones_like(x), "use_cache": False},
        {"attention_mask": (torch.arange(22) > 3).long()[None], "use_cache": False},
    ]
    with torch.no_grad():
        for positions in (again, gap):
            found = [same(x, position_ids=positions, **call).logits[:, 4:] for call in calls]
            for logits, call in zip(found, calls, strict=True):
                expected = model(x, position_ids=positions, **call).logits[:, 4:]
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert not torch.allclose(found[0], found[1], atol=1e-2)
        same.config._attn_implementation_internal = "flash_attention_2"
        flash = same(x, position_ids=gap, use_cache=False).logits[:, 4:]
    torch.testing.assert_close(flash, found[1], rtol=1e-4, atol=1e-4)


def test_documents_packed_in_several_rows_or_beside_padding_are_refused() -> None:
    model, x = swapped(tiny()), tokens()
    blocks = torch.block_diag(torch.ones(9, 9), torch.ones(13, 13)).bool().tril()
    blocks[:, :4] = False
    with pytest.raises(ValueError, match="hides more than padding and later tokens"):
        model(x[:1], attention_mask=blocks[None, None], use_cache=False)
    positions = torch.cat([torch.arange(9), torch.arange(13)])[None]
    with pytest.raises(ValueError, match=r"need a batch of one row, not \[2, 22\] tokens"):
        model(x, position_ids=positions.expand(2, -1), use_cache=False)


def test_biases_in_a_mask_are_refused() -> None:
    model, x = swapped(tiny()), tokens()
    hidden = torch.full((22, 22), torch.finfo(torch.float32).min).triu(1).expand(2, 1, -1, -1)
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        torch.testing.assert_close(model(x, attention_mask=hidden, use_cache=False).logits, expected)
    with pytest.raises(ValueError, match="adds biases to the scores"):
        model(x, attention_mask=hidden - torch.rand(22, 22), use_cache=False)


def test_attention_weights_are_refused_while_layers_are_replaced() -> None:
    """transformers would leave the layer out of the tuple."""
    model, x = tiny(), tokens()
    model.set_attn_implementation("eager")
    other = swapped(model, layers=[0])
    with pytest.raises(ValueError, match="output_attentions: replaced layers have no attention weights"):
        other(x, output_attentions=True)
    with torch.no_grad(), original_attention(other):
        with original_attention(other):
            pass
        found = other(x, output_attentions=True).attentions
    assert len(found) == 4


def test_a_model_that_was_saved_before_is_swapped(tmp_path: Path) -> None:
    """Saving leaves the name of a dtype in the configuration."""
    model, x = tiny(), tokens()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(swapped(model, AttentionConfig(kind="softmax"))(x).logits, model(x).logits)


def test_a_file_in_place_of_the_folder_is_the_error_of_transformers(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_text("notes")
    with pytest.raises(AssertionError, match="should be a directory, not a file"):
        swapped(tiny()).config.save_pretrained(file)
    assert file.read_text() == "notes"


def test_attention_derived_from_one_that_is_known_is_refused() -> None:
    model = tiny()
    layer = model.model.layers[2].self_attn
    layer.__class__ = type("OwnAttention", (type(layer),), {})
    state = set(model.state_dict())
    with pytest.raises(ValueError, match="OwnAttention is derived from LlamaAttention"):
        swap_attention(model, BLOCKS)
    assert set(model.state_dict()) == state


def test_one_row_padded_at_its_left_generates_as_without_padding() -> None:
    """Its positions, as ``generate`` counts them, stand still over the padding."""
    model, x = swapped(tiny()), tokens(1)
    mask = torch.ones_like(x)
    mask[:, :7] = 0
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    alone = model.generate(x[:, 7:], **how)[:, 15:]
    assert torch.equal(model.generate(x, attention_mask=mask, **how)[:, 22:], alone)
    assert torch.equal(model.generate(x, attention_mask=mask, prefill_chunk_size=5, **how)[:, 22:], alone)


def test_models_of_one_configuration_are_swapped_each_for_itself(tmp_path: Path) -> None:
    config = tiny().config
    first, second, third = (AutoModelForCausalLM.from_config(config) for _ in range(3))
    swap_attention(first, BLOCKS)
    swap_attention(second, AttentionConfig(kind="linear"), layers=[0])
    assert first.config.swapped_attention != second.config.swapped_attention
    assert not hasattr(third.config, "swapped_attention")
    first.save_pretrained(tmp_path / "swapped")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "swapped", trust_remote_code=False)
    third.save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert len(swap_attention(plain, BLOCKS)) == 4


def test_tokens_in_a_state_cannot_be_hidden_afterwards() -> None:
    model, x = swapped(tiny()), tokens()
    cache = model(x[:, :15]).past_key_values
    mask = torch.ones(2, 22, dtype=torch.long)
    mask[:, :8] = 0
    with pytest.raises(ValueError, match="tokens in the state cannot be hidden"):
        model(x[:, 15:], attention_mask=mask, past_key_values=cache)


def test_more_tokens_than_dense_coefficients_reach_to_are_refused() -> None:
    model = swapped(tiny(), AttentionConfig(block_size=4))
    for cached in (False, True):
        with pytest.raises(ValueError, match=r'80 tokens exceed the 64 .* mixing="exponential"'):
            model(tokens(1, 80), use_cache=cached)


def test_the_cache_that_training_makes_changes_nothing() -> None:
    """transformers makes one unless told otherwise: the same gradients, and it cannot be continued."""
    model, x = swapped(tiny()).train(), tokens()
    gradients = []
    for cached in (False, True):
        model.zero_grad()
        out = model(x, labels=x, use_cache=cached)
        out.loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients[0])
    with pytest.raises(ValueError, match="cannot continue a cache"):
        model(x[:, :1], past_key_values=out.past_key_values)
    with pytest.raises(ValueError, match="keep no state"):
        model.eval()(x[:, :1], past_key_values=out.past_key_values)


def test_recomputed_layers_give_the_same_gradients() -> None:
    """Padded, with a gate, whose input the recomputed call has to find again."""
    config = AttentionConfig(block_size=4, mixing="exponential", gate=True)
    model, x = swapped(tiny(), config).train(), tokens()
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    gradients = []
    for recomputed in (False, True):
        if recomputed:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(x, attention_mask=mask, labels=x).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*gradients, strict=True))


LOADED = """
import json, sys, torch
from lightning_mhla import load_swapped
model = load_swapped(sys.argv[1])
x = torch.tensor(json.loads(sys.argv[2]))
with torch.no_grad():
    print(json.dumps([model(x).logits.tolist(), model.generate(x, max_new_tokens=6, do_sample=False).tolist()]))
"""


@pytest.mark.parametrize("family", ["Qwen3", "Gemma"])
def test_saved_it_loads_in_another_process(family: str, tmp_path: Path) -> None:
    """Gemma's head is its embedding, and the file holds one of them."""
    model, x = swapped(tiny(family), layers=[1, 3]), tokens(1, 9)
    model.save_pretrained(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path), json.dumps(x.tolist())],
        capture_output=True,
        text=True,
        check=True,
    )
    logits, generated = json.loads(run.stdout.strip().splitlines()[-1])
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), model(x).logits, rtol=1e-5, atol=1e-5)  # other threads
    assert torch.tensor(generated).equal(model.generate(x, max_new_tokens=6, do_sample=False))
    saved, loaded = model.state_dict(), load_swapped(tmp_path).state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    half = load_swapped(tmp_path, dtype=torch.bfloat16)
    assert half.model.embed_tokens.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="already swapped"):
        swap_attention(half, BLOCKS)


def test_peft_and_trainer_train_it(tmp_path: Path) -> None:
    """LoRA on the projections and the coefficients; adapters are saved, loaded and merged."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Trainer, TrainingArguments

    base = swapped(tiny())
    wanted = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["mixing"], task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(base), wanted)
    data = [{"input_ids": row, "labels": row} for row in tokens(8)]
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=3,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
    )
    Trainer(model, arguments, train_dataset=data).train()
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapter")).eval()
    x = tokens()
    with torch.no_grad():
        expected = model.eval()(x).logits
        assert not torch.allclose(expected, base(x).logits, atol=1e-3)
        torch.testing.assert_close(loaded(x).logits, expected)
        torch.testing.assert_close(loaded.merge_and_unload()(x).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_pipeline_and_lm_eval_take_it(tmp_path: Path) -> None:
    """A pipeline generates what the model does; lm-eval's own transformers model scores it as the model's losses do."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = {"<pad>": 0, "<end>": 1, **{f"w{index}": index for index in range(2, 64)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")
    model = swapped(tiny("Qwen3", eos_token_id=1))
    prompts = ["w3 w4 w5 w9 w12 w30", "w7 w8"]
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2)
    found = [out[0]["generated_text"] for out in generate(prompts, max_new_tokens=5, do_sample=False)]
    for prompt, text in zip(prompts, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        alone = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert text == prompt + tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
    scored = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, backend="causal")
    asked = [("w3 w4", " w5 w6"), ("w9", " w10 w11 w12 w13 w14")]
    answers = scored.loglikelihood(
        [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(asked)], disable_tqdm=True
    )
    for (context, continuation), (value, _) in zip(asked, answers, strict=True):
        ids = tokenizer(context + continuation, return_tensors="pt").input_ids
        count = len(continuation.split())
        with torch.no_grad():
            losses = model(ids).logits.log_softmax(-1)[0, -count - 1 : -1].gather(1, ids[0, -count:, None])
        assert value == pytest.approx(float(losses.sum()), abs=1e-3)


def test_attention_mask_of_another_form_is_refused() -> None:
    model, x = swapped(tiny()), tokens()
    mask = torch.ones(2, 1, 22, 22, dtype=torch.bool).tril().triu(-3)
    with pytest.raises(ValueError, match="hides more than padding and later tokens"):
        model(x, attention_mask=mask)


def test_another_cache_is_refused() -> None:
    model, x = swapped(tiny()), tokens()
    with pytest.raises(ValueError, match="not in the StaticLayer of StaticCache; leave cache_implementation out"):
        model(x, past_key_values=StaticCache(config=model.config, max_cache_len=32))
    filled = DynamicCache(config=model.config)
    tiny()(x, past_key_values=filled)
    with pytest.raises(ValueError, match="keys and values of different attention"):
        model(x, past_key_values=filled)


def test_paged_keys_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match="use generate, not continuous batching"):
        swapped(tiny())(tokens(), cache=object())


def with_images() -> Any:
    """Build a model of text and images."""
    text = tiny("Gemma3").config.to_dict()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
    }
    config = Gemma3Config(text_config=text, vision_config=vision | {"patch_size": 8}, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def sizes(model: type, **options: Any) -> Any:
    config: Any = {BloomForCausalLM: BloomConfig, OPTForCausalLM: OPTConfig, T5ForConditionalGeneration: T5Config}[
        model
    ]
    return model(config(vocab_size=64, **options))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: tiny("Llama", attention_dropout=0.1), "drops attention weights"),
        (lambda: tiny("GPT2", attn_pdrop=0.1), "drops attention weights"),
        (lambda: tiny("GPT2", add_cross_attention=True), "sees later tokens too"),
        (lambda: tiny("Mistral", sliding_window=8), "window of 8 tokens.*a model with full attention is needed"),
        (
            lambda: tiny("Gemma3", sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2),
            r"layer 0 attends within a window of 8 tokens.*layers=\[1, 3\]",
        ),
        (lambda: tiny("Gemma2", attn_logit_softcapping=50.0), "caps its scores at 50.0"),
        (lambda: sizes(BloomForCausalLM, hidden_size=32, n_layer=1, n_head=2), "ALiBi"),
        (lambda: sizes(T5ForConditionalGeneration, d_model=32, num_layers=1, d_kv=8, num_heads=2), "encoder-decoder"),
        (with_images, "combines text with other inputs"),
        (lambda: tiny().half(), "in float16.*bfloat16 or float32"),
        (lambda: tiny("Llama", is_causal=False), "only causal attention"),
        (
            lambda: sizes(OPTForCausalLM, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
            "has no supported attention",
        ),
    ],
)
def test_what_would_not_be_right_is_refused_before_anything_changes(model: Any, message: str) -> None:
    model = model()
    before = model.state_dict().keys()
    with pytest.raises(ValueError, match=message) as refused:
        swap_attention(model, BLOCKS)
    assert "\n" not in str(refused.value)
    assert model.state_dict().keys() == before
    assert not hasattr(model.config, "swapped_attention")


def test_blocks_are_asked_for() -> None:
    with pytest.raises(ValueError, match="needs block_size, the number of tokens in a block"):
        swap_attention(tiny(), AttentionConfig())
    full = swapped(
        tiny("Gemma3", sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2), layers=[1, 3]
    )
    assert list(swapped_layers(full)) == [1, 3]
    assert full.generate(tokens(), max_new_tokens=4).shape == (2, 26)


@pytest.mark.parametrize("config", [BLOCKS, replace(WINDOW, options={"sinks": 3})], ids=["mhla", "window with sinks"])
@pytest.mark.parametrize("family", DECODERS)
def test_every_family_generates_from_its_state_and_is_loaded_again(
    family: str, config: AttentionConfig, tmp_path: Path
) -> None:
    """Greedy text with a cache, without one, in a batch padded on the left, and after saving and loading, is the same."""
    model, x = swapped(tiny(family), config), tokens(1, 14)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    text = model.generate(x, attention_mask=torch.ones_like(x), **options)
    assert torch.equal(text, model.generate(x, attention_mask=torch.ones_like(x), use_cache=False, **options))
    padded = torch.cat([torch.zeros(1, 5, dtype=x.dtype), x], 1)
    mask = (torch.arange(19) >= 5).long()[None]
    batch = model.generate(
        torch.cat([padded, tokens(1, 19)]), attention_mask=torch.cat([mask, torch.ones_like(mask)]), **options
    )
    assert torch.equal(batch[0, 5:], text[0])
    model.save_pretrained(tmp_path)
    again = load_swapped(tmp_path).eval()
    assert torch.equal(again.generate(x, attention_mask=torch.ones_like(x), **options), text)


@pytest.mark.parametrize("family", sorted(set(DECODERS) - {"GPT2"}))
def test_sinks_stay_at_the_distance_that_the_model_was_trained_with(family: str, tmp_path: Path) -> None:
    """A text of repeated words: beyond the context, the same words near by and the same sinks give the same scores."""
    alone = replace(WINDOW, options={"sinks": 3, "far_init": -math.inf})
    size = {"max_position_embeddings": 24, "num_hidden_layers": 1}
    if "layer_types" in OTHER.get(family, {}):
        size["layer_types"] = ["full_attention"]
    model = swapped(tiny(family, **size), alone)
    x = torch.cat([tokens(2, 8), tokens(2, 16)[:, 8:].repeat(1, 5)], 1)
    with torch.no_grad():
        scores = model(x).logits
        torch.testing.assert_close(scores[:, 23::8], scores[:, 23:24].expand_as(scores[:, 23::8]), rtol=0, atol=2e-5)
        torch.testing.assert_close(scores[:, -8:], scores[:, -16:-8], rtol=0, atol=2e-5)
        cache = DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in (x[:, :21], x[:, 21:30])]
        steps = [model(x[:, [i]], past_key_values=cache).logits for i in range(30, 48)]
        torch.testing.assert_close(torch.cat([*parts, *steps], 1), scores, rtol=0, atol=2e-5)
        padded = torch.cat([torch.zeros(2, 3, dtype=x.dtype), x], 1)
        mask = (torch.arange(padded.shape[1]) >= 3).long().expand_as(padded)
        positions = (torch.arange(padded.shape[1]) - 3).clamp(min=0).expand_as(padded)
        shifted = model(padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
        torch.testing.assert_close(shifted, scores, rtol=0, atol=2e-5)
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(load_swapped(tmp_path).eval()(x).logits, scores)
        clone = copy.deepcopy(model)
        for layer in swapped_layers(model).values():
            layer.context = None
        assert (model(x).logits[:, -8:] - scores[:, -8:]).abs().max() > 1e-3
        torch.testing.assert_close(clone(x).logits, scores)


def test_a_model_without_rotary_positions_has_no_limit() -> None:
    layers = swapped_layers(swapped(tiny("GPT2"), replace(WINDOW, options={"sinks": 3})))
    assert all(layer.context is None for layer in layers.values())


@pytest.mark.parametrize("family", ["Llama", "Phi", "Gemma3", "GPTNeoX"])
def test_features_of_one_position_ignore_the_order_of_far_tokens(family: str) -> None:
    """Otherwise they depend on positions; a step, a piece and the whole text agree."""
    size: dict[str, Any] = {"num_hidden_layers": 1}
    if "layer_types" in OTHER.get(family, {}):
        size["layer_types"] = ["full_attention"]
    model = tiny(family, **size)
    x = tokens(2, 48)
    shuffled = torch.cat([x[:, :3], x[:, 3:40].flip(1), x[:, 40:]], 1)
    differences = []
    with torch.no_grad():
        for positions in (1, None):
            equal = replace(WINDOW, mixing="dense", mixing_init="uniform", mixing_trainable=False)
            other = copy.deepcopy(model)
            swap_attention(other, replace(equal, options={"sinks": 3, "feature_positions": positions}))
            scores = other(x).logits
            differences.append((other(shuffled).logits[:, -1] - scores[:, -1]).abs().max().item())
            cache = DynamicCache(config=other.config)
            parts = [other(part, past_key_values=cache).logits for part in (x[:, :21], x[:, 21:30])]
            steps = [other(x[:, [i]], past_key_values=cache).logits for i in range(30, 48)]
            torch.testing.assert_close(torch.cat([*parts, *steps], 1), scores, rtol=0, atol=2e-5)
    assert differences[0] < 1e-5
    assert differences[1] > 1e-4


def test_features_of_limited_positions_are_for_causal_attention() -> None:
    config = AttentionConfig(kind="mhla_window", block_size=4, options={"feature_positions": 8})
    with pytest.raises(ValueError, match="feature_positions is for causal attention"):
        build_attention(config, 16, 2, BlockLayout((16,), block_size=4))
    with pytest.raises(ValueError, match="feature_positions=0 must be positive"):
        AttentionConfig(kind="mhla_window", options={"feature_positions": 0})
