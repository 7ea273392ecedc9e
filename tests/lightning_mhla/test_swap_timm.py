"""Attention swapped into timm's vision transformers: the definition, any size of image, saving, and timm's own tools."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn

from lightning_mhla import AttentionConfig, load_swapped, swap_attention
from lightning_mhla.attention import BlockLayout
from lightning_mhla.swap import original_attention, resize_blocks, save_swapped, swapped_layers, transfer_loss

TINY: dict[str, Any] = {"img_size": 48, "depth": 2, "num_classes": 5}
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {"img_size": 42, "embed_dim": 48, "num_heads": 3},
    "vit_base_patch16_siglip_224": {"embed_dim": 48, "num_heads": 3},
    "vit_base_patch16_clip_224": {"embed_dim": 48, "num_heads": 3},
    "eva02_tiny_patch14_224": {"img_size": 42},
    "eva_giant_patch14_224": {"img_size": 42, "embed_dim": 48, "num_heads": 3},
    "vit_small_patch16_dinov3": {"embed_dim": 48, "num_heads": 3},
}
BLOCKS = AttentionConfig(block_grid=[2, 2])


def tiny(name: str = "vit_tiny_patch16_224", **more: Any) -> Any:
    """Build a small random model, in which no weight has its initial value."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**TINY, **MODELS[name], **more}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def swapped(model: Any, config: AttentionConfig = BLOCKS, **options: Any) -> Any:
    """Return a copy with swapped attention, whose coefficients differ from their initial values."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    for layer in swap_attention(other, config, **options).values():
        if hasattr(layer, "mixing"):
            nn.init.uniform_(layer.mixing.weight, 0.1, 1.0)
    return other


def images(model: Any, rows: int = 2) -> Tensor:
    size = model.patch_embed.img_size
    return torch.randn(rows, 3, *size, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_model_is_its_definition(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every pair of tokens written out in float64 in the place of timm's product, in timm's own code: 1e-9."""
    model = tiny(name).double()
    other, x = swapped(model), images(model).double()
    layers = iter(swapped_layers(other).values())
    assert len(swapped_layers(other)) == 2
    prefix = model.num_prefix_tokens
    with torch.no_grad():
        got = other(x)
        before = model(x)

    def definition(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        weight = next(layers).mixing.weight.double()
        side = 3
        layout = BlockLayout((side, side), (2, 2), prefix_tokens=prefix)
        block = torch.zeros(q.shape[2], dtype=torch.long)
        order, bounds = layout.order, layout.block_offsets
        for number, (first, last) in enumerate(pairwise(bounds)):
            block[order[first:last]] = number
        f, g = q.relu() + 1e-6, k.relu() + 1e-6
        weights = (f @ g.transpose(-1, -2)) * weight[block[:, None], block]
        return (weights / (weights.sum(-1, keepdim=True) + 1e-6)) @ v

    pooled = getattr(model, "attn_pool", None)
    if pooled is not None:
        pooled.fused_attn = False  # its product is not of self-attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", definition)
    with torch.no_grad():
        torch.testing.assert_close(got, model(x), rtol=1e-9, atol=1e-9)
        monkeypatch.undo()
        assert not torch.allclose(got, before, atol=1e-3)
        torch.testing.assert_close(other.float()(x.float()).double(), got, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_softmax_swapped_for_softmax_and_nothing_swapped_change_nothing(name: str) -> None:
    model = tiny(name)
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(swapped(model, AttentionConfig(kind="softmax"))(x), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(swapped(model, layers=[])(x), expected)
        other = swapped(model)
        with original_attention(other):
            with original_attention(other, [0]):
                pass
            assert torch.equal(other(x), expected), "leaving an inner context must not change the outer one"
        assert not torch.equal(other(x), expected)
    with pytest.raises(ValueError, match="run called no replaced layer"):
        transfer_loss(other, lambda: None)
    with (
        pytest.raises(ValueError, match=r"layers \[99\] have no replaced attention"),
        original_attention(other, [0, 99]),
    ):
        pass


def test_hybrids_and_other_kinds() -> None:
    model = tiny()
    half = swapped(model, layer_kinds=["keep", "replace"])
    assert list(swapped_layers(half)) == [1]
    for kind in ("linear", "retention", "gla"):
        other = swapped(
            model, AttentionConfig(kind=kind, options={"direction": "alternate"} if kind == "gla" else None)
        )
        assert other(images(model)).isfinite().all()
    learned = swapped(model, replace(BLOCKS, feature_map="learned", lepe=3, gate=True))
    learned(images(model)).sum().backward()
    assert all(p.grad is not None for n, p in learned.named_parameters() if ".swapped." in n)


def test_images_of_any_size() -> None:
    """Without prefix tokens also those with fewer tokens than blocks along an axis."""
    model = swapped(tiny("vit_tiny_patch16_224", dynamic_img_size=True))
    sizes = [(48, 48), (96, 32), (64, 80)]
    alone = [model(torch.ones(1, 3, *size)) for size in sizes]
    again = [model(torch.ones(1, 3, *size)) for size in reversed(sizes)][::-1]
    assert all(torch.equal(*pair) for pair in zip(alone, again, strict=True))
    bare = swapped(tiny("vit_tiny_patch16_224", dynamic_img_size=True, class_token=False, global_pool="avg"))
    assert bare(torch.ones(1, 3, 16, 96)).isfinite().all()


@pytest.mark.parametrize("kinds", [["mhla"], ["mhla_window", "mhla"], ["mhla", "mhla_window"]])
def test_an_image_with_fewer_tokens_than_blocks_is_rejected_by_any_layer_that_mixes_the_class_token(
    kinds: list[str],
) -> None:
    model = tiny("vit_tiny_patch16_224", dynamic_img_size=True, img_size=64)
    swap_attention(model, AttentionConfig(block_grid=[4, 4]), layer_kinds=kinds)
    with pytest.raises(ValueError, match=r"block_grid \[4, 4\] has more blocks than the image has tokens, \[2, 2\]"):
        model(torch.ones(1, 3, 32, 32))


@torch.no_grad()
def test_blocks_of_a_window_grow_with_the_image(tmp_path: Path) -> None:
    model = swapped(tiny(dynamic_img_size=True), AttentionConfig(kind="mhla_window", block_grid=[2, 2]))
    image = torch.randn(1, 3, 96, 96)
    coarse = model(image)
    resize_blocks(model, [6, 6])
    assert {layer.mixing.weight.shape for layer in swapped_layers(model).values()} == {(36, 36)}
    fine = model(image)
    assert (fine - coarse).abs().max() > 1e-4
    save_swapped(model, tmp_path)
    assert torch.equal(load_swapped(tmp_path)(image), fine)


def test_timms_own_tools() -> None:
    """features_only, forward_intermediates, forward_features, a new head, recomputed layers, and state dicts."""
    model = tiny()
    other, x = swapped(model), images(model)
    final, every = other.forward_intermediates(x)
    torch.testing.assert_close(final, other.forward_features(x))
    assert [tuple(each.shape) for each in every] == [(2, 192, 3, 3)] * 2
    torch.manual_seed(0)
    features = timm.create_model("vit_tiny_patch16_224", features_only=True, out_indices=[0, 1], **TINY)
    features.model.load_state_dict(model.state_dict(), strict=False)
    swap_attention(features.eval(), BLOCKS)
    for layer, mine in zip(swapped_layers(features).values(), swapped_layers(other).values(), strict=True):
        layer.load_state_dict(mine.state_dict())
    for got, want in zip(features(x), every, strict=True):
        torch.testing.assert_close(got, want)
    other.set_grad_checkpointing(True)
    other.train()(x).sum().backward()
    other.set_grad_checkpointing(False)
    names = set(other.state_dict())
    assert set(model.state_dict()) < names
    assert all(".attn.swapped." in name for name in names - set(model.state_dict()))
    other.reset_classifier(3)
    assert other.eval()(x).shape == (2, 3)


def test_saved_it_loads_in_another_process(tmp_path: Path) -> None:
    model = tiny("eva02_tiny_patch14_224")
    other, x = swapped(model, layer_kinds=["keep", "replace"]), images(model)
    save_swapped(other, tmp_path / "model")
    torch.save((x, other(x), other.state_dict()), tmp_path / "expected.pt")
    program = (
        "import sys, torch; from lightning_mhla import load_swapped\n"
        "model = load_swapped(sys.argv[1]); x, out, state = torch.load(sys.argv[2])\n"
        "assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items()) and not model.training\n"
        "torch.testing.assert_close(model(x), out, rtol=1e-5, atol=1e-5); print(type(model).__name__)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model"), str(tmp_path / "expected.pt")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "Eva\n"
    half = load_swapped(tmp_path / "model", torch.bfloat16)
    assert half.head.weight.dtype == torch.bfloat16
    assert swapped_layers(half)[1].mixing.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="is already swapped"):
        swap_attention(half, BLOCKS)


def test_replaced_layers_learn_from_those_they_replaced() -> None:
    model = tiny()
    other, x = swapped(model, replace(BLOCKS, feature_map="learned")), images(model, 8)
    optimizer = torch.optim.AdamW([p for layer in swapped_layers(other).values() for p in layer.parameters()], 0.01)
    losses = []
    for _ in range(40):
        loss = transfer_loss(other, lambda: other(x))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None for n, p in other.named_parameters() if ".swapped." not in n)
        assert all(p.requires_grad for p in other.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_an_output_that_does_not_vary_counts_for_nothing() -> None:
    model = tiny()
    for parameter in model.blocks[0].attn.proj.parameters():
        torch.nn.init.zeros_(parameter)
    other = swapped(model)
    assert transfer_loss(other, lambda: other(images(model))).isfinite()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("vit_tiny_patch16_224", {"attn_drop_rate": 0.1}, r"layer 0 drops attention weights \(attn_drop_rate=0.1\)"),
        ("vit_tiny_patch16_224", {"patch_drop_rate": 0.5}, "the model drops patches"),
        (
            "vit_relpos_small_patch16_224",
            {},
            "VisionTransformerRelPos is not a vision transformer with global attention",
        ),
        ("swin_tiny_patch4_window7_224", {}, "SwinTransformer is not a vision transformer with global attention"),
        (
            "vit_small_plus_patch16_dinov3",
            {"block_grid": [4]},
            "needs block_grid, the number of blocks along each of the 2",
        ),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(name: str, options: dict[str, Any], words: str) -> None:
    config = AttentionConfig(block_grid=options.pop("block_grid", [2, 2]))
    model = timm.create_model(name, **options)
    state = set(model.state_dict())
    with pytest.raises(ValueError, match=words) as error:
        swap_attention(model, config)
    assert "\n" not in str(error.value)
    assert set(model.state_dict()) == state


class OwnAttention(Attention):
    """Attention of a user, derived from timm's."""


def test_a_block_with_attention_that_is_not_known_is_refused_before_anything_is_changed() -> None:
    model = tiny()
    model.blocks[1].attn.__class__ = OwnAttention
    state = set(model.state_dict())
    with pytest.raises(ValueError, match="the attention of block 1 is not supported"):
        swapped(model)
    assert set(model.state_dict()) == state


def test_float16_is_refused_where_sums_would_overflow() -> None:
    model = tiny().half()
    with pytest.raises(ValueError, match="layer 0 is in float16"):
        swap_attention(model, AttentionConfig(block_grid=[2, 2]))
    swap_attention(model, AttentionConfig(kind="softmax"))


def test_calls_that_swapped_attention_does_not_know_are_refused() -> None:
    model = tiny()
    other, x = swapped(model), images(model)
    with pytest.raises(ValueError, match="attn_mask, is_causal and packed images are not supported"):
        other.forward_features(x, is_causal=True)
    other(x)
    with pytest.raises(ValueError, match="4 tokens of an input of 10"):
        other.blocks[0](torch.ones(1, 4, 192))
    with pytest.raises(ValueError, match="is not swapped"):
        save_swapped(model, "nowhere")
    features = timm.create_model("vit_tiny_patch16_224", img_size=48, features_only=True)
    swap_attention(features, BLOCKS)
    with pytest.raises(
        ValueError, match="timm cannot save a FeatureGetterNet; save a model that is built without features_only"
    ):
        save_swapped(features, "nowhere")
