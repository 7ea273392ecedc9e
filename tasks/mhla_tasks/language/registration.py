"""Registration of the MHLA models in the tables of transformers and peft that list supported models.

Both libraries use tables of class names and model types in many places. For example, transformers' Trainer shifts labels for
label smoothing only if the class is in the table of causal models, and peft takes the layers to adapt from a table. The
``register`` method of the auto classes fills none of these tables, so this module adds the entries.
"""

from __future__ import annotations

from importlib.util import find_spec

import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from lightning_mhla.system.transformers_module import publish
from mhla_tasks.language.base_model import MHLAModel
from mhla_tasks.language.config import CLASSES, MHLAConfig
from mhla_tasks.language.heads import (
    MHLAForQuestionAnswering,
    MHLAForSequenceClassification,
    MHLAForTokenClassification,
)
from mhla_tasks.language.model import MHLAForCausalLM

NAMES = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}
"""Mapping from each auto class to the name of the table that lists its class names by model type."""

MODELS = (
    MHLAModel, MHLAForCausalLM, MHLAForSequenceClassification, MHLAForTokenClassification, MHLAForQuestionAnswering,
)  # fmt: skip

ADAPTED = {
    "IA3_TARGET": ["qkv", "fc2"],
    "IA3_FEEDFORWARD": ["fc2"],
    "LNTUNING_TARGET": ["norm1", "norm2", "norm"],
    "OSF_TARGET": ["qkv", "proj", "fc1_g", "fc1_x", "fc2"],
}
"""Layers that peft's methods adapt by default, by the name of the method's table; methods not listed adapt only ``qkv``."""


def register() -> None:
    """Register the MHLA model classes with transformers, and with peft if it is installed."""
    by_name = {model.__name__: model for model in MODELS}
    AutoConfig.register(MHLAConfig.model_type, MHLAConfig, exist_ok=True)
    for auto_class, table in NAMES.items():
        model = by_name[CLASSES[auto_class]]
        getattr(transformers, auto_class).register(MHLAConfig, model, exist_ok=True)
        getattr(modeling_auto, table)[MHLAConfig.model_type] = model.__name__
        publish(model.__name__, model)
    if find_spec("peft") is not None:
        _register_with_peft()


def _register_with_peft() -> None:
    from peft.utils import constants

    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MODULES_MAPPING"):
            method = name.removeprefix("TRANSFORMERS_MODELS_TO_").removesuffix("_MODULES_MAPPING")
            table.setdefault(MHLAConfig.model_type, list(ADAPTED.get(method, ["qkv"])))
