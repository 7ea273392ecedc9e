"""Callback that saves checkpoints of a run regularly, on request of ModelCheckpoints, and when a signal stops the run.

All decisions about when a checkpoint is written, and which one a run resumes from, are made in this module.
"""

# Longer than other modules because all decisions about saving and resuming are in one callback.

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Checkpoint

from lightning_mhla.callbacks.best import BestCheckpoints, complete, monitored_metrics, relocate_all
from lightning_mhla.callbacks.rows import ROW, keep_row, log_again
from lightning_mhla.checkpoints.choice import lies_in, name_of_start
from lightning_mhla.checkpoints.io import CHECKPOINTS, LAST, READ_FROM, RECOVERY, read_header
from lightning_mhla.checkpoints.runs import numbered, step_of
from lightning_mhla.system.files import give_second_name
from lightning_mhla.system.folders import checkpoint_folder, run_folder
from lightning_mhla.system.lightning_private import (
    accumulates_gradients,
    as_of_last_batch,
    ended_inside_epoch,
    ends_epoch,
    loop_metrics,
    start_next_epoch,
    stops_early,
    validates_after_this_batch,
)
from lightning_mhla.system.processes import Agreement
from lightning_mhla.system.ranges import check_range
from lightning_mhla.system.signals import StopSignals

log = logging.getLogger(__name__)

MONITORED = "monitored_metrics"
"""Entry of a checkpoint with the latest values of the metrics that ModelCheckpoints monitor."""

TEMPORARY_FAILURE = 75
"""Exit status of a run that was stopped by a signal and that the same command resumes: EX_TEMPFAIL of sysexits.h."""


class RunStopped(SystemExit):  # a subclass of SystemExit, so that no error is reported
    """Exception that exits the process with status 75 after a signal stopped the run and its state was saved."""

    def __init__(self) -> None:
        super().__init__(TEMPORARY_FAILURE)


