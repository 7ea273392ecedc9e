"""Decision whether ``backend="auto"`` may use a fused kernel on this machine.

Before the first use of a kind of kernel, a trial compares it with the PyTorch form. The verdict is stored in the user's cache
under the device, the versions of the driver, torch and Triton, and a hash of the kernels' source, so that the trial runs
once. A kernel that fails later is withdrawn for the rest of the process. See :func:`may_use`, :func:`guarded` and
:func:`agree_on_kernels`.

Longer than other modules: a verdict's life, from the trial to its withdrawal, is in one place.
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
"""Errors that do not mean that the kernel is wrong."""
EXHAUSTED = ("out of memory", "ALLOC_FAILED")
"""Parts of messages of such errors: Triton's driver and cuBLAS have no error class for lack of memory."""

BOUNDS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 4e-2)}
"""Allowed errors of outputs and of gradients, relative to their norm: a few times the errors of a correct kernel."""


LARGEST = 1 << 16
"""Largest size of a verdict file in bytes."""


@dataclass(frozen=True)
class Verdict:
    """Result of the trial of a Triton kernel: whether its outputs and gradients agree with those of PyTorch.

    Attributes:
        agrees: whether the kernel may be used.
        reason: why the kernel may not be used, or the measured errors.
        seconds: duration of the trial, compilation included.
    """

    agrees: bool
    reason: str
    seconds: float


_verdicts: dict[tuple[str, str], Verdict] = {}
"""Verdicts in this process, by device and kind."""
_withdrawn: dict[str, str] = {}
"""Kinds that this process no longer uses, with the reasons."""
_unknown: set[str] = set()
"""Kinds that were requested during the capture of a graph, when no trial can run."""


