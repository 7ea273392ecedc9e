"""Operations on encoders that depend on their library, transformers or timm: building, loading and computing vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModel
from typing_extensions import override

from lightning_mhla.swap.networks import build_configuration, load_source, read_description, repeated_layers
from lightning_mhla.swap.timm_networks import build_timm, load_timm, read_timm_description, timm_name


class EncoderLibrary(ABC):
    """Operations on the encoders of one library, transformers or timm.

    Attributes:
        unused: prefixes of the names of parameters that do not contribute to the token vectors.
    """

    unused: ClassVar[tuple[str, ...]]

    @abstractmethod
    def build(self, network: dict[str, Any]) -> Any:
        """Build an encoder with random weights from its description.

        Dropout and stochastic depth are turned off, because they would add noise to the training targets.

        Args:
            network: description of the encoder, as :func:`describe_encoder` returns it.

        Raises:
            ValueError: if the library has no encoder for the description.
        """

    @abstractmethod
    def load(self, model: Any, pretrained: str) -> None:
        """Load weights into an encoder, some of whose attention layers may have been replaced.

        Args:
            model: encoder to load the weights into.
            pretrained: path or name of the weights, in one of the forms that :func:`describe_encoder` accepts.

        Raises:
            OSError: if there are no weights.
            ValueError: if the weights are from a different model.
        """

    @abstractmethod
    def layers(self, model: Any) -> list[nn.Module]:
        """Return the layers of an encoder, from the first to the last."""

    @abstractmethod
    def recompute(self, model: Any) -> None:
        """Make an encoder recompute its layers in the backward pass, which saves memory."""

    @abstractmethod
    def encode_images(self, model: Any, images: Tensor) -> Tensor:
        """Compute the token vectors of images.

        Args:
            model: image encoder.
            images: images, ``[B, channels, height, width]``.

        Returns:
            Token vectors ``[B, N, dim]`` for B images of N tokens.

        Raises:
            ValueError: if the encoder does not take images of this size or with this number of channels.
        """

    def check_channels(self, model: Any, images: Tensor) -> None:
        """Check that images have the number of axes and of channels that an encoder takes.

        Args:
            model: image encoder.
            images: images, ``[B, channels, height, width]``.

        Raises:
            ValueError: if ``images`` is not ``[B, channels, height, width]`` with the encoder's number of channels.
        """
        channels = self.channels(model)
        if images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f"the encoder takes images [batch, {channels}, height, width], not {list(images.shape)}; set the number of "
                f"channels to {channels}"
            )

    @abstractmethod
    def channels(self, model: Any) -> int:
        """Return the number of channels of the images that an image encoder takes as input."""

    def head(self, model: Any) -> Callable[[Tensor], Tensor]:
        """Return the function that pools token vectors ``[B, N, dim]`` to the input ``[B, dim]`` of an encoder's classifier.

        Raises:
            ValueError: if the encoder has no pooling before a classifier.
        """
        raise ValueError("pooling=head is for encoders of timm; those of transformers have first and mean")


class TransformersEncoders(EncoderLibrary):
    """Operations on encoders from the transformers library."""

    unused = ("pooler.",)

    @override
    def build(self, network: dict[str, Any]) -> Any:
        config = build_configuration(network)
        for name, value in config.to_dict().items():
            # Configurations of transformers have different names for these rates. A Boolean or None is not a rate.
            if name.endswith(("dropout", "dropout_prob", "drop_path_rate")) and isinstance(value, float):
                setattr(config, name, 0.0)
        try:
            return AutoModel.from_config(config, trust_remote_code=False)
        except ValueError as error:
            raise ValueError(f"transformers has no encoder for {type(config).__name__}") from error

    @override
    def load(self, model: Any, pretrained: str) -> None:
        load_source(model, pretrained, AutoModel)

    @override
    def layers(self, model: Any) -> list[nn.Module]:
        return repeated_layers(model)

    @override
    def recompute(self, model: Any) -> None:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})

    @override
    def encode_images(self, model: Any, images: Tensor) -> Tensor:
        self.check_channels(model, images)
        # ViT takes images of a different size only with this argument, which DINOv2 does not have.
        name = "interpolate_pos_encoding"
        options = {name: True} if name in signature(model.forward).parameters else {}
        vectors: Tensor = model(pixel_values=images, **options).last_hidden_state
        return vectors

    @override
    def channels(self, model: Any) -> int:
        return int(model.config.num_channels)


class TimmEncoders(EncoderLibrary):
    """Operations on vision transformers from timm. Their pooling and their classifier keep the original weights."""

    unused = ("head.", "head_dist.", "fc_norm.", "attn_pool.")

    @override
    def build(self, network: dict[str, Any]) -> Any:
        return build_timm(network)

    @override
    def load(self, model: Any, pretrained: str) -> None:
        load_timm(model, pretrained)

    @override
    def layers(self, model: Any) -> list[nn.Module]:
        return list(model.blocks)

    @override
    def recompute(self, model: Any) -> None:
        model.set_grad_checkpointing(True)

    @override
    def encode_images(self, model: Any, images: Tensor) -> Tensor:
        self.check_channels(model, images)
        patch, sides = model.patch_embed.patch_size, images.shape[-2:]
        if any(side % length for side, length in zip(sides, patch, strict=True)):
            raise ValueError(
                f"images of {sides[0]} x {sides[1]} pixels are not divided into patches of {patch[0]} x {patch[1]}; choose a "
                "multiple of the patch size"
            )
        vectors: Tensor = model.forward_features(images)
        return vectors

    @override
    def channels(self, model: Any) -> int:
        return int(model.patch_embed.proj.in_channels)

    @override
    def head(self, model: Any) -> Callable[[Tensor], Tensor]:
        if not model.global_pool:
            raise ValueError("the encoder has no pooling (global_pool); set pooling=first or pooling=mean")
        dtype = next(model.parameters()).dtype
        # The distances are computed in float32, but the head has the dtype of the network.
        return lambda vectors: model.forward_head(vectors.to(dtype), pre_logits=True).to(vectors.dtype)


def library_of(network: Mapping[str, Any]) -> EncoderLibrary:
    """Return the operations for an encoder's library, transformers or timm.

    Args:
        network: description of the encoder, as :func:`describe_encoder` returns it.
    """
    return TimmEncoders() if "architecture" in network else TransformersEncoders()


def describe_encoder(pretrained: str) -> dict[str, Any]:
    """Read the description of an encoder, a dict of plain data from which the encoder can be rebuilt.

    Its entries are documented in :mod:`lightning_mhla.swap.networks` for transformers, and in
    :mod:`lightning_mhla.swap.timm_networks` for timm.

    Args:
        pretrained: path of a checkpoint, of a run's folder (its latest complete checkpoint is read), or of a folder with a
            model in the format of transformers or timm; or name of an encoder on the Hugging Face Hub; or
            ``timm:ARCHITECTURE`` for weights that timm publishes.

    Raises:
        FileNotFoundError: if there is no such encoder.
        ValueError: if the path leads to a model that is not from transformers or timm, to a quantized model, or to a timm model
            whose attention cannot be replaced.
    """
    return read_description(pretrained) if timm_name(pretrained) is None else read_timm_description(pretrained)


def load_encoder(pretrained: str) -> Any:
    """Load an encoder with float32 weights.

    Args:
        pretrained: path or name that :func:`describe_encoder` takes.

    Raises:
        OSError: if there is no such encoder, or its weights are missing.
        ValueError: if the encoder cannot be built, or its weights do not fit.
    """
    network = describe_encoder(pretrained)
    library = library_of(network)
    model = library.build(network)
    library.load(model, pretrained)
    return model
