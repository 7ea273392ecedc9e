"""Learning curves as a picture beside the checkpoints."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from lightning_mhla.system.folders import checkpoint_folder
from lightning_mhla.system.lightning_private import accumulates_gradients


class LearningCurves(Callback):
    """Draws every logged metric against the optimiser step: ``learning_curves.png`` in the checkpoint folder.

    Metrics of one name under ``train/`` and ``val/`` share a panel. Points survive a resume.
    """

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._path: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the points of an earlier fit."""
        if stage == "fit":
            self.points.clear()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the folder, on every rank."""
        self._path = checkpoint_folder(trainer) / "learning_curves.png"

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note the training metrics every ``log_every_n_steps``."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set when the trainer is made
        if every and trainer.global_step % every == 0 and not accumulates_gradients(trainer):
            self._note(trainer, "train/")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the validation metrics, and draw."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._note(trainer, "val/")
            if trainer.is_global_zero:
                self.draw()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the last state."""
        if trainer.is_global_zero:
            self.draw()

    def state_dict(self) -> dict[str, Any]:
        """All points."""
        return {name: [list(point) for point in points] for name, points in self.points.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Points so far."""
        self.points = defaultdict(list, {name: [(p[0], p[1]) for p in points] for name, points in state_dict.items()})

    def note(self, name: str, step: int, value: float) -> None:
        """Add a point to the curve ``name``, ``train/loss`` say, unless it has one of this step."""
        points = self.points[name]
        if not points or points[-1][0] < step:
            points.append((step, value))

    def _note(self, trainer: Trainer, prefix: str) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith(prefix):
                self.note(name, trainer.global_step, float(value))

    def _moves(self, name: str) -> bool:
        return len({value for _, value in self.points[name]}) > 1

    def draw(self) -> None:
        """Write the picture."""
        panels: dict[str, list[str]] = defaultdict(list)
        for name in sorted(self.points):
            panels[name.split("/", 1)[1]].append(name)
        panels = {title: names for title, names in panels.items() if any(self._moves(name) for name in names)}
        if not panels or self._path is None:
            return
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        from matplotlib.figure import Figure  # not before there is something to draw

        figure = Figure(figsize=(4.2 * columns, 3 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (title, names) in zip(axes, panels.items(), strict=False):
            for name in names:
                axis.plot(*zip(*self.points[name], strict=True), label=name.split("/", 1)[0], linewidth=1.2)
            axis.set_title(title, parse_math=False)
            axis.set_xlabel("optimiser step")
            axis.grid(alpha=0.3)
            if len(names) > 1:
                axis.legend()
        for axis in axes[len(panels) :]:
            axis.remove()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self._path, dpi=110)
