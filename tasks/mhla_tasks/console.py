"""Output of a command: streams that take any file name, log messages of the suite, and no noise of libraries."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from typing import TextIO

from typing_extensions import override

LOGGERS = ("mhla_kernels", "lightning_mhla", "mhla_tasks")
"""Packages whose messages of level INFO are shown."""

NOISE = (
    ".*LeafSpec.*is deprecated.*",
    ".*`srun` command is available.*",
    ".*callbacks used to create the.*",
    ".*Grad strides do not match.*",
    ".*Previous log files in this directory will be deleted.*",  # RunFolder keeps them
    ".*The dirpath has changed from.*",  # predict and validate write elsewhere than training
    ".*Checkpoint directory .* exists and is not empty.*",  # it is the run's own
    ".*is smaller than the logging interval.*",
    ".*could be decompression bomb DOS attack.*",  # larger ones are an error, which names the image
)
"""Warnings of libraries that tell the user nothing."""


def prepare_streams() -> None:
    """Let standard output and standard error take any text.

    A file name that is not UTF-8, or a sign that the terminal's encoding lacks, is printed as its number. A stream that is
    closed becomes one that nobody reads.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  as long as the process
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def ignore_noise() -> None:
    """Leave out the warnings of :data:`NOISE`."""
    for noise in NOISE:
        warnings.filterwarnings("ignore", message=noise)


def show_log(stream: TextIO) -> None:
    """Show log messages, of the suite from level INFO, of all others from WARNING."""
    logging.basicConfig(level=logging.WARNING, handlers=[log_handler(stream)])
    set_levels()


def set_levels() -> None:
    """Let messages of the suite of level INFO pass."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)


class LogHandler(logging.StreamHandler[TextIO]):
    """A handler whose stream may fail: the error ends the command, as it does when a result cannot be printed."""

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), OSError):
            raise  # this runs while the error of the stream is handled
        super().handleError(record)


def log_handler(stream: TextIO) -> logging.Handler:
    """The handler of log messages: coloured in a terminal, one line for each message elsewhere."""
    if stream.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        return RichHandler(console=Console(file=stream), show_path=False)
    handler = LogHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    return handler
