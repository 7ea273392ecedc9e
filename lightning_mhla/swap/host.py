"""Interface for replacing the attention in pretrained models, and the token grid that its implementations share.

diffusers, timm and transformers each have one implementation. A *host* is a pretrained model whose attention is replaced, or
one of its attention modules.
"""

# Longer than other modules because every implementation needs both the interface and the token grid.

from __future__ import annotations

import itertools
import logging
import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lightning_mhla.attention import (
    Attention,
    AttentionConfig,
    BlockLayout,
    CrossAttention,
    CrossAttentionConfig,
    LinearCrossAttention,
    build_attention,
    build_cross_attention,
)
from lightning_mhla.attention.summaries import SummaryAttention
from lightning_mhla.swap.groups import LayerGroup, NoCrossAttention
from lightning_mhla.system.torch_private import in_backward, makes_fake_tensors

log = logging.getLogger(__name__)

SAVED = "swapped_attention"
"""Key in a saved model's ``config.json`` under which the options of the swap are recorded."""

CROSS = "cross"
"""Key in the record of a swap under which the options of replaced cross-attention are stored."""

HUB_OPTIONS = (
    "variant", "device_map", "subfolder", "use_safetensors", "revision", "token", "cache_dir", "force_download",
    "local_files_only", "proxies", "max_memory", "offload_folder", "low_cpu_mem_usage", "quantization_config",
)  # fmt: skip
"""Options of ``from_pretrained`` that are passed on to transformers and diffusers."""


class ReplacedLayer(NamedTuple):
    """Layer whose attention was replaced.

    Attributes:
        group: group to which the layer belongs: the self-attention layers or the cross-attention layers.
        number: number of the layer in its group.
        module: original attention module of the model, whose projections stay in use.
        attention: the new attention.
    """

    group: LayerGroup[Any, Any]
    number: int
    module: Any
    attention: Attention | CrossAttention


