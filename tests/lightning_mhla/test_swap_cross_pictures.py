"""Cross-attention swapped into diffusers transformers: identity, the definition, padding, both attentions, folders, rejected models."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0, PAGCFGSanaLinearAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from lightning_mhla import AttentionConfig, CrossAttentionConfig, load_swapped, swap_attention
from lightning_mhla.swap import read_texts_once, swapped_layers

SANA = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8,
    "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 12, "patch_size": 1,
    "interpolation_scale": 1,
}  # fmt: skip
PIXART = {
    "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "cross_attention_dim": 16,
    "caption_channels": 12, "sample_size": 16, "patch_size": 2, "out_channels": 8,
}  # fmt: skip
WAN = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 24, "text_dim": 12, "ffn_dim": 64}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...], list[int]]] = {
    "SANA": ("SanaTransformer2DModel", SANA, (4, 8, 8), [2, 4]),
    "SANA-1.5": ("SanaTransformer2DModel", {**SANA, "qk_norm": "rms_norm_across_heads"}, (4, 8, 8), [2, 4]),
    "PixArt": ("PixArtTransformer2DModel", PIXART, (4, 16, 16), [3, 3]),
    "Wan": ("WanTransformer3DModel", WAN, (16, 3, 8, 12), [3, 2, 2]),
    "SkyReels": ("SkyReelsV2Transformer3DModel", WAN, (16, 3, 8, 12), [3, 2, 2]),
    "ChronoEdit": ("ChronoEditTransformer3DModel", WAN, (16, 3, 8, 12), [3, 2, 2]),
}


def tiny(name: str, **more: Any) -> Any:
    """Build a small model with random weights, which start at zero otherwise."""
    kind, options, *_ = MODELS[name]
    model = getattr(diffusers, kind)(**{**options, **more}).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    return model


def swapped(model: Any, name: str, kind: str = "mhla", **options: Any) -> Any:
    """Return a copy with swapped cross-attention, whose coefficients differ from their initial values."""
    new, blocks = copy.deepcopy(model), MODELS[name][3] if kind == "mhla" else None
    config = CrossAttentionConfig(kind=kind, block_grid=blocks, key_block_size=3, key_tokens=20, **options)
    for layer in swap_attention(new, config, cross=True).values():
        for parameter_name, parameter in layer.named_parameters():
            if "mixing" in parameter_name:
                nn.init.uniform_(parameter, 0.1, 1.0)
    return new


def text(columns: int = 11) -> Tensor:
    return torch.randn(2, columns, 12, generator=torch.Generator().manual_seed(2))


def sample(name: str) -> Tensor:
    return torch.randn(2, *MODELS[name][2], generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def output(model: Any, name: str, context: Tensor, mask: Tensor | None = None) -> Tensor:
    options = {} if mask is None else {"encoder_attention_mask": mask}
    if name == "PixArt":
        options["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    times = torch.tensor([30, 900])
    out: Tensor = model(sample(name).to(context.dtype), encoder_hidden_states=context, timestep=times, **options).sample
    return out


@pytest.mark.parametrize("name", MODELS)
def test_softmax_gives_the_output_of_the_original(name: str) -> None:
    model = tiny(name)
    torch.testing.assert_close(output(swapped(model, name, "softmax"), name, text()), output(model, name, text()))


@pytest.mark.parametrize("name", MODELS)
def test_the_new_layer_is_the_definition(name: str) -> None:
    """The output of ``attn2`` of the last block, by a sum over all pairs of a token and a word, in float64."""
    model = swapped(tiny(name), name)
    attn = (getattr(model, "blocks", None) or model.transformer_blocks)[-1].attn2
    calls: list[Any] = []
    attn.register_forward_hook(lambda module, args, kwargs, out: calls.append((args[0], kwargs, out)), with_kwargs=True)
    positional = attn.forward
    attn.forward = lambda x, encoder_hidden_states=None, *args, **kwargs: (
        calls.append(encoder_hidden_states) or positional(x, encoder_hidden_states, *args, **kwargs)
    )
    output(model, name, text())
    context, (x, _, out) = calls
    new, heads = attn.processor.attention, attn.heads
    q, k, v = attn.to_q(x), attn.to_k(context), attn.to_v(context)
    q, k = (tensor if norm is None else norm(tensor) for tensor, norm in ((q, attn.norm_q), (k, attn.norm_k)))
    q, k, v = (tensor.unflatten(-1, (heads, -1)).double() for tensor in (q, k, v))
    blocks = torch.empty(x.shape[1], dtype=torch.int64)
    blocks[new.layout.order] = torch.repeat_interleave(torch.tensor(new.layout.block_sizes))
    mixing = new.mixing.matrix().double()[blocks][:, torch.arange(11) // 3]
    weights = mixing * torch.einsum("bqhd,bkhd->bhqk", q.relu() + 1e-6, k.relu() + 1e-6)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    want = attn.to_out[0](torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2).float())
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mhla", "linear", "softmax"])
@pytest.mark.parametrize("name", ["SANA", "PixArt"])
def test_padding_of_the_text_changes_nothing_on_either_side(name: str, kind: str) -> None:
    model = swapped(tiny(name), name, kind)
    mask = torch.ones(2, 11)
    mask[1, 6:] = 0
    out = output(model, name, text(), mask)
    spoiled = torch.where(mask[..., None] > 0, text(), 50.0)
    assert torch.equal(output(model, name, spoiled, mask), out)
    shorter = output(model, name, text()[:, :6])
    torch.testing.assert_close(out[1], shorter[1], rtol=1e-4, atol=1e-5)
    rolled = output(model, name, text().roll(5, 1), mask.roll(5, 1))
    torch.testing.assert_close(out[1], rolled[1], rtol=1e-4, atol=1e-5)


def test_a_swapped_model_is_one_graph() -> None:
    model, mask = swapped(tiny("SANA"), "SANA"), torch.ones(2, 11)
    mask[1, 6:] = 0
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(output(compiled, "SANA", text(), mask), output(model, "SANA", text(), mask))


def test_self_attention_and_cross_attention_are_swapped_one_after_the_other(tmp_path: Path) -> None:
    """In either order, with the same outputs, and together in the folder; each only once."""
    model, self_config = tiny("SANA"), AttentionConfig(block_grid=[2, 2])
    cross_config = CrossAttentionConfig(block_grid=[4, 4], key_block_size=2)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    swap_attention(first, self_config)
    swap_attention(first, cross_config, [1], cross=True)
    swap_attention(second, cross_config, [1], cross=True)
    swap_attention(second, self_config)
    out = output(first, "SANA", text())
    assert torch.equal(output(second, "SANA", text()), out)
    for both in (first, second):
        with pytest.raises(ValueError, match="already swapped"):
            swap_attention(both, self_config)
        with pytest.raises(ValueError, match="already swapped"):
            swap_attention(both, cross_config, cross=True)
    first.save_pretrained(tmp_path)
    again = load_swapped(tmp_path)
    assert (list(swapped_layers(again)), list(swapped_layers(again, cross=True))) == ([0, 1], [1])
    assert torch.equal(output(again, "SANA", text()), out)


LOAD = """
import sys, torch
from lightning_mhla import load_swapped
model, inputs = load_swapped(sys.argv[1]), torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(model(**inputs).sample, sys.argv[3])
"""


def test_a_saved_model_is_the_same_in_a_new_process(tmp_path: Path) -> None:
    model = swapped(tiny("Wan"), "Wan", gate=True, feature_map="learned")
    inputs = {"hidden_states": sample("Wan"), "encoder_hidden_states": text(), "timestep": torch.tensor([30, 900])}
    torch.save(inputs, tmp_path / "inputs.pt")
    model.save_pretrained(tmp_path / "swapped")
    command = [
        sys.executable,
        "-c",
        LOAD,
        str(tmp_path / "swapped"),
        str(tmp_path / "inputs.pt"),
        str(tmp_path / "out.pt"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-2000:]
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True), output(model, "Wan", text()))


def test_a_swapped_model_trains_and_takes_other_sizes() -> None:
    model = swapped(tiny("SANA"), "SANA", mixing_per_head=True).train()
    mask = torch.ones(1, 5)
    out = model(
        torch.randn(1, 4, 12, 16),
        encoder_hidden_states=text(5)[:1],
        timestep=torch.tensor([5]),
        encoder_attention_mask=mask,
    )
    out.sample.square().sum().backward()
    for layer in swapped_layers(model, cross=True).values():
        assert layer.mixing.weight.grad.abs().sum() > 0
        assert not layer.mixing.weight.grad[..., 2:].any(), "five words are in two blocks of three"


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (lambda: dit(), {}, "DiTTransformer2DModel calls its cross-attention in ways that are not supported"),
        (
            lambda: i2v(),
            {},
            "attn2 of block 0 has added_kv_proj_dim=48, which swapped attention does not support",
        ),
        (
            lambda: adapted(),
            {},
            "attn2 of block 0 has processor AttnProcessor, an IP-Adapter or another change, .*set that processor",
        ),
        (
            lambda: tiny("SANA"),
            {"block_grid": None},
            r"needs block_grid, the number of blocks along each of the 2 axes",
        ),
        (lambda: tiny("SANA"), {"kind": "gla", "block_grid": None}, "'gla' reads its own tokens only"),
        (lambda: tiny("SANA"), {"mixing": "exponential"}, "needs queries and context on the same axes"),
    ],
)
def test_what_would_not_be_right_is_rejected_before_anything_changes(
    model: Any, config: dict[str, Any], message: str
) -> None:
    model = model()
    names = model.state_dict().keys()
    with pytest.raises(ValueError, match=message):
        swap_attention(model, CrossAttentionConfig(**{"block_grid": [2, 2], **config}), cross=True)
    assert model.state_dict().keys() == names
    assert swapped_layers(model, cross=True) == {}


def dit() -> Any:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, num_embeds_ada_norm=10
    )


def i2v() -> Any:
    return diffusers.WanTransformer3DModel(**WAN, image_dim=16, added_kv_proj_dim=48)


def adapted() -> Any:
    model = tiny("PixArt")
    model.transformer_blocks[0].attn2.set_processor(AttnProcessor())
    return model


def test_calls_that_cannot_be_right_are_rejected() -> None:
    model = swapped(tiny("SANA"), "SANA")
    with pytest.raises(
        ValueError, match=r"\[8\] context blocks do not fit dense coefficients, which were made for \[7\]"
    ):
        output(model, "SANA", text(23))
    with pytest.raises(ValueError, match=r"the attention mask has shape \[2, 1, 9\], but the context has 11 tokens"):
        output(model, "SANA", text(), torch.ones(2, 9))
    with pytest.raises(ValueError, match="adds biases to the scores"):
        output(model, "SANA", text(), torch.full((2, 11), 0.99))
    with pytest.raises(
        ValueError, match=r"\[1, 4\] query blocks do not fit dense coefficients, which were made for \[2, 4\]"
    ):
        model(torch.randn(1, 4, 1, 8), encoder_hidden_states=text()[:1], timestep=torch.tensor([5]))


def test_timm_has_no_cross_attention() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    with pytest.raises(ValueError, match="VisionTransformer has no cross-attention; leave out cross=True"):
        swap_attention(model, AttentionConfig(block_grid=[2, 2]), cross=True)
    assert swapped_layers(model, cross=True) == {}


@pytest.mark.parametrize("kind", ["mhla", "linear", "softmax"])
@pytest.mark.parametrize("name", MODELS)
def test_texts_that_are_read_once_give_the_same_samples(name: str, kind: str) -> None:
    """Three texts in turn, two of which differ in the mask, in float64; then one of them after a change of the weights."""
    model = swapped(tiny(name), name, kind).double()
    texts, runs = (text().double(), text(7).double(), text().double()), []
    masks: list[Tensor | None] = [None] * 3
    if name in ("SANA", "PixArt"):
        masks[:2] = [(torch.arange(x.shape[1]) < torch.tensor([[99], [6]])).double() for x in texts[:2]]
    for scope in (nullcontext, read_texts_once):
        with scope(model):
            runs.append([output(model, name, x, mask) for _ in range(2) for x, mask in zip(texts, masks, strict=True)])
    for plain, remembered in zip(*runs, strict=True):
        torch.testing.assert_close(remembered, plain, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        for block in getattr(model, "blocks", None) or model.transformer_blocks:
            block.attn2.to_k.weight.mul_(-1)
    with read_texts_once(model):
        changed = output(model, name, texts[0], masks[0])
    torch.testing.assert_close(changed, output(model, name, texts[0], masks[0]), rtol=1e-9, atol=1e-9)
    assert not torch.equal(changed, runs[1][0])


def test_keys_of_a_text_are_projected_once() -> None:
    model, calls = swapped(tiny("Wan"), "Wan"), []
    model.blocks[0].attn2.to_k.register_forward_hook(lambda *_: calls.append(1))
    with read_texts_once(model):
        for context in (text(), text(7), text(), text(7), text()):
            output(model, "Wan", context)
    assert len(calls) == 2
    output(model, "Wan", text())
    assert len(calls) == 3


@pytest.mark.parametrize("kind", ["mhla", "linear"])
@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_a_text_that_is_overwritten_is_read_again(scope: type[AbstractContextManager[None]], kind: str) -> None:
    """A tensor that gets a different text, in place and through NumPy, and then a different mask."""
    model = swapped(tiny("PixArt"), "PixArt", kind)
    output(model, "PixArt", text())  # the layers get the token grid
    attention, first, second = model.transformer_blocks[0].attn2, torch.randn(2, 11, 16), torch.randn(2, 11, 16)
    x = torch.randn(2, 64, 16)
    with scope():
        read, mask = first.clone(), torch.ones(2, 11)
        with read_texts_once(model):
            outs = [attention(x, encoder_hidden_states=read, attention_mask=mask)]
            read.copy_(second)
            outs.append(attention(x, encoder_hidden_states=read, attention_mask=mask))
            read.numpy()[:] = first.numpy()
            outs.append(attention(x, encoder_hidden_states=read, attention_mask=mask))
            mask[:, 5:] = 0
            outs.append(attention(x, encoder_hidden_states=read, attention_mask=mask))
        hidden = [attention(x, encoder_hidden_states=y) for y in (first, second, first)]
        hidden.append(attention(x, encoder_hidden_states=first, attention_mask=mask))
    for got, want in zip(outs, hidden, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[3])


def test_an_inner_scope_leaves_the_texts_of_the_outer_one() -> None:
    """Inner scopes that end normally and by an error."""
    model, calls = swapped(tiny("Wan"), "Wan"), []
    model.blocks[0].attn2.to_k.register_forward_hook(lambda *_: calls.append(1))
    with read_texts_once(model):
        want = output(model, "Wan", text())
        with read_texts_once(model):
            output(model, "Wan", text())
        with pytest.raises(ValueError, match="context blocks do not fit"), read_texts_once(model):
            output(model, "Wan", text(23))
        assert len(calls) == 3, "each scope projects the keys once"
        assert torch.equal(output(model, "Wan", text()), want)
        assert len(calls) == 3, "the outer scope has its text"
    output(model, "Wan", text())
    assert len(calls) == 4, "no text is stored outside"


def call(model: Any, name: str) -> Tensor:
    more = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}} if name == "PixArt" else {}
    with torch.no_grad():
        out: Tensor = model(sample(name), encoder_hidden_states=text(), timestep=torch.tensor([1, 2]), **more).sample
    return out


@pytest.mark.parametrize(
    ("name", "cross", "change"),
    [
        ("PixArt", False, lambda model: model.fuse_qkv_projections()),
        ("PixArt", True, lambda model: model.fuse_qkv_projections()),
        ("PixArt", False, lambda model: model.set_default_attn_processor()),
        ("SANA", False, lambda model: model.set_attn_processor(AttnProcessor2_0())),
        ("SANA", False, lambda model: model.transformer_blocks[1].attn1.set_processor(PAGCFGSanaLinearAttnProcessor2_0())),
        ("Wan", True, lambda model: model.blocks[0].attn2.set_processor(WanAttnProcessor())),
    ],
    ids=["fused", "fused, cross", "default", "all", "one layer", "one layer, cross"],
)  # fmt: skip
def test_a_processor_that_removes_the_swapped_attention_is_an_error(name: str, cross: bool, change: Any) -> None:
    model = tiny(name)
    if cross:
        model = swapped(model, name)
    else:
        swap_attention(model, AttentionConfig(block_grid=[2, 2]))
    expected = call(model, name)
    changed = copy.deepcopy(model)
    change(changed)
    with pytest.raises(ValueError, match=r"swapped attention of a layer was replaced by \w+Processor"):
        call(changed, name)
    torch.testing.assert_close(call(model, name), expected, rtol=0, atol=0)


def test_projections_that_are_fused_and_separated_again_change_nothing() -> None:
    model = tiny("PixArt")
    swap_attention(model, AttentionConfig(block_grid=[2, 2]))
    expected = call(model, "PixArt")
    model.fuse_qkv_projections()
    model.unfuse_qkv_projections()
    torch.testing.assert_close(call(model, "PixArt"), expected, rtol=0, atol=0)
