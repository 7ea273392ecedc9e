"""Decision whether ``backend="auto"`` may use a Triton kernel on this machine.

Before the first use of a kernel, a trial compares it with PyTorch. The result, called a verdict, is stored in the user's cache
folder under the device, the versions of the driver, torch and Triton, and a hash of the package's source files, so that the
trial runs once. A kernel that fails later is no longer used for the rest of the process. See :func:`may_use`, :func:`guarded`
and :func:`agree_on_kernels`.
"""

# Longer than other modules because it contains all steps from the trial of a kernel to its withdrawal.

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
"""Classes of errors that do not mean that a kernel is wrong."""
EXHAUSTED = ("out of memory", "ALLOC_FAILED")
"""Parts of error messages about lack of memory, for which Triton's driver and cuBLAS have no error class."""

BOUNDS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 4e-2)}
"""Allowed errors of outputs and of gradients, relative to their norm: a few times the errors of a correct kernel."""


LARGEST = 1 << 16
"""Largest size of a verdict file in bytes."""


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a Triton kernel with PyTorch: whether their outputs and gradients agree.

    Attributes:
        agrees: whether the kernel may be used.
        reason: why the kernel may not be used, or the measured errors.
        seconds: duration of the comparison in seconds, compilation included.
    """

    agrees: bool
    reason: str
    seconds: float


_verdicts: dict[tuple[str, str], Verdict] = {}
"""Verdicts in this process, by the device and the name of the kernel."""
_withdrawn: dict[str, str] = {}
"""Reasons why this process no longer uses a kernel, by the name of the kernel."""
_unknown: set[str] = set()
"""Names of kernels that were requested during the capture of a CUDA graph, when no trial can run."""


def cache_folder() -> Path:
    """Return the folder that stores the results of comparing Triton kernels with PyTorch.

    This is the folder in the environment variable ``MHLA_CACHE``, or ``mhla`` in the user's cache folder if it is not set. For
    a user without a home folder, it is in the system's folder for temporary files.
    """
    if folder := os.environ.get("MHLA_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mhla"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"mhla-{os.getuid()}"


@lru_cache
def environment(device: str) -> dict[str, str]:
    """Return the properties on which the result of comparing a Triton kernel with PyTorch depends, by name.

    They are the device, the versions of torch, CUDA, Triton and the driver, and a hash of the package's source files.

    Args:
        device: name of the device in torch, such as ``"cuda:0"``; ``"cpu"`` for Triton's interpreter.
    """
    details = {"device": "interpreter", "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    # Some builds of torch install Triton under the second name.
    for package in ("triton", "pytorch-triton"):
        with suppress(PackageNotFoundError):
            details["triton"] = version(package)
            break
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        details["device"] = f"{properties.name} {properties.major}.{properties.minor}"
        with suppress(OSError):
            details["driver"] = driver_version(Path("/proc/driver/nvidia/version").read_text())
    # A change of any kernel or of its launcher makes earlier verdicts invalid.
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    details["kernels"] = sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    return details


def driver_version(text: str) -> str:
    """Return the version of NVIDIA's kernel driver, such as ``"570.86.15"``.

    Args:
        text: content of ``/proc/driver/nvidia/version``. If its first line contains no version, this line is returned.
    """
    line = text.partition("\n")[0]
    number = re.search(r"\d+(\.\d+)+", line)
    return number[0] if number else line


def name_of(device: str) -> str:
    """Return the name of the folder that stores the results of comparing Triton kernels with PyTorch on a device.

    The name is a hash of the device, the software versions and the package's source files.

    Args:
        device: name of the device in torch, such as ``"cuda:0"``.
    """
    return sha256(json.dumps(environment(device), sort_keys=True).encode()).hexdigest()[:16]


def folder_of(device: str) -> Path:
    """Return the path of the folder that stores the results of comparing Triton kernels with PyTorch on a device.

    Args:
        device: name of the device in torch, such as ``"cuda:0"``.
    """
    return cache_folder() / "verdicts" / name_of(device)


def may_use(kind: str, device: str, trial: Callable[[], Verdict]) -> bool:
    """Return whether a Triton kernel agrees with PyTorch on a device, so that it may be used.

    If no earlier result is stored, the kernel is compared with PyTorch now. During the capture of a CUDA graph this is not
    possible, and the result is False. It is also False if this process stopped using the kernel without comparing it, for
    example because another process had stopped using it (see :func:`agree_on_kernels`).

    Args:
        kind: name of the kernel, which is used in file names.
        device: name of the device that the kernel would run on, such as ``"cuda:0"``.
        trial: function that compares the kernel with PyTorch. It runs in a separate thread, where no mode of torch (such as
            autocast) is active.
    """
    key = device, kind
    # True even if the kernel was withdrawn later: its operator then falls back to PyTorch inside. Leaving the operator out
    # would change which tensors are saved for the backward pass, and activation checkpointing rejects a recomputation that
    # saves different tensors than the first pass.
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
    """Compare a Triton kernel with PyTorch again, and replace the stored result with the new one.

    Args:
        kind: name of the kernel, which is used in file names.
        device: name of the device that the kernel runs on, such as ``"cuda:0"``.
        trial: function that compares the kernel with PyTorch.

    Returns:
        The new result.
    """
    # Otherwise `guarded` would keep on using PyTorch whatever the new result is.
    _withdrawn.pop(kind, None)
    _verdicts[device, kind] = _tried(kind, device, trial)
    return _verdicts[device, kind]


def withdraw(kind: str, device: str, reason: str) -> None:
    """Stop using a Triton kernel in this process, and warn about it once, with the reason.

    Args:
        kind: name of the kernel.
        device: name of the device that the kernel runs on, such as ``"cuda:0"``.
        reason: why the kernel may not be used.
    """
    if kind not in _withdrawn:
        _withdrawn[kind] = reason
        _warn(kind, device, reason)


def withdrawn() -> dict[str, str]:
    """Return a dict from the name of each Triton kernel that this process no longer uses to the reason."""
    return dict(_withdrawn)


def guarded(kind: str, device: torch.device, run: Callable[[], Any], instead: Callable[[], Any]) -> Any:
    """Run a Triton kernel; if it fails, stop using it in this process and compute the result with PyTorch.

    Args:
        kind: name of the kernel. If it is empty, every error of ``run`` is raised.
        device: device that the kernel runs on.
        run: function that calls the kernel.
        instead: function that computes the same result with PyTorch.

    Returns:
        The result of ``run``, or of ``instead`` if the kernel fails or was withdrawn earlier.

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

    This is a collective operation: every process of the group must call it. Without ``torch.distributed``, it changes nothing.

    Args:
        group: processes that agree; None for all processes.

    Returns:
        A dict whose keys are the names of the kernels that no process uses any longer, and whose values are the reasons.
    """
    if dist.is_available() and dist.is_initialized():
        withdrawn_by_rank: list[Any] = [None] * dist.get_world_size(group)
        # Processes with different kernels would compute different numbers in the same step.
        dist.all_gather_object(withdrawn_by_rank, _withdrawn, group)
        for rank, reasons in enumerate(withdrawn_by_rank):
            for kind, reason in reasons.items():
                _withdrawn.setdefault(kind, f"process {rank}: {reason}")
    return withdrawn()


def forget() -> None:
    """Clear this process's record of which Triton kernels agree with PyTorch; results in the cache folder stay."""
    for record in (_verdicts, _withdrawn, _unknown):
        record.clear()
    environment.cache_clear()


