"""Says within a minute when training stands still: which process, where, and since when.

faulthandler would write the stacks of all threads to a file of one process; here one stack goes to the process that warns.
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

PHASES = ("has not begun it", "computes it", "validates before it")
"""Phases of a process after a step, in their order."""


class StallWatch(Callback):
    """Every process tells the others each few seconds how far it is; when nothing moves, the slowest one is named.

    Warns on the first process; the process that is behind also says where its program stands. It changes nothing. A periodic
    evaluation that takes long is only mentioned. A thread does it, over a connection of its own to the store that the
    processes met at.

    Args:
        seconds: without a step before it warns; again after twice as long, and so on.
        interval: seconds between two looks.
    """

    def __init__(self, seconds: float = 45.0, interval: float = 5.0) -> None:
        if not 0 < interval <= seconds:
            raise ValueError(f"interval={interval} must be positive and at most seconds={seconds}")
        self.seconds, self.interval = seconds, interval
        self._thread: threading.Thread | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching."""
        self._rank, self._world = trainer.global_rank, trainer.world_size
        self._main = threading.get_ident()
        self._step, self._phase, self._evaluates, self._moved = trainer.global_step, 0, False, time.monotonic()
        self._over = threading.Event()
        self._store = _connect() if self._world > 1 else None
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)
        self._thread.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """The batch is here."""
        self._move(trainer, 1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """The step is done."""
        self._move(trainer, 0, after=1)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Validation moves."""
        if self._thread is not None:
            self._move(trainer, 2)

    def evaluating(self) -> None:
        """A periodic evaluation begins; the next step ends it."""
        if self._thread is not None:
            self._evaluates, self._moved = True, time.monotonic()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching; Lightning calls no teardown then."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Work after training takes its time."""
        self.teardown(trainer, pl_module, "fit")

    def _move(self, trainer: Trainer, phase: int, after: int = 0) -> None:
        step = trainer.fit_loop.epoch_loop.total_batch_idx + after
        self._step, self._phase, self._evaluates, self._moved = step, phase, False, time.monotonic()

    def _watch(self) -> None:
        patience, warned_for = self.seconds, -1.0
        seen: dict[int, tuple[str, float]] = {}
        while not self._over.wait(self.interval):
            moved = self._moved
            still = time.monotonic() - moved
            if moved != warned_for:
                patience = self.seconds
            try:
                everyone = self._exchange(seen)
            except RuntimeError:  # the first process, which keeps the store, is gone
                return
            if still < patience:
                continue
            patience, warned_for = 2 * still, moved
            behind = min(everyone, key=lambda rank: self._order(everyone[rank]))
            evaluates = everyone[behind]["evaluates"] and everyone[behind]["silent"] <= self.seconds / 2
            if self._rank == 0 and evaluates:
                log.info("evaluating for %.0f s so far", still)
            elif self._rank == 0:
                words = describe(behind, everyone[behind], self.seconds / 2, self._world)
                log.warning("no step for %.0f s: %s", still, words)
            if behind == self._rank and not evaluates:
                log.warning("process %d stands at\n%s", self._rank, self._stack())

    def _exchange(self, seen: dict[int, tuple[str, float]]) -> dict[int, dict[str, Any]]:
        """How far each process is, and for how long it has said nothing."""
        mine = {
            "at": [self._step, self._phase],
            "evaluates": self._evaluates,
            "host": platform.node(),
            "waits": self._waits_for_others(),
            "beat": time.monotonic(),
        }
        if self._store is None:
            return {0: {**mine, "silent": 0.0}}
        self._store.set(f"stall-watch/{self._rank}", json.dumps(mine))
        now = time.monotonic()
        everyone = {}
        for rank in range(self._world):
            key = f"stall-watch/{rank}"
            text = (
                self._store.get(key).decode()
                if self._store.check([key])
                else '{"at": [-1, 0], "evaluates": false, "host": "?", "waits": false}'
            )
            if seen.get(rank, ("", 0.0))[0] != text:
                seen[rank] = (text, now)
            everyone[rank] = {**json.loads(text), "silent": now - seen[rank][1]}
        return everyone

    def _order(self, state: dict[str, Any]) -> tuple[bool, bool, list[int]]:
        """Silent processes first, then those that do not wait for others, then those that are behind."""
        return state["silent"] < self.seconds / 2, state["waits"], state["at"]

    def _waits_for_others(self) -> bool:
        """Whether the program stands in a call of torch.distributed, as far as Python knows."""
        frame = sys._current_frames().get(self._main)
        return frame is not None and "/torch/distributed/" in frame.f_code.co_filename.replace("\\", "/")

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main)
        return "".join(traceback.format_stack(frame)[-6:]).rstrip() if frame else "an unknown line"


def describe(rank: int, state: dict[str, Any], silence: float, world: int) -> str:
    """A sentence on the process that is behind.

    Args:
        rank: which.
        state: ``at`` (batch and phase), ``host``, and the seconds it was ``silent``.
        silence: seconds after which it is taken for stopped or lost.
        world: number of processes.
    """
    step, phase = state["at"]
    if world == 1:
        return f"at batch {step}, the process {PHASES[phase]}"
    if state["silent"] > silence:
        return f"process {rank} on {state['host']} gives no sign of life for {state['silent']:.0f} s (last at batch {step})"
    return f"process {rank} on {state['host']} holds the others up at batch {step}: it {PHASES[phase]}"


def _connect() -> TCPStore | None:
    """A connection of this thread's own: one that is waiting blocks the others that share it."""
    store: Any = get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    return TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=30))
