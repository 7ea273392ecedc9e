"""Which layers of a host model become which kind of attention."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_mhla.attention import AttentionConfig

KEEP, REPLACE = "keep", "replace"
"""In place of a kind: a layer that is left as it is, and one that becomes the configuration's kind."""


def kinds_of_layers(
    attention: AttentionConfig, depth: int, layers: Sequence[int] | None, layer_kinds: Sequence[str] | None
) -> list[str]:
    """The kind that each of ``depth`` layers becomes, or :data:`KEEP`.

    Raises:
        ValueError: when both or a layer that does not exist are given, or kinds whose number does not divide the depth.
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
