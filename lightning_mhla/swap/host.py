"""A library whose models can be given other attention: one subclass of :class:`HostLibrary` for each."""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_mhla.attention import Attention, AttentionConfig, BlockLayout, build_attention
from lightning_mhla.attention.summaries import SummaryAttention
from lightning_mhla.system.torch_private import in_backward, makes_fake_tensors

log = logging.getLogger(__name__)

SAVED = "swapped_attention"
"""Entry of a saved model's ``config.json`` that says what was swapped."""

HUB_OPTIONS = (
    "variant", "device_map", "subfolder", "use_safetensors", "revision", "token", "cache_dir", "force_download",
    "local_files_only", "proxies", "max_memory", "offload_folder", "low_cpu_mem_usage", "quantization_config",
)  # fmt: skip
"""Options that transformers and diffusers take where they load a model."""


class HostLibrary(ABC):
    """A library of models, and how attention is replaced in them.

    Attributes:
        package: name of the library; its models are classes of its modules, or derived from such.
        options: names of options that the library takes where it loads a model.
    """

    package: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = HUB_OPTIONS

    def claims(self, model: nn.Module) -> bool:
        """Whether ``model`` is of this library."""
        return any(base.__module__.partition(".")[0] == self.package for base in type(model).__mro__)

    @abstractmethod
    def layers(self, model: Any) -> list[Any]:
        """The self-attention modules of a model, first to last.

        Raises:
            ValueError: when the model is not one that attention can be swapped in.
        """

    @abstractmethod
    def check(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]) -> None:
        """Refuse what the new attention would not compute as the old one did, before anything is changed.

        Args:
            model: the model.
            layers: attention modules that are to be replaced, by the number of their layer.
            configs: what comes in their place.

        Raises:
            ValueError: naming what is not known.
        """

    @abstractmethod
    def replace(
        self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, AttentionConfig]
    ) -> dict[int, Attention]:
        """Put the new attention in, and return it by the number of its layer; nothing is changed if this raises."""

    def put_in(self, model: Any, record: Mapping[str, Any]) -> dict[int, Attention]:
        """Put in the attention that a record of :meth:`remember` describes, in place.

        Returns:
            The new attention by the number of its layer.

        Raises:
            ValueError: for what the new attention would not compute as the old one did.
        """
        attention, found = AttentionConfig(**record["attention"]), self.layers(model)
        kinds = {int(index): kind for index, kind in record["layers"].items() if int(index) < len(found)}
        configs = {index: attention.with_kind(kind).at_layer(index) for index, kind in kinds.items()}
        chosen = {index: found[index] for index in configs}
        self.check(model, chosen, configs)
        return self.replace(model, chosen, configs)

    def swapped(self, model: Any) -> dict[int, Attention]:
        """The attention that :meth:`replace` put in, by the number of its layer."""
        return {index: layer.swapped for index, layer in enumerate(self.layers(model)) if hasattr(layer, "swapped")}

    def use_original(self, model: Any, layer: Any, original: bool) -> None:
        """Let a replaced layer compute what it did before the swap, or its new attention again; see :meth:`original`."""
        raise NotImplementedError(f"models of {self.package} do not keep the attention that was replaced")

    @contextmanager
    def original(self, model: Any, layers: Collection[int] | None = None) -> Iterator[None]:
        """Within it, replaced layers compute what they did before the swap, with their projections as they are now.

        Args:
            model: after the swap.
            layers: numbers of the replaced layers that do; None for all.

        Raises:
            NotImplementedError: where the library's models do not keep what was replaced.
        """
        every = self.layers(model)
        replaced = [every[index] for index in self.swapped(model) if layers is None or index in layers]
        for layer in replaced:
            self.use_original(model, layer, True)
        try:
            yield
        finally:
            for layer in replaced:
                self.use_original(model, layer, False)

    def real_tokens(self, options: Mapping[str, Any], x: Tensor) -> Tensor | None:
        """Which tokens of a layer's call are no padding, ``[B, N]`` bool; None for all.

        Args:
            options: keyword arguments of the call.
            x: output of the layer, ``[B, N, dim]``.
        """
        return None

    @abstractmethod
    def record(self, model: Any) -> Mapping[str, Any] | None:
        """The record that :meth:`remember` was given; None for a model that was not swapped."""

    @abstractmethod
    def remember(self, model: Any, record: Mapping[str, Any]) -> None:
        """Keep a record of the swap in the configuration that the library saves."""

    @abstractmethod
    def wrote(self, config: Mapping[str, Any]) -> bool:
        """Whether a saved ``config.json`` is one that this library wrote."""

    @abstractmethod
    def load(
        self, source: str, config: Mapping[str, Any], dtype: torch.dtype | None, options: Mapping[str, Any]
    ) -> nn.Module:
        """A saved model, by the library's own rules.

        Args:
            source: folder, or name on the hub.
            config: its ``config.json``.
            dtype: dtype of the weights; None as they were saved.
            options: of the library, among :attr:`options`.

        Raises:
            ValueError: when the weights are not those of the model.
        """


_shapes: dict[int, Tensor] = {}
"""Tensors without memory that have the present shapes of all grids.

Blocks that are compiled by themselves read them here: numbers, and tensors that are attributes of a module, would be constants
of their graph, and every size would compile one. Entries stay, since graphs of models that are gone may still be checked
against them; they are few bytes each.
"""

_numbers = itertools.count()


