"""The interface of timm's models, for the vision models."""

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
    """Numbers of the maps that ``indices`` asks for, of ``count``: so many of the last, those of a list, or all for None.

    Raises:
        ValueError: for one that is not there.
    """
    if indices is None:
        return list(range(count))
    wanted = range(count - indices, count) if isinstance(indices, int) else indices
    taken = [index + count if index < 0 else index for index in wanted]
    if not taken or not all(0 <= index < count for index in taken):
        raise ValueError(f"indices={indices} are not among the {count} maps")
    return taken


@register_notrace_module
class ImageCheck(nn.Module):
    """Images as they are; an error for those that a model does not take.

    Args:
        check: raises ValueError for images of a height and width that do not fit.
    """

    def __init__(self, check: Callable[[tuple[int, int]], object]) -> None:
        super().__init__()
        self.check = check

    def forward(self, images: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to the same."""
        self.check((images.shape[2], images.shape[3]))
        return images


class VisionModel(nn.Module):
    """Images to class scores by ``forward_features`` and ``forward_head``, with the methods that timm's models have.

    Attributes:
        in_chans: channels of the images, by timm's name.
        num_classes: scores that come out; 0 for features.
        num_features: channels of the last map.
        head_hidden_size: width of what the head takes.
        feature_info: channels, reduction and module of each map, as timm keeps them.
        head: what gives the scores.
        class_names: names of the classes, in the order of the scores; None where they are not known.
        preprocessing: what :meth:`predict` does with an image before the model sees it; None where it is not known.
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
        """Keep what :meth:`predict` needs.

        Args:
            class_names: names of the classes.
            preprocessing: what images go through.

        Raises:
            ValueError: for names that are not as many as classes.
        """
        if class_names is not None and len(class_names) != self.num_classes:
            raise ValueError(f"class_names lists {len(class_names)} names for num_classes={self.num_classes}")
        self.class_names = None if class_names is None else list(class_names)
        self.preprocessing = None if preprocessing is None else as_dataclass(Preprocessing, preprocessing)

    @torch.inference_mode()
    def predict(self, image: Image.Image | str | PathLike[str], top: int | None = None) -> dict[str, float]:
        """Names of the classes with their probabilities, the most probable first.

        Args:
            image: an image, or the path of one; it goes through :attr:`preprocessing`.
            top: how many classes; None for all.

        Raises:
            BrokenSampleError: for a file that is not an image.
            ValueError: when the model does not know its preprocessing.
        """
        if self.preprocessing is None:
            raise ValueError(
                "the model does not know what its images go through: load an export, or give class_names and preprocessing"
            )
        if not isinstance(image, Image.Image):
            from lightning_mhla.data.images import decode_file  # brings Lightning

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
        """All blocks, first to last."""
        raise NotImplementedError

    def forward_features(self, images: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to the features that the head takes."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features to class scores; with ``pre_logits`` to what the head takes."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to scores ``[B, num_classes]``."""
        return self.forward_head(self.forward_features(images))

    def maps(self, images: Tensor, taken: list[int], stop_early: bool, norm: bool) -> tuple[Tensor, list[Tensor]]:
        """Features as of :meth:`forward_features`, and the maps ``[B, C, H, W]`` of the numbers ``taken``."""
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
        """Maps between the layers, as timm's models give them.

        Args:
            x: images ``[B, channels, H, W]``.
            indices: entries of ``feature_info``; a number for so many of the last; None for all.
            norm: pass each through the final norm of the tokens, where there is one.
            stop_early: leave out what comes behind the last that is asked for; the features are then not those of the head.
            output_fmt: NCHW, or NLC for ``[B, H * W, C]``.
            intermediates_only: give the list alone, without the features.

        Raises:
            ValueError: for another format.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt={output_fmt!r} is not NCHW or NLC")
        taken = taken_indices(indices, len(self.feature_info))
        features, maps = self.maps(x, taken, stop_early, norm)
        if output_fmt == "NLC":
            maps = [each.flatten(2).transpose(1, 2) for each in maps]
        return maps if intermediates_only else (features, maps)

    def get_classifier(self) -> nn.Module:
        """The layer that gives the scores."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head.

        Args:
            num_classes: number of classes; 0 for none.
            global_pool: another pooling; empty for none, None for the one that is there.

        Raises:
            ValueError: for classes without pooling.
        """
        if num_classes > 0 and global_pool == "":
            raise ValueError(f"num_classes={num_classes} needs pooling; leave global_pool empty for features only")
        if num_classes != self.__dict__.get("num_classes"):
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
        """Take another pooling; empty for none."""
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay: positions and mixing coefficients."""
        return {name for name, _ in self.named_parameters() if name == "position" or ".mixing." in name}