def in_own_thread(run: Callable[[], Any], device: torch.device) -> Any:
    """Call a function in a separate thread, where no mode of torch (fake tensors, inference, autocast) is active.

    The thread uses the current CUDA stream of the calling thread. Backward passes in ``run`` stay in the new thread, because
    autograd's own thread for the device may be waiting for it.

    Args:
        run: function to call.
        device: device whose current stream the thread uses.

    Returns:
        The result of ``run``.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def with_stream() -> Any:
        on_stream = torch.cuda.stream(stream) if stream is not None else nullcontext()
        # Work that `run` launches must stay in the order of the caller's stream.
        with on_stream, torch.autograd.set_multithreading_enabled(False):
            return run()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(with_stream).result()


def compare(name: str, actual: Tensor, want: Tensor, bound: float) -> tuple[float, str]:
    """Compute the relative error of a result, and a message if the error exceeds a bound.

    Args:
        name: name of the result, for the message.
        actual: the computed result.
        want: the expected result.
        bound: largest allowed relative error.

    Returns:
        The relative error (norm of the difference divided by the norm of ``want``), and a message, which is empty if the error
        is allowed.
    """
    actual, want = actual.double(), want.double()
    error = float((actual - want).norm() / want.norm().clamp(min=1e-30))
    # `error <= bound`, not its opposite: NaN must not pass
    return error, "" if error <= bound else f"{name} is off by {error:.2g} of its norm (allowed: {bound:g})"


def short(error: BaseException) -> str:
    """Format an error as the name of its type and up to 300 characters of the first line of its message."""
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
    """Compare a Triton kernel with PyTorch (a trial), and store the result in the cache if it is final.

    While the trial runs, a locked mark file exists. If the trial crashes the process, the file stays and tells later processes
    of the crash. A result is final if the trial compared outputs, or if Triton's compiler raised an error. Any other error may
    be temporary, and its result is valid for this process only.
    """
    folder, start = folder_of(device), time.perf_counter()
    mark = folder / f"{kind}.{uuid4().hex}.running"
    lasting = True
    with ExitStack() as resources:
        with suppress(OSError):  # without a writable cache, the trial runs and only its verdict is not stored
            own_folder(folder, cache_folder())
            # The lock, unlike the file, goes away with the process: an unlocked mark belongs to a trial that crashed.
            fcntl.flock(resources.enter_context(mark.open("x")), fcntl.LOCK_EX)
        try:
            verdict = in_own_thread(trial, torch.device(device))
        except BaseException as error:
            # an interrupted trial proves nothing: its mark must not count as a crash
            if _is_fatal(error) or not isinstance(error, Exception):
                with suppress(OSError):
                    mark.unlink()
                raise
            # The compiler rejects a kernel every time; other errors, such as those of the driver, may not come back.
            lasting = type(error).__module__.startswith("triton")
            verdict = Verdict(False, short(error), time.perf_counter() - start)
        if lasting and mark.exists():  # the mark is missing where the folder cannot be written to
            _keep(verdict, mark.with_suffix(".part"), folder / f"{kind}.json", device)
        # This process has survived the trial, so earlier crashes prove nothing any more.
        for ended in (mark, *_ended_trials(kind, folder)):
            with suppress(OSError):
                ended.unlink()
    return verdict


def _keep(verdict: Verdict, aside: Path, path: Path, device: str) -> None:
    """Write the result of comparing a Triton kernel with PyTorch to the cache atomically.

    If this fails, later processes compare the kernel again.

    Args:
        verdict: result to write.
        aside: path of the temporary file that is written first.
        path: path of the final file.
        device: name of the device that the kernel ran on, such as ``"cuda:0"``.
    """
    text = json.dumps({**asdict(verdict), "environment": environment(device)}, indent=2) + "\n"
    with suppress(OSError):
        with aside.open("x") as stream:
            stream.write(text)
        aside.replace(path)  # atomic: another process reads all of the verdict or none
    with suppress(OSError):
        aside.unlink(missing_ok=True)


def _kept(kind: str, device: str) -> Verdict | None:
    """Return the stored result of comparing a Triton kernel with PyTorch; None if there is no result.

    If no result is stored, but at least two comparisons crashed their processes, return a result that rejects the kernel.
    """
    folder = folder_of(device)
    if stored := _read(folder / f"{kind}.json"):
        return stored
    ended = _ended_trials(kind, folder)
    if len(ended) < 2:  # a single one may have been killed for a different reason
        return None
    return Verdict(False, f"trials of it ended their processes (remove {folder / kind}.*.running to try again)", 0.0)


def _read(path: Path) -> Verdict | None:
    """Read the result of comparing a Triton kernel with PyTorch from a file.

    Returns:
        The result; None if the file is missing or damaged, is a link, or belongs to an untrusted user.
    """
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
    """List the mark files that crashed trials of a Triton kernel left behind.

    A trial compares the kernel with PyTorch. Its mark file is locked while it runs, and stays after a crash.

    Args:
        kind: name of the kernel.
        folder: folder of the mark files.
    """
    ended = []
    for mark in folder.glob(f"{kind}.*.running"):
        with suppress(OSError), open(open_own(mark)) as stream:
            # raises OSError while the trial runs; the system releases the lock when the process ends, even after a crash
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            ended.append(mark)
    return ended


def forget_kept(device: str) -> None:
    """Delete all stored results of comparing Triton kernels with PyTorch on a device.

    Each kernel is compared again at its next use.
    """
    with suppress(OSError):
        for path in folder_of(device).iterdir():
            if path.suffix == ".json" or re.fullmatch(r".+\.[0-9a-f]{32}\.(running|part)", path.name):
                path.unlink(missing_ok=True)
    forget()
