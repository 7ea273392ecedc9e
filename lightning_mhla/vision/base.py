"""Base class of the vision models, with the interface of timm's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lightning_mhla.system.options import as_dataclass
from lightning_mhla.vision.preprocessing import Preprocessing


def taken_indices(indices: int | list[int] | None, count: int) -> list[int]:
    """Convert timm's argument ``indices`` to the indices of feature maps, counted from 0.

    Args:
        indices: indices of feature maps, negative ones counted from the end; a single number n for the last n maps; None for
            all.
        count: number of feature maps of the model.

    Raises:
        ValueError: if an index is out of range, or if no map remains.
    """
    if indices is None:
        return list(range(count))
    requested = range(count - indices, count) if isinstance(indices, int) else indices
    resolved = [index + count if index < 0 else index for index in requested]
    if not resolved or not all(0 <= index < count for index in resolved):
        raise ValueError(f"indices={indices} must name maps of the {count} that the model has, counted from 0")
    return resolved


@register_notrace_module
class ImageCheck(nn.Module):
    """Layer that checks the size of images and returns the images unchanged.

    The check is a module because torch.fx does not trace into it, so that traced graphs do not contain the check.

    Args:
        check: function of height and width that raises ValueError for a size that the model does not support.
    """

    def __init__(self, check: Callable[[tuple[int, int]], object]) -> None:
        super().__init__()
        self.check = check

    def forward(self, images: Tensor) -> Tensor:
        """Check the size of images ``[B, channels, H, W]``, and return them.

        Raises:
            ValueError: if the model does not support their size.
        """
        self.check((images.shape[2], images.shape[3]))
        return images


class VisionModel(nn.Module):
    """Base class of image classifiers, with the methods of timm's models.

    Derived classes define ``forward_features``, from images to features, and ``forward_head``, from features to class scores.

    Attributes:
        in_chans: number of channels of the images; the name is timm's.
        num_classes: number of class scores; 0 for a model without a head.
        num_features: number of channels of the last feature map.
        head_hidden_size: width of the input of the head.
        feature_info: channels, reduction and module name of each feature map, in timm's format.
        head: layer from pooled features to class scores.
        class_names: names of the classes, in the order of the scores; None if unknown.
        preprocessing: transform that :meth:`predict` applies to an image; None if unknown.
    """

    in_chans: int
    num_classes: int
    num_features: int
    head_hidden_size: int
    feature_info: list[dict[str, Any]]
    head: nn.Module
    class_names: list[str] | None = None
    preprocessing: Preprocessing | None = None

    def describe(
        self, class_names: Sequence[str] | None, preprocessing: Preprocessing | Mapping[str, Any] | None
    ) -> None:
        """Set the class names and the image transform that :meth:`predict` uses.

        Args:
            class_names: names of the classes, in the order of the scores; None if unknown.
            preprocessing: transform of images, or its options; None if unknown.

        Raises:
            ValueError: if the number of names is not ``num_classes``.
        """
        if class_names is not None and len(class_names) != self.num_classes:
            raise ValueError(f"class_names lists {len(class_names)} names, but num_classes={self.num_classes}")
        self.class_names = None if class_names is None else list(class_names)
        self.preprocessing = None if preprocessing is None else as_dataclass(Preprocessing, preprocessing)

    @torch.inference_mode()
    def predict(self, image: Image.Image | str | PathLike[str], top: int | None = None) -> dict[str, float]:
        """Compute the class probabilities of one image.

        Args:
            image: an image, or the path of one; it is transformed by :attr:`preprocessing`.
            top: number of classes to return; None for all.

        Returns:
            Probabilities by class name, or by class number as a string if names are unknown; the most probable comes first.

        Raises:
            BrokenSampleError: if a file is not an image.
            ValueError: if the model has no preprocessing.
        """
        if self.preprocessing is None:
            raise ValueError(
                "the model has no preprocessing for its images: load an export, or give class_names and preprocessing"
            )
        if not isinstance(image, Image.Image):
            from lightning_mhla.data.images import decode_file  # imports Lightning, which models do not need

            image = decode_file(Path(image), self.preprocessing.mode)
        like, training = next(self.parameters()), self.training
        pixels = self.preprocessing(image.convert(self.preprocessing.mode))[None].to(like.device, like.dtype)
        probabilities = self.eval()(pixels).float().softmax(-1)[0]
        self.train(training)
        names = self.class_names or [str(number) for number in range(self.num_classes)]
        order = probabilities.argsort(descending=True, stable=True)[:top].tolist()
        return {names[index]: float(probabilities[index]) for index in order}

    @property
    def layers(self) -> list[nn.Module]:
        """Transformer blocks of the model, from first to last."""
        raise NotImplementedError

    def forward_features(self, images: Tensor) -> Tensor:
        """Compute features of images ``[B, channels, H, W]``, the input of :meth:`forward_head`."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Compute class scores ``[B, num_classes]`` from features.

        Args:
            x: result of :meth:`forward_features`.
            pre_logits: whether to return the pooled features, the input of the last layer, instead.
        """
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Compute class scores ``[B, num_classes]`` of images ``[B, channels, H, W]``."""
        return self.forward_head(self.forward_features(images))

    def maps(self, images: Tensor, map_indices: list[int], stop_early: bool, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """Compute the features of images, and some of the intermediate feature maps.

        Args:
            images: images, ``[B, channels, H, W]``.
            map_indices: indices of the feature maps, from 0.
            stop_early: whether to skip layers after the last requested map.
            norm: whether to apply the final norm of the tokens to the maps, if there is one.

        Returns:
            Features as :meth:`forward_features` returns them, and the maps, ``[B, C, H, W]`` each.
        """
        raise NotImplementedError

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Compute intermediate feature maps, with the signature of timm's models.

        Args:
            x: images, ``[B, channels, H, W]``.
            indices: indices of entries of ``feature_info``; a single number n for the last n entries; None for all.
            norm: whether to apply the final norm of the tokens to the maps, if there is one.
            stop_early: whether to skip layers after the last requested map. The features are then not the input of the head.
            output_fmt: ``"NCHW"``, or ``"NLC"`` for maps ``[B, H * W, C]``.
            intermediates_only: whether to return the maps alone.

        Returns:
            The features and the list of maps, or the list alone.

        Raises:
            ValueError: if the format is unknown, or an index is out of range.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt={output_fmt!r} is not NCHW or NLC")
        map_indices = taken_indices(indices, len(self.feature_info))
        features, maps = self.maps(x, map_indices, stop_early, norm)
        if output_fmt == "NLC":
            maps = [feature_map.flatten(2).transpose(1, 2) for feature_map in maps]
        return maps if intermediates_only else (features, maps)

    def get_classifier(self) -> nn.Module:
        """Return the last layer, from pooled features to class scores."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classification head with a new, randomly initialized one.

        Args:
            num_classes: number of classes; 0 for no head.
            global_pool: new kind of pooling; an empty string for no pooling, None to keep the current one.

        Raises:
            ValueError: if there are classes but no pooling.
        """
        if num_classes > 0 and global_pool == "":
            raise ValueError(f"num_classes={num_classes} needs pooling; leave global_pool empty for features only")
        if num_classes != self.__dict__.get("num_classes"):  # the names belong to the old classes
            self.class_names = None
        self.num_classes = num_classes
        if global_pool is not None:
            self.set_pool(global_pool)
        self.head = nn.Identity()
        if num_classes > 0:
            like = next(self.parameters())
            self.head = nn.Linear(self.head_hidden_size, num_classes, device=like.device, dtype=like.dtype)
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)
        self.head.train(self.training)

    def set_pool(self, kind: str) -> None:
        """Set the kind of pooling before the head, such as ``"avg"``; an empty string for none."""
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters to exclude from weight decay: position embeddings and mixing coefficients."""
        return {name for name, _ in self.named_parameters() if name == "position" or ".mixing." in name}
