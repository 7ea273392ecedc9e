"""Base class of the vision models, with the same methods as timm's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from PIL import Image
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lightning_mhla.system.listing import distinct_names
from lightning_mhla.system.modes import evaluation_mode
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from lightning_mhla.vision.preprocessing import Preprocessing


def taken_indices(indices: int | list[int] | None, count: int) -> list[int]:
    """Convert the argument ``indices`` of timm's methods to a list of indices, counted from 0.

    Args:
        indices: indices of feature maps, where negative ones count from the end; or a number n for the last n maps; or None for
            all maps.
        count: number of feature maps of the model.

    Returns:
        Indices of the selected feature maps, not negative, in the order of ``indices``.

    Raises:
        ValueError: if an index is out of range, or if no map is selected.
    """
    if indices is None:
        return list(range(count))
    if isinstance(indices, int):  # more maps than there are begin below 0, which must not count from the end
        resolved = list(range(count - indices, count))
    else:
        resolved = [index + count if index < 0 else index for index in indices]
    if not resolved or not all(0 <= index < count for index in resolved):
        raise ValueError(f"indices={indices} must name maps of the {count} that the model has, counted from 0")
    return resolved


@register_notrace_module
class ImageCheck(nn.Module):
    """Layer that checks the size of images and returns the images unchanged.

    The class is registered with timm as a module that torch.fx does not trace into, so that traced graphs do not contain the
    check itself.

    Args:
        check: function of ``(height, width)`` in pixels that raises ValueError for a size that the model does not support.
    """

    def __init__(self, check: Callable[[tuple[int, int]], object]) -> None:
        super().__init__()
        self.check = check

    def forward(self, images: Tensor) -> Tensor:
        """Check the size of images ``[B, channels, H, W]``, and return the images unchanged.

        Raises:
            ValueError: if the images do not have four axes, or the model does not support their size.
        """
        if images.ndim != 4:
            raise ValueError(f"images are {list(images.shape)}; they must be [batch, channels, height, width]")
        self.check((images.shape[2], images.shape[3]))
        return images


class VisionModel(nn.Module, PyTorchModelHubMixin):
    """Base class of image classifiers, with the same methods as timm's models.

    Derived classes define ``forward_features``, which computes features of images, and ``forward_head``, which computes class
    scores from these features.

    Attributes:
        in_chans: number of channels of the images (timm's name).
        num_classes: number of class scores; 0 for a model without a head.
        num_features: number of channels of the last feature map.
        head_hidden_size: number of features that the head takes.
        feature_info: number of channels, reduction (image size divided by map size) and module name of each feature map, in
            timm's format.
        head: layer that computes class scores from pooled features.
        class_names: names of the classes, in the order of the scores; None if unknown.
        preprocessing: transform that :meth:`predict` applies to an image; None if unknown.
        is_pruned: whether layers were removed.
    """

    in_chans: int
    num_classes: int
    num_features: int
    head_hidden_size: int
    feature_info: list[dict[str, Any]]
    head: nn.Module
    class_names: list[str] | None = None
    preprocessing: Preprocessing | None = None
    is_pruned = False

    def describe(
        self, class_names: Sequence[str] | None, preprocessing: Preprocessing | Mapping[str, Any] | None
    ) -> None:
        """Set the class names and the image transform that :meth:`predict` uses.

        Args:
            class_names: names of the classes, in the order of the scores; None if unknown.
            preprocessing: image transform, or a mapping of its options; None if unknown.

        Raises:
            ValueError: if the number of names is not ``num_classes``, or an option in the mapping is not valid.
        """
        if class_names is not None and len(class_names) != self.num_classes:
            raise ValueError(f"class_names lists {len(class_names)} names, but num_classes={self.num_classes}")
        self.class_names = None if class_names is None else list(class_names)
        self.preprocessing = None if preprocessing is None else as_dataclass(Preprocessing, preprocessing)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, *, config: dict[str, Any] | None = None, **options: Any
    ) -> str | None:
        """Save the weights and ``config.json``, with the current head, pooling, class names and image transform.

        Args:
            save_directory: folder to write, created if it does not exist.
            config: contents of ``config.json``; None for the options from which ``from_pretrained`` rebuilds this model.
            options: further options of ``PyTorchModelHubMixin.save_pretrained``, such as ``push_to_hub``.

        Returns:
            URL of the commit on the Hugging Face Hub with ``push_to_hub=True``, otherwise None.

        Raises:
            ValueError: if ``config`` is None and layers were removed with ``prune_intermediate_layers``, which ``config.json``
                cannot express.
        """
        if config is None:
            if self.is_pruned:
                raise ValueError(
                    "layers were removed from the model, which config.json cannot express; save its state_dict"
                )
            preprocessing = None if self.preprocessing is None else self.preprocessing.as_dict()
            # PyTorchModelHubMixin recorded the arguments of the constructor; head, pooling and names may have changed since.
            constructed: Any = self._hub_mixin_config
            config = {**constructed, "num_classes": self.num_classes, "global_pool": self.pool_name}
            config |= {"class_names": self.class_names, "preprocessing": preprocessing}
        return super().save_pretrained(save_directory, config=config, **options)

    @torch.inference_mode()
    def predict(self, image: Image.Image | str | PathLike[str], top: int | None = None) -> dict[str, float]:
        """Compute the class probabilities of one image.

        Args:
            image: image, or path of an image file; both give the same result. The method applies :attr:`preprocessing`.
            top: number of most probable classes to return; None for all classes.

        Returns:
            Probabilities by class name, from the most to the least probable. Classes of the same name have their labels after
            their names, as in ``crane (134)``. If the model has no class names, the keys are class numbers as strings.

        Raises:
            BrokenSampleError: if the file is not a readable image.
            ValueError: if the model has no head or no preprocessing, ``top`` is below 1, or the levels of the image have no
                defined range: modes ``"I"`` and ``"F"`` of Pillow, except for an image from a PNG file.
        """
        check_range(least=1, top=top)
        if isinstance(image, Image.Image) and image.mode in ("I", "F") and image.format != "PNG":
            raise ValueError(
                f"an image of mode {image.mode} does not say which level is white; convert it to L, RGB or I;16 (0 to 65,535)"
            )
        if self.num_classes == 0:
            raise ValueError(
                "the model has no head (num_classes=0) to compute probabilities; call reset_classifier first"
            )
        if self.preprocessing is None:
            raise ValueError(
                "the model has no preprocessing for its images: load an export, or give class_names and preprocessing"
            )
        from lightning_mhla.data.images import as_shown, decode_file  # imports Lightning, which models do not need

        mode = self.preprocessing.mode
        picture = as_shown(image.copy()) if isinstance(image, Image.Image) else decode_file(Path(image), mode)
        like = next(self.parameters())
        pixels = self.preprocessing(picture.convert(mode))[None].to(like.device, like.dtype)
        with evaluation_mode(self):
            probabilities = self(pixels).float().softmax(-1)[0]
        names = distinct_names(self.class_names or [str(number) for number in range(self.num_classes)])
        order = probabilities.argsort(descending=True, stable=True)[:top].tolist()
        return {names[index]: float(probabilities[index]) for index in order}

    @property
    def layers(self) -> list[nn.Module]:
        """Transformer blocks of the model, from first to last."""
        raise NotImplementedError

    def forward_features(self, images: Tensor) -> Tensor:
        """Compute the features of images, from which :meth:`forward_head` computes class scores.

        Args:
            images: images, ``[B, channels, H, W]``.

        Returns:
            Tokens ``[B, N, C]`` or a feature map ``[B, C, h, w]``, depending on the model.
        """
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Compute class scores ``[B, num_classes]`` from features.

        Args:
            x: features that :meth:`forward_features` returned.
            pre_logits: whether to return the pooled features instead of the scores. The last layer, ``head``, computes the
                scores from these features, which are ``[B, head_hidden_size]`` if the model has pooling.
        """
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Compute class scores ``[B, num_classes]`` of images ``[B, channels, H, W]``."""
        return self.forward_head(self.forward_features(images))

    def maps(self, images: Tensor, map_indices: list[int], stop_early: bool, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """Compute the features of images and some of the intermediate feature maps.

        Args:
            images: images, ``[B, channels, H, W]``.
            map_indices: indices of the requested feature maps, counted from 0.
            stop_early: whether to skip layers after the last requested map. The returned features may then differ from those of
                :meth:`forward_features`.
            norm: whether to apply the model's final norm to the maps, if the model has one.

        Returns:
            The features, and the requested maps in the order of ``map_indices``, ``[B, C, h, w]`` each, with C channels and
            h x w positions.
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
        """Compute intermediate feature maps, with the same arguments as in timm's models.

        Args:
            x: images, ``[B, channels, H, W]``.
            indices: indices of feature maps, which are returned in this order, where negative ones count from the end; or a
                number n for the last n maps; or None for all maps.
            norm: whether to apply the model's final norm to the maps, if the model has one.
            stop_early: whether to skip layers after the last requested map. The returned features may then be unsuitable as the
                input of the head.
            output_fmt: ``"NCHW"`` for maps ``[B, C, h, w]`` with C channels and h x w positions, or ``"NLC"`` for maps
                ``[B, h * w, C]``.
            intermediates_only: whether to return only the maps.

        Returns:
            The features and the list of maps, or only the list if ``intermediates_only`` is true.

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
        """Return the last layer, which computes class scores from pooled features."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classification head with a new, randomly initialized one.

        If the number of classes changes, the names of the classes are removed.

        Args:
            num_classes: number of classes; 0 for no head.
            global_pool: name of the new pooling, such as ``"avg"``; an empty string for no pooling, None to keep the current
                pooling.

        Raises:
            ValueError: if ``num_classes`` is negative, or is positive although there is no pooling.
        """
        check_range(least=0, num_classes=num_classes)
        if num_classes > 0 and (self.pool_name if global_pool is None else global_pool) == "":
            raise ValueError(
                f"num_classes={num_classes} needs pooling: give global_pool, such as 'avg', or num_classes=0 for features only"
            )
        # From __dict__, because constructors call this method before the attribute exists.
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

    @property
    def pool_name(self) -> str:
        """Name of the pooling before the head, such as ``"avg"``; an empty string for no pooling."""
        raise NotImplementedError

    def set_pool(self, kind: str) -> None:
        """Set the pooling before the head by name, such as ``"avg"``. An empty string means no pooling."""
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters to exclude from weight decay: position embeddings and mixing coefficients."""
        return {name for name, _ in self.named_parameters() if name == "position" or ".mixing." in name}
