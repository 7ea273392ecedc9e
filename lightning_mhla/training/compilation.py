"""Compiling a network by its repeated blocks: what is compiled once serves all of them, and names of weights stay."""

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
    """How blocks are compiled; see :func:`torch.compile`.

    Args:
        mode: ``"default"``, ``"reduce-overhead"`` (CUDA graphs), ``"max-autotune"``, or null to give ``options``.
        dynamic: whether sizes are left open; null leaves those open that are seen to change.
        fullgraph: whether a block that does not become one graph is an error.
        backend: compiler of the graphs.
        options: options of the backend; without ``mode`` only. Random numbers are drawn as without compilation
            (``fallback_random``), so that a run is the same with and without, unless this says otherwise.
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
    """Compile the forward of each layer, where it is not compiled yet; ``state_dict`` keeps its names."""
    given: dict[str, Any] = {"dynamic": options.dynamic, "fullgraph": options.fullgraph, "backend": options.backend}
    if options.mode is not None:
        given["mode"] = options.mode
    elif options.backend == "inductor":
        given["options"] = {"fallback_random": True, **(options.options or {})}
    elif options.options is not None:
        given["options"] = options.options
    layers = list(layers)
    raise_recompile_limit(8 * len(layers))  # layers may differ, in the kind of their attention say
    for layer in layers:
        if not is_compiled(layer):
            layer.compile(**given)


class CompileReport(Callback):
    """Says how long the first step compiled, and how often a graph was compiled after it."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here."""
        self._start = compilations()
        self._first: tuple[int, float] | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """After the first step of this process."""
        if self._first is None:
            self._first = compilations()
            if trainer.is_global_zero:
                graphs, seconds = (now - start for now, start in zip(self._first, self._start, strict=True))
                log.info("compiled %d graphs in %.0f s, up to the end of the first step", graphs, seconds)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count what was compiled later: for other sizes, a last short batch, validation."""
        if self._first is not None and trainer.is_global_zero:
            graphs, seconds = (now - first for now, first in zip(compilations(), self._first, strict=True))
            log.info("compiled %d graphs in %.0f s after the first step", graphs, seconds)
