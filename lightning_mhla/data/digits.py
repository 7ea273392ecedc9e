"""The real handwritten digits that ship with scikit-learn: 1,797 images of 8 x 8, nothing to download."""

from __future__ import annotations

from functools import cache

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
        raise ModuleNotFoundError(
            "the digits come with scikit-learn: pip install 'lightning-mhla[classification]'"
        ) from error
    digits = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    chosen = order[HELD_OUT:] if train else order[:HELD_OUT]
    images = torch.from_numpy(digits.images[chosen]).float().unsqueeze(1) / 16
    return images, torch.from_numpy(digits.target[chosen]).long()
