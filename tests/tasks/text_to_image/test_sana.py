"""The swap into SANA, sampling and captions against diffusers' own pipeline, weights from every place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SanaPipeline, SanaTransformer2DModel
from mhla_tasks.captioned.host import build_transformer, load_weights
from mhla_tasks.captioned.sampling import denoise, latent_shape
from mhla_tasks.captioned.text import TextConfig, make_encoder
from mhla_tasks.text_to_image import TextToImage
from mhla_tasks.text_to_image.model import SanaTransformerConfig
from mhla_tasks.text_to_image.pretrained import SANA
from mhla_tasks.text_to_image.sampling import SanaSamplingConfig
from sana import TINY, inputs, save_pipeline, shaken, tiny_sana

from lightning_mhla import AttentionConfig, load_swapped, swap_attention
from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.generative.codecs import ImageCodec
from lightning_mhla.generative.images import to_pixels

UNIFORM = AttentionConfig(block_grid=[2, 2], mixing_init="uniform", feature_map="sana")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("pipeline") / "sana")


@pytest.mark.parametrize(
    ("shape", "millions"),
    [
        (SanaTransformerConfig(), 591.7),
        (
            SanaTransformerConfig(
                num_attention_heads=70,
                num_layers=20,
                num_cross_attention_heads=20,
                cross_attention_head_dim=112,
                cross_attention_dim=2240,
            ),
            1604.5,
        ),
    ],
)
def test_parameters_are_those_of_sana(shape: SanaTransformerConfig, millions: float) -> None:
    with torch.device("meta"):
        kept = build_transformer(SANA, shape, AttentionConfig(kind="linear"), ["keep"])
        mixed = build_transformer(SANA, shape, AttentionConfig(block_grid=[4, 4]), None)
    count = sum(parameter.numel() for parameter in kept.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.05)
    assert sum(parameter.numel() for parameter in mixed.parameters()) - count == shape.num_layers * 16 * 16


@torch.no_grad()
@pytest.mark.parametrize("size", [(8, 8), (6, 9)])
def test_uniform_coefficients_change_nothing(size: tuple[int, int]) -> None:
    """Not even where queries are nearly zero, so that an offset of the features would count."""
    given = inputs(*size)
    for options, same in ((UNIFORM, True), (AttentionConfig(block_grid=[2, 2], feature_map="sana"), False)):
        model, swapped = tiny_sana(), tiny_sana()
        swap_attention(swapped, options)
        for each in (model, swapped):
            for block in each.transformer_blocks:
                block.attn1.to_q.weight.mul_(1e-4)
        before = model(**given).sample
        difference = (swapped(**given).sample - before).abs().max().item() / before.abs().max().item()
        assert (difference < 1e-5) == same, difference


@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "mhla", "softmax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    """Keys whose sum overflows float16, under autocast and as a half-precision model."""
    model, given = tiny_sana(), inputs(32, 32)
    for block in model.transformer_blocks:
        block.attn1.to_k.weight.mul_(300)
    swap_attention(model, AttentionConfig(kind=kind, block_grid=[2, 2], mixing_init="uniform"))
    plain = model(**given).sample
    bound = {torch.bfloat16: 0.1, torch.float16: 0.02}[dtype] * plain.abs().max().item()
    with torch.autocast("cpu", dtype):
        found = model(**given).sample.float()
    assert (found - plain).abs().max().item() < bound
    half = model.to(dtype)(**{name: tensor.to(dtype) for name, tensor in given.items()}).sample.float()
    assert torch.isfinite(half).all()
    assert (half - plain).abs().max().item() < bound


def test_the_same_pictures_as_diffusers_own_pipeline(pipeline: Path) -> None:
    """Text encoder with instruction, guidance, scheduler, autoencoder: by prompt there, by our parts here."""
    own = SanaPipeline.from_pretrained(pipeline)
    own.set_progress_bar_config(disable=True)
    prompts = ["A red three left of a green seven", "a blue seven"]
    noise = torch.stack([torch.randn(4, 8, 8, generator=sample_generator(7, index)) for index in (0, 1)])
    theirs = own(
        prompts, height=32, width=32, latents=noise, num_inference_steps=3, guidance_scale=4.5, max_sequence_length=12,
        use_resolution_binning=False, output_type="pt",
    ).images  # fmt: skip
    ours_model = build_transformer(SANA, TINY, AttentionConfig(kind="linear"), None)
    load_weights(ours_model, str(pipeline), SANA)
    encoder = make_encoder(TextConfig(str(pipeline), 12, "sana"), 8)
    cpu = torch.device("cpu")
    sampling = SanaSamplingConfig(steps=3, guidance=4.5, height=16, width=16)
    codec = ImageCodec(str(pipeline))
    negative = encoder.encode([""], cpu)[0].expand(2, -1, -1)
    captions = TextToImage.caption_arguments(encoder.encode(prompts, cpu), negative)
    shape = latent_shape(ours_model, codec, sampling, "images")
    latents = denoise(SANA, ours_model.eval(), shape, sampling, 3.0, captions, [0, 1], 7)
    ours = to_pixels(codec.decode(latents))
    assert ours.shape == (2, 3, 16, 16)
    expected = to_pixels(theirs * 2 - 1)
    assert (ours.int() - expected.int()).abs().max() <= 1, "a level of 255, for rounding"


def test_captions_are_those_of_the_pipeline(pipeline: Path) -> None:
    own = SanaPipeline.from_pretrained(pipeline, transformer=None, vae=None)
    instruction = ["Write of a red three.", "User Prompt: "]
    embeds, mask, *_ = own.encode_prompt(
        "a blue seven left of a red three", False, max_sequence_length=6, complex_human_instruction=instruction
    )
    encoder = make_encoder(TextConfig(str(pipeline), 6, "\n".join(instruction)), None)
    found = encoder.tokens("A blue seven left of a red three ", torch.device("cpu"))
    torch.testing.assert_close(found, embeds[0][mask[0].bool()].float(), atol=2e-2, rtol=2e-2)
    *_, negative, mask = own.encode_prompt(
        "a", True, negative_prompt="a red seven", max_sequence_length=6, complex_human_instruction=instruction
    )
    (found,) = encoder.encode(["a red seven"], torch.device("cpu"), instructed=False)
    torch.testing.assert_close(found[mask[0].bool()], negative[0][mask[0].bool()].float(), atol=1e-2, rtol=1e-2)
    empty, mask, *_ = own.encode_prompt("", False, max_sequence_length=6)
    found = encoder.tokens("", torch.device("cpu"))
    torch.testing.assert_close(found, empty[0][mask[0].bool()].float(), atol=1e-6, rtol=1e-6)


NVLABS = {
    "patch_embed.proj": "x_embedder.proj",
    "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_embed.linear": "t_block.1",
    "caption_projection.linear_1": "y_embedder.y_proj.fc1",
    "caption_projection.linear_2": "y_embedder.y_proj.fc2",
    "caption_norm": "attention_y_norm",
    "proj_out": "final_layer.linear",
    "attn1.to_out.0": "attn.proj",
    "attn2.to_q": "cross_attn.q_linear",
    "attn2.to_out.0": "cross_attn.proj",
    "ff.conv_inverted": "mlp.inverted_conv.conv",
    "ff.conv_depth": "mlp.depth_conv.conv",
    "ff.conv_point": "mlp.point_conv.conv",
}


def nvlabs_names(model: SanaTransformer2DModel) -> dict[str, torch.Tensor]:
    """Rename weights to NVlabs' names: queries, keys and values in one tensor."""
    state, out = dict(model.state_dict()), {}
    for index in range(len(model.transformer_blocks)):
        own, theirs = f"transformer_blocks.{index}.", f"blocks.{index}."
        out[f"{theirs}attn.qkv.weight"] = torch.cat([state.pop(f"{own}attn1.to_{part}.weight") for part in "qkv"])
        for leaf in ("weight", "bias"):
            pair = [state.pop(f"{own}attn2.to_{part}.{leaf}") for part in "kv"]
            out[f"{theirs}cross_attn.kv_linear.{leaf}"] = torch.cat(pair)
    for name, tensor in state.items():
        for ours, theirs in NVLABS.items():
            name = name.replace(ours, theirs)
        name = name.replace("transformer_blocks.", "blocks.")
        out["final_layer.scale_shift_table" if name == "scale_shift_table" else name] = tensor
    return {**out, "pos_embed": torch.zeros(1), "y_embedder.y_embedding": torch.zeros(1)}


