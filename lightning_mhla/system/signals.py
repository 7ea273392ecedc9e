"""Signals that only set a flag, so that a run stops where its state can be saved."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)


class StopSignals:
    """Notes the first signal that asks this process to stop.

    Args:
        names: names of the signals. A second Ctrl+C (SIGINT) raises KeyboardInterrupt.

    Raises:
        ValueError: for a name that this system does not know.
    """

    def __init__(self, names: Sequence[str]) -> None:
        unknown = [name for name in names if not hasattr(signal, name)]
        if unknown:
            raise ValueError(f"signals names {unknown[0]!r}, which is not a signal here; SIGTERM and SIGUSR1 are")
        self.numbers = [signal.Signals[name] for name in names]
        self.received: str | None = None
        self._active = self._ignored = False
        self._previous: dict[signal.Signals, Any] = {}

    def start(self) -> None:
        """Listen from here on."""
        self.received, self._active, self._ignored = None, True, False
        self.listen()

    def listen(self) -> None:
        """Install the handlers where others have replaced them, as Lightning does."""
        for number in self.numbers if self._active else []:
            current = signal.getsignal(number)
            in_background = number == signal.SIGINT and current == signal.SIG_IGN  # a shell's job does not get Ctrl+C
            if current != self._note and not in_background:
                self._previous.setdefault(number, current)
                signal.signal(number, self._note)

    def stop(self, ignore: bool) -> None:
        """Restore the previous handlers, or ignore the signals from now on: srun sends more of them to a job that leaves."""
        self._active, self._ignored = False, ignore
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if ignore else handler)
        self._previous = {}

    def _note(self, number: int, _: Any) -> None:
        name = signal.Signals(number).name
        if self._active and number == signal.SIGINT and self.received == name:
            raise KeyboardInterrupt
        if self._active:
            if number == signal.SIGINT:
                log.warning("Ctrl+C: saving after this step; press it again to stop at once, without saving")
            self.received = name
        elif not self._ignored:  # Lightning restores the handlers that it found, this one too, when the run is over
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
