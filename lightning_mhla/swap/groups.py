"""Interface for replacing one type of attention, self-attention or cross-attention, in models of a library such as timm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from lightning_mhla.attention import Attention, AttentionConfig, CrossAttention, CrossAttentionConfig

New = TypeVar("New", Attention, CrossAttention)
Config = TypeVar("Config", AttentionConfig, CrossAttentionConfig)


class LayerGroup(ABC, Generic[New, Config]):
    """Interface for replacing one type of attention, self-attention or cross-attention, in models of a library such as timm.

    The attention layers of this type in a model are called a group.

    Attributes:
        config_class: class of the configuration of the new attention.
    """

    config_class: type[Config]

    @abstractmethod
    def layers(self, model: Any) -> list[Any]:
        """Return the attention modules of this group in the order of the model's layers.

        Raises:
            ValueError: if attention cannot be replaced in a model of this class.
        """

    @abstractmethod
    def check(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, Config]) -> None:
        """Check that the attention modules have no feature that the new attention lacks. The model does not change.

        Args:
            model: model whose attention is to be replaced.
            layers: mapping from layer number to the attention module to replace.
            configs: mapping from layer number to the configuration of the new attention.

        Raises:
            ValueError: if a module or a configuration is not supported.
        """

    @abstractmethod
    def replace(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, Config]) -> dict[int, New]:
        """Replace the attention of layers for which :meth:`check` found no problem, in place.

        The model does not change if an exception is raised.

        Args:
            model: model whose attention is replaced.
            layers: mapping from layer number to the attention module to replace.
            configs: mapping from layer number to the configuration of the new attention.

        Returns:
            Mapping from layer number to the new attention module.
        """

    def complete(self, model: Any, config: Config) -> Config:
        """Set those options of a configuration that have model-dependent defaults. The base class changes nothing.

        Args:
            model: model whose attention is to be replaced.
            config: configuration of the new attention.

        Returns:
            The completed configuration.
        """
        return config

    def put_in(self, model: Any, record: Mapping[str, Any]) -> dict[int, New]:
        """Replace the attention of a model in place as a record describes.

        Args:
            model: model with its original attention.
            record: mapping with two entries. ``attention`` maps the fields of :attr:`config_class` to their values; ``layers``
                maps the number of each layer to replace to its attention kind. Numbers of layers that the model does not have
                are ignored.

        Returns:
            Mapping from layer number to the new attention module.

        Raises:
            ValueError: if a layer or its new attention is not supported.
        """
        if not record["layers"]:  # a model may have no layers of this group
            return {}
        attention, all_layers = self.config_class(**record["attention"]), self.layers(model)
        kinds = {int(index): kind for index, kind in record["layers"].items() if int(index) < len(all_layers)}
        configs = {index: attention.with_kind(kind).at_layer(index) for index, kind in kinds.items()}
        replaced_layers = {index: all_layers[index] for index in configs}
        self.check(model, replaced_layers, configs)
        return self.replace(model, replaced_layers, configs)

    def candidates(self, model: Any) -> list[Any]:
        """Return the attention modules whose attention may have been replaced, in the order of the model's layers.

        A subclass overrides this method if :meth:`layers` raises an error for models that have no layers of this group.
        """
        return self.layers(model)

    def holder(self, layer: Any) -> Any:
        """Return the object that stores the new attention of a layer in its attribute ``swapped``.

        The base class returns the layer itself.

        Args:
            layer: attention module of a model, as :meth:`layers` returns it.
        """
        return layer

    def swapped(self, model: Any) -> dict[int, New]:
        """Return the new attention modules in a model, by layer number; empty if no layer of this group was replaced."""
        holders = ((index, self.holder(layer)) for index, layer in enumerate(self.candidates(model)))
        return {index: holder.swapped for index, holder in holders if hasattr(holder, "swapped")}

    def use_original(self, model: Any, layer: Any, original: bool) -> bool:
        """Switch a layer with replaced attention to its original attention, or back to the new attention.

        Args:
            model: model whose attention :func:`lightning_mhla.swap_attention` replaced.
            layer: attention module of the layer.
            original: True to compute the original attention from now on; False to compute the new attention.

        Returns:
            Whether the layer computed its original attention before this call.

        Raises:
            NotImplementedError: if models of this library do not keep the original attention.
        """
        library = next(base.__module__.partition(".")[0] for base in type(layer).__mro__)
        raise NotImplementedError(f"models of {library} do not keep the attention that was replaced")

    def real_tokens(self, options: Mapping[str, Any], x: Tensor) -> Tensor | None:
        """Return a mask of the tokens in an attention layer's input that are not padding. The base class always returns None.

        Args:
            options: keyword arguments with which the layer was called.
            x: output of the layer, ``[B, N, C]`` for B rows of N tokens of width C. The input has the same number of tokens.

        Returns:
            ``[B, N]`` bool, False for padding; None if no token is padding.
        """
        return None


class NoCrossAttention(LayerGroup[CrossAttention, CrossAttentionConfig]):
    """Implementation of :class:`LayerGroup` for libraries whose models have no cross-attention layers to replace."""

    config_class = CrossAttentionConfig

    @override
    def layers(self, model: Any) -> list[Any]:
        raise ValueError(f"{type(model).__name__} has no cross-attention; leave out cross=True")

    @override
    def check(self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, CrossAttentionConfig]) -> None:
        """Do nothing, because there are no layers."""

    @override
    def replace(
        self, model: Any, layers: Mapping[int, Any], configs: Mapping[int, CrossAttentionConfig]
    ) -> dict[int, CrossAttention]:
        return {}

    @override
    def candidates(self, model: Any) -> list[Any]:
        return []
