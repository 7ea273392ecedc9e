"""Weights of one model in another: matching ones are loaded, grids and lengths are resized, heads start from new values."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped import grouped
from mhla_kernels import extend_mixing, resize_mixing
from mhla_tasks.classification import ImageClassifier
from mhla_tasks.language import DecoderShape, LanguageModel
from torch import nn
from torch.nn import functional as F

from lightning_mhla import MHLA, AttentionConfig, Backbone, BlockLayout
from lightning_mhla.attention.mixing import DenseCoefficients, ExponentialCoefficients
from lightning_mhla.checkpoints.pretrained import Pretrained, adopt, read_pretrained, resize_positions
from lightning_mhla.vision.vit import VisionTransformer

SIZES: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "patch_size": 2, "channels": 1}


def classifier(blocks: int, side: int, classes: int, **options: Any) -> VisionTransformer:
    torch.manual_seed(blocks)
    attention = AttentionConfig(block_grid=[blocks, blocks], **options)
    network = ImageClassifier(attention, classes, image_size=side, **grouped(**SIZES)).network
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network.eval()


def language(context: int, vocab: int, **options: Any) -> nn.Module:
    attention = AttentionConfig(block_size=8, normalize=False, rotary=True, **options)
    shape = DecoderShape(dim=16, depth=2, heads=2, mlp_width=32, initializer_range=0.3)
    return LanguageModel(attention, vocab_size=vocab, context=context, shape=shape).network.eval()


def exported(network: Any, folder: Path) -> Pretrained:
    network.save_pretrained(folder)
    return read_pretrained(folder)


def test_the_same_model_gives_the_same_outputs(tmp_path: Path) -> None:
    old, new = classifier(2, 8, 3), classifier(2, 8, 3)
    nn.init.zeros_(new.head.weight)
    report = adopt(new, exported(old, tmp_path), "old", heads=("head.",), positions=("position",))
    assert [*report.resized, *report.initialized, *report.left] == []
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(new(images), old(images))


def test_another_resolution_and_other_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = classifier(2, 8, 3), classifier(4, 16, 5)
    head = new.head.weight.clone()
    with caplog.at_level(logging.INFO, "lightning_mhla"):
        report = adopt(new, exported(old, tmp_path), "old", heads=("head.",), positions=("position",))
    assert report.initialized == ["head.bias", "head.weight"]
    assert torch.equal(new.head.weight, head)
    assert sorted(report.resized) == [*(f"backbone.blocks.{i}.attn.mixing.weight" for i in (0, 1)), "position"]
    want = resize_mixing(old.backbone.blocks[1].attn.mixing(), (2, 2), (4, 4))
    assert torch.equal(new.backbone.blocks[1].attn.mixing.weight, want)
    grid = old.position.view(1, 4, 4, 16).permute(0, 3, 1, 2)
    want = F.interpolate(grid, (8, 8), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
    torch.testing.assert_close(new.position, want)
    assert torch.equal(new.backbone.blocks[0].attn.qkv.weight, old.backbone.blocks[0].attn.qkv.weight)
    assert "newly initialized (head.bias, head.weight)" in caplog.text


def test_blocks_of_another_shape_and_the_same_number_are_resized(tmp_path: Path) -> None:
    """16 blocks as 2 x 8 are not those of 4 x 4, though the matrices have one size."""
    attention = AttentionConfig(block_grid=[2, 8])
    old = ImageClassifier(attention, 3, image_size=16, **grouped(**SIZES)).network
    nn.init.uniform_(old.backbone.blocks[0].attn.mixing.weight)
    new = classifier(4, 16, 3)
    report = adopt(new, exported(old, tmp_path), "old", heads=("head.",), positions=("position",))
    assert "backbone.blocks.0.attn.mixing.weight" in report.resized
    want = resize_mixing(old.backbone.blocks[0].attn.mixing.weight, (2, 8), (4, 4))
    assert torch.equal(new.backbone.blocks[0].attn.mixing.weight, want)


def test_other_attention_keeps_the_start_of_what_it_adds(tmp_path: Path) -> None:
    old, new = classifier(2, 8, 3), classifier(2, 8, 3, kind="softmax")
    report = adopt(new, exported(old, tmp_path), "old", heads=("head.",), positions=("position",))
    assert report.left == [f"backbone.blocks.{i}.attn.mixing.weight" for i in (0, 1)]
    gated = classifier(2, 8, 3, gate=True, lepe=3)
    before = gated.backbone.blocks[0].attn.gate.weight.clone()
    report = adopt(gated, read_pretrained(tmp_path), "old", heads=("head.",), positions=("position",))
    assert {name.split(".attn.")[1].split(".")[0] for name in report.initialized} == {"gate", "lepe"}
    assert torch.equal(gated.backbone.blocks[0].attn.gate.weight, before)


def test_a_longer_context_and_another_vocabulary(tmp_path: Path) -> None:
    old, new, words = language(64, 50), language(128, 50), language(64, 70)
    source = exported(old, tmp_path)
    adopt(new, source, "old", heads=("head.", "embedding."))
    ids = torch.randint(0, 50, (1, 64))
    torch.testing.assert_close(new(ids).logits, old(ids).logits)
    want = extend_mixing(old.backbone.blocks[0].attn.mixing.weight, 16)
    assert torch.equal(new.backbone.blocks[0].attn.mixing.weight, want)
    kept = words.embedding.weight.clone()
    report = adopt(words, source, "old", heads=("head.", "embedding."))
    assert "embedding.weight" in report.initialized
    assert torch.equal(words.embedding.weight, kept)


def test_a_model_of_another_width_is_refused(tmp_path: Path) -> None:
    source = exported(classifier(2, 8, 3), tmp_path)
    wider = ImageClassifier(
        AttentionConfig(block_grid=[2, 2]), 3, image_size=8, **grouped(**{**SIZES, "dim": 32})
    ).network
    with pytest.raises(ValueError, match=r"different shape: .*tensors in all\); set width, depth, heads and patches"):
        adopt(wider, source, "old", heads=("head.",), positions=("position",))
    deeper = ImageClassifier(
        AttentionConfig(block_grid=[2, 2]), 3, image_size=8, **grouped(**{**SIZES, "depth": 3})
    ).network
    with pytest.raises(ValueError, match="is missing"):
        adopt(deeper, source, "old", heads=("head.",), positions=("position",))
    with pytest.raises(FileNotFoundError, match="is not a run folder, a checkpoint"):
        read_pretrained(tmp_path / "absent")


def test_positions_of_a_constant_stay_constant() -> None:
    for tokens in (4, 16, 64, 100):
        torch.testing.assert_close(
            resize_positions(torch.full((1, 36, 2), 0.7), tokens), torch.full((1, tokens, 2), 0.7)
        )
    with pytest.raises(ValueError, match="both numbers must be squares"):
        resize_positions(torch.zeros(1, 12, 2), 16)


def test_exponential_coefficients_keep_their_reach() -> None:
    """Twice as many blocks along an axis are half as far apart, so that decays halve."""
    old = ExponentialCoefficients(BlockLayout((8, 8), (4, 2)), terms=3)
    new = ExponentialCoefficients(BlockLayout((8, 8), (8, 2)), terms=3, heads=2)
    nn.init.uniform_(old.decay)
    carried = new.carried("decay", old.decay.detach(), (4, 2))
    assert carried is not None
    torch.testing.assert_close(carried, (old.decay * torch.tensor([0.5, 1.0])).expand(2, 3, 2))
    other = ExponentialCoefficients(BlockLayout((8, 8), (8, 2)), terms=4)
    assert other.carried("amplitude", old.amplitude.detach(), (4, 2)) is None


def test_coefficients_of_each_head_and_of_all() -> None:
    shared, own = (DenseCoefficients(BlockLayout((4, 4), (2, 2)), heads) for heads in (None, 3))
    values = torch.rand(3, 4, 4)
    torch.testing.assert_close(shared.carried("weight", values, (2, 2)), values.mean(0))
    carried = own.carried("weight", values[0], (2, 2))
    assert carried is not None
    assert carried.shape == (3, 4, 4)
    assert torch.equal(carried[2], values[0])
    assert own.carried("weight", torch.rand(2, 4, 4), (2, 2)) is None


@pytest.mark.parametrize("make", ["layer", "backbone"])
def test_tables_survive_the_meta_device(make: str) -> None:
    """Made on meta, given memory, loaded strictly: as FSDP2 and large models are set up."""
    config = AttentionConfig(block_grid=[2, 2], lepe=3)

    def build() -> nn.Module:
        if make == "layer":
            return MHLA(16, 2, BlockLayout((4, 6), (2, 2), prefix_tokens=1), config)
        return Backbone(16, 2, 2, (4, 6), config, prefix_tokens=1)

    torch.manual_seed(0)
    real = build().eval()
    with torch.device("meta"):
        empty = build().eval()
    empty.to("meta").to_empty(device="cpu")
    empty.load_state_dict(real.state_dict(), strict=True)
    x = torch.randn(2, 25, 16)
    assert torch.equal(empty(x), real(x))
    moved = build().eval().to("meta").to_empty(device="cpu")
    for name, buffer in real.named_buffers():
        assert torch.equal(dict(moved.named_buffers())[name], buffer), name


@pytest.mark.parametrize("mixing", ["dense", "exponential"])
def test_coefficients_made_on_meta_can_start_anew(mixing: str) -> None:
    def build() -> MHLA:
        config = AttentionConfig(block_grid=[2, 2], mixing=mixing, mixing_per_head=True)  # type: ignore[arg-type]
        return MHLA(16, 2, BlockLayout((4, 4), (2, 2)), config)

    with torch.device("meta"):
        layer = build()
    layer.to_empty(device="cpu").mixing.reset_parameters()
    for name, parameter in build().mixing.named_parameters():
        assert torch.equal(dict(layer.mixing.named_parameters())[name], parameter), name


def test_coefficients_left_on_meta_are_an_error() -> None:
    layer = MHLA(16, 2, BlockLayout((4, 4), (2, 2)), AttentionConfig(block_grid=[2, 2]))
    layer.mixing.to("meta")
    with pytest.raises(ValueError, match="mixing is on 'meta', but q is on 'cpu'; it was never given values"):
        layer(torch.randn(1, 16, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mixing": "exponental"},
            "mixing='exponental' is not one of 'dense', 'exponential'; did you mean 'exponential'",
        ),
        ({"mixing_init": "locally"}, "did you mean 'locality'"),
        ({"feature_map": "gelu"}, "feature_map='gelu' is not one of"),
        ({"block_grid": [0, 2]}, r"block_grid=\[0, 2\] must be positive"),
        ({"block_size": -1}, "block_size=-1 must be positive"),
        ({"mixing_terms": 0}, "mixing_terms=0 must be positive"),
    ],
)
def test_misspelt_attention_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**options)
