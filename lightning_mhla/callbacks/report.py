"""A report at the end of a run: results, and where its files lie."""

from __future__ import annotations

import time
from pathlib import Path

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from lightning_mhla.system.folders import checkpoint_folder, run_folder


class RunReport(Callback):
    """Prints the last validation metrics, the training time, and the paths of checkpoint, logs and pictures."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._start = time.monotonic()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the report on the first process."""
        folder, checkpoints = run_folder(trainer), checkpoint_folder(trainer)
        if not trainer.is_global_zero:
            return
        lines = [
            (name, f"{float(value):.4f}".rstrip("0").rstrip("."))
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val/")
        ]
        lines.append(("training time", f"{time.monotonic() - self._start:.0f} s, {trainer.global_step} steps"))
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                best, last = callback.best_model_path, callback.last_model_path
                if not callback.monitor:  # Lightning calls the newest the best
                    best, last = "", last or best
                kept = {"best checkpoint": best, "last checkpoint": last}
                lines += [(name, _short(path)) for name, path in kept.items() if path]
        lines.append(("log folder", _short(folder)))
        drawn = sorted(path for path in (folder / "pictures").glob("*") if path.suffix in (".png", ".gif"))
        pictures = [*checkpoints.glob("*.png"), *drawn]
        lines += [("picture", _short(picture)) for picture in pictures]
        console = Console(soft_wrap=True, highlight=False)
        console.rule("result")
        for name, value in lines:
            console.print(f"{name:<18} {value}")


def _short(path: str | Path) -> str:
    """Relative to the working folder where it lies below it."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
