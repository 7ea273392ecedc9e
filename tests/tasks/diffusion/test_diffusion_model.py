"""DiT: equal to diffusers' with converted weights, what swapping its attention keeps, saving and loading."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from mhla_tasks.diffusion import DiT
from mhla_tasks.diffusion.pretrained import convert_state, load_pretrained, read_state
from safetensors.torch import save_file
from tiny import tiny_dit
from torch import Tensor

from lightning_mhla import AttentionConfig

KINDS = ("mhla", "linear", "softmax", "retention", "gla", "gated_deltanet", "mamba2")


def batch(count: int = 3, channels: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    return (
        torch.randn(count, channels, 8, 8),
        torch.tensor([0.0, 400.0, 999.0])[:count],
        torch.tensor([0, 9, 10])[:count],
    )


def published(tied: bool = True) -> DiTTransformer2DModel:
    """Build a random softmax DiT of diffusers whose blocks share their embeddings, as in published weights."""
    torch.manual_seed(3)
    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        norm_num_groups=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    first = model.transformer_blocks[0].norm1.emb.state_dict()
    for block in model.transformer_blocks if tied else []:
        block.norm1.emb.load_state_dict(first)
    return model


def original_layout(model: DiTTransformer2DModel) -> dict[str, Tensor]:
    """Rename weights to the names of DiT's original code."""
    renamed = {
        r"pos_embed\.proj": "x_embedder.proj",
        r"transformer_blocks\.0\.norm1\.emb\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
        r"transformer_blocks\.0\.norm1\.emb\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
        r"transformer_blocks\.0\.norm1\.emb\.class_embedder": "y_embedder",
        r"transformer_blocks\.(\d+)\.norm1\.linear": r"blocks.\1.adaLN_modulation.1",
        r"transformer_blocks\.(\d+)\.attn1\.to_out\.0": r"blocks.\1.attn.proj",
        r"transformer_blocks\.(\d+)\.ff\.net\.0\.proj": r"blocks.\1.mlp.fc1",
        r"transformer_blocks\.(\d+)\.ff\.net\.2": r"blocks.\1.mlp.fc2",
        r"proj_out_1": "final_layer.adaLN_modulation.1",
        r"proj_out_2": "final_layer.linear",
    }
    state, original = model.state_dict(), {"pos_embed": torch.zeros(1, 16, 16)}
    for name, tensor in state.items():
        if "norm1.emb" in name and ".0.norm1" not in name:
            continue
        if found := re.match(r"transformer_blocks\.(\d+)\.attn1\.to_q\.(.*)", name):
            parts = [state[name.replace("to_q", f"to_{letter}")] for letter in "qkv"]
            original[f"blocks.{found[1]}.attn.qkv.{found[2]}"] = torch.cat(parts)
        elif ".to_k." not in name and ".to_v." not in name:
            for old, new in renamed.items():
                if re.match(old, name):
                    name = re.sub(old, new, name)
                    break
            original[name] = tensor
    return original


def like_published(kind: str, **options: Any) -> DiT:
    attention = AttentionConfig(kind=kind, block_grid=[2, 2], **options)
    sizes: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "patch_size": 2, "out_channels": 8}
    return DiT(8, 4, 10, attention, frequency_shift=1, mlp_norm_eps=1e-5, **sizes).eval()


@pytest.mark.parametrize("layout", ["diffusers folder", "diffusers pipeline", "original pt", "original safetensors"])
@torch.no_grad()
def test_a_converted_softmax_dit_gives_the_originals_output(tmp_path: Path, layout: str) -> None:
    model = published()
    x, times, labels = batch()
    path = tmp_path / {"original pt": "dit.pt", "original safetensors": "dit.safetensors"}.get(layout, "dit")
    if layout.startswith("diffusers"):
        model.save_pretrained(path if layout.endswith("folder") else path / "transformer")
    elif layout.endswith("pt"):
        torch.save(original_layout(model), path)
    else:
        save_file(original_layout(model), path)
    converted = like_published("softmax")
    load_pretrained(converted, str(path))
    want = model(x, times, labels).sample
    torch.testing.assert_close(converted(x, times, labels), want, rtol=1e-5, atol=1e-5)
    assert want.std() > 0.1


@pytest.mark.parametrize("kind", KINDS[:-1])  # mamba2 projects queries and keys to fewer heads
@torch.no_grad()
def test_new_modules_of_swapped_attention_start_without_effect(tmp_path: Path, kind: str) -> None:
    published().save_pretrained(tmp_path)
    plain, dressed = like_published(kind), like_published(kind, lepe=3, gate=True)
    for model in (plain, dressed):
        load_pretrained(model, str(tmp_path))
    torch.testing.assert_close(dressed(*batch()), plain(*batch()), rtol=1e-5, atol=1e-5)
    weights = published().state_dict()
    for name in ("q", "k", "v"):
        theirs = weights[f"transformer_blocks.1.attn1.to_{name}.weight"]
        third = dict(zip("qkv", dressed.backbone.layers[1].attn.qkv.weight.chunk(3), strict=True))[name]
        assert torch.equal(third, theirs)


