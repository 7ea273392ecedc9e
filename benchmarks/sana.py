"""SANA-0.6B and 1.6B with each kind of attention: parameters, operations, memory of a training step, and times on a GPU.

    lightning bench sana --out benchmarks/results
    lightning bench sana --size 1.6B --pixels 1024

A batch is one image: 512 pixels are a latent of 16 x 16, 1,024 pixels a latent of 32 x 32. MHLA has 4 x 4 blocks. Without a
GPU, operations and memory are counted, see benchmarks/full_size.py. The first row is SANA's own linear attention.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from mhla_tasks.captioned.host import build_transformer
from mhla_tasks.text_to_image import TextToImage
from mhla_tasks.text_to_image.model import SanaTransformerConfig
from mhla_tasks.text_to_image.pretrained import SANA

from benchmarks.full_size import FullSize, run
from lightning_mhla import AttentionConfig

SIZES = {
    "0.6B": SanaTransformerConfig(),
    "1.6B": SanaTransformerConfig(
        num_attention_heads=70,
        num_layers=20,
        num_cross_attention_heads=20,
        cross_attention_head_dim=112,
        cross_attention_dim=2240,
    ),
}
VARIANTS = {"SANA's own": ["keep"], "linear": ["linear"], "mhla": ["mhla"], "softmax": ["softmax"]}
ATTENTION = AttentionConfig(block_grid=[4, 4], mixing_init="uniform", feature_map="sana")
TEXT, STEP = 300, 32
"""Number of tokens of a caption, and image pixels per latent pixel along one side."""


def case(size: str, pixels: int, layers: int | None = None) -> FullSize:
    """Return the description of a SANA model and one image for :mod:`benchmarks.full_size`.

    Args:
        size: size of the model, ``0.6B`` or ``1.6B``.
        pixels: height and width of the image in pixels.
        layers: number of blocks; None for that of the size.
    """
    shape, side = SIZES[size], pixels // STEP
    return FullSize(
        VARIANTS,
        layers or shape.num_layers,
        lambda kinds, depth: build_transformer(SANA, replace(shape, num_layers=depth), ATTENTION, kinds),
        lambda device: (
            torch.zeros(1, shape.in_channels, side, side, device=device),
            torch.full((1,), 500.0, device=device),
            torch.zeros(1, TEXT, shape.caption_channels, device=device),
        ),
        TextToImage.velocity,
        lambda model: model.transformer_blocks[-1].attn1,
    )


def main() -> None:
    """Measure every combination of model size and image size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON files")
    parser.add_argument(
        "--size", nargs="+", choices=SIZES, default=list(SIZES), help="sizes of the model (default: all)"
    )
    parser.add_argument(
        "--pixels",
        nargs="+",
        type=int,
        default=[512, 1024],
        help="height and width of images in pixels (default: 512 1024)",
    )
    parser.add_argument("--layers", type=int, help="number of blocks of the transformer (default: that of the size)")
    args = parser.parse_args()
    for size in args.size:
        for pixels in args.pixels:
            print(f"SANA-{size}, {pixels} pixels")
            run(case(size, pixels, args.layers), f"sana-{size.lower()}-{pixels}", args.out, {"pixels": pixels})


if __name__ == "__main__":
    main()
