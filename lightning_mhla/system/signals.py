"""Signal handlers that only set a flag, so that a run stops at a step where its state can be saved."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)


class StopSignals:
    """Signal handlers that record a request to stop, so that the process can stop at a suitable time.

    A second Ctrl+C (SIGINT) raises KeyboardInterrupt. Python allows only the main thread to install handlers, so an object that
    is started in any other thread records no signals.

    Args:
        names: names of the signals, such as ``SIGTERM``.

    Attributes:
        numbers: numbers of the signals.
        received: name of the latest signal since :meth:`start`; None if there was none.

    Raises:
        ValueError: if a name is not the name of a signal on this system.
    """

    def __init__(self, names: Sequence[str]) -> None:
        unknown = [name for name in names if not hasattr(signal, name)]
        if unknown:
            raise ValueError(
                f"signals contains {unknown[0]!r}, which is not a signal here; use names such as SIGTERM or SIGUSR1"
            )
        self.numbers = [signal.Signals[name] for name in names]
        self.received: str | None = None
        self._active = self._ignored = False
        self._previous: dict[signal.Signals, Any] = {}

    def start(self) -> None:
        """Install the handlers, and clear the record of the latest signal."""
        self.received, self._active, self._ignored = None, True, False
        self.listen()

    def listen(self) -> None:
        """Reinstall handlers that other code has replaced. Lightning, for example, replaces some when training starts.

        Only the main thread can install handlers. In any other thread, the method does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self.numbers if self._active else []:
            current = signal.getsignal(number)
            # A shell starts background jobs with SIGINT ignored, so that Ctrl+C for the foreground job does not stop them.
            in_background = number == signal.SIGINT and current == signal.SIG_IGN
            if current != self._note and not in_background:
                # Only the handler from before `start` is restored, not the one that Lightning installed since.
                self._previous.setdefault(number, current)
                signal.signal(number, self._note)

    def stop(self, ignore: bool) -> None:
        """Stop recording signals.

        Args:
            ignore: whether to ignore the signals from now on instead of restoring the previous handlers. Ignoring them is
                useful because srun repeats its signal while a job exits.
        """
        self._active, self._ignored = False, ignore
        for number, handler in self._previous.items():
            # getsignal returns None for a handler that was not installed from Python, which cannot be restored.
            signal.signal(number, signal.SIG_IGN if ignore else handler or signal.SIG_DFL)
        self._previous = {}

    def _note(self, number: int, _: Any) -> None:
        name = signal.Signals(number).name
        if self._active and number == signal.SIGINT and self.received == name:
            raise KeyboardInterrupt
        if self._active:
            if number == signal.SIGINT:
                log.warning("Ctrl+C: saving after this step; press it again to stop immediately without saving")
            self.received = name
        elif not self._ignored:
            # Lightning may reinstall this handler after stop(); then the default action must happen.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
