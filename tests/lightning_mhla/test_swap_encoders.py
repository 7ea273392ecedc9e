"""Attention swapped into transformers' encoders of text and of images: the definition, padding, sizes, saving, rejected models."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_mhla import AttentionConfig, load_swapped, swap_attention
from lightning_mhla.attention import MHLA
from lightning_mhla.swap import original_attention, resize_blocks, swapped_layers, transfer_loss
from lightning_mhla.swap.transformers import IMAGE_ENCODERS, TEXT_ENCODERS

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
NO_DROPOUT = {
    "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "dropout": 0.0
}  # fmt: skip
TOKENS = {"vocab_size": 64, "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
PICTURES = {"image_size": 24, "patch_size": 4}  # 6 x 6 patches
OTHER: dict[str, dict[str, Any]] = {
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "ModernBert": {"layer_types": ["full_attention"] * 2, "cls_token_id": 0, "sep_token_id": 2},
    "Dinov2WithRegisters": {"num_register_tokens": 3},
    "DINOv3ViT": {"num_register_tokens": 2},
}
TEXT = AttentionConfig(block_size=4, mixing="exponential", mixing_per_head=True)
IMAGES = AttentionConfig(block_grid=[2, 3])
WINDOW = AttentionConfig(kind="mhla_window", block_size=4, mixing="exponential")


def tiny(family: str, images: bool = False, name: str = "Model", **more: Any) -> Any:
    """Build a small random model of a family, with changed weights of norms and biases."""
    torch.manual_seed(0)
    part = {"Siglip": "Vision" if images else "Text", "CLIP": "Vision" if images else "Text"}.get(family, "")
    kind = getattr(transformers, f"{family}{part}Config")
    known = kind().to_dict()
    wanted = {**SIZES, **NO_DROPOUT, **(PICTURES if images else TOKENS)}
    config = kind(**{**{key: wanted[key] for key in wanted if key in known}, **OTHER.get(family, {}), **more})
    model = getattr(transformers, f"{family}{part}{name}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def swapped(model: Any, config: AttentionConfig, **options: Any) -> Any:
    """Return a copy with swapped attention, whose coefficients differ from their initial values."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    for layer in swap_attention(other, config, **options).values():
        if isinstance(layer, MHLA):
            for parameter in layer.mixing.parameters():
                nn.init.uniform_(parameter, 0.1, 1.0)
    return other


def tokens(columns: int = 22) -> Tensor:
    return torch.randint(3, 64, (2, columns), generator=torch.Generator().manual_seed(2))


def pictures(height: int = 24, width: int = 24) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(2)).double()


def hidden(model: Any, *args: Any, **options: Any) -> Tensor:
    out: Tensor = model(*args, **options).last_hidden_state
    return out


