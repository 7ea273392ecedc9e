"""Callback that continues held-out clips during training, and shows them beside the true clips."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from torch import Tensor

from lightning_mhla.callbacks import PeriodicEvaluation
from lightning_mhla.callbacks.averaging import evaluation_weights
from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.data.sampling import kept_random_state
from lightning_mhla.system.figures import log_figure
from lightning_mhla.system.folders import run_folder
from lightning_mhla.system.ranges import check_range
from lightning_mhla.system.sharding import gathered_weights
from mhla_tasks.video.bouncing import BouncingDigits
from mhla_tasks.video.continuation import VideoContinuation
from mhla_tasks.video.data import VideoFolders, VideoShards
from mhla_tasks.video.frames import relative_errors
from mhla_tasks.video.strips import draw_continuations, side_by_side, write_animation

DATA = (BouncingDigits, VideoFolders, VideoShards)
"""Data modules whose held-out clips can be continued."""


class ContinuationPictures(PeriodicEvaluation):
    """Callback that continues held-out clips during training, and shows them beside the true clips.

    At step 1,000, the files in the log folder are ``pictures/continued-step0001000.png`` and
    ``pictures/continued-step0001000.gif``. The picture is also logged to TensorBoard. Every logger gets two mean relative
    errors: ``continued/error_trained`` over the predicted frames up to the trained length, and ``continued/error`` over all
    predicted frames. Clips are continued with the moving average of the weights if training maintains one, otherwise with the
    current weights.

    Args:
        every_n_steps: number of optimizer steps between two pictures; null for no pictures during training.
        at_end: whether to continue clips at the end of training.
        clips: number of clips.
        frames: number of frames of the continued clips; null for the model's option sampling.frames.

    Raises:
        ValueError: if ``every_n_steps``, ``clips`` or ``frames`` is below 1.
    """

    def __init__(
        self, every_n_steps: int | None = 500, at_end: bool = True, clips: int = 4, frames: int | None = None
    ) -> None:
        super().__init__(every_n_steps, at_end)
        check_range(least=1, clips=clips)
        if frames is not None and frames < 1:
            raise ValueError(f"frames={frames} must be at least 1, or null for the model's option sampling.frames")
        self.clips, self.frames = clips, frames

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before training that the model can continue clips to the requested length, and that there are true clips.

        Raises:
            ValueError: if the model is not a VideoContinuation, the data cannot be continued, a held-out clip is shorter than
                the copied frames, or the clips are too long for the model or not longer than their copied frames.
            BrokenSampleError: if a held-out video cannot be read.
        """
        data = trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        if not isinstance(pl_module, VideoContinuation) or not isinstance(data, DATA):
            names = " or ".join(kind.__name__ for kind in DATA)
            raise ValueError(
                f"ContinuationPictures needs the model VideoContinuation and the data {names}, not "
                f"{type(pl_module).__name__} and {type(data).__name__}; remove it from trainer.callbacks"
            )
        pl_module.network.check_length(pl_module.start, self.frames or pl_module.sampling.frames)
        self._held_out = data.held_out(self.frames or pl_module.sampling.frames, self.clips)

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue the clips, on all processes if the weights are sharded, and write pictures of them on the first process."""
        assert isinstance(pl_module, VideoContinuation)
        folder = run_folder(trainer)  # a collective, so every process must call it
        if trainer.is_global_zero or shards_weights(trainer):
            truth, clips = self._continued(trainer, pl_module)
            if trainer.is_global_zero:
                self._keep(trainer, pl_module, truth, clips, folder / "pictures")
        trainer.strategy.barrier()

    @torch.no_grad()
    def _continued(self, trainer: Trainer, module: VideoContinuation) -> tuple[list[Tensor], list[Tensor]]:
        """Return the true clips, which may be shorter, and the continued clips, each ``[F, C, H, W]`` uint8 on the CPU."""
        frames = self.frames or module.sampling.frames
        samples = [self._held_out[index] for index in range(len(self._held_out))]
        video = torch.stack([sample["video"] for sample in samples])
        truth = module.network.to_levels(video.to(module.device))
        with (
            kept_random_state(),
            evaluation_weights(trainer, module),
            trainer.precision_plugin.forward_context(),
            gathered_weights(module.network),
        ):
            clips, _ = module.continue_clips(truth[:, : module.start], frames)
        pixels = module.network.to_bytes(truth).cpu()
        lengths = [sample.get("frames", frames) for sample in samples]
        return [clip[:length] for clip, length in zip(pixels, lengths, strict=True)], list(clips.cpu())

    def _keep(
        self, trainer: Trainer, module: VideoContinuation, truth: list[Tensor], clips: list[Tensor], folder: Path
    ) -> None:
        figure = draw_continuations(truth, clips, module.start, module.frames)
        caption = (
            f"Held-out clips continued at step {trainer.global_step:,}, each below the true clip. The first {module.start} "
            f"frames are copied; training clips have {module.frames} frames. Look for objects that keep their shape and path "
            "after that."
        )
        log_figure(trainer, figure, "continued", folder, caption)
        moving = f"The same clips in motion at step {trainer.global_step:,}, truth on the left."
        animation = folder / f"continued-step{trainer.global_step:07d}.gif"
        write_animation(animation, side_by_side(truth, clips), module.sampling.fps, moving)
        errors = [
            relative_errors(clip[: len(true)], true)[module.start :] for clip, true in zip(clips, truth, strict=True)
        ]
        if sum(map(len, errors)):  # the true clips may have only the frames that are copied
            trained = torch.cat([clip[: module.frames - module.start] for clip in errors])
            # without the black frames of videos, which have no relative error
            values = {"error_trained": float(trained.nanmean()), "error": float(torch.cat(errors).nanmean())}
            self.log_values(trainer, "continued", values)
