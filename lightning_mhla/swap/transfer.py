"""Attention transfer: training each replaced layer separately to reproduce the output of its original attention.

This is the first training step of LoLCATs (arXiv 2410.10254, section 3.2). The model first runs with its original attention.
Each replaced layer then computes the new attention from the input that it received in that forward pass, and is compared with
its original output. If models of a library do not keep their original attention, a second model provides the original layers.
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

from lightning_mhla.swap.swapping import host_of


def original_attention(model: nn.Module, layers: Collection[int] | None = None) -> AbstractContextManager[None]:
    """Return a context manager in which replaced layers compute their original attention, using their current projections.

    Args:
        model: model whose attention :func:`lightning_mhla.swap_attention` replaced.
        layers: numbers of the layers to switch; None for all replaced layers.

    Raises:
        ValueError: if a layer in ``layers`` was not replaced.
        NotImplementedError: if the model comes from diffusers, whose models do not keep the original attention. Both exceptions
            are raised when the context is entered.
    """
    return host_of(model).original(model, layers)


@dataclass(frozen=True)
class LayerCosts:
    """Results of evaluating a model with its original attention, with all layers replaced, and with each single layer replaced.

    Attributes:
        original: result with the original attention in all layers; lower is better for all results.
        replaced: result with the new attention in all replaced layers.
        alone: mapping from layer number to the result with the new attention in this layer only.
    """

    original: float
    replaced: float
    alone: dict[int, float]

    def worst(self, count: int) -> list[int]:
        """Return the ``count`` layers whose replacement alone gives the worst results, as layer numbers in ascending order."""
        return sorted(sorted(self.alone, key=lambda index: -self.alone[index])[:count])


def layer_costs(model: nn.Module, measure: Callable[[], float]) -> LayerCosts:
    """Evaluate a model with its original attention, with all layers replaced, and with each single layer replaced.

    If both self-attention and cross-attention are replaced, the two modules with the same layer number count as one layer.

    Args:
        model: model whose attention :func:`lightning_mhla.swap_attention` replaced, preferably trained with
            :func:`transfer_loss`.
        measure: function that evaluates the model, for example its loss on held-out data; lower is better.

    Returns:
        The results of all evaluations.

    Raises:
        NotImplementedError: if the model comes from diffusers, whose models do not keep the original attention.
    """
    every = {entry.number for entry in host_of(model).replaced(model)}
    alone = {}
    with original_attention(model):
        original = measure()
    for index in sorted(every):
        with original_attention(model, every - {index}):
            alone[index] = measure()
    return LayerCosts(original, measure(), alone)


@contextmanager
def only_new_trained(model: nn.Module) -> Iterator[None]:
    """Context manager in which no parameters require gradients except those of the new attention in replaced layers.

    On exit, the other parameters get their previous ``requires_grad`` back.
    """
    new = {id(parameter) for entry in host_of(model).replaced(model) for parameter in entry.attention.parameters()}
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
    """Compute how much the outputs of the new and the original attention differ, averaged over the replaced layers.

    The distance of a layer is the mean squared difference of the two outputs, divided by the variance of the original output,
    so that layers with large outputs do not dominate the mean. Each layer gets the input that it has in the original model, so
    no layer has to correct errors of an earlier one. Only the parameters of the new attention get gradients. Padding tokens are
    ignored, except those of the decoder of an encoder-decoder model.

    Args:
        model: model whose attention :func:`lightning_mhla.swap_attention` replaced.
        run: function that calls the complete model once, without a cache.

    Returns:
        Scalar loss.

    Raises:
        ValueError: if no layer is replaced, or ``run`` calls none of the replaced layers.
        NotImplementedError: if the model comes from diffusers, whose models do not keep the original attention.
    """
    host = host_of(model)

    def run_original() -> None:
        with host.original(model):
            run()

    recomputes = bool(getattr(model, "is_activation_checkpointing", False))
    itself = {entry.module: entry.module for entry in host.replaced(model)}
    return matching_loss(model, itself, run_original, recomputes, partial(only_new_trained, model))


def matching_loss(
    model: nn.Module,
    replaced: Mapping[nn.Module, nn.Module],
    run: Callable[[], Any],
    recomputes: bool,
    trained: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """Compute how much the outputs of replacement layers and original layers differ, averaged over layers.

    The distance of a layer is the mean squared difference of the two outputs, divided by the variance of the original output.
    Both layers get the input that the original layer receives in ``run``. Padding tokens are ignored.

    Args:
        model: model in which layers were replaced.
        replaced: mapping from each original layer to its replacement. Both may be the same module if it computes the original
            attention during ``run``.
        run: function that calls the complete model with the original layers once, without a cache.
        recomputes: whether replaced layers are recomputed in the backward pass, to save memory.
        trained: function that returns a context manager. Replaced layers are called inside it, so it can select the parameters
            that get gradients.

    Returns:
        Scalar loss.

    Raises:
        ValueError: if ``replaced`` is empty, or ``run`` calls none of the layers.
    """
    if not replaced:
        raise ValueError("no layer is replaced, so there is nothing to transfer")
    host = host_of(model)
    groups = {entry.module: entry.group for entry in host.replaced(model)}
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
    if not calls:
        raise ValueError("run called no replaced layer; it must call the complete model once")
    distances = []
    while calls:  # pop each call, so that its output is freed while the graphs of later layers grow
        layer, args, kwargs, output = calls.popleft()

        def call(*args: Any, layer: nn.Module = layer, **kwargs: Any) -> Tensor:
            with trained():  # inside the function, so that it also applies when the layer is recomputed
                return _first(layer(*args, **kwargs)).float()

        new = checkpoint(call, *args, use_reentrant=False, **kwargs) if recomputes else call(*args, **kwargs)
        group = groups.get(layer, host)  # replaced layers of a different copy of the model have self-attention
        distances.append(_distance(new, output, group.real_tokens(kwargs, output)))
    return torch.stack(distances).mean()


def _distance(new: Tensor, output: Tensor, real: Tensor | None) -> Tensor:
    """Compute the mean squared difference between two outputs, divided by the variance of the original output.

    All tensor shapes are independent of the mask's values. The function therefore also works with fake tensors, which are used
    to estimate memory.

    Args:
        new: output of the replaced layer, ``[B, N, C]`` float32 for B rows of N tokens of width C.
        output: output of the original layer, same shape and dtype.
        real: ``[B, N]`` bool, False for padding; None if no token is padding.

    Returns:
        Scalar distance.
    """
    # A constant output has variance 0.
    tiny = torch.finfo(output.dtype).tiny
    if real is None:
        return (new - output).square().mean() / output.var().clamp(min=tiny)
    real = real.expand(output.shape[:2])[..., None]
    # The mean and the variance of the real tokens alone; like `var`, the variance is divided by one less than their number.
    count = (real.sum() * output.shape[-1]).clamp(min=1)  # a batch of padding alone has distance 0, not 0 / 0
    mean = torch.where(real, output, 0).sum() / count
    variance = torch.where(real, output - mean, 0).square().sum() / (count - 1).clamp(min=1)
    return torch.where(real, new - output, 0).square().sum() / count / variance.clamp(min=tiny)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
