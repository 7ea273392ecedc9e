"""Causal language models with mhla, linear or softmax attention."""

from mhla_tasks.language.config import MHLAConfig
from mhla_tasks.language.data import HubText, PythonSource, TokenShards
from mhla_tasks.language.model import MHLAForCausalLM
from mhla_tasks.language.module import LanguageModel

__all__ = ["HubText", "LanguageModel", "MHLAConfig", "MHLAForCausalLM", "PythonSource", "TokenShards"]
