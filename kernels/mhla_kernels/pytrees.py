"""Dataclasses of tensors as pytrees, which ``torch.export`` saves and ``torch.load`` reads without running code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mhla_kernels.torch_private import pytree


def register(
    kind: type[Any],
    tensors: tuple[str, ...],
    context: Callable[[Any], Any],
    build: Callable[[dict[str, Any], Any], Any],
    to_json: Callable[[Any], Any],
    from_json: Callable[[Any], Any],
) -> None:
    """Make a class a pytree of its tensors, and one that ``torch.load`` accepts with ``weights_only=True``.

    Args:
        kind: the class.
        tensors: names of the attributes that are its leaves.
        context: everything else that an instance holds; it must be hashable.
        build: an instance from the leaves by name and the context.
        to_json: the context as JSON has it, for saved programs.
        from_json: the context from JSON.
    """

    def flatten(instance: Any) -> tuple[list[Tensor], Any]:
        return [getattr(instance, name) for name in tensors], context(instance)

    def flatten_with_keys(instance: Any) -> tuple[list[tuple[Any, Tensor]], Any]:
        return [(pytree.GetAttrKey(name), getattr(instance, name)) for name in tensors], context(instance)

    def unflatten(leaves: Iterable[Any], rest: Any) -> Any:
        return build(dict(zip(tensors, leaves, strict=True)), rest)

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
        to_dumpable_context=to_json,
        from_dumpable_context=from_json,
        flatten_with_keys_fn=flatten_with_keys,
    )
    torch.serialization.add_safe_globals([kind])
