"""Models for classifying texts and tokens and for finding answers: transformers' heads on :class:`MHLAModel`."""

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
        """Replace the token embedding."""
        self.model.set_input_embeddings(value)

    def extend(self, tokens: int) -> None:
        """Extend the model to sequences of ``tokens`` tokens; see :meth:`MHLAModel.extend`."""
        self.model.extend(tokens)


class MHLAForSequenceClassification(HeadedModel, GenericForSequenceClassification, MHLAPreTrainedModel):
    """Text classifier that uses the hidden state of the last token other than ``config.pad_token_id``."""


class MHLAForTokenClassification(HeadedModel, GenericForTokenClassification, MHLAPreTrainedModel):
    """Token classifier; each token attends only to itself and to earlier tokens."""


class MHLAForQuestionAnswering(HeadedModel, GenericForQuestionAnswering, MHLAPreTrainedModel):
    """Model for extractive question answering, which predicts the first and the last token of the answer in a text."""
