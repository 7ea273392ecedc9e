"""Context manager that puts a model in evaluation mode, and then restores the previous mode of each module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that puts a model in evaluation mode, and restores the previous mode of each of its modules on exit.

    Frozen parts that are in evaluation mode during training, such as a backbone with batch norms, therefore stay in it. A call
    of ``model.train()`` on exit would put them in training mode.

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
