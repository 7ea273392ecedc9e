"""Whether ``backend="auto"`` may use a fused kernel on this machine.

Before the first use of a kind of kernel a trial compares it with the PyTorch form. What it said is kept in the user's
cache, by device, driver, torch, Triton and the kernels' own text, so that it is done once. A kernel that fails later is
withdrawn for the rest of the process. See :func:`may_use`, :func:`guarded` and :func:`agree_on_kernels`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from mhla_kernels.own_files import open_own, own_folder, read_own

FATAL = (torch.OutOfMemoryError, KeyboardInterrupt, SystemExit)
"""Errors that say nothing of the kernel."""
EXHAUSTED = ("out of memory", "ALLOC_FAILED")
"""Likewise, in messages: Triton's driver and cuBLAS have no error of their own for it."""

BOUNDS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 4e-2)}
"""Allowed errors of outputs and of gradients, relative to their norm: a few times what a sound kernel has."""


LARGEST = 1 << 16
"""Bytes of a file with a verdict."""


@dataclass(frozen=True)
class Verdict:
    """The result of a trial of one kind of kernel.

    Attributes:
        agrees: whether the kernel may be used.
        reason: why not, or the errors found.
        seconds: that the trial took, with compilation.
    """

    agrees: bool
    reason: str
    seconds: float


_verdicts: dict[tuple[str, str], Verdict] = {}
"""By device and kind, in this process."""
_withdrawn: dict[str, str] = {}
"""Kinds that are not to be used any more, and why."""
_unknown: set[str] = set()
"""Kinds that were asked for while a graph was captured, when no trial can run."""


