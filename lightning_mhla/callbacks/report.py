"""What a run came to and where its files lie, said once at its end."""

from __future__ import annotations

import time
from pathlib import Path

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table

from lightning_mhla.callbacks.folder import checkpoint_folder, run_folder


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
        table = Table(title="result", show_header=False)
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val/"):
                table.add_row(name, f"{float(value):.4f}".rstrip("0").rstrip("."))
        table.add_row("training time", f"{time.monotonic() - self._start:.0f} s, {trainer.global_step} steps")
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                if callback.best_model_path:
                    table.add_row("best checkpoint", _short(callback.best_model_path))
                if callback.last_model_path:
                    table.add_row("last checkpoint", _short(callback.last_model_path))
        table.add_row("log folder", _short(folder))
        pictures = [*checkpoints.glob("*.png"), *sorted((folder / "pictures").glob("*.png"))[-4:]]
        for picture in pictures:
            table.add_row("picture", _short(picture))
        Console(soft_wrap=True).print(table)


def _short(path: str | Path) -> str:
    """Relative to the working folder where it lies below it."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
