"""Scores by lm-evaluation-harness: from the command line, and while a model trains."""

from mhla_tasks.language.evaluation.callback import LMEval

__all__ = ["LMEval"]