class Recovery(Checkpoint):
    """Callback that writes all checkpoints of a run, including those that ModelCheckpoint callbacks request.

    The callback saves the complete state of the run at regular intervals, at the end of training, whenever a ModelCheckpoint
    requests a checkpoint, and when a signal asks the run to stop. It saves the state of a step only once: after all callbacks
    have processed the step, and after any validation or end of the epoch that follows the step. The file is
    ``checkpoints/recovery/step=N.ckpt`` for step N. ``checkpoints/last.ckpt`` and, where possible, the paths that
    ModelCheckpoints request are hard links to it. A command with ``--run_dir`` resumes from the latest complete state.

    A signal only sets a flag. At the end of a step, all processes find out whether any of them received a signal. If so, they
    save the state together, and exit with status 75.

    Args:
        every_minutes: minutes between two saves, by the clock of the first process; None for no saves by time.
        every_n_steps: optimizer steps between two saves; None for no saves by steps.
        keep: number of latest states to keep in ``recovery``. With two, one is left if the latest is damaged.
        signals: names of the signals that stop the run. Ctrl+C is SIGINT; a second Ctrl+C stops immediately without saving.

    Raises:
        ValueError: if a number is not positive, or a signal does not exist on this system.
    """

    def __init__(
        self,
        every_minutes: float | None = 10.0,
        every_n_steps: int | None = None,
        keep: int = 2,
        signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT"),
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        for name, value in {"every_minutes": every_minutes, "every_n_steps": every_n_steps}.items():
            check_range(above=0, **{name: value})
        self.every_minutes, self.every_n_steps, self.keep = every_minutes, every_n_steps, keep
        self.signals = StopSignals(signals)
        self.leaving = False
        self.started_from: str | None = None
        self._best = BestCheckpoints()
        self._plan: dict[str, list[str]] = {"names": [], "removals": []}
        # `_row_is_due`: a step has begun, and Lightning has not yet passed its metrics to the loggers.
        self._due = self._stopping = self._row_is_due = self._stopped_inside_epoch = self._finished = False
        self._stops: list[int] = []
        self._row: dict[str, Any] | None = None
        self._monitored: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install the signal handlers, and take over the writing of checkpoints from ModelCheckpoints, in stage ``fit``."""
        if stage == "fit":
            self._agreement = Agreement()
            self._due = self._stopping = self.leaving = False
            self.started_from, self._stops = None, []
            self._row, self._monitored = None, {}
            self._best.validated_step, self._best.validation_metrics = -1, set()
            _move_to_end(trainer, self)
            environment = getattr(trainer.strategy, "cluster_environment", None)
            if isinstance(environment, SLURMEnvironment):
                # Lightning would save inside the signal handler, which may run in the middle of a step or of a collective.
                environment.auto_requeue = False
            self.signals.start()
            self._best.adopt(trainer)
            self._folder = self._find_folder(trainer)

    def _find_folder(self, trainer: Trainer) -> Path:
        folder = run_folder(trainer)
        has_run_folder = trainer.loggers or folder.resolve() != Path.cwd()  # Lightning's default is the working folder
        return folder / CHECKPOINTS if has_run_folder else checkpoint_folder(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop handling signals, and let the ModelCheckpoints write their files themselves again.

        The previous signal handlers are restored. If a signal has stopped the run, further signals are ignored instead.
        """
        self.signals.stop(ignore=self.leaving)
        self._best.release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the checkpoints that ModelCheckpoints with ``save_on_exception`` request, and call :meth:`teardown`.

        Lightning does not call ``teardown`` after an exception.
        """
        if self._best.wanted and not trainer.sanity_checking and trainer.state.fn == "fit":
            self._best.finish(trainer, None)
        self.teardown(trainer, pl_module, "fit")

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reinstall this callback's signal handlers, which Lightning has replaced with its own.

        Lightning's handlers would communicate with other processes in the middle of a step.
        """
        self.signals.listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the timer for saves, and move checkpoints of steps after the current one to a new folder.

        In a resumed run, also log metrics of the checkpoint's step that a logger lacks, and restore the values that
        ModelCheckpoints monitor.
        """
        self.signals.listen()
        start_next_epoch(trainer)
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step
        start = Path(str(trainer.ckpt_path)) if trainer.ckpt_path else None
        if start is not None and start.resolve() != self._folder.parent.resolve():
            self.started_from = name_of_start(start, self._folder.parent)
        if trainer.is_global_zero:
            is_of_this_run = start is None or lies_in(start, self._folder.parent)
            set_aside(self._folder, trainer.global_step, everything=not is_of_this_run)
        if trainer.global_step:
            log_again(trainer, self._row)
            self._row = None
            trainer.callback_metrics.update(
                {name: value.to(pl_module.device) for name, value in self._monitored.items()}
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Raise :class:`RunStopped` before the next step if a signal stopped the run and its state was saved.

        By then, the metrics of the last step have been logged.
        """
        if self.leaving:
            raise RunStopped
        self._row_is_due = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record that the loggers have received the metrics of the last step, and that validation follows this step."""
        self._row_is_due = False
        if not trainer.sanity_checking:
            self._best.validated_step = trainer.global_step

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Flush the loggers, and store in the checkpoint the metrics that would otherwise be lost when the run resumes."""
        if self._row_is_due:
            keep_row(trainer, checkpoint)
        checkpoint[MONITORED] = monitored_metrics(trainer)
        if self._stopped_inside_epoch:
            as_of_last_batch(checkpoint["loops"])
        for logger in trainer.loggers:
            logger.save()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read saved metrics from a checkpoint and, if training resumes from it, complete an interrupted save.

        A save is interrupted if the process ends before it has created all links to the checkpoint and removed outdated files.
        The saved states of ModelCheckpoints are also changed in place, so that their file paths lie in the current folders.
        """
        self._row, self._monitored = checkpoint.get(ROW), checkpoint.get(MONITORED) or {}
        states, read_from = checkpoint.get("callbacks") or {}, checkpoint.get(READ_FROM)
        if trainer.state.fn != "fit" or read_from is None:
            return
        plan = (states.get(self.state_key) or {}).get("plan")
        # The plan of a different run, from whose checkpoint this run starts, concerns files of that run.
        if plan and trainer.is_global_zero and lies_in(Path(read_from), self._folder):
            complete(plan, Path(read_from), self._folder)
        trainer.strategy.barrier()  # wait until the first process has completed the plan
        relocate_all(trainer, states)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this callback, for the checkpoint.

        Returns:
            Dict with these entries:

            - ``started_from``: path of the checkpoint that the run started from; None if it started from scratch.
            - ``validated_step``: optimizer step of the last validation; -1 if there was none.
            - ``validation_metrics``: names of the metrics that validation has logged.
            - ``stops``: steps that were saved only because a signal stopped the run.
            - ``finished``: whether training is over.
            - ``plan``: result of :meth:`BestCheckpoints.plan`.
        """
        return {
            "started_from": self.started_from,
            "validated_step": self._best.validated_step,
            "validation_metrics": sorted(self._best.validation_metrics),
            "stops": list(self._stops),
            "finished": self._finished,
            "plan": self._plan,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, except ``finished`` and ``plan``."""
        self.started_from = state_dict.get("started_from")
        self._stops = list(state_dict.get("stops", ()))
        self._best.validated_step = state_dict.get("validated_step", -1)
        self._best.validation_metrics = set(state_dict.get("validation_metrics", ()))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Decide together with all processes whether to save or stop, and save at once if possible.

        The save is postponed if a validation or the end of the epoch follows, or while gradients are being accumulated.
        """
        # The clock and the signals differ between processes, but saving is collective, so all of them must decide the same.
        stop, due = self._agreement.any(self.signals.received is not None, self._is_due(trainer))
        self._due, self._stopping = self._due or due, self._stopping or stop
        # Between two batches of an optimizer step nothing is saved: a checkpoint does not contain accumulated gradients.
        later = ends_epoch(trainer) or validates_after_this_batch(trainer) or accumulates_gradients(trainer)
        if not later and self._wants_save:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the state after a validation inside an epoch, if a save is due."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._best.validation_metrics |= set(loop_metrics(trainer))
        if ends_epoch(trainer):
            return
        if accumulates_gradients(trainer):  # a run cannot resume from this state, but its weights may be the best
            self._due = self._due or self._best.wanted
            self._best.finish(trainer, None)
        elif self._wants_save:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the state at the end of an epoch if a save is due, and always at the end of training."""
        self._row_is_due = False
        if self._wants_save or _is_over(trainer):
            self._finished, self._stopped_inside_epoch = _is_over(trainer), ended_inside_epoch(trainer)
            self._save(trainer)
            self._finished = self._stopped_inside_epoch = False

    @property
    def _wants_save(self) -> bool:
        return self._due or self._stopping or self._best.wanted

    def _is_due(self, trainer: Trainer) -> bool:
        if trainer.global_step == self._saved_step:
            return False
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            return True
        minutes = (time.monotonic() - self._saved_at) / 60
        return trainer.is_global_zero and self.every_minutes is not None and minutes >= self.every_minutes

    def _save(self, trainer: Trainer) -> None:
        """Save the state together with all processes, create links to it for ModelCheckpoints, and remove older states."""
        if self._stopping and not (self._due or self._best.wanted or self._finished):
            # Without the signal, this step would not have been saved.
            self._stops.append(trainer.global_step)
        self._due = False
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set when the trainer is created
            self.leaving = self._stopping
            return
        state, last = self._folder / RECOVERY / f"step={trainer.global_step:08d}.ckpt", self._folder / LAST
        # First, because a ModelCheckpoint with `save_last` may add its own path to the requests, which the plan then includes.
        self._best.name_last(last)
        # The state must list its names before it is written, so that a start after a crash in between can complete them.
        self._plan = self._best.plan(self._folder)
        trainer.save_checkpoint(state)
        self._plan = {"names": [], "removals": []}
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step
        is_complete = trainer.is_global_zero and state.exists()  # an asynchronous plugin may still be writing it
        if is_complete:
            give_second_name(state, last)
        self._best.finish(trainer, state if trainer.strategy.broadcast(is_complete) else None)
        # Only now, so that a complete state exists at every moment.
        for old in self._superseded(state) if trainer.is_global_zero else ():
            trainer.strategy.remove_checkpoint(old)
        self.leaving = self._stopping
        if self.leaving and trainer.is_global_zero:
            log.warning(
                "stopped on %s after step %d, saved as %s; the same command with --run_dir resumes from there",
                self.signals.received or "a signal to another process",
                trainer.global_step,
                state,
            )

    def _superseded(self, state: Path) -> Sequence[Path]:
        """Return the paths of the saved states to remove after the new state ``state`` was written.

        The states of the latest ``keep`` steps stay. A state that was saved only because the run was stopped does not count
        toward ``keep``, and is removed once there is a later state. The run thus ends with the same files as a run that was
        not stopped.
        """
        steps = {path: step for path in state.parent.iterdir() if (step := step_of(path)) is not None}
        regular = [path for path in sorted(steps, key=lambda path: steps[path]) if steps[path] not in self._stops]
        stops = [path for path in steps if steps[path] in self._stops]
        # A new state that is itself a stop stays until the next save.
        return [path for path in (*regular[: -self.keep], *stops) if path != state]


def _move_to_end(trainer: Trainer, callback: Callback) -> None:
    """Move a callback behind all others of a trainer.

    In front of a ModelCheckpoint, the Recovery callback would save before the ModelCheckpoint requests a checkpoint of the same
    step, and would not write the checkpoint that is requested at the end of training.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # the trainer's own list
    # A new list, because Lightning iterates over the current one.
    trainer.callbacks = [item for item in callbacks if item is not callback] + [callback]  # type: ignore[attr-defined]


def set_aside(folder: Path, step: int, everything: bool = False) -> None:
    """Move checkpoints of steps after ``step`` to a new folder, so that no later start of the run resumes from them.

    The new folder is the first unused one of ``set-aside-1``, ``set-aside-2`` and so on. Both the saved states of the run and
    the best checkpoints that these states list are moved.

    Args:
        folder: folder of the run's checkpoints.
        step: optimizer step at which the run starts.
        everything: whether to move all saved states, whatever their steps, because they belong to a different run.
    """
    latest = -1 if everything else step
    headers = {path: header for path in _states_in(folder) if (header := _header(path))}
    later = {path: header for path, header in headers.items() if header["global_step"] > latest}
    best = {
        folder / Path(str(name)).name
        for header in later.values()
        for state in (header.get("callbacks") or {}).values()
        if isinstance(state, dict)
        for name in state.get("best_k_models") or ()
    }
    moved = [*later, *(path for path in sorted(best) if (header := _header(path)) and header["global_step"] > latest)]
    if not moved:
        return
    target = numbered(folder / "set-aside")
    for path in moved:
        (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        path.rename(target / path.relative_to(folder))
    log.warning(
        "this start continues from step %d: %d checkpoints of %s are now in %s",
        step,
        len(moved),
        "another run" if everything else "later steps",
        target,
    )


def _states_in(folder: Path) -> list[Path]:
    """List the paths of the saved states in a run's checkpoint folder, including ``last.ckpt``."""
    states = [path for path in (folder / RECOVERY).glob("*.ckpt") if step_of(path) is not None]
    return [*states, *([folder / LAST] if (folder / LAST).exists() else [])]


def _header(path: Path) -> dict[str, Any] | None:
    """Return the entries of a checkpoint, or None if it is unreadable or does not record its step."""
    try:
        header = read_header(path)
    except (ValueError, OSError):
        return None
    return header if isinstance(header.get("global_step"), int) else None


def _is_over(trainer: Trainer) -> bool:
    epochs = trainer.max_epochs
    # `current_epoch` counts this epoch only after the hooks of its end.
    last_epoch = epochs not in (None, -1) and trainer.current_epoch + 1 >= epochs
    return last_epoch or 0 <= trainer.max_steps <= trainer.global_step or stops_early(trainer)


def is_leaving(trainer: Trainer) -> bool:
    """Return whether a run has saved its state after a stop signal and is about to exit.

    Callbacks then skip work that takes time, such as drawing pictures.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # the trainer's own list
    return any(isinstance(callback, Recovery) and callback.leaving for callback in callbacks)