@torch.no_grad()
def test_own_exports_are_a_start_too_with_whatever_they_have(tmp_path: Path) -> None:
    model = tiny_dit(attention={"lepe": 3, "gate": True})
    model.save_pretrained(tmp_path)
    other = DiT.from_pretrained(str(tmp_path)).eval()
    third = tiny_dit(attention={"lepe": 3, "gate": True}, depth=2)
    for parameter in third.parameters():
        parameter.zero_()
    load_pretrained(third, str(tmp_path))
    for each in (other, third):
        assert torch.equal(each(*batch()), model(*batch()))
    config = (tmp_path / "config.json").read_text()
    assert '"kind": "mhla"' in config


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    published(tied=False).save_pretrained(tmp_path / "untied")
    with pytest.raises(ValueError, match=r"norm1\.emb.*differs from the first block's"):
        load_pretrained(like_published("mhla"), str(tmp_path / "untied"))
    published().save_pretrained(tmp_path / "dit")
    small = DiT(8, 4, 10, AttentionConfig(block_grid=[2, 2]), dim=32, depth=2, heads=2, out_channels=8)
    with pytest.raises(ValueError, match="from a model of a different shape"):
        load_pretrained(small, str(tmp_path / "dit"))
    deeper = DiT(8, 4, 10, AttentionConfig(block_grid=[2, 2]), dim=16, depth=3, heads=2, out_channels=8)
    with pytest.raises(ValueError, match=r"backbone\.blocks\.2\.attn\.qkv\.weight is missing"):
        load_pretrained(deeper, str(tmp_path / "dit"))
    with pytest.raises(ValueError, match="not the weights of a DiT"):
        convert_state({"something.else": torch.zeros(1)})
    with pytest.raises(FileNotFoundError, match=r"nowhere is neither a file"):
        read_state(str(tmp_path / "nowhere"))
    torch.save(
        {"ema": original_layout(published()), "args": argparse.Namespace(model="DiT-S/2")}, tmp_path / "train.pt"
    )
    assert "final_layer.linear.weight" in read_state(str(tmp_path / "train.pt"))
    torch.save({"pytorch-lightning_version": "2.6"}, tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match=r"run.ckpt holds no state_dict: it is not a training checkpoint"):
        load_pretrained(deeper, str(tmp_path / "run.ckpt"))
    torch.save({"args": Path()}, tmp_path / "code.pt")
    with pytest.raises(ValueError, match="cannot be read safely"):
        read_state(str(tmp_path / "code.pt"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_trained(kind: str) -> None:
    model = tiny_dit(kind, attention={"lepe": 3, "gate": True}).train()
    x, times, labels = batch()
    model(x, times, labels).square().mean().backward()
    untouched = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not untouched


def test_at_the_start_blocks_and_output_are_zero() -> None:
    torch.manual_seed(0)
    model = DiT(8, 4, 10, AttentionConfig(block_grid=[2, 2]), dim=16, depth=2, heads=2)
    x = torch.randn(2, 16, 16)
    condition = torch.randn(2, 16)
    torch.testing.assert_close(model.backbone.layers[0](x, condition), x)
    assert not model(*batch()).any()


def test_times_are_embedded_as_dit_does() -> None:
    """Cosines, then sines, of t / 10000^(i / 128)."""
    times = torch.tensor([0.0, 0.5, 737.0])
    angles = times.double()[:, None] * torch.exp(-math.log(10_000) * torch.arange(128).double() / 128)
    want = torch.cat([angles.cos(), angles.sin()], 1)
    torch.testing.assert_close(tiny_dit().frequencies(times).double(), want, rtol=0, atol=2e-4)


def test_layers_of_several_kinds() -> None:
    model = tiny_dit(layer_kinds=["mhla", "softmax"])
    assert [layer.attn.config.kind for layer in model.backbone.layers] == ["mhla", "softmax"]
    with pytest.raises(ValueError, match="its length must divide depth=2"):
        tiny_dit(layer_kinds=["mhla", "mhla", "softmax"])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="patch_size=2 does not divide"):
        tiny_dit(sample_size=7)
    with pytest.raises(ValueError, match=r"channels and sides \(4, 10, 10\), the model expects \(4, 8, 8\)"):
        tiny_dit()(torch.zeros(1, 4, 10, 10), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="size='M' is not one of"):
        DiT(8, 4, 10, AttentionConfig(block_grid=[2, 2]), size="M")  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "millions"), [("S", 33.0), ("B", 130.5), ("L", 458.1), ("XL", 675.1)])
def test_named_sizes_have_dits_number_of_parameters(size: Any, millions: float) -> None:
    """Table 4 of DiT; with softmax attention, patch 2, learned variance."""
    with torch.device("meta"):
        model = DiT(32, 4, 1000, AttentionConfig(kind="softmax"), size=size, out_channels=8)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(millions, rel=0.01)
