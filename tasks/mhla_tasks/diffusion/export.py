"""The trained DiT of a checkpoint, for use anywhere.

    python -m mhla_tasks.diffusion.export runs/diffusion-digits/version_0/checkpoints/last.ckpt exported

writes a diffusers pipeline: network, scheduler of its process, and VAE. Three lines draw from it,

    from mhla_tasks.diffusion import DiTPipeline
    pipe = DiTPipeline.from_pretrained("exported")
    images = pipe(class_labels=[3, 7], seed=0).images

and ``--model.init_args.pretrained=exported`` starts from it. The weights are the moving average where the checkpoint has one.
"""

from __future__ import annotations

from lightning_mhla.training.export import export_module, export_parser
from mhla_tasks.diffusion.module import ClassToImage
from mhla_tasks.diffusion.pipeline import DiTPipeline


def main() -> None:
    """Command line."""
    parser = export_parser("mhla_tasks.diffusion.export", __doc__)
    export_module(ClassToImage, parser, lambda module, args: DiTPipeline.of_module(module).save_pretrained(args.folder))


if __name__ == "__main__":
    main()
