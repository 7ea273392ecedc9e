"""Cross-attention swapped into diffusers transformers and encoder-decoder models: identity, definition, padding, generation, folders."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_mhla import AttentionConfig, CrossAttentionConfig, load_swapped, swap_attention
from lightning_mhla.swap import layer_costs, original_attention, swapped_layers, transfer_loss
from lightning_mhla.swap.adapters import LoraOptions, choose_trained
from lightning_mhla.swap.transformers_cross import CROSS_FAMILIES

WIDTHS: dict[str, Any] = {
    "vocab_size": 99, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 3, "dropout_rate": 0.0,
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "attention_dropout": 0.0, "dropout": 0.0, "activation_dropout": 0.0,
    "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "max_position_embeddings": 40,
    "num_mel_bins": 8, "max_source_positions": 24, "max_target_positions": 40, "forced_eos_token_id": None, "forced_bos_token_id": None,
}  # fmt: skip
HEADS = {"Marian": "MTModel"}
BLOCKS = AttentionConfig(block_size=4, mixing_per_head=True)
KINDS = [
    BLOCKS,
    AttentionConfig(kind="linear"),
    AttentionConfig(block_size=4, mixing="exponential", gate=True, normalize=False),
]
IDS = ["mhla", "linear", "exponential"]


def tiny(family: str = "Bart", **more: Any) -> Any:
    """Build a small random encoder-decoder model, with changed weights of norms and biases."""
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}Config")
    known = kind().to_dict()
    config = kind(**{**{name: value for name, value in WIDTHS.items() if name in known}, **more})
    model = getattr(transformers, f"{family}{HEADS.get(family, 'ForConditionalGeneration')}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # fixed positions are not saved
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.decoder_start_token_id = 3
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model


def swapped(model: Any, config: AttentionConfig = BLOCKS, **options: Any) -> Any:
    """Return a copy with swapped cross-attention, whose coefficients differ from their initial values."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    for layer in swap_attention(other, config, cross=True, **options).values():
        for name, parameter in layer.named_parameters():
            if "mixing" in name:
                nn.init.uniform_(parameter, 0.1, 1.0)
    return other


def read(model: Any, columns: int = 11) -> dict[str, Tensor]:
    """Inputs of an encoder: two rows of tokens, the second of which is padded, or of sounds."""
    generator = torch.Generator().manual_seed(2)
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(2, 8, 48, generator=generator)}
    ids, mask = torch.randint(4, 99, (2, columns), generator=generator), torch.ones(2, columns, dtype=torch.int64)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def written(columns: int = 9) -> Tensor:
    return torch.randint(4, 99, (2, columns), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Tensor], decoder: Tensor, **options: Any) -> Tensor:
    out: Tensor = model(**inputs, decoder_input_ids=decoder, **options).logits
    return out


@pytest.mark.parametrize("family", CROSS_FAMILIES)
def test_softmax_gives_the_output_of_the_original(family: str) -> None:
    model = tiny(family)
    other = swapped(model, AttentionConfig(kind="softmax"))
    torch.testing.assert_close(
        logits(other, read(model), written()), logits(model, read(model), written()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("config", KINDS, ids=IDS)
@pytest.mark.parametrize("family", CROSS_FAMILIES)
def test_generation_with_a_cache_gives_the_logits_of_a_complete_pass(family: str, config: AttentionConfig) -> None:
    """More tokens than one block of queries, with beams, which reorder the cache, and one at a time."""
    model = swapped(tiny(family), config)
    inputs = read(model)
    options = {"max_new_tokens": 11, "min_new_tokens": 11, "do_sample": False, "return_dict_in_generate": True}
    made = model.generate(**inputs, decoder_input_ids=torch.full((2, 1), 3), output_logits=True, **options)
    complete = logits(model, inputs, made.sequences[:, :-1], use_cache=False)
    torch.testing.assert_close(complete[:, -11:], torch.stack(made.logits, 1), rtol=1e-3, atol=1e-4)
    beams = {"num_beams": 3, "num_return_sequences": 1, **options}
    with_cache, without = (model.generate(**inputs, use_cache=cache, **beams).sequences for cache in (True, False))
    assert torch.equal(with_cache, without)


def test_the_new_layer_is_the_definition() -> None:
    """The output of the first decoder layer's cross-attention, by a sum over all pairs, with the padding of the second row."""
    model = swapped(tiny("T5"))
    layer, inputs = model.decoder.block[0].layer[1].EncDecAttention, read(model)
    calls: list[Any] = []
    layer.register_forward_hook(
        lambda module, args, kwargs, out: calls.append((args[0], kwargs, out[0])), with_kwargs=True
    )
    logits(model, inputs, written())
    x, context, out = calls[0][0], calls[0][1]["key_value_states"], calls[0][2]
    q, k, v = (
        part(t).unflatten(-1, (4, 6)).double() for part, t in ((layer.q, x), (layer.k, context), (layer.v, context))
    )
    q = q * 6**0.5  # T5 does not divide its scores
    rows, columns = torch.arange(9) // 4, torch.arange(11) // 4
    mixing = layer.swapped.mixing.matrix().double()[:, rows][:, :, columns]
    weights = (
        mixing
        * torch.einsum("bqhd,bkhd->bhqk", q.relu() + 1e-6, k.relu() + 1e-6)
        * inputs["attention_mask"][:, None, None]
    )
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    want = layer.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2).float())
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["T5", "Bart"])
@pytest.mark.parametrize("config", KINDS[:2], ids=IDS[:2])
def test_padding_of_the_encoder_changes_nothing_on_either_side(family: str, config: AttentionConfig) -> None:
    model = swapped(tiny(family), config)
    alone, decoder = {"input_ids": read(model)["input_ids"][1:, :7]}, written()[1:]
    want = logits(model, alone, decoder)
    right = {name: value[1:] for name, value in read(model).items()}
    torch.testing.assert_close(logits(model, right, decoder), want, rtol=1e-4, atol=1e-5)
    if family == "T5":  # BART's encoder counts positions from the first column
        left = {name: value.roll(4, 1) for name, value in right.items()}
        torch.testing.assert_close(logits(model, left, decoder), want, rtol=1e-4, atol=1e-5)


