"""The real handwritten digits that ship with scikit-learn: 1,797 images of 8 x 8, nothing to download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

HELD_OUT = 360
"""Images kept for validation, the same ones in every run."""


@cache
def load_digits(train: bool) -> tuple[Tensor, Tensor]:
    """Images ``[n, 1, 8, 8]`` float32 in [0, 1] and labels ``[n]`` int64 (UCI optical digits, through scikit-learn).

    Args:
        train: the 1,437 training images, or the 360 held out.

    Raises:
        ModuleNotFoundError: naming the extra to install.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install 'lightning-mhla[all]'") from error
    digits = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    chosen = order[HELD_OUT:] if train else order[:HELD_OUT]
    images = torch.from_numpy(digits.images[chosen]).float().unsqueeze(1) / 16
    return images, torch.from_numpy(digits.target[chosen]).long()


class DigitSamples:
    """The digits as a source.

    Args:
        train: the training images, or those held out.
        transform: applied to each image ``[1, 8, 8]``; None for none.
    """

    def __init__(self, train: bool, transform: Callable[[Tensor], Tensor] | None = None) -> None:
        self.images, self.labels = load_digits(train)
        self.shard_sizes: Sequence[int] = [len(self.labels)]
        self.transform = transform

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``image`` ``[1, 8, 8]``, ``label`` and ``index``."""
        image = self.images[index]
        image = image if self.transform is None else self.transform(image)
        return {"image": image, "label": int(self.labels[index]), "index": index}
