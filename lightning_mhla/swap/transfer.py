"""Attention transfer: replaced layers learn the outputs of the attention that they replaced, each by itself.

The first stage of LoLCATs (arXiv 2410.10254, section 3.2). The model is its own teacher: while it runs with its original
attention, every replaced layer is given the same input with its new attention. Where a library does not keep
the original attention, the layers of a second model take its place (:func:`matching_loss`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mhla.swap.swapping import host_of, swapped_layers


def original_attention(model: nn.Module, layers: Collection[int] | None = None) -> AbstractContextManager[None]:
    """A context in which replaced layers compute what they did before the swap, with their present weights.

    Args:
        model: after :func:`lightning_mhla.swap_attention`.
        layers: numbers of those that do; None for all.

    Raises:
        NotImplementedError: for a model whose library does not keep what was replaced (diffusers).
    """
    return host_of(model).original(model, layers)


@dataclass(frozen=True)
class LayerCosts:
    """Costs of replacing each layer, by a measure of which less is better.

    Attributes:
        original: the measure with the original attention in all layers.
        replaced: with the new attention in all that were replaced.
        alone: with the new attention in one layer, by the layer's number.
    """

    original: float
    replaced: float
    alone: dict[int, float]

    def worst(self, count: int) -> list[int]:
        """The layers that cost most to replace, in the order of the model."""
        return sorted(sorted(self.alone, key=lambda index: -self.alone[index])[:count])


def layer_costs(model: nn.Module, measure: Callable[[], float]) -> LayerCosts:
    """Measure a swapped model with one new layer after the other.

    Args:
        model: after :func:`lightning_mhla.swap_attention`, best with its layers trained by :func:`transfer_loss`.
        measure: for instance its loss on held-out data.

    Raises:
        NotImplementedError: as for :func:`original_attention`.
    """
    every = set(swapped_layers(model))
    found = {}
    with original_attention(model):
        original = measure()
    for index in sorted(every):
        with original_attention(model, every - {index}):
            found[index] = measure()
    return LayerCosts(original, measure(), found)


@contextmanager
def only_new_trained(model: nn.Module) -> Iterator[None]:
    """A context in which nothing gets a gradient but what the swap added."""
    new = {id(parameter) for layer in swapped_layers(model).values() for parameter in layer.parameters()}
    others = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in new]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def transfer_loss(model: nn.Module, run: Callable[[], Any]) -> Tensor:
    """How far the output of each replaced layer is from that of the attention it replaced, mean over the layers and tokens.

    A layer's distance is the mean square of the difference over the variance of the output, so that all layers count alike.
    Each is given the input that it has in the original model: none has to mend what an earlier one does. Gradients reach
    what the swap added and nothing else. Padding does not count.

    Args:
        model: after :func:`lightning_mhla.swap_attention`.
        run: calls the model as a whole, without a cache.

    Raises:
        ValueError: when no layer is replaced.
        NotImplementedError: for a model whose library does not keep what was replaced (diffusers).
    """
    host = host_of(model)
    layers = host.layers(model)

    def run_original() -> None:
        with host.original(model):
            run()

    recomputes = bool(getattr(model, "is_activation_checkpointing", False))
    itself = {layers[index]: layers[index] for index in swapped_layers(model)}
    return matching_loss(model, itself, run_original, recomputes, partial(only_new_trained, model))


def matching_loss(
    model: nn.Module,
    replaced: Mapping[nn.Module, nn.Module],
    run: Callable[[], Any],
    recomputes: bool,
    trained: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """Return the distance of replaced layers' outputs from those of the original layers, mean over the layers and tokens.

    See :func:`transfer_loss` for the distance of a layer.

    Args:
        model: model with the replaced layers.
        replaced: the replaced layer for each original one, which may be the same module, in another state while ``run`` lasts.
        run: calls the model of the original layers as a whole, without a cache.
        recomputes: whether replaced layers are computed again in the backward pass, to save memory.
        trained: context in which replaced layers are called, which decides what gets gradients.

    Raises:
        ValueError: when no layer is replaced.
    """
    if not replaced:
        raise ValueError("no layer is replaced, so there is nothing to transfer")
    real_tokens = host_of(model).real_tokens
    calls: deque[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]] = deque()

    def record(original: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append((replaced[original], args, kwargs, _first(output).float()))

    hooks = [original.register_forward_hook(record, with_kwargs=True) for original in replaced]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    distances = []
    while calls:  # outputs are freed one by one, while the differences from them take their memory
        layer, args, kwargs, output = calls.popleft()

        def call(*args: Any, layer: nn.Module = layer, **kwargs: Any) -> Tensor:
            with trained():  # also when it is computed again in the backward pass
                return _first(layer(*args, **kwargs)).float()

        new = checkpoint(call, *args, use_reentrant=False, **kwargs) if recomputes else call(*args, **kwargs)
        distances.append(_distance(new, output, real_tokens(kwargs, output)))
    return torch.stack(distances).mean()


def _distance(new: Tensor, output: Tensor, real: Tensor | None) -> Tensor:
    """Mean square of the difference over the variance of ``output``, of the tokens that are ``real`` ``[B, N]``.

    No shape depends on the mask, so that the memory of a step can be counted on fake tensors.
    """
    tiny = torch.finfo(output.dtype).tiny
    if real is None:
        return (new - output).square().mean() / output.var().clamp(min=tiny)
    real = real.expand(output.shape[:2])[..., None]
    count = real.sum() * output.shape[-1]
    mean = torch.where(real, output, 0).sum() / count
    variance = torch.where(real, output - mean, 0).square().sum() / (count - 1)
    return torch.where(real, new - output, 0).square().sum() / count / variance.clamp(min=tiny)


def _first(output: Any) -> Tensor:
    """The output of an attention module, without the weights beside it."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