def cache_folder() -> Path:
    """Return the folder that stores trial results of fused kernels: ``$MHLA_CACHE``, or ``mhla`` in the user's cache folder."""
    if folder := os.environ.get("MHLA_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mhla"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"mhla-{os.getuid()}"


@lru_cache
def environment(device: str) -> dict[str, str]:
    """Return the properties for which a stored verdict is valid: the device, software versions, and a hash of the kernels.

    Args:
        device: name of the device in torch, such as ``"cuda:0"``; ``"cpu"`` for Triton's interpreter.
    """
    details = {"device": "interpreter", "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("triton", "pytorch-triton"):
        with suppress(PackageNotFoundError):
            details["triton"] = version(package)
            break
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        details["device"] = f"{properties.name} {properties.major}.{properties.minor}"
        with suppress(OSError):
            details["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("  ")[1].strip()
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    details["kernels"] = sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    return details


def name_of(device: str) -> str:
    """Return the name of the folder that stores verdicts for a device: a hash of the result of :func:`environment`."""
    return sha256(json.dumps(environment(device), sort_keys=True).encode()).hexdigest()[:16]


def folder_of(device: str) -> Path:
    """Return the path of the folder that stores the results of kernel trials on a device."""
    return cache_folder() / "verdicts" / name_of(device)


def may_use(kind: str, device: str, trial: Callable[[], Verdict]) -> bool:
    """Return whether a Triton kernel may be used on a device; run its trial if no earlier result is stored.

    Args:
        kind: name of the kind of kernel, used in file names.
        device: device that the kernel would run on.
        trial: function that compares the kernel with the PyTorch form. It runs in a separate thread, where no mode of torch
            (such as autocast) is active.
    """
    key = device, kind
    # True even if the kernel was withdrawn since: its operator then computes the PyTorch form. Another path would save other
    # tensors in a recomputation than in the first pass, which checkpointing of activations rejects.
    if key in _verdicts:
        return _verdicts[key].agrees
    if kind in _withdrawn:
        return False
    if stored := _kept(kind, device):
        _verdicts[key] = stored
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
    """Run the trial of a kernel again, and replace the stored verdict by the new one.

    Args:
        kind: kind of kernel, as for :func:`may_use`.
        device: device that the kernel runs on.
        trial: function that compares the kernel with the PyTorch form.

    Returns:
        The new verdict.
    """
    _withdrawn.pop(kind, None)
    _verdicts[device, kind] = _tried(kind, device, trial)
    return _verdicts[device, kind]


def withdraw(kind: str, device: str, reason: str) -> None:
    """Stop using a kind of Triton kernel in this process, and warn about it once, with the reason."""
    if kind not in _withdrawn:
        _withdrawn[kind] = reason
        _warn(kind, device, reason)


def withdrawn() -> dict[str, str]:
    """Return a dict of the kinds of Triton kernels that this process no longer uses, with the reasons as values."""
    return dict(_withdrawn)


def guarded(kind: str, device: torch.device, run: Callable[[], Any], instead: Callable[[], Any]) -> Any:
    """Run a Triton kernel; if it fails, stop using it in this process and compute the result with PyTorch.

    Args:
        kind: name of the kind of kernel. If it is empty, every error of ``run`` is raised.
        device: device that the kernel runs on.
        run: function that calls the kernel.
        instead: function that computes the same result with PyTorch.

    Returns:
        The result of ``run``, or that of ``instead``.

    Raises:
        Exception: if ``run`` fails for a reason that is not a fault of the kernel, such as lack of memory, or if ``kind`` is
            empty.
    """
    if kind in _withdrawn:
        return instead()
    try:
        return run()
    except Exception as error:
        if not kind or _is_fatal(error):
            raise
        withdraw(kind, str(device), short(error))
    return instead()  # outside the handler: the error's traceback keeps the buffers of the failed call alive


def agree_on_kernels(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Stop using every Triton kernel that any process of a group has stopped using.

    This is a collective operation: every process of the group must call it.

    Args:
        group: processes that agree; None for all processes.

    Returns:
        A dict whose keys are the kinds of kernels that no process uses any more, and whose values are the reasons.
    """
    if dist.is_available() and dist.is_initialized():
        withdrawn_by_rank: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(withdrawn_by_rank, _withdrawn, group)
        for rank, reasons in enumerate(withdrawn_by_rank):
            for kind, reason in reasons.items():
                _withdrawn.setdefault(kind, f"process {rank}: {reason}")
    return withdrawn()


def forget() -> None:
    """Clear this process's record of kernel trials; verdicts stored in the cache folder stay."""
    for record in (_verdicts, _withdrawn, _unknown):
        record.clear()
    environment.cache_clear()


def in_own_thread(run: Callable[[], Any], device: torch.device) -> Any:
    """Call a function in a separate thread, where no mode of torch (fake tensors, inference, autocast) is active.

    The thread uses the current stream. Backward passes run in this thread too, since autograd's own thread for the device may
    be waiting for it.

    Args:
        run: function to call.
        device: device whose current stream the thread uses.

    Returns:
        The result of ``run``.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def with_stream() -> Any:
        on_stream = torch.cuda.stream(stream) if stream is not None else nullcontext()
        with on_stream, torch.autograd.set_multithreading_enabled(False):
            return run()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(with_stream).result()


def compare(name: str, actual: Tensor, want: Tensor, bound: float) -> tuple[float, str]:
    """Return the relative error of a result, and a message if the error exceeds a bound.

    Args:
        name: name of the result, for the message.
        actual: the result.
        want: the expected result.
        bound: largest allowed relative error.

    Returns:
        The relative error (norm of the difference divided by the norm of ``want``), and a message, empty if the error is
        allowed.
    """
    actual, want = actual.double(), want.double()
    error = float((actual - want).norm() / want.norm().clamp(min=1e-30))
    # `error <= bound`, not its opposite: NaN must not pass
    return error, "" if error <= bound else f"{name} is off by {error:.2g} of its norm (allowed: {bound:g})"


def short(error: BaseException) -> str:
    """Format an error as the name of its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _warn(kind: str, device: str, reason: str) -> None:
    details = environment(device)
    versions = ", ".join(f"{name} {details[name]}" for name in ("driver", "torch", "triton") if name in details)
    warnings.warn(
        f"the Triton kernel {kind} is not used on {details['device']} ({versions}): {reason}. The PyTorch form is used "
        'instead; backend="triton" raises the complete error.',
        RuntimeWarning,
        stacklevel=3,
    )


def _is_fatal(error: BaseException) -> bool:
    return isinstance(error, FATAL) or any(fragment in str(error) for fragment in EXHAUSTED)


def _tried(kind: str, device: str, trial: Callable[[], Verdict]) -> Verdict:
    """Run the trial of a kernel, and store its verdict in the cache if the verdict is final.

    A mark file exists, and is locked, while the trial runs. If the trial crashes the process, the file stays and tells later
    processes of the crash. A verdict is final if the trial compared results, or if Triton's compiler raised an error. Any other
    error may be temporary, and its verdict is valid for this process only.
    """
    folder, start = folder_of(device), time.perf_counter()
    mark = folder / f"{kind}.{uuid4().hex}.running"
    lasting = True
    with ExitStack() as resources:
        with suppress(OSError):  # without a writable cache, the trial runs and only its verdict is not stored
            own_folder(folder, cache_folder())
            fcntl.flock(resources.enter_context(mark.open("x")), fcntl.LOCK_EX)
        try:
            verdict = in_own_thread(trial, torch.device(device))
        except BaseException as error:
            # an interrupted trial proves nothing: its mark must not count as a crash
            if _is_fatal(error) or not isinstance(error, Exception):
                with suppress(OSError):
                    mark.unlink()
                raise
            lasting = type(error).__module__.startswith("triton")
            verdict = Verdict(False, short(error), time.perf_counter() - start)
        if lasting and mark.exists():  # the mark is missing where the folder cannot be written to
            _keep(verdict, mark.with_suffix(".part"), folder / f"{kind}.json", device)
        for ended in (mark, *_ended_trials(kind, folder)):
            with suppress(OSError):
                ended.unlink()
    return verdict


def _keep(verdict: Verdict, aside: Path, path: Path, device: str) -> None:
    """Write a verdict to the cache atomically. If this fails, later processes run the trial again.

    Args:
        verdict: verdict to write.
        aside: path of the temporary file that is written first.
        path: path of the verdict file.
        device: device that the verdict is for.
    """
    text = json.dumps({**asdict(verdict), "environment": environment(device)}, indent=2) + "\n"
    with suppress(OSError):
        with aside.open("x") as stream:
            stream.write(text)
        aside.replace(path)  # atomic: another process reads all of the verdict or none
    with suppress(OSError):
        aside.unlink(missing_ok=True)


def _kept(kind: str, device: str) -> Verdict | None:
    """Return the stored verdict on a kind of kernel; None without one.

    If there is none, but two trials crashed their processes, the result is a verdict against the kernel.
    """
    folder = folder_of(device)
    if stored := _read(folder / f"{kind}.json"):
        return stored
    ended = _ended_trials(kind, folder)
    if len(ended) < 2:  # a single one may have been killed for other reasons
        return None
    return Verdict(False, f"trials of it ended their processes (remove {folder / kind}.*.running to try again)", 0.0)


def _read(path: Path) -> Verdict | None:
    """Read the verdict in a file; None if the file is missing or damaged, is a link, or belongs to a different user."""
    try:
        fields = json.loads(read_own(path, LARGEST))
        agrees, reason, seconds = fields["agrees"], fields["reason"], fields["seconds"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(agrees) is not bool or not isinstance(reason, str) or type(seconds) not in (int, float):
        return None
    printable = "".join(sign if sign.isprintable() else "?" for sign in reason[:1000])
    return Verdict(agrees, f"{printable} (known from {path})", seconds)


def _ended_trials(kind: str, folder: Path) -> list[Path]:
    """List the mark files of trials that crashed: the mark files that no running process has locked."""
    ended = []
    for mark in folder.glob(f"{kind}.*.running"):
        with suppress(OSError), open(open_own(mark)) as stream:
            # fails while the trial runs; the system releases the lock of a process that ended, however it ended
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            ended.append(mark)
    return ended


def forget_kept(device: str) -> None:
    """Delete all stored verdicts for a device, so that each kind of kernel gets a new trial at its next use."""
    with suppress(OSError):
        for path in folder_of(device).iterdir():
            if path.suffix == ".json" or re.fullmatch(r".+\.[0-9a-f]{32}\.(running|part)", path.name):
                path.unlink(missing_ok=True)
    forget()
