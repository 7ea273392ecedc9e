"""The trained classifier of a checkpoint, for use anywhere.

    python -m mhla_tasks.classification.checkpoint runs/digits/version_0/checkpoints/last.ckpt exported

writes a folder (safetensors, ``config.json``, ``classes.txt``) that ``VisionTransformer.from_pretrained("exported")`` loads,
and that ``--model.init_args.pretrained=exported`` starts from. The weights are the moving average where the checkpoint has
one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from lightning_mhla.checkpoints import load_module
from mhla_tasks.classification.module import ImageClassifier


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mhla_tasks.classification.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="file that training wrote, or the folder of a run")
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--live", action="store_true", help="the weights as trained, not their moving average")
    args = parser.parse_args()
    try:
        module = load_module(ImageClassifier, args.checkpoint, args.live)
        module.network.save_pretrained(args.folder)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
    (args.folder / "classes.txt").write_text("".join(f"{name}\n" for name in module.class_names))
    Console(soft_wrap=True).print(f"{args.folder}: {', '.join(sorted(path.name for path in args.folder.iterdir()))}")


if __name__ == "__main__":
    main()
