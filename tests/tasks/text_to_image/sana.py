"""Small SANA transformers, pipelines and captioned images, shared by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from mhla_tasks.text_to_image.model import SanaTransformerConfig
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

SHAPE: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 8,
    "sample_size": 8,
    "patch_size": 1,
}
TINY = SanaTransformerConfig(**SHAPE)


def shaken(model: Any, seed: int = 1) -> Any:
    """Add noise to all weights of a model, so that none are zero, one or equal by initialization, and return it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tiny_sana(**options: Any) -> SanaTransformer2DModel:
    """Build a small SANA with random weights and its original attention."""
    torch.manual_seed(0)
    return shaken(SanaTransformer2DModel(**{**SHAPE, **options}))


def inputs(rows: int = 8, columns: int = 8, batch: int = 2) -> dict[str, torch.Tensor]:
    """Draw latents, times and text as inputs of a SANA."""
    torch.manual_seed(5)
    return {
        "hidden_states": torch.randn(batch, 4, rows, columns),
        "timestep": torch.linspace(3, 900, batch),
        "encoder_hidden_states": torch.randn(batch, 5, 8),
    }


def save_pipeline(folder: Path) -> Path:
    """Write a tiny, random SANA pipeline with an autoencoder, a Gemma-2 encoder and a tokenizer, and return its folder."""
    torch.manual_seed(2)
    words = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *["a", "red", "green", "blue", "yellow", "three", "seven", "left", "right", "of"],
    ]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    encoder = Gemma2Model(
        Gemma2Config(
            vocab_size=len(words), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=4, pad_token_id=0, eos_token_id=1, bos_token_id=2, attn_implementation="eager",
        )
    )  # fmt: skip
    stages: dict[str, Any] = {}
    for part in ("encoder", "decoder"):
        stages |= {
            f"{part}_block_types": ("ResBlock", "EfficientViTBlock"),
            f"{part}_block_out_channels": (8, 8),
            f"{part}_layers_per_block": (1, 1),
            f"{part}_qkv_multiscales": ((), (5,)),
        }
    vae = AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, upsample_block_type="interpolate",
        downsample_block_type="conv", decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41407, **stages,
    )  # fmt: skip
    SanaPipeline(
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
        ),
        text_encoder=encoder.to(torch.bfloat16),
        vae=shaken(vae),
        transformer=tiny_sana(),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ).save_pretrained(folder)
    return folder


def save_pictures(folder: Path, count: int = 6, captions: bool = True) -> Path:
    """Write images of noise with caption files, and return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(0, 256, (20, 24, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
        if captions:
            (folder / f"{number}.txt").write_text(f"a red {('three', 'seven')[number % 2]}\n")
    return folder
