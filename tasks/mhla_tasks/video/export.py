"""The trained transformer of a checkpoint, for use anywhere.

    python -m mhla_tasks.video.export runs/video-digits-finetune/version_0/checkpoints/last.ckpt exported

writes a folder that ``lightning_mhla.load_swapped("exported")`` loads, or diffusers' own ``from_pretrained`` where no layer
was replaced, and that ``--model.init_args.pretrained=exported`` starts from. The weights are the moving average where the
checkpoint has one; LoRA adapters are added to the weights that they adapt.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from diffusers import WanPipeline

from lightning_mhla.generative.adapters import merge_adapters, save_adapters
from lightning_mhla.training.export import export_module, export_parser
from mhla_tasks.video.module import VideoDiffusion


def write(module: VideoDiffusion, args: argparse.Namespace) -> None:
    """The transformer, and its adapters where they go elsewhere."""
    if args.adapters is None:
        merge_adapters(module.network)
    else:
        save_adapters(module.network, args.adapters, WanPipeline)
    module.network.save_pretrained(args.folder)


def main() -> None:
    """Command line."""
    parser = export_parser("mhla_tasks.video.export", __doc__)
    parser.add_argument("--adapters", type=Path, help="folder for LoRA adapters, instead of adding them to the weights")
    export_module(VideoDiffusion, parser, write)


if __name__ == "__main__":
    main()
