"""Callback that detects stalled training, and logs which process is the slowest and at which batch it is.

Python's faulthandler is not used, because it writes the stacks of all threads of each process to a file. Here only the slowest
process logs its stack.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_mhla.system.torch_private import get_default_store

log = logging.getLogger(__name__)

PHASES = ("has not begun it", "validates before it", "computes it")
"""Phases of a process with respect to a batch, in order, worded as predicates for log messages."""


class StallWatch(Callback):
    """Callback that warns when training makes no progress, and names the slowest process.

    In each process, a thread writes the progress of the process to the key-value store of the process group every few seconds.
    The first process logs the warning, and the slowest process logs the stack of its main thread. Training itself is not
    affected. A long periodic evaluation is logged as information, not as a warning.

    Args:
        seconds: seconds without progress before the first warning. The time before each further warning doubles.
        interval: polling interval in seconds, at which each process writes its progress and reads that of the others.

    Raises:
        ValueError: if ``interval`` is not positive, or is larger than ``seconds``.
    """

    def __init__(self, seconds: float = 45.0, interval: float = 5.0) -> None:
        if not 0 < interval <= seconds:
            raise ValueError(f"interval={interval} must be positive and at most seconds={seconds}")
        self.seconds, self.interval = seconds, interval
        self._thread: threading.Thread | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Connect to the key-value store of the process group, and start the thread that watches for stalls."""
        self._rank, self._world = trainer.global_rank, trainer.world_size
        self._main = threading.get_ident()
        self._step, self._phase, self._evaluates, self._moved = trainer.global_step, 0, False, time.monotonic()
        self._over = threading.Event()
        self._store = _connect() if self._world > 1 else None
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)
        self._thread.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record that this process has received a training batch, for the watching thread to report."""
        self._move(trainer, 2)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record that this process has finished a training batch, for the watching thread to report."""
        self._move(trainer, 0, after=1)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record that this process has finished a validation batch, for the watching thread to report."""
        if self._thread is not None:
            self._move(trainer, 1, after=1)  # Lightning counts the next batch when it begins

    def evaluating(self) -> None:
        """Mark this process as running a periodic evaluation, until it receives or finishes its next batch."""
        if self._thread is not None:
            self._evaluates, self._moved = True, time.monotonic()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the thread that watches for stalls."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop the thread that watches for stalls, since Lightning does not call ``teardown`` after an exception."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the thread that watches for stalls, because a final evaluation after training would look like a stall."""
        self.teardown(trainer, pl_module, "fit")

    def _move(self, trainer: Trainer, phase: int, after: int = 0) -> None:
        step = trainer.fit_loop.epoch_loop.total_batch_idx + after
        self._step, self._phase, self._evaluates, self._moved = step, phase, False, time.monotonic()

    def _watch(self) -> None:
        patience, warned_for = self.seconds, -1.0
        latest_messages: dict[int, tuple[str, float]] = {}
        while not self._over.wait(self.interval):
            # Read once: the main thread may change it at any time.
            moved = self._moved
            stalled_seconds = time.monotonic() - moved
            # There was progress since the last warning, so this is a new stall.
            if moved != warned_for:
                patience = self.seconds
            try:
                states = self._exchange(latest_messages)
            except RuntimeError:  # the first process, which serves the store, has ended
                return
            if stalled_seconds < patience:
                continue
            # Wait twice as long before the next warning about the same stall.
            patience, warned_for = 2 * stalled_seconds, moved
            behind = min(states, key=lambda rank: self._order(states[rank]))
            # A process that evaluates still sends heartbeats. One that has gone silent has not merely a long evaluation.
            evaluates = states[behind]["evaluates"] and states[behind]["silent"] <= self.seconds / 2
            if self._rank == 0 and evaluates:
                log.info("evaluating for %.0f s so far", stalled_seconds)
            elif self._rank == 0:
                description = describe(behind, states[behind], self.seconds / 2, self._world)
                log.warning("no step for %.0f s: %s", stalled_seconds, description)
            if behind == self._rank and not evaluates:
                log.warning("stack of process %d:\n%s", self._rank, self._stack())

    def _exchange(self, latest_messages: dict[int, tuple[str, float]]) -> dict[int, dict[str, Any]]:
        """Publish the progress of this process in the key-value store, and read the progress of all processes.

        Args:
            latest_messages: latest JSON message of each process and the local time in seconds at which it was first read, by
                rank; updated in place.

        Returns:
            Progress of each process by rank, a dict with the entries ``at``, ``host`` and ``silent`` (see :func:`describe`),
            ``evaluates`` (whether the process runs a periodic evaluation) and ``waits`` (whether it waits for other processes
            in a collective operation).
        """
        own_state = {
            "at": [self._step, self._phase],
            "evaluates": self._evaluates,
            "host": platform.node(),
            "waits": self._waits_for_others(),
            # changes the message even without progress, so that a stalled process differs from a dead one
            "beat": time.monotonic(),
        }
        if self._store is None:
            return {0: {**own_state, "silent": 0.0}}
        self._store.set(f"stall-watch/{self._rank}", json.dumps(own_state))
        now = time.monotonic()
        states = {}
        for rank in range(self._world):
            key = f"stall-watch/{rank}"
            text = (
                self._store.get(key).decode()
                if self._store.check([key])
                else '{"at": [-1, 0], "evaluates": false, "host": "?", "waits": false}'
            )
            # Clocks of machines differ, so silence is measured here, from when the text with its changing beat last changed.
            if latest_messages.get(rank, ("", 0.0))[0] != text:
                latest_messages[rank] = (text, now)
            states[rank] = {**json.loads(text), "silent": now - latest_messages[rank][1]}
        return states

    def _order(self, state: dict[str, Any]) -> tuple[bool, bool, list[int]]:
        """Return a sort key for the progress of a process, which puts the slowest process first.

        Processes that have sent no message for half of ``seconds`` come first, then processes that do not wait for others in a
        collective operation, then those with the fewest batches.

        Args:
            state: progress of a process, from :meth:`_exchange`.
        """
        return state["silent"] < self.seconds / 2, state["waits"], state["at"]

    def _waits_for_others(self) -> bool:
        """Return whether the main thread is inside a function of torch.distributed, where it waits for other processes."""
        frame = sys._current_frames().get(self._main)
        return frame is not None and "/torch/distributed/" in frame.f_code.co_filename.replace("\\", "/")

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main)
        return "".join(traceback.format_stack(frame)[-6:]).rstrip() if frame else "an unknown line"


def describe(rank: int, state: dict[str, Any], silence: float, world: int) -> str:
    """Describe the slowest process in one clause, for the warning about a stall.

    Args:
        rank: rank of the process.
        state: progress of the process, a dict with these entries:

            - ``at``: pair of the batch number and its phase. The phase is 0 before the batch begins, 1 during a validation that
              precedes it, and 2 while it is computed.
            - ``host``: name of the machine.
            - ``silent``: seconds since the progress message of the process last changed.
        silence: seconds without a new message after which the process counts as stopped or lost.
        world: number of processes.
    """
    step, phase = state["at"]
    if world == 1:
        return f"at batch {step}, the process {PHASES[phase]}"
    if state["silent"] > silence:
        return f"process {rank} on {state['host']} has given no sign of life for {state['silent']:.0f} s (last at batch {step})"
    return f"process {rank} on {state['host']} holds up the others at batch {step}: it {PHASES[phase]}"


def _connect() -> TCPStore | None:
    """Open a separate connection to the key-value store of the process group.

    A blocking call on a shared connection would block every thread that uses the connection.

    Returns:
        The connected store; None if the process group does not use a ``TCPStore``.
    """
    store: Any = get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    return TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=30))
