"""Wan2.1-1.3B with each kind of attention: parameters, operations, memory of a training step, and times on a GPU.

    lightning bench wan --out benchmarks/results

A batch is one clip of 81 frames of 480 x 800 pixels: a latent of 21 x 60 x 100, 31,500 tokens. MHLA has 3 x 5 x 10 blocks and a
gate, as in configs/video. Without a GPU, operations and memory are counted, see benchmarks/full_size.py.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from mhla_tasks.captioned.host import build_transformer
from mhla_tasks.video.model import WanTransformerConfig
from mhla_tasks.video.pretrained import WAN

from benchmarks.full_size import FullSize, run
from lightning_mhla import AttentionConfig

VARIANTS = {
    "softmax": ["keep"],
    "linear": ["linear"],
    "mhla": ["mhla"],
    "mhla in 2 of 3 layers": ["keep", "mhla", "mhla"],
}

ATTENTION = AttentionConfig(block_grid=[3, 5, 10], normalize=False, gate=True)
LATENT = (16, 21, 60, 100)
TEXT = 512


def case(layers: int, latent: tuple[int, ...]) -> FullSize:
    """Return the description of a Wan model and one clip for :mod:`benchmarks.full_size`.

    Args:
        layers: number of blocks of the model.
        latent: shape of the clip's latent, without the batch axis.
    """
    shape = WanTransformerConfig()
    return FullSize(
        VARIANTS,
        layers,
        lambda kinds, depth: build_transformer(WAN, replace(shape, num_layers=depth), ATTENTION, kinds),
        lambda device: (
            torch.zeros(1, *latent, device=device),
            torch.full((1,), 500.0, device=device),
            torch.zeros(1, TEXT, shape.text_dim, device=device),
        ),
        lambda model, *inputs: model(*inputs).sample,
        lambda model: model.blocks[-1].attn1,
    )


def main() -> None:
    """Measure the model with every variant of attention."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--layers", type=int, default=30, help="number of blocks of the transformer (default: 30)")
    parser.add_argument(
        "--latent", type=int, nargs=4, default=LATENT, help="shape of a clip's latent: channels, frames, rows, columns"
    )
    args = parser.parse_args()
    run(case(args.layers, tuple(args.latent)), "wan-1.3b", args.out, {"latent": list(args.latent)})


if __name__ == "__main__":
    main()
