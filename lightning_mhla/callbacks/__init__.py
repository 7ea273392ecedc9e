"""Lightning callbacks for training any kind of model: checkpoints, weight averaging, reports and checks."""

from lightning_mhla.callbacks.averaging import ExponentialMovingAverage
from lightning_mhla.callbacks.curves import LearningCurves
from lightning_mhla.callbacks.finite import FiniteWatch
from lightning_mhla.callbacks.forecast import Forecast
from lightning_mhla.callbacks.periodic import PeriodicEvaluation
from lightning_mhla.callbacks.pictures import AttentionPictures
from lightning_mhla.callbacks.recovery import Recovery
from lightning_mhla.callbacks.report import RunReport
from lightning_mhla.callbacks.seeding import StepSeed
from lightning_mhla.callbacks.stalls import StallWatch

__all__ = [
    "AttentionPictures",
    "ExponentialMovingAverage",
    "FiniteWatch",
    "Forecast",
    "LearningCurves",
    "PeriodicEvaluation",
    "Recovery",
    "RunReport",
    "StallWatch",
    "StepSeed",
]
