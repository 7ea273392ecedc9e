"""The trained transformer of a checkpoint, for use anywhere.

    python -m mhla_tasks.video.checkpoint runs/video-digits-finetune/version_0/checkpoints/last.ckpt exported

writes a folder that ``lightning_mhla.load_swapped("exported")`` loads, or diffusers' own ``from_pretrained`` where no layer
was replaced, and that ``--model.init_args.pretrained=exported`` starts from. The weights are the moving average where the
checkpoint has one; LoRA adapters are added to the weights that they adapt.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from lightning_mhla.checkpoints import load_module
from mhla_tasks.video.model import merge_adapters, save_adapters
from mhla_tasks.video.module import VideoDiffusion


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mhla_tasks.video.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="file that training wrote")
    parser.add_argument("folder", type=Path, help="where the transformer goes")
    parser.add_argument("--live", action="store_true", help="the weights as trained, not their moving average")
    parser.add_argument("--adapters", type=Path, help="folder for LoRA adapters, instead of adding them to the weights")
    args = parser.parse_args()
    try:
        network = load_module(VideoDiffusion, args.checkpoint, args.live).network
        if args.adapters is None:
            merge_adapters(network)
        else:
            save_adapters(network, args.adapters)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
    network.save_pretrained(args.folder)
    Console(soft_wrap=True).print(f"{args.folder}: {', '.join(sorted(path.name for path in args.folder.iterdir()))}")


if __name__ == "__main__":
    main()
