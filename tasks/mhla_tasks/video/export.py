"""Export of a trained video model to a folder. LoRA adapters of a text-to-video transformer can be exported separately."""

from __future__ import annotations

from pathlib import Path

from mhla_tasks.captioned import export as captioned
from mhla_tasks.captioned.export import OPTIONS
from mhla_tasks.video.continuation import VideoContinuation
from mhla_tasks.video.module import VideoDiffusion

__all__ = ["OPTIONS", "loading", "write"]

LOADING_FRAMES = """\
from mhla_tasks.video import FrameTransformer

model = FrameTransformer.from_pretrained("FOLDER")"""
"""Python code that loads the export of a model that continues clips, where FOLDER is the path of the export."""


def loading(module: VideoDiffusion | VideoContinuation) -> str:
    """Return the Python code that loads an exported model, for the model card.

    The code contains the placeholder FOLDER instead of the path of the export.

    Args:
        module: module that is exported.
    """
    return LOADING_FRAMES if isinstance(module, VideoContinuation) else captioned.loading(module)


def write(module: VideoDiffusion | VideoContinuation, folder: Path, adapters: Path | None = None) -> None:
    """Export the transformer of a trained module to a folder, which the Python code that :func:`loading` returns can load.

    Args:
        module: trained module.
        folder: path of the folder for the transformer.
        adapters: path of a separate folder for LoRA adapters; None to merge the adapters into the weights.

    Raises:
        ValueError: if ``adapters`` is given for a model without LoRA adapters, such as every model that continues clips.
    """
    if not isinstance(module, VideoContinuation):
        captioned.write(module, folder, adapters)
    elif adapters is not None:
        raise ValueError("a model that continues clips is trained without adapters; leave --adapters out")
    else:
        module.network.save_pretrained(folder)
