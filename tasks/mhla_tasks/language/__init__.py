"""Causal language models with any kind of attention."""

from mhla_tasks.language.config import MHLAConfig
from mhla_tasks.language.data import HubText, PythonSource, TokenShards
from mhla_tasks.language.linearized import LinearizedModel
from mhla_tasks.language.model import MHLAForCausalLM
from mhla_tasks.language.module import LanguageModel
from mhla_tasks.language.recall import AssociativeRecall, Needle

__all__ = [
    "AssociativeRecall",
    "HubText",
    "LanguageModel",
    "LinearizedModel",
    "MHLAConfig",
    "MHLAForCausalLM",
    "Needle",
    "PythonSource",
    "TokenShards",
]
