"""Callback that draws video clips during training."""

from __future__ import annotations

from pathlib import Path

from lightning import Trainer
from torch import Tensor

from lightning_mhla.system.figures import log_figure
from lightning_mhla.system.ranges import check_range
from mhla_tasks.captioned.callbacks import DrawnSamples
from mhla_tasks.captioned.module import CaptionedDiffusion
from mhla_tasks.video.module import VideoDiffusion
from mhla_tasks.video.strips import draw_strips, write_animation


class ClipPictures(DrawnSamples):
    """Callback that draws a clip for each prompt during training, and shows the clips as pictures.

    All clips are written to two files in the log folder: a picture with a row of frames for each clip, and an animation. At
    step 1,000, these files are ``pictures/clips-step0001000.png`` and ``pictures/clips-step0001000.gif``. The picture is also
    logged to TensorBoard. Clips are drawn with the moving average of the weights if training maintains one, otherwise with the
    current weights. A clip for a prompt starts from the same noise at every step, so that changes in it come from the weights
    alone.

    Args:
        prompts: prompts; one clip is drawn for each.
        every_n_steps: number of optimizer steps between two pictures; null for no pictures during training.
        at_end: whether to draw clips at the end of training.
        frames: number of frames in a row of the picture.
        seed: random seed for the noise that sampling starts from.

    Raises:
        ValueError: if ``prompts`` is empty, ``every_n_steps`` or ``frames`` is below 1, or ``seed`` is out of range.
    """

    module_class = VideoDiffusion

    def __init__(
        self,
        prompts: list[str],
        every_n_steps: int | None = 1000,
        at_end: bool = True,
        frames: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(prompts, every_n_steps, at_end, at_start=False, seed=seed)
        check_range(least=1, frames=frames)
        self.frames = frames

    def keep(self, trainer: Trainer, module: CaptionedDiffusion, samples: Tensor, folder: Path) -> None:
        """Write the clips as a picture with a row of frames for each clip, and as an animated GIF.

        Args:
            trainer: Lightning trainer that runs the callback.
            module: module that drew the clips.
            samples: a clip of F frames for each of the n prompts, ``[n, F, C, H, W]`` uint8 on the CPU.
            folder: log folder of the training run.
        """
        pictures, step = folder / "pictures", trainer.global_step
        figure = draw_strips(list(zip(self.prompts, samples, strict=True)), self.frames)
        caption = (
            f"Clips drawn from captions at step {step:,}, from the same noise at every step; a row shows the frames of a clip. "
            "Look for objects that keep their shape from frame to frame, and for the motion that the caption names."
        )
        log_figure(trainer, figure, "clips", pictures, caption)
        moving = (
            f"Clips in motion at step {step:,}, in the order of the prompts. Look for objects that keep their shape."
        )
        write_animation(pictures / f"clips-step{step:07d}.gif", samples, module.sampling.fps, moving)