def test_weights_from_every_place(pipeline: Path, tmp_path: Path) -> None:
    source = shaken(tiny_sana(), 9)
    source.save_pretrained(tmp_path / "folder")
    torch.save({"state_dict": nvlabs_names(source)}, tmp_path / "nvlabs.pth")
    swapped = build_transformer(SANA, TINY, UNIFORM, None)
    load_weights(swapped, str(tmp_path / "folder"), SANA)
    swapped.save_pretrained(tmp_path / "swapped")
    with torch.no_grad():
        expected = source(**inputs()).sample
        for name in ("folder", "nvlabs.pth", "swapped"):
            model = build_transformer(SANA, TINY, UNIFORM, None).eval()
            load_weights(model, str(tmp_path / name), SANA)
            torch.testing.assert_close(model(**inputs()).sample, expected, atol=1e-4, rtol=1e-4)
        again = load_swapped(tmp_path / "swapped")
        torch.testing.assert_close(again(**inputs()).sample, expected, atol=1e-4, rtol=1e-4)
    assert SanaPipeline.from_pretrained(pipeline, transformer=again).transformer is again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 3}, "lacks transformer_blocks.2"),
        ({"caption_channels": 9}, "have different shapes or attention"),
    ],
)
def test_wrong_weights_are_short_errors(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_sana().save_pretrained(tmp_path)
    model = tiny_sana(**options)
    with pytest.raises(ValueError, match=message):
        load_weights(model, str(tmp_path), SANA)
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="holds no weights of a SANA transformer"):
        load_weights(model, str(tmp_path / "other.pt"), SANA)
    with pytest.raises(ValueError, match="give different token widths"):
        SanaTransformerConfig(num_attention_heads=3)
