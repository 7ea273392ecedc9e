"""Configuration of the language model, which transformers stores in ``config.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from typing_extensions import override

from lightning_mhla import AttentionConfig

REMOTE = "modeling_mhla"
"""Name of the Python module that is written beside a saved model."""

CLASSES = {
    "AutoConfig": "MHLAConfig",
    "AutoModel": "MHLAModel",
    "AutoModelForCausalLM": "MHLAForCausalLM",
    "AutoModelForSequenceClassification": "MHLAForSequenceClassification",
    "AutoModelForTokenClassification": "MHLAForTokenClassification",
    "AutoModelForQuestionAnswering": "MHLAForQuestionAnswering",
}
"""Mapping from transformers' auto classes to the classes that they load for MHLA models."""

MODULE = f'''"""The classes of this model come with the package lightning-mhla."""

from mhla_tasks.language import (
{"".join(f"    {name},{chr(10)}" for name in sorted(CLASSES.values()))})

__all__ = {sorted(CLASSES.values())}
'''


class MHLAConfig(PreTrainedConfig):
    """Configuration of a causal language model with MHLA, linear or softmax attention, or a mixture of them.

    Some sizes also have the names that transformers uses for them: ``hidden_size``, ``num_hidden_layers``,
    ``num_attention_heads``, ``num_key_value_heads``, ``head_dim`` (for ``key_width``), ``intermediate_size`` and
    ``max_position_embeddings``. Both names can be read and set.
    ``config.json`` holds each size once, under the names below.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        dim: width of the model.
        depth: number of layers.
        heads: number of attention heads.
        key_value_heads: number of heads of keys and values, a divisor of ``heads``; None for as many as ``heads``.
        key_width: width of a key in one head; None for ``dim / heads``.
        value_width: width of a value in one head; None for ``dim / heads``.
        mlp_width: inner width of the SwiGLU MLP.
        context: number of tokens in a training sample. With dense mixing coefficients (one for each pair of blocks), it is also
            the maximum sequence length, until ``MHLAForCausalLM.extend`` raises it.
        attention: options of :class:`lightning_mhla.AttentionConfig` as a dict, or a list with one dict for each layer. The
            constructor replaces None with :func:`default_attention`.
        tie_word_embeddings: whether input and output embeddings share one matrix.
        initializer_range: standard deviation of the initial weights.
        use_cache: whether the forward pass returns the generation state by default, outside training and without labels.
        bos_token_id: index of the token that begins a text; None if there is no such token.
        eos_token_id: index of the token that ends a text, or a list of several; None if there is no such token.
        pad_token_id: index of the padding token, which is never attended to; None if there is no such token.

    Raises:
        ValueError: if a size is given under both of its names, with different values.
    """

    model_type = "mhla"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "intermediate_size": "mlp_width",
        "max_position_embeddings": "context",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 32_000
    dim: int = 1024
    depth: int = 24
    heads: int = 4
    key_value_heads: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    mlp_width: int = 2816
    context: int = 2048
    attention: Any = None
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **options: Any) -> None:
        self.attention = plain_attention(self.attention or default_attention())
        aliases = {**self.attribute_map, "num_key_value_heads": "key_value_heads", "head_dim": "key_width"}
        for alias, name in aliases.items():
            if alias in options:
                self._take_alias(alias, name, options.pop(alias))
        super().__post_init__(**options)

    def _take_alias(self, alias: str, name: str, value: int | None) -> None:
        value_by_name = getattr(self, name)
        if value is None or value in (value_by_name, getattr(self, alias)):
            return  # to_dict() lists derived sizes, too; reading them back must not fix them
        if value_by_name != getattr(type(self), name):
            raise ValueError(f"{name}={value_by_name} and {alias}={value} are the same size; give one of the two")
        setattr(self, name, value)

    @property
    def num_key_value_heads(self) -> int:
        """Number of key-value heads in each layer; equal to ``heads`` unless ``key_value_heads`` is set."""
        return self.key_value_heads or self.heads

    @num_key_value_heads.setter
    def num_key_value_heads(self, value: int | None) -> None:
        self.key_value_heads = value

    @property
    def head_dim(self) -> int:
        """Width of a key in one head; ``dim / heads`` unless ``key_width`` is set."""
        return self.key_width or self.dim // self.heads

    @head_dim.setter
    def head_dim(self, value: int | None) -> None:
        self.key_width = value

    @override
    def to_dict(self) -> dict[str, Any]:
        """Return all options as a dict that also lists sizes under the names that transformers uses for them.

        For example, the width of the model is listed as both ``dim`` and ``hidden_size``.
        """
        return {**super().to_dict(), **{alias: getattr(self, alias) for alias in self._aliases()}}

    @override
    def to_diff_dict(self) -> dict[str, Any]:
        """Return the contents of ``config.json``, which lists each size only under its name in this class.

        For example, the width of the model is listed as ``dim``, but not as ``hidden_size``. With a single entry for each size,
        a file that is edited by hand cannot contradict itself.
        """
        return {name: value for name, value in super().to_diff_dict().items() if name not in self._aliases()}

    def _aliases(self) -> tuple[str, ...]:
        return *self.attribute_map, "num_key_value_heads", "head_dim"

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing, because :meth:`save_pretrained` already records the model's classes for transformers' auto classes."""

    @override
    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **options: Any) -> None:
        """Write ``config.json`` and a Python module from which transformers' auto classes import the model's classes.

        Args:
            save_directory: path of the folder to write to, created if missing.
            push_to_hub: whether to also upload the files to the Hugging Face Hub.
            options: further arguments of transformers' method of this name.
        """
        self.auto_map = {auto_class: f"{REMOTE}.{name}" for auto_class, name in CLASSES.items()}
        folder = Path(save_directory)
        if not folder.is_file():  # else transformers raises
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{REMOTE}.py").write_text(MODULE)
        super().save_pretrained(save_directory, push_to_hub, **options)

    def layer_attention(self) -> list[AttentionConfig]:
        """Return the attention options of each layer.

        Raises:
            ValueError: if ``attention`` is a list whose length is not ``depth``, or an option is invalid.
        """
        layers = self.attention if isinstance(self.attention, list) else [self.attention] * self.depth
        if len(layers) != self.depth:
            raise ValueError(f"attention lists {len(layers)} layers, but depth={self.depth}")
        return [AttentionConfig(**options) for options in layers]


def default_attention() -> AttentionConfig:
    """Return the attention options of the language model in the MHLA paper.

    The options are MHLA with blocks of 64 tokens, rotary embeddings after the ReLU feature map, an output gate, and no
    normalizer.
    """
    return AttentionConfig(kind="mhla", block_size=64, normalize=False, rotary=True, gate=True)


def plain_attention(attention: Any) -> dict[str, Any] | list[dict[str, Any]]:
    """Convert attention options to dicts, which can be stored in ``config.json`` and checkpoints.

    Args:
        attention: ``AttentionConfig`` or mapping for all layers, or a sequence with one of these for each layer.

    Returns:
        A dict, or a list with one dict for each layer.
    """
    if isinstance(attention, AttentionConfig):
        return asdict(attention)
    if isinstance(attention, Sequence):
        return [asdict(options) if isinstance(options, AttentionConfig) else dict(options) for options in attention]
    return dict(attention)
