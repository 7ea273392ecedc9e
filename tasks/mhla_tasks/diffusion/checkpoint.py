"""The trained DiT of a checkpoint, for use anywhere.

    python -m mhla_tasks.diffusion.checkpoint runs/diffusion-digits/version_0/checkpoints/last.ckpt exported

writes a diffusers pipeline: network, scheduler of its process, and VAE. Three lines draw from it,

    from mhla_tasks.diffusion import DiTPipeline
    pipe = DiTPipeline.from_pretrained("exported")
    images = pipe(class_labels=[3, 7], seed=0).images

and ``--model.init_args.pretrained=exported`` starts from it. The weights are the moving average where the checkpoint has one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from lightning_mhla.checkpoints import load_module
from mhla_tasks.diffusion.module import ClassToImage
from mhla_tasks.diffusion.pipeline import DiTPipeline


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mhla_tasks.diffusion.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="file that training wrote")
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--live", action="store_true", help="the weights as trained, not their moving average")
    args = parser.parse_args()
    try:
        DiTPipeline.of_module(load_module(ClassToImage, args.checkpoint, args.live)).save_pretrained(args.folder)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
    Console(soft_wrap=True).print(f"{args.folder}: {', '.join(sorted(path.name for path in args.folder.iterdir()))}")


if __name__ == "__main__":
    main()
