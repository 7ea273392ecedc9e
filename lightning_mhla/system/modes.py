"""Evaluation mode for a part of a program, after which each module is in the mode that it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that puts a model in evaluation mode, and gives each of its modules its previous mode on exit.

    Frozen parts of a model that trains, such as a backbone with batch norms, thus stay in evaluation mode. ``train()`` would
    put them in training mode.

    Args:
        model: model to evaluate.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
