"""Command ``lightning linearize``: checks of its options, and a lock on its working folder."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_mhla.system.redaction import redact
from mhla_tasks.tools.linearize import stages
from mhla_tasks.tools.linearize.pipeline import Pipeline, written
from mhla_tasks.tools.linearize.source import find_domain, sample_length

log = logging.getLogger(__name__)


def linearize(options: Any) -> None:
    """Linearize a pretrained model, export it, and write a report.

    Args:
        options: parsed options of ``lightning linearize``, an ``argparse.Namespace``.

    Raises:
        FileNotFoundError: if the pretrained model does not exist.
        SystemExit: if a command that performs one of the steps fails, with the exit status of the command.
        ValueError: if the model cannot be linearized, or if an option has an invalid value or contradicts another one.
    """
    if not 0 <= options.keep < 1:
        raise ValueError(f"--keep={options.keep} must be a share of the layers, from 0 to below 1")
    target, source = options.target, Path(options.source)
    if target.exists() and (not target.is_dir() or target.resolve() == source.resolve()):
        raise ValueError(f"{target} is the source, or not a folder; name another folder for the linearized model")
    if any(redact(path) != path for path in (*options.train, *options.val)):
        raise ValueError(
            "user names, passwords and queries of URLs would be written to the configurations in the working folder; download "
            "the data first"
        )
    for name in ("batch_size", "block_size", "val_batches", "steps"):
        _check_positive(name, getattr(options, name))
    typed = {field.name: getattr(options, field.name) for field in fields(stages.Settings)}
    domain = find_domain(options.source)
    defaults = dict(stages.DEFAULTS[domain])
    defaults["length"] = sample_length(options.source, domain, defaults["length"], options.length)
    _check_positive("length", options.length)
    settings = stages.Settings(**{name: defaults[name] if value is None else value for name, value in typed.items()})
    steps = None if options.steps is None else (options.steps[0], options.steps[1])
    work = options.work or target.with_name(f"{target.name}-work")
    with only_call_in(work) as lock:
        Pipeline(options.source, target, work, settings, options.budget, steps, lock).run()


@contextmanager
def only_call_in(work: Path) -> Iterator[int]:
    """Context manager that holds an exclusive lock on the working folder.

    If the folder did not exist before and is empty at the end, it is removed. The lock is released when this process has left
    the context and all child processes that inherited the file descriptor have ended.

    Yields:
        File descriptor of the lock.

    Raises:
        ValueError: if another process holds the lock.
    """
    created = not work.exists()
    descriptor = _locked(work)
    try:
        yield descriptor
    finally:
        if created:
            with suppress(OSError):
                work.rmdir()  # a folder with files stays
        os.close(descriptor)


def _locked(work: Path) -> int:
    """Create a folder if necessary, lock it, and return the file descriptor of the lock.

    If the file system does not support locks, a warning is logged.

    Raises:
        ValueError: if another process holds the lock.
    """
    while True:
        work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(
                f"another lightning linearize works in {work}; wait until it has finished, or choose another folder with --work"
            ) from None
        except OSError as error:  # file systems without locks
            log.warning("%s cannot be locked (%s): do not start a second call that works there", work, error)
        # Another call may have removed the folder after it was opened here; a lock on a removed folder excludes nobody.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), work.stat()):
                return descriptor
        os.close(descriptor)


def _check_positive(name: str, value: int | list[int] | None) -> None:
    """Raise ValueError if the value of a command-line option, or one of its values, is below 1."""
    if value is not None and min(value if isinstance(value, list) else [value]) < 1:
        raise ValueError(f"--{name}={written(value)} must be at least 1")
