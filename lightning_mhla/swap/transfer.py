"""Attention transfer: each replaced layer is trained on its own to reproduce the output of the original attention.

This is the first stage of LoLCATs (arXiv 2410.10254, section 3.2). The model is its own teacher: it runs with its original
attention, and every replaced layer then computes the new attention from the input that it had in this run. Where a library
does not keep the original attention, a second model provides the original layers (:func:`matching_loss`).
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
    """Return a context manager in which replaced layers compute their original attention, with their current weights.

    Args:
        model: model after :func:`lightning_mhla.swap_attention`.
        layers: numbers of the layers to switch; None for all replaced layers.

    Raises:
        NotImplementedError: if the model's library does not keep the original attention (diffusers).
    """
    return host_of(model).original(model, layers)


@dataclass(frozen=True)
class LayerCosts:
    """Quality of a model with replaced attention: with the replacement in no layer, in all layers, and in one at a time.

    Attributes:
        original: value of the measure (lower is better) with the original attention in all layers.
        replaced: value of the measure with the new attention in all replaced layers.
        alone: value of the measure with the new attention in a single layer, by the number of that layer.
    """

    original: float
    replaced: float
    alone: dict[int, float]

    def worst(self, count: int) -> list[int]:
        """Return the numbers of the ``count`` layers whose replacement raises the measure most, sorted by layer number."""
        return sorted(sorted(self.alone, key=lambda index: -self.alone[index])[:count])


def layer_costs(model: nn.Module, measure: Callable[[], float]) -> LayerCosts:
    """Measure a model with replaced attention: with the replacement in no layer, in all layers, and in one at a time.

    Args:
        model: model after :func:`lightning_mhla.swap_attention`, preferably trained with :func:`transfer_loss`.
        measure: function that evaluates the model, such as its loss on held-out data; lower is better.

    Raises:
        NotImplementedError: if the model's library does not keep the original attention (diffusers).
    """
    every = set(swapped_layers(model))
    alone = {}
    with original_attention(model):
        original = measure()
    for index in sorted(every):
        with original_attention(model, every - {index}):
            alone[index] = measure()
    return LayerCosts(original, measure(), alone)


@contextmanager
def only_new_trained(model: nn.Module) -> Iterator[None]:
    """Context manager in which only the parameters of the model's new attention, in replaced layers, require gradients."""
    new = {id(parameter) for layer in swapped_layers(model).values() for parameter in layer.parameters()}
    original_parameters = [
        parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in new
    ]
    for parameter in original_parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in original_parameters:
            parameter.requires_grad_(True)


def transfer_loss(model: nn.Module, run: Callable[[], Any]) -> Tensor:
    """Compute the distance between the outputs of new and original attention, averaged over replaced layers and tokens.

    The distance of a layer is the mean squared difference divided by the variance of the original output, so that all layers
    have the same weight. Each layer gets the input that it has in the original model, so no layer has to correct errors of an
    earlier one. Only the parameters of the new attention get gradients. Padding does not count.

    Args:
        model: model after :func:`lightning_mhla.swap_attention`.
        run: function that calls the complete model once, without a cache.

    Returns:
        Scalar loss.

    Raises:
        ValueError: if no layer is replaced.
        NotImplementedError: if the model's library does not keep the original attention (diffusers).
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
    """Compute the distance between the outputs of replaced and original layers, averaged over layers and tokens.

    See :func:`transfer_loss` for the distance of a layer.

    Args:
        model: model with the replaced layers.
        replaced: mapping from each original layer to its replacement; both may be the same module if it computes the
            original attention during ``run``.
        run: function that calls the complete model of the original layers once, without a cache.
        recomputes: whether replaced layers are recomputed in the backward pass, to save memory.
        trained: function that returns a context manager, in which the replaced layers are called. It can select the
            parameters that get gradients.

    Returns:
        Scalar loss.

    Raises:
        ValueError: if no layer is replaced.
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
    while calls:  # pop each call, so that its output is freed while the graphs of later layers grow
        layer, args, kwargs, output = calls.popleft()

        def call(*args: Any, layer: nn.Module = layer, **kwargs: Any) -> Tensor:
            with trained():  # inside the function, so that it also applies when the layer is recomputed
                return _first(layer(*args, **kwargs)).float()

        new = checkpoint(call, *args, use_reentrant=False, **kwargs) if recomputes else call(*args, **kwargs)
        distances.append(_distance(new, output, real_tokens(kwargs, output)))
    return torch.stack(distances).mean()


def _distance(new: Tensor, output: Tensor, real: Tensor | None) -> Tensor:
    """Compute the mean squared difference between two outputs, divided by the variance of the original output.

    No shape depends on the values of the mask, so the memory of a step can be counted with fake tensors.

    Args:
        new: output of the replaced layer, ``[B, N, dim]`` float32.
        output: output of the original layer, same shape and dtype.
        real: mask of non-padding tokens, ``[B, N]`` bool; None if no token is padding.
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
    """Return the output of an attention module, without the attention weights that may follow it in a tuple."""
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first
