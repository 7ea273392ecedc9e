"""Choice of the attention kind for each layer of a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mhla.attention import AttentionConfig

KEEP, REPLACE = "keep", "replace"
"""Values of ``layer_kinds`` that keep a layer, or replace it with the attention kind of the configuration."""


def kinds_of_layers(
    attention: AttentionConfig, depth: int, layers: Sequence[int] | None, layer_kinds: Sequence[str] | None
) -> list[str]:
    """Return the new attention kind of each layer, or ``"keep"`` for layers that do not change.

    Args:
        attention: configuration of the new attention, with the kind to use for replaced layers.
        depth: number of layers of the model.
        layers: numbers of the layers to replace, from 0; None for all layers.
        layer_kinds: attention kinds, such as ``"mhla"``, for the first layers, repeated until all layers have one. ``"keep"``
            keeps a layer, and ``"replace"`` stands for the kind in ``attention``. None to choose layers with ``layers``.

    Returns:
        One attention kind or ``"keep"`` per layer.

    Raises:
        ValueError: if both ``layers`` and ``layer_kinds`` are given, if a layer in ``layers`` does not exist, or if
            ``layer_kinds`` is empty or its length does not divide ``depth``.
    """
    if layers is not None and layer_kinds is not None:
        raise ValueError("give layers or layer_kinds, not both")
    if layer_kinds is not None:
        if not layer_kinds or depth % len(layer_kinds):
            raise ValueError(
                f"layer_kinds={list(layer_kinds)} is repeated to the depth, so its length must divide the {depth} layers"
            )
        return [attention.kind if kind == REPLACE else kind for kind in layer_kinds] * (depth // len(layer_kinds))
    chosen = set(range(depth)) if layers is None else set(layers)
    if wrong := sorted(chosen - set(range(depth))):
        raise ValueError(f"layers {wrong} are not among the model's 0 to {depth - 1}")
    return [attention.kind if index in chosen else KEEP for index in range(depth)]