def defined(model: Any, other: Any, blocks: Tensor, real: Tensor | None = None) -> Any:
    """``model`` with every pair of tokens written out, by the coefficients of ``other``.

    Args:
        model: before the swap.
        other: after it.
        blocks: ``[N]``, block of each token.
        real: ``[B, N]``.
    """
    layers = iter(swapped_layers(other).values())

    def definition(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        mixing = next(layers).coefficients(query)[0]  # as many calls as layers
        count = int(blocks.max()) + 1
        mixing = mixing.double() if isinstance(mixing, Tensor) else mixing.to(torch.float64).dense(count)
        scaled = query * options["scaling"] * query.shape[-1] ** 0.5
        weights = (scaled.relu() + 1e-6) @ (key.relu() + 1e-6).transpose(-1, -2)
        weights = weights * mixing[..., blocks[:, None], blocks]
        if real is not None:
            weights = weights * real[:, None, None]
        return (weights / (weights.sum(-1, keepdim=True) + 1e-6) @ value).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("definition", definition)
    written = copy.deepcopy(model)
    written.config._attn_implementation = "definition"
    return written


@pytest.mark.parametrize("family", TEXT_ENCODERS)
@torch.no_grad()
def test_a_window_over_two_blocks_is_the_original_text_encoder(family: str) -> None:
    model, x = tiny(family).double(), tokens()
    mask = torch.ones_like(x)
    mask[0, 15:] = 0
    for config in (WINDOW, replace(WINDOW, block_size=11, options={"sinks": 2})):
        other = swapped(model, replace(config, block_size=11))
        real = mask[..., None].bool()
        expected, out = (hidden(each, x, attention_mask=mask).where(real, 0) for each in (model, other))
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(hidden(other, x), hidden(model, x), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_window_over_part_of_a_text_ignores_padding_and_takes_any_length() -> None:
    for config in (WINDOW, replace(WINDOW, options={"sinks": 1}), replace(WINDOW, mixing="dense")):
        other, x = swapped(tiny("Bert").double(), config), tokens(38)
        mask = torch.ones_like(x)
        mask[0, 17:] = 0
        padded = hidden(other, x, attention_mask=mask)
        torch.testing.assert_close(padded[:1, :17], hidden(other, x[:1, :17]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(padded[1:], hidden(other, x[1:]), rtol=1e-9, atol=1e-9)
        assert not torch.allclose(padded[1:], hidden(tiny("Bert").double(), x[1:]), atol=1e-3)


@pytest.mark.parametrize("family", IMAGE_ENCODERS)
@torch.no_grad()
def test_a_window_over_two_blocks_of_each_axis_is_the_original_image_encoder(family: str) -> None:
    model, x = tiny(family, images=True).double(), pictures()
    config = AttentionConfig(kind="mhla_window", block_grid=[2, 2])
    torch.testing.assert_close(hidden(swapped(model, config), x), hidden(model, x), rtol=1e-9, atol=1e-9)
    several = hidden(swapped(model, replace(config, block_grid=[3, 6])), x)
    assert several.isfinite().all()
    assert not torch.allclose(several, hidden(model, x), atol=1e-3)


@pytest.mark.parametrize("mixing", ["dense", "exponential"])
@pytest.mark.parametrize("family", TEXT_ENCODERS)
@torch.no_grad()
def test_a_swapped_encoder_of_text_is_its_definition(family: str, mixing: Any) -> None:
    """Texts shorter than the longest, one of them padded: 1e-9 in float64, 1e-4 in float32."""
    model, x = tiny(family).double(), tokens()
    mask = torch.ones_like(x)
    mask[1, 13:] = 0
    other = swapped(model, AttentionConfig(block_size=4, mixing=mixing))
    assert len(swapped_layers(other)) == 2
    expected = hidden(defined(model, other, torch.arange(22) // 4, mask), x, attention_mask=mask)
    real = mask.bool()
    found = hidden(other, x, attention_mask=mask)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected[real], hidden(model, x, attention_mask=mask)[real], atol=1e-2)
    found = hidden(other.float(), x, attention_mask=mask)
    torch.testing.assert_close(found[real].double(), expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", IMAGE_ENCODERS)
@torch.no_grad()
def test_a_swapped_encoder_of_images_is_its_definition(family: str) -> None:
    model, x = tiny(family, images=True).double(), pictures()
    other = swapped(model, IMAGES)
    found = hidden(other, x)
    prefix = found.shape[1] - 36
    rows, columns = torch.arange(6) // 3, torch.arange(6) // 2
    blocks = (rows[:, None] * 3 + columns).flatten()
    if prefix:
        blocks = torch.cat([torch.zeros(prefix, dtype=torch.long), 1 + blocks])
    expected = hidden(defined(model, other, blocks), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected, hidden(model, x), atol=1e-2)


@pytest.mark.parametrize(
    ("family", "images"),
    [*((family, False) for family in TEXT_ENCODERS), *((family, True) for family in IMAGE_ENCODERS)],
)
@torch.no_grad()
def test_softmax_swapped_for_softmax_and_nothing_swapped_change_nothing(family: str, images: bool) -> None:
    model, x = tiny(family, images), pictures().float() if images else tokens()
    expected = hidden(model, x)
    softmax = swapped(model, AttentionConfig(kind="softmax"))
    torch.testing.assert_close(hidden(softmax, x), expected, rtol=1e-5, atol=1e-5)
    other = swapped(model, IMAGES if images else TEXT)
    with original_attention(other):
        assert torch.equal(hidden(other, x), expected)
    assert torch.equal(hidden(swapped(model, IMAGES if images else TEXT, layers=[]), x), expected)


@pytest.mark.parametrize("mixing", ["dense", "exponential"])
@torch.no_grad()
def test_padding_on_either_side_is_not_seen(mixing: Any) -> None:
    other = swapped(tiny("ModernBert").double(), AttentionConfig(block_size=4, mixing=mixing))  # knows distances only
    x = tokens(13)
    alone = hidden(other, x)
    filled, positions = torch.full((2, 6), 5), torch.arange(19)
    mask = torch.cat([torch.ones(2, 13), torch.zeros(2, 6)], 1).long()
    right = hidden(other, torch.cat([x, filled], 1), attention_mask=mask)[:, :13]
    torch.testing.assert_close(right, alone, rtol=1e-9, atol=1e-9)
    places = (positions - 6).clamp(min=0)[None]
    left = hidden(other, torch.cat([filled, x], 1), attention_mask=mask.flip(1), position_ids=places)[:, 6:]
    torch.testing.assert_close(left, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["ViT", "Dinov2", "Siglip"])
@torch.no_grad()
def test_images_of_another_size_have_blocks_of_their_own(family: str) -> None:
    other = swapped(tiny(family, images=True), IMAGES)
    options = {} if family == "Dinov2" else {"interpolate_pos_encoding": True}
    before = hidden(other, pictures().float(), **options)
    assert hidden(other, pictures(32, 16).float(), **options).shape[1] == 32 + before.shape[1] - 36
    (layer,) = {layer.layout.grid for layer in swapped_layers(other).values()}
    assert layer == (8, 4)
    assert torch.equal(hidden(other, pictures().float(), **options), before)


@pytest.mark.parametrize("mixing", ["dense", "exponential"])
@torch.no_grad()
def test_blocks_of_a_window_grow_with_the_image(mixing: Any, tmp_path: Path) -> None:
    """A window has no coefficients of the class token, so its blocks can be resized, and are saved."""
    config = AttentionConfig(kind="mhla_window", block_grid=[2, 2], mixing=mixing)
    model, images = tiny("Dinov2", images=True), pictures(48, 32).float()
    other = swapped(model, config)
    resize_blocks(other, [6, 4])
    finer = copy.deepcopy(model)
    for number, layer in swap_attention(finer, replace(config, block_grid=[6, 4])).items():
        layer.load_state_dict(swapped_layers(other)[number].state_dict())
    out = hidden(other, images)
    torch.testing.assert_close(out, hidden(finer, images), rtol=1e-5, atol=1e-5)
    assert (out - hidden(swapped(model, config), images)).abs().max() > 1e-3
    other.save_pretrained(tmp_path)
    again = load_swapped(tmp_path)
    assert again.config.swapped_attention["attention"]["block_grid"] == [6, 4]
    assert torch.equal(hidden(again, images), out)


def test_blocks_that_cannot_be_resized_are_rejected_before_anything_changes() -> None:
    with_class = swapped(tiny("Dinov2", images=True), IMAGES)
    with pytest.raises(ValueError, match="prefix tokens"):
        resize_blocks(with_class, [3, 3])
    for model, grid in ((swapped(tiny("Bert"), TEXT), [4]), (with_class, [3]), (with_class, [0, 3])):
        before = {name: x.clone() for name, x in model.state_dict().items()}
        with pytest.raises(ValueError, match="cannot be resized"):
            resize_blocks(model, grid)
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("family", "name", "images"),
    [
        ("Bert", "ForSequenceClassification", False),
        ("ModernBert", "ForMaskedLM", False),
        ("ViT", "ForImageClassification", True),
    ],
)
@torch.no_grad()
def test_saved_it_loads(family: str, name: str, images: bool, tmp_path: Path) -> None:
    other = swapped(tiny(family, images, name), IMAGES if images else TEXT)
    x = pictures().float() if images else tokens()
    other.save_pretrained(tmp_path)
    again = load_swapped(tmp_path)
    assert type(again) is type(other)
    assert torch.equal(again.eval()(x).logits, other(x).logits)


@pytest.mark.parametrize(("family", "images"), [("Bert", False), ("ViT", True)])
def test_layers_learn_what_they_replaced(family: str, images: bool) -> None:
    model = tiny(family, images)
    x = pictures().float() if images else tokens()
    swap_attention(model, AttentionConfig(**{**vars(IMAGES if images else TEXT), "feature_map": "learned"}))
    layers = swapped_layers(model).values()
    optimizer = torch.optim.Adam([parameter for layer in layers for parameter in layer.parameters()], lr=0.02)
    losses = []
    for _ in range(20):
        loss = transfer_loss(model, lambda: model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if ".swapped." not in name)


def test_trainer_and_pipeline_take_it(tmp_path: Path) -> None:
    model = swapped(tiny("Bert", name="ForSequenceClassification"), TEXT)
    rows = [{"input_ids": row, "labels": int(row[0]) % 2} for row in torch.randint(3, 64, (16, 12)).tolist()]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no"
    )
    before = model.bert.encoder.layer[0].attention.self.swapped.mixing.decay.detach().clone()
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert not torch.equal(model.bert.encoder.layer[0].attention.self.swapped.mixing.decay, before)
    images = swapped(tiny("ViT", images=True, name="ForImageClassification"), IMAGES)
    processor = transformers.ViTImageProcessor(size={"height": 24, "width": 24})
    classify = transformers.pipeline("image-classification", model=images, image_processor=processor)
    from PIL import Image

    found = classify(Image.new("RGB", (40, 30)))
    assert sum(each["score"] for each in found) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (lambda: tiny("Bert", attention_probs_dropout_prob=0.1), TEXT, "load the model with attention_probs_dropout_prob=0"),
        (lambda: tiny("DistilBert", attention_dropout=0.1), TEXT, "drops attention weights"),
        (lambda: tiny("Bert", is_decoder=True), TEXT, r"is causal \(is_decoder, is_causal\)"),
        (lambda: tiny("Bert", is_decoder=True, add_cross_attention=True), TEXT, r"is causal \(is_decoder, is_causal\)"),
        (lambda: transformers.T5EncoderModel(transformers.T5Config(d_model=32, num_layers=1, num_heads=2, d_kv=16)), TEXT,
         "biases by relative position"),
        (lambda: transformers.DebertaV2Model(transformers.DebertaV2Config(**SIZES, vocab_size=64, relative_attention=True)),
         TEXT, "biases by relative position"),
        (lambda: transformers.BeitModel(transformers.BeitConfig(**SIZES, image_size=32, patch_size=8,
                                                                use_relative_position_bias=True)),
         IMAGES, "biases by relative position"),
        (lambda: transformers.SwinModel(transformers.SwinConfig(
            image_size=32, patch_size=2, embed_dim=8, depths=[1], num_heads=[2], window_size=2)),
         IMAGES, "has no supported attention"),
        (lambda: tiny("ModernBert", layer_types=["full_attention", "sliding_attention"], local_attention=8), TEXT,
         r"layer 1 attends within a window of 5 tokens.*layers=\[0\]"),
        (lambda: tiny("Bert", is_causal=True), TEXT, r"is causal \(is_decoder, is_causal\)"),
        (lambda: transformers.EncoderDecoderModel(encoder=tiny("Bert"), decoder=tiny("Bert", is_decoder=True,
            add_cross_attention=True, name="LMHeadModel")), TEXT, "is an encoder-decoder model"),
        (lambda: tiny("ViT", images=True), AttentionConfig(block_grid=[8, 8]), r"more blocks than the image has tokens, \[6, 6\]"),
        (lambda: tiny("CLIP"), TEXT, "CLIPTextModel has no image patches"),
        (lambda: transformers.SiglipModel(transformers.SiglipConfig(text_config=
            tiny("Siglip").config.to_dict(), vision_config=tiny("Siglip", images=True).config.to_dict())), TEXT, "combines text with other inputs"),
        (lambda: tiny("ViT", images=True), TEXT, "needs block_grid"),
        (lambda: tiny("Bert"), IMAGES, "needs block_size, the number of tokens in a block, not block_grid"),
        (lambda: tiny("Bert"), AttentionConfig(kind="gated_conv"), "causal only"),
        (lambda: tiny("Bert"), AttentionConfig(kind="mhla_window", block_size=4, options={"sinks": 5}), "exceeds the 4 tokens"),
        (lambda: tiny("ViT", images=True), AttentionConfig(block_grid=[2, 2], mixing="exponential"), "prefix tokens; use dense"),
    ],
)  # fmt: skip
def test_what_would_not_be_right_is_refused_before_anything_changes(
    model: Any, config: AttentionConfig, message: str
) -> None:
    model = model()
    before = model.state_dict().keys()
    with pytest.raises(ValueError, match=message) as refused:
        swap_attention(model, config)
    assert "\n" not in str(refused.value)
    assert model.state_dict().keys() == before
    assert not hasattr(model.config, "swapped_attention")


@torch.no_grad()
def test_masks_of_every_form_are_read() -> None:
    other, x = swapped(tiny("Bert"), TEXT), tokens()
    mask = torch.ones(2, 22, dtype=torch.bool)
    mask[1, 13:] = False
    expected = hidden(other, x, attention_mask=mask)[mask]
    square = mask[:, None, None].expand(2, 1, 22, 22)
    added = torch.zeros(2, 1, 22, 22).masked_fill(~square, torch.finfo(torch.float32).min)
    for form in (mask[:, None, None], square, added):
        torch.testing.assert_close(hidden(other, x, attention_mask=form)[mask], expected)


@torch.no_grad()
def test_exported_it_still_reads_its_mask() -> None:
    class Encoder(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return hidden(self.model, x, attention_mask=mask)

    other, x = swapped(tiny("Bert"), TEXT), tokens()
    mask = torch.ones_like(x)
    mask[1, 13:] = 0
    exported = torch.export.export(Encoder(other), (x, mask), strict=False).module()
    torch.testing.assert_close(exported(x, mask), hidden(other, x, attention_mask=mask))
    images = swapped(tiny("ViT", images=True), IMAGES)
    pixels = pictures().float()
    exported = torch.export.export(images, (pixels,), strict=False).module()
    torch.testing.assert_close(exported(pixels).last_hidden_state, hidden(images, pixels))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_have_the_sizes_of_their_images(reentrant: bool) -> None:
    """Several crops before one backward pass, as DINO is trained; then one crop of the tokens of another."""
    plain, other = (swapped(tiny("Dinov2", images=True), AttentionConfig(block_grid=[2, 2])).train() for _ in range(2))
    other.activation_checkpointing_enable({"use_reentrant": reentrant})

    def gradients(model: Any, *sizes: tuple[int, int]) -> list[Tensor]:
        model.zero_grad()
        torch.stack([hidden(model, pictures(*size).float()).square().mean() for size in sizes]).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for sizes in ((32, 16), (16, 16)), ((16, 32),), ((32, 16),):
        for mine, theirs in zip(gradients(other, *sizes), gradients(plain, *sizes), strict=True):
            torch.testing.assert_close(mine, theirs)
    for size in (24, 24), (32, 16), (16, 32):  # layers are matched for one size after another
        found = []
        for model in (plain, other):
            model.zero_grad()
            transfer_loss(model, partial(model, pictures(*size).float())).backward()
            found.append([layer.mixing.weight.grad for layer in swapped_layers(model).values()])
        torch.testing.assert_close(found[1], found[0])
    with pytest.raises(
        ValueError, match=r"its 33 tokens belong to a grid of \[4, 8\] or \[8, 4\]; call backward after each input"
    ):
        gradients(other, (32, 16), (16, 32))


def test_padding_does_not_count_in_attention_transfer() -> None:
    other, x = swapped(tiny("Bert"), AttentionConfig(kind="softmax")), tokens()
    mask = torch.ones_like(x)
    mask[1, 8:] = 0
    assert float(transfer_loss(other, lambda: other(x, attention_mask=mask))) < 1e-9
    linear = swapped(tiny("Bert"), TEXT)
    alone = transfer_loss(linear, lambda: linear(x[1:, :8]))
    padded = transfer_loss(linear, lambda: linear(x[1:], attention_mask=mask[1:]))
    torch.testing.assert_close(padded, alone)


@pytest.mark.parametrize(
    ("family", "images", "option"),
    [
        ("Bert", False, {"add_pooling_layer": False}),
        ("ViT", True, {"add_pooling_layer": False}),
        ("ViT", True, {"use_mask_token": True}),
    ],
)
def test_options_that_transformers_does_not_save_are_found_again(
    family: str, images: bool, option: dict[str, bool], tmp_path: Path
) -> None:
    model = tiny(family, images)
    model = swapped(type(model)(model.config, **option).eval(), IMAGES if images else TEXT)
    model.save_pretrained(tmp_path)
    x = pictures().float() if images else tokens()
    assert torch.equal(hidden(load_swapped(tmp_path), x), hidden(model, x))


@torch.no_grad()
def test_the_image_encoder_in_a_model_of_two_is_swapped_where_it_is_used_alone(tmp_path: Path) -> None:
    parts = {
        "vision_config": tiny("Siglip", images=True).config.to_dict(),
        "text_config": tiny("Siglip").config.to_dict(),
    }
    model = transformers.SiglipForImageClassification(transformers.SiglipConfig(**parts)).eval()
    other = swapped(model, IMAGES)
    assert len(swapped_layers(other)) == 2
    other.save_pretrained(tmp_path)
    x = pictures().float()
    assert torch.equal(load_swapped(tmp_path)(x).logits, other(x).logits)


@torch.no_grad()
def test_more_tokens_than_dense_coefficients_reach_to_are_refused() -> None:
    other = swapped(tiny("ModernBert"), AttentionConfig(block_size=4))
    with pytest.raises(ValueError, match="11 blocks are more than the 10"):
        other(tokens(44))


@torch.no_grad()
def test_a_mask_that_hides_more_than_padding_is_refused() -> None:
    other = swapped(tiny("Bert"), TEXT)
    with pytest.raises(ValueError, match="hides more than padding"):
        other(tokens(), attention_mask=torch.ones(2, 1, 22, 22).tril().bool())