def test_blocks_of_the_decoder_are_counted_from_its_first_token() -> None:
    model = swapped(tiny())
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    right = logits(model, read(model), written(), decoder_attention_mask=mask)
    torch.testing.assert_close(right[0, :6], logits(model, read(model), written())[0, :6], rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"decoder_attention_mask hides the first token of a row.*pad the decoder's input on the right"
    ):
        logits(model, read(model), written(), decoder_attention_mask=mask.flip(1))
    with original_attention(model):
        logits(model, read(model), written(), decoder_attention_mask=mask.flip(1))


def test_a_swapped_model_is_one_graph() -> None:
    model = swapped(tiny())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    want = logits(model, read(model), written(), use_cache=False)
    torch.testing.assert_close(logits(compiled, read(model), written(), use_cache=False), want)


@pytest.mark.parametrize("family", ["T5", "Bart", "Whisper"])
def test_only_the_new_attention_learns_to_match_the_original(family: str) -> None:
    model = tiny(family)
    other = swapped(model, AttentionConfig(block_size=4, feature_map="learned"))
    with original_attention(other):
        torch.testing.assert_close(logits(other, read(model), written()), logits(model, read(model), written()))

    def run() -> None:
        other(**read(other), decoder_input_ids=written(), use_cache=False)

    new = [parameter for layer in swapped_layers(other, cross=True).values() for parameter in layer.parameters()]
    optimizer, losses = torch.optim.Adam(new, 0.02), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = transfer_loss(other, run)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    learning = {name for name, parameter in other.named_parameters() if parameter.grad is not None}
    assert learning
    assert all(".swapped." in name for name in learning)
    costs = layer_costs(other, lambda: float(logits(other, read(other), written()).square().mean()))
    assert costs.original != costs.replaced
    assert sorted(costs.alone) == [0, 1]

    def distance() -> float:
        with original_attention(other):
            expected = logits(other, read(other), written())
        return float((logits(other, read(other), written()) - expected).abs().max())

    distances = layer_costs(other, distance)
    assert distances.original == 0
    assert min(distances.alone.values()) > 0
    assert distances.replaced not in distances.alone.values()


def test_weights_to_train_are_chosen_in_cross_attention_too() -> None:
    model = swapped(tiny("T5"), AttentionConfig(block_size=4, mixing_trainable=False, gate=True))
    choose_trained(model, "attention", LoraOptions())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("EncDecAttention" in name for name in trained)
    assert not any("mixing" in name for name in trained)
    model.train()
    model(**read(model), decoder_input_ids=written(), use_cache=False).logits.square().sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if name in trained)


LOAD = """
import sys, torch
from lightning_mhla import load_swapped
for folder in sys.argv[1:]:
    with torch.no_grad():
        out = load_swapped(folder + "/swapped")(**torch.load(folder + "/inputs.pt", weights_only=True))
    torch.save(out[0], folder + "/out.pt")
"""


