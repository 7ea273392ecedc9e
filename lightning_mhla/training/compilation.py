"""Compilation of a network block by block, so that equal blocks share one graph and the names of weights do not change."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import nn

from lightning_mhla.system.torch_private import compilations, is_compiled, raise_recompile_limit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileOptions:
    """Options of :func:`torch.compile` for the blocks of a network.

    Args:
        mode: ``"default"``, ``"reduce-overhead"`` (CUDA graphs), ``"max-autotune"``, or null for the default mode, in which
            ``options`` can be set.
        dynamic: whether graphs are compiled for symbolic sizes; null makes a size symbolic once it changes.
        fullgraph: whether a block with a graph break is an error.
        backend: compiler backend.
        options: options of the backend, allowed only if ``mode`` is null. By default, the inductor backend draws random numbers
            as without compilation (``fallback_random``), so that results agree with those of an uncompiled run.

    Raises:
        ValueError: if both ``mode`` and ``options`` are given.
    """

    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    backend: str = "inductor"
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.options is not None:
            raise ValueError(
                f"compile_options.mode={self.mode!r} and options={self.options} exclude each other; give one"
            )


def compile_layers(layers: Iterable[nn.Module], options: CompileOptions) -> None:
    """Compile the forward pass of each layer in place. Names in ``state_dict`` do not change.

    Args:
        layers: layers of a network. Layers that are already compiled are left unchanged.
        options: options of :func:`torch.compile`.
    """
    compile_arguments: dict[str, Any] = {
        "dynamic": options.dynamic,
        "fullgraph": options.fullgraph,
        "backend": options.backend,
    }
    if options.mode is not None:
        compile_arguments["mode"] = options.mode
    elif options.backend == "inductor":
        compile_arguments["options"] = {"fallback_random": True, **(options.options or {})}
    elif options.options is not None:
        compile_arguments["options"] = options.options
    layers = list(layers)
    raise_recompile_limit(8 * len(layers))  # layers may differ, in the kind of their attention say
    for layer in layers:
        if not is_compiled(layer):
            layer.compile(**compile_arguments)


class CompileReport(Callback):
    """Callback that logs the compile time and the number of compiled graphs, for the first step and for all later steps."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the number of graphs and the compile time so far, so that the log counts only graphs of this fit."""
        self._start = compilations()
        self._first: tuple[int, float] | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the number of graphs compiled up to the end of the first training step, and the compile time in seconds."""
        if self._first is None:
            self._first = compilations()
            if trainer.is_global_zero:
                graphs, seconds = (current - start for current, start in zip(self._first, self._start, strict=True))
                log.info("compiled %d graphs in %.0f s, up to the end of the first step", graphs, seconds)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the number of graphs compiled after the first step, for example for a new batch size, and the compile time."""
        if self._first is not None and trainer.is_global_zero:
            graphs, seconds = (current - first for current, first in zip(compilations(), self._first, strict=True))
            log.info("compiled %d graphs in %.0f s after the first step", graphs, seconds)
