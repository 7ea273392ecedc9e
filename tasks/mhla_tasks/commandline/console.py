"""Safe output to the terminal: messages without secrets or control characters, and fewer warnings from libraries."""

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
"""Packages whose log messages are shown if their level is INFO or higher."""

NOISE = (
    ".*LeafSpec.*is deprecated.*",
    ".*`srun` command is available.*",
    ".*callbacks used to create the.*",
    ".*Grad strides do not match.*",
    ".*Previous log files in this directory will be deleted.*",  # not true here: LogFiles renames them
    ".*The dirpath has changed from.*",  # predict and validate write to different folders than training
    ".*Checkpoint directory .* exists and is not empty.*",  # it belongs to the run
    ".*is smaller than the logging interval.*",
    ".*args parameter is intended to run from within Python.*",  # the arguments were parsed into a configuration before
    r"\s*Unable to serialize instance",  # saved_configuration writes such values as text
    ".*could be decompression bomb DOS attack.*",  # larger images are an error that names the image
)
"""Patterns of library warnings that are not useful to the user."""


def prepare_streams() -> None:
    """Make standard output and standard error accept any text, and remove secrets from messages.

    Characters that the terminal's encoding lacks, and bytes in file names that are not UTF-8, are printed as escape sequences.
    A closed stream is replaced by the null device. Secrets, such as passwords in URLs, are removed from log messages, warnings
    and tracebacks.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open until the process ends
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.setLogRecordFactory(_make_record)
    sys.excepthook = _print_traceback
    warnings.formatwarning = _format_warning


def harmless(text: str) -> str:
    r"""Make a text safe to print: remove secrets, and escape control characters, which a terminal would execute.

    Secrets, such as passwords in URLs, are found by :mod:`lightning_mhla.system.redaction`.

    Args:
        text: any text. Line feeds and tabs stay; other control characters become escapes such as ``\x1b``.
    """
    if re.search("(?i):/|key|token|pass|pwd|secret|credential|authorization", text):
        # Imports torch, which would delay the message for a wrong option; most messages need no redaction.
        from lightning_mhla.system.redaction import redact

        text = redact(text)
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" or _is_raw(sign) else sign.encode("unicode_escape").decode()
        for sign in text
    )


def _is_raw(sign: str) -> bool:
    """Return whether a character is a surrogate, which represents a byte that is not UTF-8. The output stream escapes it."""
    return "\ud800" <= sign <= "\udfff"


def _make_record(*args: Any, **options: Any) -> logging.LogRecord:
    """Create a log record from the arguments of ``logging.LogRecord``, and make its message safe to print."""
    record = logging.LogRecord(*args, **options)
    try:
        text = record.getMessage()
    except Exception:  # the arguments do not match the format of the message; the handler reports this
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
    """Suppress a fixed list of library warnings that do not help the user."""
    for noise in NOISE:
        warnings.filterwarnings("ignore", message=noise)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # warns about classes that torchao registers


def show_log(stream: TextIO) -> None:
    """Print log messages to a stream: from level INFO for this project's packages, from WARNING for all others."""
    logging.basicConfig(level=logging.WARNING, handlers=[log_handler(stream)])
    set_levels()


def set_levels() -> None:
    """Set the log level of this project's packages to INFO."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)


class LogHandler(logging.StreamHandler[TextIO]):
    """Log handler that raises the ``OSError`` if writing to its stream fails, so that the command ends.

    Python's own handlers print such an error and continue.
    """

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), OSError):
            raise  # re-raises the error of the stream, since this method runs inside its except block
        super().handleError(record)


def log_handler(stream: TextIO) -> logging.Handler:
    """Create a log handler that writes in color to a terminal, and plain lines to any other stream."""
    if stream.isatty():
        from rich import get_console
        from rich.console import Console
        from rich.logging import RichHandler

        # Messages that share the console of the progress bar are printed above it.
        console = get_console() if stream is sys.stdout else Console(file=stream)
        colored = RichHandler(console=console, show_time=False, show_path=False)
        colored.setFormatter(logging.Formatter("%(message)s"))
        return colored
    handler = LogHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    return handler
