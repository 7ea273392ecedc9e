"""Output of a command: streams that take any file name, messages without secrets, and no noise of libraries."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import traceback
import warnings
from types import TracebackType
from typing import Any, TextIO

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
    ".*args parameter is intended to run from within Python.*",  # the configuration that was read from them
    ".*could be decompression bomb DOS attack.*",  # larger ones are an error, which names the image
)
"""Warnings of libraries that tell the user nothing."""


def prepare_streams() -> None:
    """Let standard output and standard error take any text.

    A file name that is not UTF-8, or a sign that the terminal's encoding lacks, is printed as its number. A stream that is
    closed becomes one that nobody reads. Log messages, warnings and tracebacks are those of :func:`harmless`.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  as long as the process
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.setLogRecordFactory(_make_record)
    sys.excepthook = _print_traceback
    warnings.formatwarning = _format_warning


def harmless(text: str) -> str:
    r"""Text without secrets (:mod:`lightning_mhla.system.redaction`), control characters written as ``\x1b``."""
    if re.search("(?i):/|key|token|pass|pwd|secret|credential|authorization", text):
        from lightning_mhla.system.redaction import redact  # imports torch, which a wrong option should not wait for

        text = redact(text)
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" or _is_raw(sign) else sign.encode("unicode_escape").decode()
        for sign in text
    )


def _is_raw(sign: str) -> bool:
    """Whether a sign stands for a byte of a file name that is not UTF-8; the stream prints it as its number."""
    return "\ud800" <= sign <= "\udfff"


def _make_record(*args: Any, **options: Any) -> logging.LogRecord:
    """A log record whose message is harmless, whichever handler prints it."""
    record = logging.LogRecord(*args, **options)
    try:
        text = record.getMessage()
    except Exception:  # the handler reports a message that does not fit its arguments
        return record
    if (shown := harmless(text)) != text:
        record.msg, record.args = shown, None
    return record


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(harmless("".join(traceback.format_exception(kind, error, trace))))


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return harmless(f"{filename}:{lineno}: {category.__name__}: {message}\n")


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
