"""Error messages of commands. Errors that the user can fix get one or two lines, and all others get a traceback.

If the environment variable ``LIGHTNING_MHLA_TRACEBACK`` is set, all errors are shown with a traceback.
"""

from __future__ import annotations

import dis
import os
import re
import select
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from mhla_tasks.commandline.console import harmless
from mhla_tasks.commandline.extras import name_the_extra
from mhla_tasks.commandline.failures import chain, explain_failure

TRACEBACK = "LIGHTNING_MHLA_TRACEBACK"
"""Environment variable that makes every error show its traceback. Any value that is not empty counts."""

INTERRUPTED, READER_GONE = 130, 141
"""Exit statuses after Ctrl+C, and after the program that reads the output has ended: 128 plus the number of the signal."""

RUST_PANIC = "PanicException"
"""Name of the exception class for panics of Rust libraries, which is not a subclass of ``Exception``.

Tokenizers raise it for regular expressions that do not terminate.
"""

OWN = ("mhla_kernels", "lightning_mhla", "mhla_tasks", "benchmarks")
DELIBERATE = (ValueError, TypeError, ModuleNotFoundError, NotImplementedError)
"""Exception classes that the suite raises for errors of the user, in addition to ``OSError``."""

LIBRARIES = (
    "PIL", "datasets", "diffusers", "huggingface_hub", "jsonargparse", "json", "lm_eval", "peft", "timm", "tokenizers",
    "transformers", "yaml",
)  # fmt: skip
"""Packages that validate user input; their ``ValueError`` and ``ImportError`` are errors that the user can fix."""

SERVICES = ("httpx", "huggingface_hub", "requests", "urllib3", "wandb")
"""Packages whose exception classes all concern the network or an account."""

HINTS = (
    (r"No supported gpu backend found", "torch finds no GPU here: --trainer.accelerator=cpu, or see lightning doctor"),
    (r"is not a valid input using|`devices` selected with", "--trainer.devices takes a number above 0, or auto"),
    (r"could not find the monitored key|Early stopping conditioned on", "set the callback's monitor to one of these metrics"),
    (r"invalid accelerator name", "set --trainer.accelerator to one of these"),
    (r"requires a GPU accelerator|selected an invalid strategy", "--trainer.strategy=auto takes what fits the machine"),
    (r"not in bounds, numpy accepts", "set --seed_everything to a number in these bounds"),
)  # fmt: skip
"""Remedies to append to Lightning's error messages that do not name one: pairs of a message pattern and a remedy."""


class CommandFailed(SystemExit):
    """Exception that ends the command. Its error message, if it has one, has already been printed.

    Args:
        text: the printed message; empty if nothing was printed.
        status: exit status of the process.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(status)
        self.text = text

    def __str__(self) -> str:
        return self.text


@contextmanager
def reported() -> Iterator[None]:
    """Context manager that runs a command, and prints a short message for an error that the user can fix.

    Other errors are raised unchanged, as are all errors if ``LIGHTNING_MHLA_TRACEBACK`` is set. The context manager may be
    nested.

    Raises:
        CommandFailed: with exit status 1 after a message; with status 130 and no message after Ctrl+C; with status 141 and no
            message if the program that reads the output has ended (``| head``).
    """
    hook, threading.excepthook = threading.excepthook, _report_thread
    try:
        yield
    except SystemExit:
        _flush()
        raise
    except KeyboardInterrupt:
        if os.environ.get(TRACEBACK):
            raise
        _flush()
        _leave("", INTERRUPTED)
    except Exception as error:
        _report(error)
    except BaseException as error:
        if type(error).__name__ != RUST_PANIC or os.environ.get(TRACEBACK):
            raise
        _flush()
        _leave(
            f"{' '.join(str(error).split())}: the tokenizers library fails on this input; use a different tokenizer", 1
        )
    else:
        _flush()
    finally:
        threading.excepthook = hook


def explain(error: BaseException) -> str | None:
    """Return the message for an error that the user can fix; None for any other error, which is most likely a bug.

    Args:
        error: error with its traceback, which shows the package that raised it.
    """
    if _is_ours(error):
        text = name_the_extra(str(error))
        return text if text.strip() else None
    if failure := explain_failure(error):
        return failure
    if worker := _from_worker(error):
        return worker
    if not _is_for_the_user(error):
        return None
    text = " ".join(name_the_extra(str(error)).split())
    remedies = [remedy for pattern, remedy in HINTS if re.search(pattern, text)]
    return "; ".join([text.rstrip("."), *remedies[:1]]) if remedies else text or None


def printable(text: str) -> str:
    """Make an error message safe to print: remove secrets, escape control characters, and shorten it to 2000 characters."""
    return harmless(text)[:2000]


def report_usage_error(text: str, program: str) -> NoReturn:
    """Print a usage error and the command that shows the help, and exit with status 2.

    Args:
        text: the error message.
        program: name of the command or tool, such as ``lightning fit``.

    Raises:
        CommandFailed: always.
    """
    message = printable(text)
    sys.stderr.write(f"error: {message}\nhelp: {program} --help\n")
    raise CommandFailed(message, 2)


def _report(error: Exception) -> None:
    """Print the message of an error that the user can fix, and end the command.

    Args:
        error: error that ended the command.

    Raises:
        SystemExit: with status 1 after the message; with status 141 if the program that reads the output has ended.
        Exception: ``error`` itself, if the user cannot fix it or if ``LIGHTNING_MHLA_TRACEBACK`` is set.
    """
    if any(isinstance(link, BrokenPipeError) for link in chain(error)) and _reader_is_gone():
        _leave("", READER_GONE)
    if os.environ.get(TRACEBACK):
        raise error
    text = explain(error)
    if text is None:
        raise error
    _flush()
    _leave(text, 1)


def _report_thread(thrown: threading.ExceptHookArgs) -> None:
    """Print an exception that ended a thread. The function is installed as ``threading.excepthook``.

    A failure of the machine, such as a full disk, is printed in one line, and any other exception with its traceback.
    """
    text = None if thrown.exc_value is None or os.environ.get(TRACEBACK) else explain_failure(thrown.exc_value)
    if text is None:
        lines = traceback.format_exception(thrown.exc_type, thrown.exc_value, thrown.exc_traceback)
        sys.stderr.write(harmless(f"Exception in thread {thrown.thread and thrown.thread.name}:\n{''.join(lines)}"))
    else:
        name = type(thrown.thread).__name__.strip("_")
        sys.stderr.write(f"error: {printable(text)} (in the thread {name})\n")


def _flush() -> None:
    """Flush standard output, and end the command with an error if this fails.

    Raises:
        SystemExit: if standard output cannot be written to. Without this exception, a command with incomplete output would exit
            with status 0.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave("", READER_GONE)
    except OSError as error:
        _leave(f"standard output: {explain_failure(error) or error}", 1)


