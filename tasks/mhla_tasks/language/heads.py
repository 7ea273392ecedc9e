"""MHLA models with transformers' heads for text classification, token classification and question answering."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from mhla_tasks.language.base_model import MHLAModel, MHLAPreTrainedModel


class HeadedModel:
    """Mixin for models that combine :class:`MHLAModel` with a task head of transformers, such as a classifier.

    These models can also load the weights of an MHLA language model; their head is then initialized randomly.

    Attributes:
        model: model without the head.
    """

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^head\.weight$"]
    model: MHLAModel

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding with ``value``, which must be an ``nn.Embedding``."""
        self.model.set_input_embeddings(value)

    def extend(self, tokens: int) -> None:
        """Extend the model to sequences of up to ``tokens`` tokens, without changing its results for shorter ones."""
        self.model.extend(tokens)


class MHLAForSequenceClassification(HeadedModel, GenericForSequenceClassification, MHLAPreTrainedModel):
    """MHLA model that classifies a text by the hidden state of its last token other than ``config.pad_token_id``."""


class MHLAForTokenClassification(HeadedModel, GenericForTokenClassification, MHLAPreTrainedModel):
    """MHLA model that classifies every token of a text; a token attends only to itself and to earlier tokens."""


class MHLAForQuestionAnswering(HeadedModel, GenericForQuestionAnswering, MHLAPreTrainedModel):
    """MHLA model for extractive question answering: it predicts the first and the last token of the answer in a text."""
