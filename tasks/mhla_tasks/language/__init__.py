"""Causal language models with any kind of attention, and the data modules and tools to train, evaluate and use them."""

from mhla_tasks.language.base_model import MHLAModel
from mhla_tasks.language.config import MHLAConfig
from mhla_tasks.language.data import HubText, PythonSource, TokenShards
from mhla_tasks.language.heads import (
    MHLAForQuestionAnswering,
    MHLAForSequenceClassification,
    MHLAForTokenClassification,
)
from mhla_tasks.language.linearized import LinearizedModel
from mhla_tasks.language.model import MHLAForCausalLM
from mhla_tasks.language.module import DecoderShape, LanguageModel
from mhla_tasks.language.recall import AssociativeRecall, Needle
from mhla_tasks.language.registration import register

__all__ = [
    "AssociativeRecall",
    "DecoderShape",
    "HubText",
    "LanguageModel",
    "LinearizedModel",
    "MHLAConfig",
    "MHLAForCausalLM",
    "MHLAForQuestionAnswering",
    "MHLAForSequenceClassification",
    "MHLAForTokenClassification",
    "MHLAModel",
    "Needle",
    "PythonSource",
    "TokenShards",
]

register()