class TokenGrid:
    """The token grid of a model's present input, which its attention modules are not told; a hook calls :meth:`enter`.

    A layer that is computed again in the backward pass is of one of the inputs since the last backward pass: of the one that
    has as many tokens.

    Args:
        prefix_tokens: tokens before those of the grid.
    """

    def __init__(self, prefix_tokens: int = 0) -> None:
        self.prefix_tokens = prefix_tokens
        self.recent: set[tuple[int, ...]] = set()
        self.recomputed = False
        self.layouts: dict[tuple[Any, ...], BlockLayout] = {}
        self._take_number()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of the model has a shape of its own."""
        self.__dict__.update(state)
        self._take_number()

    def _take_number(self) -> None:
        self.number = next(_numbers)
        _shapes[self.number] = torch.empty(0, device="cpu")

    def enter(self, shape: tuple[int, ...]) -> None:
        """Note the grid of an input that comes into the model."""
        _shapes[self.number] = torch.empty((), device="cpu").expand(shape)
        if torch.compiler.is_compiling():
            return
        if self.recomputed or in_backward():
            self.recent.clear()
            self.recomputed = False
        if torch.is_grad_enabled():
            self.recent.add(shape)

    def layout(self, blocks: tuple[int, ...], tokens: int) -> BlockLayout:
        """The grid of the input that a layer computes, in at most so many blocks along each axis.

        Args:
            blocks: along each axis.
            tokens: of the layer's input.

        Raises:
            ValueError: when there are other numbers of tokens, or when the input of a layer that is computed again is unclear.
        """
        shape = self._shape_of(tokens)
        if (expected := self.prefix_tokens + math.prod(shape)) != tokens:
            raise ValueError(
                f"{tokens} tokens for an input of {expected}: call the whole model, with all tokens of its input"
            )
        # no min(): of an open size it would be an expression in every later one
        fitted = tuple(count if length >= count else length for count, length in zip(blocks, shape, strict=True))
        if torch.compiler.is_compiling():  # sizes may be open, so nothing is looked up by them
            if self.prefix_tokens:
                check_prefix(self.prefix_tokens, blocks, shape)
            return BlockLayout(shape, fitted, prefix_tokens=self.prefix_tokens)
        key = (shape, fitted)
        if key in self.layouts:
            return self.layouts[key]
        if fitted != tuple(blocks):
            check_prefix(self.prefix_tokens, blocks, shape)
            log.warning("block_grid %s has more blocks than %s tokens: %s are used", blocks, shape, fitted)
        layout = BlockLayout(shape, fitted, prefix_tokens=self.prefix_tokens)
        if not makes_fake_tensors():  # its tables are made when they are first used
            self.layouts[key] = layout
        return layout

    def _shape_of(self, tokens: int) -> tuple[int, ...]:
        present = tuple(_shapes[self.number].shape)
        assert present != (0,), "call the whole model, not its layers: the size of the input is seen there"
        if torch.compiler.is_compiling() or not in_backward():
            return present
        self.recomputed = True
        known = {*self.recent, present}  # attention transfer passes images without gradients first
        fitting = sorted(shape for shape in known if self.prefix_tokens + math.prod(shape) == tokens)
        if len(fitting) > 1:
            raise ValueError(
                f"a layer that is computed again does not know whether its {tokens} tokens are of a grid of "
                f"{' or '.join(str(list(shape)) for shape in fitting)}; call backward after each, or train without "
                "activation checkpointing"
            )
        return fitting[0] if fitting else present


def check_prefix(prefix_tokens: int, blocks: Sequence[int], tokens: Sequence[int]) -> None:
    """Refuse more blocks than tokens along an axis, where class or register tokens have a block too.

    Raises:
        ValueError: naming both; coefficients with a block that has no place on the grid cannot be resized.
    """
    if prefix_tokens and any(count > length for count, length in zip(blocks, tokens, strict=True)):
        raise ValueError(
            f"block_grid {list(blocks)} has more blocks than the image has tokens, {list(tokens)}; with class or register "
            "tokens an axis must have at least as many tokens as blocks"
        )


def refuse_float16(index: int, kind: type) -> None:
    """Refuse attention of linear cost in float16.

    Raises:
        ValueError: for a kind that sums over tokens.
    """
    if issubclass(kind, SummaryAttention):
        raise ValueError(
            f"layer {index} is in float16, in which sums over many tokens overflow; load the model in bfloat16 or float32"
        )


def fit(owner: Any, attention: Attention, layout: BlockLayout, device: torch.device) -> BlockLayout | None:
    """Let ``attention`` take tokens of ``layout``, unless ``owner.fitted`` says that it does.

    Returns:
        The layout, for :meth:`Attention.forward`, in a graph: there nothing is kept from call to call. None elsewhere.
    """
    if torch.compiler.is_compiling():
        return layout
    if (fitted := (layout, device)) != owner.fitted:
        attention.fit(*fitted)
        owner.fitted = None if makes_fake_tensors() else fitted  # tables without values serve this call alone
    return None


def blocks_along(axes: int, config: AttentionConfig) -> tuple[int, ...]:
    """The blocks along each axis that a configuration asks for; 1 for a kind without blocks.

    Raises:
        ValueError: when it does not give as many.
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
) -> Attention:
    """Attention without projections, to use those of a layer that has ``weight``: on its device, in its dtype, gate open.

    Args:
        weight: a weight of the layer.
        config: which attention.
        dim: width of the tokens.
        heads: number of query heads.
        layout: see :class:`Attention`.
        options: see there.
    """
    with weight.device:
        attention = build_attention(config, dim, heads, layout, projections=False, **options)
    if weight.dtype != torch.get_default_dtype():
        attention = attention.to(weight.dtype)
    attention.open_gate()
    return attention