class HostLibrary(LayerGroup[Attention, AttentionConfig]):
    """Interface for replacing the attention in the models of a library such as timm, and for saving and loading these models.

    Attributes:
        package: name of the library's package. A model belongs to the library if its class or a base class is defined there.
        options: names of the keyword arguments that :func:`lightning_mhla.load_swapped` passes on to the library.
        cross: implementation of attention replacement for the cross-attention of the library's models.
    """

    package: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = HUB_OPTIONS
    config_class = AttentionConfig
    cross: ClassVar[LayerGroup[CrossAttention, CrossAttentionConfig]] = NoCrossAttention()

    def claims(self, model: nn.Module) -> bool:
        """Return whether the class of ``model``, or one of its base classes, is defined in the library's package."""
        return any(base.__module__.partition(".")[0] == self.package for base in type(model).__mro__)

    def restore(self, model: Any, record: Mapping[str, Any]) -> None:
        """Replace the attention of a model in place as a record describes, and store the record.

        Args:
            model: model with its original attention.
            record: mapping with the options of the new attention and the replaced layers, in the form that :meth:`remember`
                describes.

        Raises:
            ValueError: if a layer or its new attention is not supported.
        """
        self.put_in(model, record)
        if CROSS in record:
            self.cross.put_in(model, record[CROSS])
        self.remember(model, record)

    def replaced(self, model: Any) -> list[ReplacedLayer]:
        """Return all layers whose attention was replaced: self-attention in the order of the layers, then cross-attention."""
        replaced_layers: list[ReplacedLayer] = []
        groups: tuple[LayerGroup[Any, Any], ...] = (self, self.cross)
        for group in groups:
            new = group.swapped(model)
            modules = group.candidates(model)
            replaced_layers += [ReplacedLayer(group, index, modules[index], layer) for index, layer in new.items()]
        return replaced_layers

    def use_blocks(self, model: Any, block_grid: tuple[int, ...]) -> None:
        """Divide the tokens of the model's next inputs into a different number of blocks, in its self-attention layers.

        Layers whose attention does not use blocks stay unchanged.

        Args:
            model: model whose attention :func:`lightning_mhla.swap_attention` replaced.
            block_grid: number of blocks along each axis.
        """
        layers = self.layers(model)
        for index, attention in self.swapped(model).items():
            if attention.uses_blocks:
                holder = self.holder(layers[index])
                holder.blocks, holder.fitted = block_grid, None

    @contextmanager
    def original(self, model: Any, layers: Collection[int] | None = None) -> Iterator[None]:
        """Context manager in which replaced layers compute their original attention, using their current projections.

        On exit, each layer computes what it computed on entry, so that contexts may be nested.

        Args:
            model: model whose attention :func:`lightning_mhla.swap_attention` replaced.
            layers: numbers of the layers to switch, both self-attention and cross-attention; None for all replaced layers.

        Raises:
            ValueError: if a layer in ``layers`` was not replaced.
            NotImplementedError: if models of this library do not keep the original attention.
        """
        replaced_layers = self.replaced(model)
        if layers is not None and (wrong := sorted(set(layers) - {entry.number for entry in replaced_layers})):
            raise ValueError(f"layers {wrong} have no replaced attention, so they cannot compute their original one")
        switched = [entry for entry in replaced_layers if layers is None or entry.number in layers]
        previous = [entry.group.use_original(model, entry.module, True) for entry in switched]
        try:
            yield
        finally:
            for entry, was_original in zip(switched, previous, strict=True):
                entry.group.use_original(model, entry.module, was_original)

    @abstractmethod
    def record(self, model: Any) -> Mapping[str, Any] | None:
        """Return the record of a replacement that :meth:`remember` stored; None if the attention was not replaced."""

    @abstractmethod
    def remember(self, model: Any, record: Mapping[str, Any]) -> None:
        """Store a record of how a model's attention was replaced. The record is later saved with the model's configuration.

        Args:
            model: model whose attention was replaced.
            record: mapping with two entries. ``attention`` maps the fields of :class:`AttentionConfig` to their values;
                ``layers`` maps the number of each replaced layer to its attention kind. If cross-attention was replaced, the
                entry ``cross`` has the same two entries for it.
        """

    @abstractmethod
    def wrote(self, config: Mapping[str, Any]) -> bool:
        """Return whether the library that this class supports wrote a model's ``config.json``.

        Args:
            config: content of the file.
        """

    @abstractmethod
    def load(
        self, source: str, config: Mapping[str, Any], dtype: torch.dtype | None, options: Mapping[str, Any]
    ) -> nn.Module:
        """Load a model with replaced attention from a folder or from the Hugging Face Hub.

        Args:
            source: path of the folder, or name of the model on the hub.
            config: content of the model's ``config.json``.
            dtype: dtype of the weights; None for the dtype in which they were saved.
            options: keyword arguments for the library's own loading function. :attr:`options` lists the supported names.

        Returns:
            The model with its new attention and weights.

        Raises:
            ValueError: if the weights do not fit the model, or the library does not have the model's class.
        """


_shapes: dict[int, Tensor] = {}
"""Tensors whose shapes are the current token grids. The keys are the numbers of the :class:`TokenGrid` objects.

Transformer blocks that are compiled separately read the grid's size from these shapes. Python numbers, and tensors that are
attributes of a module, would be constants of their graph, so every new size would compile another graph. Entries are never
removed, since guards of graphs of deleted models may still read them; each takes few bytes.
"""

_numbers = itertools.count()