def cache_folder() -> Path:
    """Where verdicts are kept: ``$MHLA_CACHE``, or ``mhla`` in the user's cache."""
    if own := os.environ.get("MHLA_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mhla"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"mhla-{os.getuid()}"


@lru_cache
def environment(device: str) -> dict[str, str]:
    """The device, and the versions that compile and run a kernel on it: a verdict holds for these.

    Args:
        device: as torch names it, ``"cuda:0"`` or ``"cpu"`` (the interpreter).
    """
    found = {"device": "interpreter", "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("triton", "pytorch-triton"):
        with suppress(PackageNotFoundError):
            found["triton"] = version(package)
            break
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = f"{properties.name} {properties.major}.{properties.minor}"
        with suppress(OSError):
            found["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("  ")[1].strip()
    own = sorted(Path(__file__).parent.rglob("*.py"))
    found["kernels"] = sha256(b"".join(path.read_bytes() for path in own)).hexdigest()[:12]
    return found


def name_of(device: str) -> str:
    """Of the files for a device and the versions on it."""
    return sha256(json.dumps(environment(device), sort_keys=True).encode()).hexdigest()[:16]


def folder_of(device: str) -> Path:
    """Folder that keeps the verdicts for a device."""
    return cache_folder() / "verdicts" / name_of(device)


def may_use(kind: str, device: str, trial: Callable[[], Verdict]) -> bool:
    """Whether a kernel may be used, by what is known or by a trial; one warning for each kind that may not.

    Args:
        kind: kind of kernel, a name that can be part of a file's.
        device: that it would run on.
        trial: compares the kernel with the PyTorch form. It runs in a thread of its own, where no mode of torch is on.
    """
    key = device, kind
    # if it was withdrawn since, its operator computes the PyTorch form, and saves the same tensors for a recomputation
    if key in _verdicts:
        return _verdicts[key].agrees
    if kind in _withdrawn:
        return False
    if found := _kept(kind, device):
        _verdicts[key] = found
    else:
        if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
            if kind not in _unknown:
                _unknown.add(kind)
                _warn(kind, device, "it was not tried before a CUDA graph was captured; call it once before")
            return False
        _verdicts[key] = _tried(kind, device, trial)
    if not _verdicts[key].agrees:
        withdraw(kind, device, _verdicts[key].reason)
    return _verdicts[key].agrees


def try_again(kind: str, device: str, trial: Callable[[], Verdict]) -> Verdict:
    """The verdict of a new trial, whatever is known; it replaces what is kept."""
    _withdrawn.pop(kind, None)
    _verdicts[device, kind] = _tried(kind, device, trial)
    return _verdicts[device, kind]


def withdraw(kind: str, device: str, reason: str) -> None:
    """Use a kernel no more in this process; warn of it once."""
    if kind not in _withdrawn:
        _withdrawn[kind] = reason
        _warn(kind, device, reason)


def withdrawn() -> dict[str, str]:
    """Kinds of kernels that this process does not use, and why."""
    return dict(_withdrawn)


def guarded(kind: str, device: torch.device, run: Callable[[], Any], instead: Callable[[], Any]) -> Any:
    """``run()``; if it fails, and ``kind`` is named, the kernel is withdrawn and ``instead()`` gives the result."""
    if kind in _withdrawn:
        return instead()
    try:
        return run()
    except Exception as error:
        if not kind or _is_fatal(error):
            raise
        withdraw(kind, str(device), short(error))
    return instead()  # out of the handler, which keeps the buffers of the call that failed


def agree_on_kernels(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Use no kernel that any process of a group has withdrawn. A collective: every process of the group calls it.

    Returns:
        The kinds that no process uses now, and why.
    """
    if dist.is_available() and dist.is_initialized():
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, _withdrawn, group)
        for rank, theirs in enumerate(every):
            for kind, reason in theirs.items():
                _withdrawn.setdefault(kind, f"process {rank}: {reason}")
    return withdrawn()


def forget() -> None:
    """Forget what this process knows; what is kept in the cache stays."""
    for known in (_verdicts, _withdrawn, _unknown):
        known.clear()
    environment.cache_clear()


def in_own_thread(run: Callable[[], Any], device: torch.device) -> Any:
    """``run()`` where no mode of torch is on (fake tensors, inference, autocast), on the same stream.

    Backward passes in it run in its thread: the one that autograd has for the device may be waiting for it.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def with_stream() -> Any:
        on_stream = torch.cuda.stream(stream) if stream is not None else nullcontext()
        with on_stream, torch.autograd.set_multithreading_enabled(False):
            return run()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(with_stream).result()


def compare(name: str, got: Tensor, want: Tensor, bound: float) -> tuple[float, str]:
    """The norm of the difference, relative to that of ``want``, and what is wrong with it (empty for nothing)."""
    got, want = got.double(), want.double()
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    return error, "" if error <= bound else f"{name} is off by {error:.2g} of its norm (allowed: {bound:g})"


def short(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _warn(kind: str, device: str, reason: str) -> None:
    found = environment(device)
    versions = ", ".join(f"{name} {found[name]}" for name in ("driver", "torch", "triton") if name in found)
    warnings.warn(
        f"the Triton kernel {kind} is not used on {found['device']} ({versions}): {reason}. The PyTorch form takes its "
        'place, and backend="triton" raises the whole error.',
        RuntimeWarning,
        stacklevel=3,
    )


def _is_fatal(error: BaseException) -> bool:
    return isinstance(error, FATAL) or any(words in str(error) for words in EXHAUSTED)


def _tried(kind: str, device: str, trial: Callable[[], Verdict]) -> Verdict:
    """A trial, with a locked mark on the disk as long as it runs: if it takes the process with it, later ones know.

    Numbers, and what Triton's compiler says, are kept; other errors may pass, and count for this process alone.
    """
    folder, start = folder_of(device), time.perf_counter()
    mark = folder / f"{kind}.{uuid4().hex}.running"
    lasting = True
    with ExitStack() as held:
        with suppress(OSError):
            own_folder(folder, cache_folder())
            fcntl.flock(held.enter_context(mark.open("x")), fcntl.LOCK_EX)
        try:
            verdict = in_own_thread(trial, torch.device(device))
        except BaseException as error:
            if _is_fatal(error) or not isinstance(error, Exception):
                with suppress(OSError):
                    mark.unlink()
                raise
            lasting = type(error).__module__.startswith("triton")
            verdict = Verdict(False, short(error), time.perf_counter() - start)
        if lasting and mark.exists():
            _keep(verdict, mark.with_suffix(".part"), folder / f"{kind}.json", device)
        for ended in (mark, *_ended_trials(kind, folder)):
            with suppress(OSError):
                ended.unlink()
    return verdict


def _keep(verdict: Verdict, aside: Path, path: Path, device: str) -> None:
    """Write a verdict to the cache; where that fails, later processes try the kernel again."""
    text = json.dumps({**asdict(verdict), "environment": environment(device)}, indent=2) + "\n"
    with suppress(OSError):
        with aside.open("x") as stream:
            stream.write(text)
        aside.replace(path)
    with suppress(OSError):
        aside.unlink(missing_ok=True)


def _kept(kind: str, device: str) -> Verdict | None:
    """The verdict in the cache, or one against a kind whose trials ended their processes; None for neither."""
    folder = folder_of(device)
    if found := _read(folder / f"{kind}.json"):
        return found
    ended = _ended_trials(kind, folder)
    if len(ended) < 2:  # one may have been stopped from outside
        return None
    return Verdict(False, f"trials of it ended their processes (remove {folder / kind}.*.running to try again)", 0.0)


def _read(path: Path) -> Verdict | None:
    """The verdict in a file; None where there is none, it is damaged, or somebody else put it there."""
    try:
        found = json.loads(read_own(path, LARGEST))
        agrees, reason, seconds = found["agrees"], found["reason"], found["seconds"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(agrees) is not bool or not isinstance(reason, str) or type(seconds) not in (int, float):
        return None
    printable = "".join(sign if sign.isprintable() else "?" for sign in reason[:1000])
    return Verdict(agrees, f"{printable} (known from {path})", seconds)


def _ended_trials(kind: str, folder: Path) -> list[Path]:
    """Marks of trials whose processes are gone: nobody holds their lock."""
    found = []
    for mark in folder.glob(f"{kind}.*.running"):
        with suppress(OSError), open(open_own(mark)) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found.append(mark)
    return found


def forget_kept(device: str) -> None:
    """Remove all verdicts that are kept for a device: every kind of kernel is tried again at its next use."""
    with suppress(OSError):
        for path in folder_of(device).iterdir():
            if path.suffix == ".json" or re.fullmatch(r".+\.[0-9a-f]{32}\.(running|part)", path.name):
                path.unlink(missing_ok=True)
    forget()
