"""Language models of transformers as hosts: attention of ours behind their attention interface.

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    swap_attention(model, AttentionConfig(block_size=64, mixing="exponential"))
    model.generate(**tokenizer("def ", return_tensors="pt"))

The model's own code projects, normalises and turns queries and keys by their positions, and hands them over. So the feature
map comes after the rotary embedding, and ``normalize`` may stay on. Turned and then mapped, features depend on positions
themselves and not only on their differences: give ``position_ids`` with rows padded at their left, as ``generate`` does.

What the new attention adds is found under ``...self_attn.swapped``. Generation keeps a state in transformers' own cache in
place of keys and values; it is of constant size with ``mixing="exponential"``. Rows may be padded on either side: blocks are
counted from a row's first real token. Documents packed in one row (positions that start again) do not see each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention import Attention, AttentionConfig, BlockLayout
from lightning_mhla.swap.host import SAVED, Host, build_beside

FAMILIES = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Olmo", "Olmo2", "Phi", "Phi3"
)  # fmt: skip
"""Model families whose attention is known: causal self-attention that calls transformers' attention interface with queries
and keys already turned by their positions."""

NAMES = frozenset(f"{family}Attention" for family in FAMILIES)


class TransformersHost(Host):
    """Decoders of :data:`FAMILIES`."""

    package = "transformers"

    @override
    def layers(self, model: Any) -> list[Any]:
        found = [module for module in model.modules() if type(module).__name__ in NAMES]
        if not found:
            raise ValueError(
                f"{type(model).__name__} {_reason(model.config)}; attention can be swapped in {', '.join(FAMILIES)}; for "
                "your own model use lightning_mhla.MHLA in place of its attention"
            )
        return found

    @override
    def check(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]) -> None:
        if windows := [index for index, layer in layers.items() if _window(layer)]:
            full = [index for index, layer in enumerate(self.layers(model)) if not _window(layer)]
            way = f"replace others: layers={full}" if full else "a model with full attention is needed"
            raise ValueError(
                f"layer {windows[0]} attends within a window of {_window(layers[windows[0]])} tokens, which the new "
                f"attention would not keep to; {way}"
            )
        for index, layer in layers.items():
            if (cap := getattr(layer, "attn_logit_softcapping", None)) is not None:
                raise ValueError(
                    f"layer {index} caps its scores at {cap} (attn_logit_softcapping), which the new attention does not"
                )
            if layer.attention_dropout:
                raise ValueError(
                    f"layer {index} drops attention weights (attention_dropout={layer.attention_dropout}), which linear "
                    "attention does not have; load the model with attention_dropout=0"
                )
            if not layer.is_causal:
                raise ValueError(f"layer {index} sees later tokens too (use_bidirectional_attention)")
        for index, config in configs.items():
            if Attention.kinds[config.kind].uses_blocks and config.block_size is None:
                raise ValueError(f"layer {index}: attention kind {config.kind!r} needs block_size, tokens in a block")

    @override
    def replace(
        self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]
    ) -> dict[int, Attention]:
        from lightning_mhla.swap.transformers_attention import install

        built = {index: _build(layer, configs[index]) for index, layer in layers.items()}
        for index, attention in built.items():
            install(layers[index], attention)
        return built

    @override
    def swapped(self, model: Any) -> dict[int, Attention]:
        return {index: layer.swapped for index, layer in enumerate(self.layers(model)) if hasattr(layer, "swapped")}

    @override
    def record(self, model: Any) -> Mapping[str, Any] | None:
        return getattr(model.config, SAVED, None)

    @override
    def remember(self, model: Any, record: Mapping[str, Any]) -> None:
        setattr(model.config, SAVED, dict(record))

    @override
    def wrote(self, config: Mapping[str, Any]) -> bool:
        return "model_type" in config and "transformers_version" in config

    @override
    def build(self, folder: Path, config: dict[str, Any]) -> nn.Module:
        import transformers

        loaded = transformers.AutoConfig.from_pretrained(folder)
        delattr(loaded, SAVED)
        model = getattr(transformers, config["architectures"][0])(loaded)
        if (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        return model

    @override
    def load(self, model: Any, state: dict[str, Tensor]) -> None:
        tied = {name for name in model.all_tied_weights_keys if name not in state}
        own = model.state_dict()
        super().load(model, {**state, **{name: own[name] for name in tied}})
        model.tie_weights()


def _window(layer: Any) -> int | None:
    """Tokens that a layer sees; None for all."""
    return layer.sliding_window if hasattr(layer, "sliding_window") else getattr(layer.config, "sliding_window", None)


def _reason(config: Any) -> str:
    """What keeps a model from being swapped."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model, whose cross-attention has no blocks"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "adds biases by distance to its scores (ALiBi), which linear attention does not have"
    return "has no attention that is known here"


def _build(layer: Any, config: AttentionConfig) -> Attention:
    """The attention that takes the place of ``layer``'s."""
    own = layer.config
    tokens = own.max_position_embeddings
    blocks = config.block_size if Attention.kinds[config.kind].uses_blocks else tokens
    return build_beside(
        next(layer.parameters()),
        replace(config, rotary=False),
        own.hidden_size,
        own.num_attention_heads,
        BlockLayout((tokens,), block_size=blocks),
        key_value_heads=own.num_key_value_heads,
        key_width=layer.head_dim,
        value_width=layer.head_dim,
        causal=True,
    )
