"""Clips drawn while a model trains."""

from __future__ import annotations

from pathlib import Path

from lightning import Trainer
from torch import Tensor
from typing_extensions import override

from lightning_mhla.generative.captioned import CaptionedDiffusion
from lightning_mhla.generative.prompted import PromptedSamples, save_figure
from mhla_tasks.video.module import VideoDiffusion
from mhla_tasks.video.strips import draw_strips, write_animation


class ClipPictures(PromptedSamples):
    """Draws clips for a few prompts, from the weights that validation uses, as strips of frames and as an animation.

    ``clips-step*.png`` and ``.gif`` go to ``pictures/`` in the log folder, the strips also to TensorBoard. The noise of a
    clip is always the same.

    Args:
        prompts: a clip is drawn for each.
        every_n_steps: optimiser steps between two pictures; null for none on the way.
        at_end: whether the last weights draw one.
        frames: number of frames of a strip.
        seed: seed of the noise.
        at_start: whether the first weights draw one: right after replacing, of a pretrained model.
    """

    draws_from = VideoDiffusion

    def __init__(
        self,
        prompts: list[str],
        every_n_steps: int | None = 1000,
        at_end: bool = True,
        frames: int = 8,
        seed: int = 0,
        at_start: bool = False,
    ) -> None:
        super().__init__(prompts, every_n_steps, at_end, at_start, seed)
        self.frames = frames

    @override
    def keep(self, trainer: Trainer, module: CaptionedDiffusion, pixels: Tensor) -> None:
        figure = draw_strips(list(zip(self.prompts, pixels, strict=True)), self.frames)
        path = save_figure(trainer, figure, "clips")
        write_animation(Path(f"{path}.gif"), pixels, module.sampling.fps)