def test_saved_models_are_the_same_in_a_new_process(tmp_path: Path) -> None:
    models = {
        "T5": swapped(tiny("T5"), layers=[1]),
        "Whisper": swapped(tiny("Whisper"), KINDS[2]),
        "Marian": swapped(tiny("Marian")),
    }
    for family, model in models.items():
        model.save_pretrained(tmp_path / family / "swapped")
        torch.save({**read(model), "decoder_input_ids": written()}, tmp_path / family / "inputs.pt")
    command = [sys.executable, "-c", LOAD, *(str(tmp_path / family) for family in models)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-2000:]
    for family, model in models.items():
        out = torch.load(tmp_path / family / "out.pt", weights_only=True)
        with torch.no_grad():
            assert torch.equal(out, model(**read(model), decoder_input_ids=written())[0]), family
        with pytest.raises(Exception, match=r"lightning_mhla\.load_swapped"):
            type(model).host.from_pretrained(tmp_path / family / "swapped")
    again = load_swapped(tmp_path / "T5/swapped")
    assert list(swapped_layers(again, cross=True)) == [1]
    assert swapped_layers(again) == {}


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (
            lambda: tiny(attention_dropout=0.1),
            BLOCKS,
            "drops attention weights.*load the model with attention_dropout=0",
        ),
        (lambda: tiny("T5", dropout_rate=0.1), BLOCKS, "drops attention weights.*load the model with dropout_rate=0"),
        (tiny, AttentionConfig(), "'mhla' needs block_size, the number of tokens in a block of the decoder's input"),
        (tiny, AttentionConfig(block_grid=[2, 2]), r"needs block_size.*not block_grid=\[2, 2\]"),
        (tiny, AttentionConfig(kind="retention"), "'retention' reads its own tokens only"),
        (tiny, AttentionConfig(block_size=4, lepe=3), "lepe=3 needs queries and keys of the same tokens"),
        (lambda: tiny().half(), BLOCKS, "in float16.*bfloat16 or float32"),
        (
            lambda: transformers.LlamaForCausalLM(llama()),
            BLOCKS,
            "is not an encoder-decoder model.*leave out cross=True",
        ),
        (
            lambda: other("Mvp"),
            BLOCKS,
            r"the cross-attention of MvpForConditionalGeneration \(MvpAttention\) is not supported",
        ),
        (
            lambda: other("ProphetNet"),
            BLOCKS,
            "the cross-attention of ProphetNetForConditionalGeneration is not supported",
        ),
    ],
)
def test_what_would_not_be_right_is_rejected_before_anything_changes(
    model: Any, config: AttentionConfig, message: str
) -> None:
    model = model()
    names = model.state_dict().keys()
    with pytest.raises(ValueError, match=message):
        swap_attention(model, config, cross=True)
    assert model.state_dict().keys() == names
    assert not hasattr(model.config, "swapped_attention")


def llama() -> Any:
    return transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )


def other(family: str) -> Any:
    """Build a small model of a family that is not supported."""
    sizes = {"hidden_size": 32, "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2} | {
        "num_decoder_attention_heads": 2, "decoder_ffn_dim": 16, "encoder_ffn_dim": 16
    }  # fmt: skip
    sizes = sizes if family == "ProphetNet" else {**WIDTHS, "encoder_layers": 1, "decoder_layers": 1}
    kind = getattr(transformers, f"{family}Config")
    known = {*kind().to_dict(), *kind.attribute_map}
    config = kind(**{name: value for name, value in sizes.items() if name in known})
    return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def test_calls_that_cannot_be_right_are_rejected() -> None:
    model = swapped(tiny("T5"), CrossAttentionConfig(block_size=4, key_tokens=8))
    with pytest.raises(ValueError, match=r"\[3\] context blocks do not fit.*made for \[2\]"):
        logits(model, read(model), written())
    with pytest.raises(ValueError, match="output_attentions"):
        logits(model, read(model, 8), written(), output_attentions=True)
    with pytest.raises(ValueError, match="already swapped"):
        swap_attention(model, BLOCKS, cross=True)
    with pytest.raises(ValueError, match="in which only cross-attention can be replaced: pass cross=True"):
        swap_attention(tiny(), BLOCKS)
    with pytest.raises(ValueError, match="CrossAttentionConfig describes cross-attention; pass cross=True"):
        swap_attention(tiny(), CrossAttentionConfig(block_size=4))
