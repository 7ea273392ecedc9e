"""Heads that classify texts and tokens, and find answers: transformers' own, on :class:`MHLAModel`."""

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
    """Methods of a head on a model that is kept as ``model``; it loads the weights of a language model."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^head\.weight$"]
    model: MHLAModel

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.model.set_input_embeddings(value)

    def extend(self, tokens: int) -> None:
        """Take sequences of ``tokens`` tokens; see :meth:`MHLAModel.extend`."""
        self.model.extend(tokens)


class MHLAForSequenceClassification(HeadedModel, GenericForSequenceClassification, MHLAPreTrainedModel):
    """Classes of a text, from the hidden state of its last token that is not ``config.pad_token_id``."""


class MHLAForTokenClassification(HeadedModel, GenericForTokenClassification, MHLAPreTrainedModel):
    """Classes of each token, which sees the tokens before it."""


class MHLAForQuestionAnswering(HeadedModel, GenericForQuestionAnswering, MHLAPreTrainedModel):
    """First and last token of the answer that a text holds."""
