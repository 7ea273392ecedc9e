"""Registration of dataclasses of tensors as pytrees, so that ``torch.export`` can save them.

``torch.load(weights_only=True)`` can read them too.
"""

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
    """Register a class as a pytree of its tensors, and allow ``torch.load(weights_only=True)`` to load it.

    Args:
        kind: class to register.
        tensors: names of the attributes that are the leaves of the pytree.
        context: function that returns everything in an instance except its leaves, as a hashable value.
        build: function that makes an instance from a dict of leaves by name and the result of ``context``.
        to_json: function that converts the result of ``context`` to a JSON value, for programs that ``torch.export`` saves.
        from_json: function that converts this JSON value back.
    """

    def flatten(instance: Any) -> tuple[list[Tensor], Any]:
        return [getattr(instance, name) for name in tensors], context(instance)

    def flatten_with_keys(instance: Any) -> tuple[list[tuple[Any, Tensor]], Any]:
        return [(pytree.GetAttrKey(name), getattr(instance, name)) for name in tensors], context(instance)

    def unflatten(leaves: Iterable[Any], values: Any) -> Any:
        return build(dict(zip(tensors, leaves, strict=True)), values)

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