def _leave(text: str, status: int) -> NoReturn:
    # The interpreter flushes standard output again at exit, and would print the same error a second time.
    if status != 1 or text.startswith("standard output"):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    text = harmless(text)
    if text:
        with suppress(OSError):
            sys.stderr.write(f"error: {printable(text)}\n")
            sys.stderr.flush()
    raise CommandFailed(text, status)


def _reader_is_gone() -> bool:
    """Return whether standard output or standard error is a pipe whose reading program has ended."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            poll = select.poll()
            # No event has to be asked for: POLLERR is always reported.
            poll.register(stream.fileno(), 0)
            if any(events & select.POLLERR for _, events in poll.poll(0)):
                return True
    return False


def _is_ours(error: BaseException) -> bool:
    """Return whether this project raised an error deliberately, with a message that tells the user what to fix."""
    if (
        type(error).__module__.partition(".")[0] in OWN
    ):  # DataLoader re-raises errors of worker processes in its own code
        return True
    root, by_statement = _raised_in(error)
    if isinstance(error, OSError):
        return root in OWN and error.errno is None
    return root in OWN and by_statement and isinstance(error, DELIBERATE)


def _is_for_the_user(error: BaseException) -> bool:
    """Return whether an error raised by a library points to user input, files or the network rather than to a bug."""
    root, by_statement = _raised_in(error)
    if isinstance(error, OSError | UnicodeError) or type(error).__module__.partition(".")[0] in SERVICES:
        return True
    if isinstance(error, ModuleNotFoundError) and name_the_extra(str(error)) != str(error):
        return True
    if root == "lightning":  # MisconfigurationException, and plain errors for the same purpose
        kinds = (ValueError, TypeError, RuntimeError, ImportError)
        return by_statement and (isinstance(error, kinds) or type(error).__name__ == "MisconfigurationException")
    return root in LIBRARIES and by_statement and isinstance(error, ValueError | ImportError)


def _raised_in(error: BaseException) -> tuple[str, bool]:
    """Return the top-level package in which an error occurred, and whether a ``raise`` statement raised it.

    Errors without a ``raise`` statement, such as the one from ``1 + None``, come from the Python interpreter and point to a
    bug. The name of the package is empty if the error has no traceback.
    """
    link = error.__traceback__
    if link is None:
        return "", False
    while link.tb_next is not None:
        link = link.tb_next
    frame = link.tb_frame
    # A script has no package, and its name is __main__.
    name = str(frame.f_globals.get("__package__") or frame.f_globals.get("__name__", ""))
    # The bytecode at the failing instruction tells a deliberate `raise` from an error of the interpreter.
    return name.partition(".")[0], frame.f_code.co_code[link.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _from_worker(error: BaseException) -> str | None:
    """Extract the message of an error that this project's code raised in a DataLoader worker process.

    PyTorch raises a new error in the main process. The text of this error is the traceback from the worker process.

    Args:
        error: error in the main process.

    Returns:
        The original message, without the name of the exception class; None if the error has a different origin.
    """
    text = str(error)
    if "Traceback (most recent call last)" not in text:
        return None
    places = re.findall(r'File "([^"]+)", line \d+, in .*\n\s+(.*)', text)
    last = text.strip().rpartition("\n")[2]
    kind, _, message = last.partition(": ")
    raised_by_suite = (
        places and any(f"/{package}/" in places[-1][0] for package in OWN) and places[-1][1].startswith("raise ")
    )
    return message if raised_by_suite and kind.endswith("Error") and message else None
