"""Errors of every command, in one place: those that the user can remove are a line or two, all others a traceback.

Every command runs inside :func:`reported`. ``LIGHTNING_MHLA_TRACEBACK=1`` shows the traceback of the former, too.
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
"""Environment variable; with a value, errors come with their traceback."""

INTERRUPTED, READER_GONE = 130, 141
"""Exit statuses after Ctrl+C, and when what reads the output has ended: 128 and the number of the signal."""

RUST_PANIC = "PanicException"
"""Class of the failures of libraries in Rust, which is no ``Exception``: tokenizers whose regular expressions never end."""

OWN = ("mhla_kernels", "lightning_mhla", "mhla_tasks", "benchmarks")
DELIBERATE = (ValueError, TypeError, ModuleNotFoundError, NotImplementedError)
"""Errors that checks of the suite raise, beside ``OSError``."""

LIBRARIES = (
    "PIL", "datasets", "diffusers", "huggingface_hub", "jsonargparse", "json", "lm_eval", "peft", "timm", "tokenizers",
    "transformers", "yaml",
)  # fmt: skip
"""Packages that check what the user gives; their ``ValueError`` and ``ImportError`` are for the user."""

SERVICES = ("httpx", "huggingface_hub", "requests", "urllib3", "wandb")
"""Packages all of whose own errors are about the network, or an account."""

HINTS = (
    (r"No supported gpu backend found", "torch finds no GPU here: --trainer.accelerator=cpu, or see lightning doctor"),
    (r"is not a valid input using|`devices` selected with", "--trainer.devices takes a number above 0, or auto"),
    (r"could not find the monitored key|Early stopping conditioned on", "set the callback's monitor to one of these metrics"),
    (r"invalid accelerator name", "set --trainer.accelerator to one of these"),
    (r"requires a GPU accelerator|selected an invalid strategy", "--trainer.strategy=auto takes what fits the machine"),
    (r"not in bounds, numpy accepts", "set --seed_everything to a number in these bounds"),
)  # fmt: skip
"""Texts of Lightning's errors that say what is wrong and not what to do."""


class CommandFailed(SystemExit):
    """The end of a command after its error is printed; its text is the error, its code the exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(status)
        self.text = text

    def __str__(self) -> str:
        """The error."""
        return self.text


@contextmanager
def reported() -> Iterator[None]:
    """Run a command: end it with a short error and status 1 where the user can remove the error.

    Any other error is raised. A reader of the output that has ended (``| head``) and Ctrl+C end the command silently. May be
    nested.
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
    """The message for an error that the user can remove; None for one that is a mistake of the suite.

    Args:
        error: as it was raised; its traceback says whether a check raised it.
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
    """Text without secrets and without signs that a terminal would obey, and not longer than can be read."""
    return harmless(text)[:2000]


def _report(error: Exception) -> None:
    """Print an error and end the command.

    Raises:
        SystemExit: with status 1, or 141 if nobody reads the output any more.
        Exception: the error itself, where the user cannot remove it or wants the traceback.
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
    """Print a failure of the machine that ended a thread, such as the writer of TensorBoard's events, in a line."""
    text = None if thrown.exc_value is None or os.environ.get(TRACEBACK) else explain_failure(thrown.exc_value)
    if text is None:
        lines = traceback.format_exception(thrown.exc_type, thrown.exc_value, thrown.exc_traceback)
        sys.stderr.write(harmless(f"Exception in thread {thrown.thread and thrown.thread.name}:\n{''.join(lines)}"))
    else:
        name = type(thrown.thread).__name__.strip("_")
        sys.stderr.write(f"error: {printable(text)} (in the thread {name})\n")


def _flush() -> None:
    """Write out what is printed so far.

    Raises:
        SystemExit: when that fails: a result would be cut short behind an exit status of 0.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave("", READER_GONE)
    except OSError as error:
        _leave(f"standard output: {explain_failure(error) or error}", 1)


def _leave(text: str, status: int) -> NoReturn:
    if status != 1 or text.startswith("standard output"):  # the interpreter would flush it again, and complain
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    text = harmless(text)
    if text:
        with suppress(OSError):
            sys.stderr.write(f"error: {printable(text)}\n")
            sys.stderr.flush()
    raise CommandFailed(text, status)


def _reader_is_gone() -> bool:
    """Whether what reads standard output or standard error has ended."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(events & select.POLLERR for _, events in poll.poll(0)):
                return True
    return False


def _is_ours(error: BaseException) -> bool:
    """Whether a check of the suite raised an error, so that its message alone is enough."""
    if type(error).__module__.partition(".")[0] in OWN:  # raised again by the loader when a worker process met it
        return True
    root, by_statement = _raised_in(error)
    if isinstance(error, OSError):
        return root in OWN and error.errno is None
    return root in OWN and by_statement and isinstance(error, DELIBERATE)


def _is_for_the_user(error: BaseException) -> bool:
    """Whether an error of a library is about what the user gave it."""
    root, by_statement = _raised_in(error)
    if isinstance(error, OSError | UnicodeError) or type(error).__module__.partition(".")[0] in SERVICES:
        return True
    if isinstance(error, ModuleNotFoundError) and name_the_extra(str(error)) != str(error):
        return True
    if root == "lightning":  # MisconfigurationException, and plain errors for the same
        kinds = (ValueError, TypeError, RuntimeError, ImportError)
        return by_statement and (isinstance(error, kinds) or type(error).__name__ == "MisconfigurationException")
    return root in LIBRARIES and by_statement and isinstance(error, ValueError | ImportError)


def _raised_in(error: BaseException) -> tuple[str, bool]:
    """Top package of the code that raised an error, and whether a statement ``raise`` did.

    A mistake in the code, such as a sum of a number and None, is raised by the interpreter itself.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return "", False
    frame, _ = frames[-1]
    name = str(
        frame.f_globals.get("__package__") or frame.f_globals.get("__name__", "")
    )  # a program's name is __main__
    link = error.__traceback__
    while link is not None and link.tb_next is not None:
        link = link.tb_next
    assert link is not None
    return name.partition(".")[0], frame.f_code.co_code[link.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _from_worker(error: BaseException) -> str | None:
    """The message of an error that a check raised in another process, whose traceback came as text."""
    text = str(error)
    if "Traceback (most recent call last)" not in text:
        return None
    places = re.findall(r'File "([^"]+)", line \d+, in .*\n\s+(.*)', text)
    last = text.strip().rpartition("\n")[2]
    kind, _, message = last.partition(": ")
    own = places and any(f"/{package}/" in places[-1][0] for package in OWN) and places[-1][1].startswith("raise ")
    return message if own and kind.endswith("Error") and message else None
