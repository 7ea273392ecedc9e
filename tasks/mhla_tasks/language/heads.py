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
    """Methods that models with a transformers head share; each also loads the weights of a language model.

    Attributes:
        model: model without a head.
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
    """Classifier of texts, which reads the hidden state of the last token that is not ``config.pad_token_id``."""


class MHLAForTokenClassification(HeadedModel, GenericForTokenClassification, MHLAPreTrainedModel):
    """Classifier of tokens, each of which attends to the tokens before it only."""


class MHLAForQuestionAnswering(HeadedModel, GenericForQuestionAnswering, MHLAPreTrainedModel):
    """Extractive question answering: predicts the first and the last token of the answer in a text."""
