"""Evaluation with lm-evaluation-harness, from the command line and during training."""

from mhla_tasks.language.evaluation.callback import LMEval

__all__ = ["LMEval"]
