"""Error messages for failures of the machine: full disks, process limits, exhausted memory, killed worker processes.

Python and the libraries report such failures as ``OSError`` or ``MemoryError``, or as errors whose message contains the text of
the operating system's error.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Container, Iterator
from pathlib import Path

FEWER_WORKERS = "use fewer worker processes (--data.num_workers)"
RIGHTS = "change the permissions, or name a path that you may use"
AWAY = "choose a different path, or move the file away"

MEANINGS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("no space is left on the device", "make room there, or write to a folder on a different disk"),
    errno.EDQUOT: ("your disk quota is used up", "delete files, or write to a folder outside the quota"),
    errno.EFBIG: ("the file would be larger than the limit of this process", "raise it (ulimit -f unlimited)"),
    errno.EROFS: ("the file system is read-only", "write to a folder elsewhere"),
    errno.EACCES: ("permission denied", RIGHTS),
    errno.EPERM: ("operation not permitted", RIGHTS),
    errno.ENAMETOOLONG: ("the name is too long for the file system", "choose a shorter one"),
    errno.ENOTDIR: ("a part of this path is a file, where a folder is needed", AWAY),
    errno.EISDIR: ("this is a folder, where a file is needed", "name a file"),
    errno.EEXIST: ("a file of this name exists already", AWAY),
    errno.ENOTEMPTY: ("the folder is not empty", "choose a different path, or move the folder away"),
    errno.ENOENT: ("there is no such file or folder", "check the path"),
    errno.ELOOP: ("the symbolic links of this path form a loop", "check the links"),
    errno.EIO: ("the device reports an input or output error", "check the disk, or the network file system"),
    errno.ESTALE: ("the network file system has lost this file", "check the connection, then start the command again"),
    errno.EMFILE: ("too many open files", f"raise the limit of this process (ulimit -n 65536), or {FEWER_WORKERS}"),
    errno.ENFILE: (
        "the machine has too many open files",
        "close programs, or have its administrator raise fs.file-max",
    ),
    errno.ENOMEM: ("the memory of the machine is used up", f"use a smaller batch, or {FEWER_WORKERS}"),
    errno.EAGAIN: ("no more processes or threads are allowed", f"raise the limit (ulimit -u), or {FEWER_WORKERS}"),
    errno.EADDRINUSE: ("the network port is in use", "set MASTER_PORT to a free one, or end the other program"),
    errno.ECONNREFUSED: ("the connection was refused", "check the address, and whether the server runs"),
}
"""Cause and remedy of system errors, by error number."""

OF_THE_MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
)  # fmt: skip
"""Error numbers that always mean a failure of the machine.

They are also recognized inside the messages of other errors, and in the chain of errors that caused the reported one.
"""

FULL = 1 << 20
"""Number of free bytes below which a disk counts as full."""

SHARED_MEMORY = (
    "a worker process found no space in shared memory (/dev/shm): use fewer worker processes (--data.num_workers=0 "
    "uses none), or enlarge it (docker run --shm-size=8g, mount -o remount,size=8g /dev/shm)"
)
MEMORY = (
    "a worker process was killed, most likely because the memory is used up: use fewer worker processes "
    "(--data.num_workers) or a smaller batch, or ask the scheduler for more memory"
)
ENDED = (
    "a worker process ended unexpectedly; its own message is above. --data.num_workers=0 reads the data in this "
    "process, and shows where it fails"
)
DEVICE_MEMORY = (
    "the memory of the GPU is used up: use a smaller batch (--data.batch_size, with "
    "--trainer.accumulate_grad_batches to keep the effective size), or --trainer.precision=bf16-mixed"
)
TEXTS: tuple[tuple[str, str | int], ...] = (
    (r"Unexpected bus error encountered in worker|killed by signal: Bus error|/torch_\w+>.*No space left", SHARED_MEMORY),
    (r"unable to allocate shared memory|unable to write to file </torch_", SHARED_MEMORY),
    (r"DataLoader worker .* is killed by signal: Killed", MEMORY),
    (r"CUDA out of memory|HIP out of memory|CUDA error: out of memory", DEVICE_MEMORY),
    (r"DefaultCPUAllocator: (can't|not enough)", errno.ENOMEM),
    (r"received \d+ items of ancdata|Communication with the workers is no longer possible", errno.EMFILE),
    (r"can't start new thread", errno.EAGAIN),
    (r"PytorchStreamWriter failed|inline_container\.cc.*unexpected pos|unexpected pos \d+ vs", errno.ENOSPC),
)  # fmt: skip
"""Patterns of libraries' error messages, each with the message to show instead, or the error number whose message applies."""


