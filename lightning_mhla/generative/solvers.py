"""DPM-Solver++ (arXiv 2211.01095) for flow matching, and the numbers of steps that diffusers' scheduler supports."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler

from lightning_mhla.generative.flow import TIMESTEPS


def flow_solver(shift: float) -> DPMSolverMultistepScheduler:
    """Build diffusers' DPM-Solver++ for a flow-matching model. The solver rounds timesteps to integers.

    Args:
        shift: timestep shift that the model was trained with.
    """
    return DPMSolverMultistepScheduler(
        num_train_timesteps=TIMESTEPS, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def set_steps(scheduler: Any, steps: int, device: torch.device | None = None) -> None:
    """Set the number of sampling steps of a scheduler.

    Args:
        scheduler: diffusers scheduler.
        steps: number of sampling steps.
        device: device of the timesteps; None for the CPU.
    """
    if isinstance(scheduler, DPMSolverMultistepScheduler) and scheduler.config.timestep_spacing == "trailing":
        # the same grid as diffusers', which for some numbers of steps, such as 769, ends with a timestep of -1
        ends = TIMESTEPS - np.arange(steps) * (TIMESTEPS / steps)
        scheduler.set_timesteps(timesteps=(ends.round().astype(int) - 1).tolist(), device=device)
    else:
        scheduler.set_timesteps(steps, device=device)


def check_steps(scheduler: Any, sampler: str, steps: int) -> None:
    """Check that a scheduler supports a number of sampling steps.

    DPM-Solver++ divides by the difference of two noise levels, which must not be equal. Its scheduler skips the first step if
    the first two timesteps are equal after rounding. All other schedulers support any number.

    Args:
        scheduler: diffusers scheduler.
        sampler: name of the sampler, for the error message.
        steps: number of sampling steps.

    Raises:
        ValueError: if there are too many steps.
    """
    if not isinstance(scheduler, DPMSolverMultistepScheduler):
        return
    set_steps(scheduler, steps)
    levels, times = scheduler.sigmas, scheduler.timesteps
    if len(levels.unique()) < len(levels) or times[:1].equal(times[1:2]):
        raise ValueError(
            f"steps={steps} are too many for sampler {sampler!r}, whose steps would no longer differ; 20 to 50 are usual"
        )
