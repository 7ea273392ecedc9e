"""The trained classifier of a checkpoint, for use anywhere.

    python -m mhla_tasks.classification.export runs/digits/version_0/checkpoints/last.ckpt exported

writes a folder (safetensors, ``config.json``, ``classes.txt``) that ``VisionTransformer.from_pretrained("exported")`` loads,
and that ``--model.init_args.pretrained=exported`` starts from. The weights are the moving average where the checkpoint has
one.
"""

from __future__ import annotations

import argparse

from lightning_mhla.training.export import export_module, export_parser
from mhla_tasks.classification.module import ImageClassifier


def write(module: ImageClassifier, args: argparse.Namespace) -> None:
    """Model and names of its classes."""
    module.network.save_pretrained(args.folder)
    (args.folder / "classes.txt").write_text("".join(f"{name}\n" for name in module.class_names))


def main() -> None:
    """Command line."""
    export_module(ImageClassifier, export_parser("mhla_tasks.classification.export", __doc__), write)


if __name__ == "__main__":
    main()
