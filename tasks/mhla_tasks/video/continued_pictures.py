"""Callback that continues clips during training, and shows them beside the true ones."""

from __future__ import annotations

import torch
from lightning import LightningModule, Trainer

from lightning_mhla.callbacks import PeriodicEvaluation
from lightning_mhla.callbacks.averaging import evaluation_weights
from lightning_mhla.data.sampling import kept_random_state
from lightning_mhla.system.folders import run_folder
from mhla_tasks.captioned.callbacks import log_figure
from mhla_tasks.video.bouncing import BouncingDigits
from mhla_tasks.video.continuation import VideoContinuation
from mhla_tasks.video.frames import relative_errors
from mhla_tasks.video.strips import draw_continuations, side_by_side, write_animation


class ContinuationPictures(PeriodicEvaluation):
    """Callback that continues held-out clips during training, and shows them beside the true clips.

    At step 1,000, the files in the log folder are ``pictures/continued-step0001000.png`` and
    ``pictures/continued-step0001000.gif``. The picture is also logged to TensorBoard. Every logger gets two mean relative
    errors: ``continued/error_trained`` of the frames up to the trained length, and ``continued/error`` of all frames. Clips are
    continued with the moving average of the weights if training maintains one, otherwise with the current weights.

    Args:
        every_n_steps: number of optimizer steps between two pictures; null for no pictures during training.
        at_end: whether to continue clips at the end of training.
        clips: number of clips.
        frames: number of frames of the continued clips; null for those of the model's option sampling.
    """

    def __init__(
        self, every_n_steps: int | None = 500, at_end: bool = True, clips: int = 4, frames: int | None = None
    ) -> None:
        super().__init__(every_n_steps, at_end)
        if clips < 1:
            raise ValueError(f"clips={clips} must be at least 1")
        self.clips, self.frames = clips, frames

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue the clips and write their pictures, on the first process.

        Raises:
            ValueError: if the model does not continue clips, or the data has no clips of any length.
        """
        data = trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        if not isinstance(pl_module, VideoContinuation) or not isinstance(data, BouncingDigits):
            raise ValueError(
                f"ContinuationPictures needs the model VideoContinuation and the data BouncingDigits, not "
                f"{type(pl_module).__name__} and {type(data).__name__}"
            )
        folder = run_folder(trainer)  # a collective, so every process must call it
        if trainer.is_global_zero:
            frames = self.frames or pl_module.sampling.frames
            held_out = data.held_out(frames, self.clips)
            video = torch.stack([held_out[index]["video"] for index in range(len(held_out))]).to(pl_module.device)
            truth = pl_module.network.to_levels(video)
            with (
                kept_random_state(),
                evaluation_weights(trainer, pl_module),
                trainer.precision_plugin.forward_context(),
            ):
                clips, _ = pl_module.continue_clips(truth[:, : pl_module.start], frames)
            truth, clips = pl_module.network.to_bytes(truth).cpu(), clips.cpu()
            pictures, step = folder / "pictures", trainer.global_step
            figure = draw_continuations(list(truth), list(clips), pl_module.start, pl_module.frames)
            pictures.mkdir(parents=True, exist_ok=True)
            figure.savefig(pictures / f"continued-step{step:07d}.png", dpi=110)
            shown = side_by_side(list(truth), list(clips))
            write_animation(pictures / f"continued-step{step:07d}.gif", shown, pl_module.sampling.fps)
            log_figure(trainer, "continued", figure)
            errors = torch.stack([relative_errors(*pair) for pair in zip(clips, truth, strict=True)])[
                :, pl_module.start :
            ]
            trained = errors[:, : pl_module.frames - pl_module.start]
            values = {"error_trained": float(trained.mean()), "error": float(errors.mean())}
            self.log_values(trainer, "continued", values)
        trainer.strategy.barrier()