class TokenGrid:
    """Recorder of how many tokens a model's input has along each axis, for layers that receive only a flat token sequence.

    A hook on the model calls :meth:`enter` for each input. Activation checkpointing recomputes layers in the backward pass,
    possibly for an input that is not the most recent one. A recomputed layer therefore gets the recorded grid whose number of
    tokens matches its own, among all grids recorded since the previous backward pass.

    Args:
        prefix_tokens: number of tokens that precede the tokens of the grid, such as class and register tokens.
    """

    def __init__(self, prefix_tokens: int = 0) -> None:
        self.prefix_tokens = prefix_tokens
        self.recent: set[tuple[int, ...]] = set()
        self.recomputed = False
        self.layouts: dict[tuple[Any, ...], BlockLayout] = {}
        self._take_number()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled object, so that it records inputs independently of the original."""
        self.__dict__.update(state)
        self._take_number()

    def _take_number(self) -> None:
        self.number = next(_numbers)
        _shapes[self.number] = torch.empty(0, device="cpu")

    def enter(self, shape: tuple[int, ...]) -> None:
        """Record how many tokens the model's next input has along each axis.

        Args:
            shape: number of tokens along each axis.
        """
        # An expanded scalar has the shape without its memory.
        _shapes[self.number] = torch.empty((), device="cpu").expand(shape)
        if torch.compiler.is_compiling():
            return
        # the first input after a backward pass begins a new set of inputs that later recomputation may refer to
        if self.recomputed or in_backward():
            self.recent.clear()
            self.recomputed = False
        if torch.is_grad_enabled():
            self.recent.add(shape)

    def layout(self, blocks: tuple[int, ...], tokens: int, mixes_prefix: bool = True) -> BlockLayout:
        """Return the partition of a layer's input tokens into blocks.

        Args:
            blocks: number of blocks along each axis. An axis with fewer tokens than blocks gets one block per token.
            tokens: number of tokens in the layer's input, including prefix tokens.
            mixes_prefix: whether any prefix tokens have mixing coefficients, which cannot be resized to fewer blocks.

        Returns:
            Layout of the blocks in the grid of the current input.

        Raises:
            ValueError: if the recorded grid has a different number of tokens, if several recorded grids match a recomputed
                layer, or if prefix tokens have mixing coefficients and an axis has more blocks than tokens.
        """
        shape = self._shape_of(tokens)
        if (expected := self.prefix_tokens + math.prod(shape)) != tokens:
            raise ValueError(
                f"the layer got {tokens} tokens of an input of {expected}: call the complete model, with all tokens"
            )
        # min() of a symbolic size would be an expression that every later size contains; a comparison is only a guard
        fitted = tuple(count if length >= count else length for count, length in zip(blocks, shape, strict=True))
        if mixes_prefix:
            check_prefix(self.prefix_tokens, blocks, shape)
        if torch.compiler.is_compiling():  # sizes may be symbolic, so they cannot be keys of a dictionary
            return BlockLayout(shape, fitted, prefix_tokens=self.prefix_tokens)
        key = (shape, fitted)
        if key in self.layouts:
            return self.layouts[key]
        if fitted != blocks:
            log.warning("block_grid %s has more blocks than %s tokens: %s are used", blocks, shape, fitted)
        layout = BlockLayout(shape, fitted, prefix_tokens=self.prefix_tokens)
        if not makes_fake_tensors():  # a layout makes its tables on first use; fake ones must not be reused
            self.layouts[key] = layout
        return layout

    def _shape_of(self, tokens: int) -> tuple[int, ...]:
        present = tuple(_shapes[self.number].shape)
        assert present != (0,), "call the complete model, not its layers: the model records the size of the input"
        if torch.compiler.is_compiling() or not in_backward():
            return present
        self.recomputed = True
        # attention transfer runs without gradients first, which adds nothing to recent
        candidates = {*self.recent, present}
        fitting = sorted(shape for shape in candidates if self.prefix_tokens + math.prod(shape) == tokens)
        if len(fitting) > 1:
            raise ValueError(
                f"a recomputed layer cannot tell whether its {tokens} tokens belong to a grid of "
                f"{' or '.join(str(list(shape)) for shape in fitting)}; call backward after each input, or train without "
                "activation checkpointing"
            )
        return fitting[0] if fitting else present


def check_prefix(prefix_tokens: int, blocks: Sequence[int], tokens: Sequence[int]) -> None:
    """Check that each axis has at least as many tokens as blocks if the model has prefix tokens, such as a class token.

    Where prefix tokens form an additional block, mixing coefficients cannot be resized to fewer blocks.

    Args:
        prefix_tokens: number of class and register tokens, which precede the tokens of the image.
        blocks: number of blocks along each axis.
        tokens: number of tokens along each axis.

    Raises:
        ValueError: if there are prefix tokens and an axis has more blocks than tokens.
    """
    if prefix_tokens and any(count > length for count, length in zip(blocks, tokens, strict=True)):
        raise ValueError(
            f"block_grid {list(blocks)} has more blocks than the image has tokens, {list(tokens)}; with class or register "
            "tokens an axis must have at least as many tokens as blocks"
        )


def refuse_float16(index: int, kind: type) -> None:
    """Reject an attention class that would overflow in float16. Call this function only for layers in float16.

    Args:
        index: number of the layer, for the error message.
        kind: class of the new attention.

    Raises:
        ValueError: if ``kind`` computes sums over many tokens, as linear attention does.
    """
    if issubclass(kind, SummaryAttention | LinearCrossAttention):
        raise ValueError(
            f"layer {index} is in float16, in which sums over many tokens overflow; load the model in bfloat16 or float32"
        )


def fit(
    owner: Any, attention: Attention | CrossAttention, layout: BlockLayout, device: torch.device
) -> BlockLayout | None:
    """Set the block layout of an attention module; during compilation or export, return the layout instead.

    Args:
        owner: object with an attribute ``fitted``, in which the last layout and device are stored. If ``layout`` and ``device``
            have not changed, the attention module stays unchanged.
        attention: attention module whose layout is set.
        layout: partition of the tokens into blocks.
        device: device of the tokens.

    Returns:
        The layout while ``torch.compile`` or ``torch.export`` traces the model, since tracing must not change the module. The
        caller must pass the returned layout to :meth:`Attention.forward`. None in all other cases.
    """
    if torch.compiler.is_compiling():
        return layout
    fitted = (layout, device)
    if fitted != owner.fitted:
        attention.fit(layout, device)
        owner.fitted = None if makes_fake_tensors() else fitted  # fake tables are good for this call only
    return None


def blocks_along(axes: int, config: AttentionConfig) -> tuple[int, ...]:
    """Return the number of blocks along each axis of the token grid, as configured in ``block_grid``.

    Args:
        axes: number of axes of the token grid.
        config: configuration of the attention.

    Returns:
        Number of blocks along each axis; 1 for each axis if this kind of attention does not use blocks.

    Raises:
        ValueError: if the kind uses blocks, and ``block_grid`` is None or does not have one entry for each axis.
    """
    if not Attention.kinds[config.kind].uses_blocks:
        return (1,) * axes
    if config.block_grid is None or len(config.block_grid) != axes:
        raise ValueError(
            f"attention kind {config.kind!r} needs block_grid, the number of blocks along each of the {axes} axes of "
            f"the model's token grid, not {config.block_grid}"
        )
    return tuple(config.block_grid)


def build_beside(
    weight: Tensor, config: AttentionConfig, dim: int, heads: int, layout: BlockLayout, **options: Any
) -> Any:
    """Build an attention module without projections, for use with the projections of an existing layer.

    If the attention has an output gate, the gate is initialized so that it does not change the output.

    Args:
        weight: any weight of the existing layer; the new attention gets its device and dtype.
        config: configuration of the new attention. In a :class:`CrossAttentionConfig`, ``key_tokens`` and ``key_block_size``
            must be set.
        dim: width of the tokens.
        heads: number of query heads.
        layout: partition of the tokens into blocks; for cross-attention, partition of the query tokens.
        options: further arguments of :func:`build_attention` or :func:`build_cross_attention`.

    Returns:
        The new attention module, a :class:`CrossAttention` for a :class:`CrossAttentionConfig`.
    """
    attention: Attention | CrossAttention
    with weight.device:
        if isinstance(config, CrossAttentionConfig):
            assert config.key_tokens is not None
            context = BlockLayout((config.key_tokens,), block_size=config.key_block_size)
            # The configuration's `rotary` is ignored in pretrained models, and a cross-attention layer would reject it.
            config = replace(config, rotary=False)
            attention = build_cross_attention(config, dim, heads, layout, context, projections=False, **options)
        else:
            attention = build_attention(config, dim, heads, layout, projections=False, **options)
    if weight.dtype != torch.get_default_dtype():
        attention = attention.to(weight.dtype)
    attention.open_gate()
    return attention