def explain_failure(error: BaseException) -> str | None:
    """Describe a system error, such as a full disk or a missing file, in one line: the path if known, the cause and a remedy.

    Args:
        error: any error. The errors that caused it are examined too.

    Returns:
        The description; None if the error is not a known system error.
    """
    if isinstance(error, OSError) and error.errno in MEANINGS:
        return _line(error.errno, _path_of(error))
    for link in chain(error):
        if isinstance(link, OSError) and link.errno in OF_THE_MACHINE:
            return _line(link.errno, _path_of(link))
        if isinstance(link, MemoryError):
            return _line(errno.ENOMEM, None)
        if isinstance(link, EOFError) and _receives_tensors(link):
            return _line(errno.EMFILE, None)
        # Libraries in Rust raise SafetensorError (safetensors) or Exception itself (tokenizers).
        of_library = isinstance(link, OSError | RuntimeError) or type(link).__name__ in ("SafetensorError", "Exception")
        if of_library and (line := _explain_text(str(link), MEANINGS if link is error else OF_THE_MACHINE)):
            return line
    return ENDED if re.search(r"DataLoader worker .* exited unexpectedly", str(error)) else None


def _receives_tensors(error: BaseException) -> bool:
    """Return whether an error occurred while this process received a tensor from a worker process.

    An ``EOFError`` during this transfer means that the worker process has too many open files.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_globals.get("__name__") == "torch.multiprocessing.reductions" for frame in frames)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the chain of errors that led to it, from the latest to the earliest."""
    passed: set[int] = set()  # a chain of errors may contain a cycle
    link: BaseException | None = error
    while link is not None and id(link) not in passed:
        passed.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _explain_text(text: str, numbers: Container[int]) -> str | None:
    """Describe a failure of the machine that can be recognized only from the text of an error message.

    Args:
        text: the error message.
        numbers: system error numbers to look for in forms such as ``[Errno 28]``.

    Returns:
        Cause and remedy in one line; None if the text does not contain a known failure.
    """
    for pattern, line in TEXTS:
        if re.search(pattern, text):
            return line if isinstance(line, str) else _line(line, None)
    numbered = re.search(r"\[Errno (\d+)\] [^\n:]*(?:: '([^'\n]*)')?", text)
    if numbered and int(numbered[1]) in numbers:
        return _line(int(numbered[1]), numbered[2])
    numbered = re.search(r"\(os error (\d+)\)(?: at path \"([^\"\n]*)\")?", text)  # the format of Rust
    if numbered and int(numbered[1]) in numbers:
        # Show the folder, because the file itself has a temporary name that the user does not know.
        return _line(int(numbered[1]), str(Path(numbered[2]).parent) if numbered[2] else None)
    number = next((number for number in OF_THE_MACHINE if os.strerror(number) in text), None)
    return None if number is None else _line(number, None)


def _line(number: int, path: str | None) -> str:
    cause, remedy = MEANINGS[number]
    path = path and _final_path(path)
    if number == errno.EMFILE:
        cause, path = f"{cause}: the limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}", None
    if number == errno.ENOSPC and path is None and (places := full_places()):
        path = ", ".join(places)
    return f"{f'{path}: ' if path else ''}{cause}; {remedy}"


def _final_path(path: str) -> str:
    """Replace temporary names in a path with the final ones. Files and folders have temporary names until they are complete."""
    from lightning_mhla.system.files import UNFINISHED  # not at the start: the package imports torch

    final = Path()
    for part in Path(path).parts:
        match = UNFINISHED.fullmatch(part)
        named_so_far = match and final.name == match[1]  # the temporary folder of a mount point lies inside it
        final = final if named_so_far else final / (match[1] if match else part)
    return str(final)


def _path_of(error: OSError) -> str | None:
    """Return the path in an ``OSError``, or the target path for a copy or rename; None if the error has no path."""
    name = error.filename2 or error.filename
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) and name else None


def full_places() -> list[str]:
    """Search the command-line arguments, the working folder and the folder for temporary files for paths on full disks.

    If writing to an open file fails, the error does not contain its path. This search finds likely candidates.

    Returns:
        At most two paths on full disks.
    """
    argument_paths = [word.partition("=")[2] if word.startswith("-") else word for word in sys.argv[1:]]
    places: list[str] = []
    for name in [*argument_paths, os.curdir, tempfile.gettempdir()]:
        path = next((part for part in (Path(name), *Path(name).parents) if name and os.path.lexists(part)), None)
        try:
            full = path is not None and os.access(path, os.W_OK) and shutil.disk_usage(path).free < FULL
        except OSError:
            continue
        if full and name not in places:
            places.append(name)
    return places[:2]
