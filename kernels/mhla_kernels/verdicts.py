"""Decision on whether ``backend="auto"`` may use a Triton kernel on this machine.

Before the first use of a kernel, a trial compares it with PyTorch. If they agree, a file in the user's cache folder says so,
and later processes skip the trial. A kernel that disagrees, or that fails later, is not used for the rest of the process. See
:func:`may_use`, :func:`guarded` and :func:`agree_on_kernels`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from mhla_kernels.own_files import check_own, own_folder

EXHAUSTED = ("out of memory", "ALLOC_FAILED")
"""Parts of error messages about lack of memory, for which Triton's driver and cuBLAS have no error class."""


class WrongNumbersError(ArithmeticError):
    """Error for a Triton kernel whose outputs or gradients differ too much from those of PyTorch."""


class Verdict(NamedTuple):
    """Result of comparing a Triton kernel with PyTorch.

    Attributes:
        agrees: whether outputs and gradients agree, so that the kernel may be used.
        reason: numerical errors that were measured or, if ``agrees`` is False, why the kernel may not be used.
    """

    agrees: bool
    reason: str


_usable: dict[tuple[str, str], bool] = {}
"""Whether a kernel agrees with PyTorch, by the device and the name of the kernel."""
_withdrawn: dict[str, str] = {}
"""Reasons why this process no longer uses a kernel, by the name of the kernel."""
_captured: set[str] = set()
"""Names of kernels that were requested during the capture of a CUDA graph, when no trial can run."""


def cache_folder() -> Path:
    """Return the folder that stores which Triton kernels agree with PyTorch.

    The environment variable ``MHLA_CACHE`` names the folder. If it is not set, the folder is ``mhla`` in the user's cache
    folder. For a user without a home folder, it is ``mhla-UID``, with the user ID, in the system's folder for temporary files.
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

    These properties are the model of the device, the versions of torch, CUDA, Triton and (if it is known) the driver, and a
    hash of the package's source files.

    Args:
        device: name of the device in torch, such as ``"cuda:0"``; ``"cpu"`` for Triton's interpreter.
    """
    import triton  # not at the top: this module also serves machines without Triton

    details = {"device": "interpreter", "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    details["triton"] = triton.__version__
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        details["device"] = f"{properties.name} {properties.major}.{properties.minor}"
        with suppress(OSError):
            details["driver"] = driver_version(Path("/proc/driver/nvidia/version").read_text())
    # After a change of any kernel or of its launcher, kernels must be compared again.
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


def folder_of(device: str) -> Path:
    """Return the path of the folder that stores which Triton kernels agree with PyTorch on a device.

    The name of the folder is a hash of the result of :func:`environment`.

    Args:
        device: name of the device in torch, such as ``"cuda:0"``.
    """
    name = sha256(json.dumps(environment(device), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "verdicts" / name


def may_use(kind: str, device: str, trial: Callable[[], str]) -> bool:
    """Return whether a Triton kernel agrees with PyTorch on a device, so that it may be used.

    The first call compares the kernel with PyTorch, unless an earlier process has stored that it agrees. Later calls return the
    same result, even if the kernel fails in between (:func:`guarded` then uses PyTorch). During the capture of a CUDA graph, no
    comparison is possible, and the result is False if there is none yet. It is also False if this process stopped using the
    kernel before any comparison, for example because another process had stopped using it (see :func:`agree_on_kernels`).

    Args:
        kind: name of the kernel, which is used in file names.
        device: name of the device that the kernel would run on, such as ``"cuda:0"``.
        trial: function that compares the kernel with PyTorch, as for :func:`judge`.

    Raises:
        Exception: if the comparison fails for lack of memory.
    """
    key = device, kind
    # True even if the kernel was withdrawn later: its operator then falls back to PyTorch inside. Leaving the operator out
    # would change which tensors are saved for the backward pass, and activation checkpointing rejects a recomputation that
    # saves different tensors than the first pass.
    if key in _usable:
        return _usable[key]
    if kind in _withdrawn:
        return False
    if _is_stored(_path_of(kind, device)):
        _usable[key] = True
        return True
    if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
        if kind not in _captured:
            _captured.add(kind)
            _warn(kind, device, "it was not tried before a CUDA graph was captured; call it once before")
        return False
    verdict = judge(kind, device, trial)
    if not verdict.agrees:
        withdraw(kind, device, verdict.reason)
    return verdict.agrees


def judge(kind: str, device: str, trial: Callable[[], str]) -> Verdict:
    """Compare a Triton kernel with PyTorch now, and store for later processes whether the two agree.

    Args:
        kind: name of the kernel, which is used in file names.
        device: name of the device that the kernel runs on, such as ``"cuda:0"``.
        trial: function that compares the kernel with PyTorch and returns a text with the numerical errors. It raises an
            exception if they are too large. It runs in a separate thread, where no mode of torch (such as autocast) is active.

    Returns:
        The result. From now on, :func:`may_use` returns its field ``agrees`` in this process.

    Raises:
        Exception: if the trial fails for lack of memory.
    """
    _withdrawn.pop(kind, None)
    try:
        verdict = Verdict(True, in_own_thread(trial, torch.device(device)))
    except Exception as error:
        if _lacks_memory(error):
            raise
        verdict = Verdict(False, str(error) if isinstance(error, WrongNumbersError) else short(error))
    _usable[device, kind] = verdict.agrees
    path = _path_of(kind, device)
    with suppress(OSError):  # without a writable cache, every process runs its own trial
        own_folder(path.parent, cache_folder())
        if verdict.agrees:
            # Only the existence of the file counts; its content is for a person.
            _write(path, {"errors": verdict.reason, "environment": environment(device)})
        else:
            check_own(path)
            path.unlink()
    return verdict


def withdraw(kind: str, device: str, reason: str) -> None:
    """Stop using a Triton kernel in this process, and warn about it once, with the reason.

    Args:
        kind: name of the kernel.
        device: name of a device, such as ``"cuda:0"``, for the warning. The kernel is no longer used on any device.
        reason: why the kernel may not be used.
    """
    if kind not in _withdrawn:
        _withdrawn[kind] = reason
        _warn(kind, device, reason)


def withdrawn() -> dict[str, str]:
    """Return a dict of the Triton kernels that this process no longer uses: names as keys, reasons as values."""
    return dict(_withdrawn)


def guarded(kind: str, device: torch.device, run: Callable[[], Any], instead: Callable[[], Any]) -> Any:
    """Run a Triton kernel; if it fails, stop using it in this process and compute the result with PyTorch.

    Args:
        kind: name of the kernel. If it is empty, errors of ``run`` are not handled.
        device: device that the kernel runs on.
        run: function that calls the kernel.
        instead: function that computes the same result with PyTorch.

    Returns:
        The result of ``run``, or of ``instead`` if the kernel fails or was withdrawn earlier.

    Raises:
        Exception: the error of ``run``, if it is due to lack of memory or if ``kind`` is empty.
    """
    if kind in _withdrawn:
        return instead()
    try:
        return run()
    except Exception as error:
        if not kind or _lacks_memory(error):
            raise
        withdraw(kind, str(device), short(error))
    return instead()  # outside the handler: the error's traceback keeps the buffers of the failed call alive


def agree_on_kernels(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Stop using every Triton kernel that any process of a group has stopped using.

    This is a collective operation: every process of the group must call it. Without ``torch.distributed``, it changes nothing.

    Args:
        group: process group whose processes take part; None for all processes.

    Returns:
        A dict whose keys are the names of the kernels that no process of the group uses any longer, and whose values are the
        reasons.
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
    """Clear this process's record of which Triton kernels may and may not be used; files in the cache folder stay."""
    for record in (_usable, _withdrawn, _captured):
        record.clear()
    environment.cache_clear()


def in_own_thread(run: Callable[[], Any], device: torch.device) -> Any:
    """Call a function in a separate thread, where no mode of torch (fake tensors, inference, autocast) is active.

    The thread uses the current CUDA stream of the calling thread. Backward passes in ``run`` stay in the new thread, because
    autograd's own thread for the device may be waiting for the result of this function.

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


def short(error: BaseException) -> str:
    """Format an error as the name of its type and up to 300 characters of the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _path_of(kind: str, device: str) -> Path:
    """Return the path of the file that says that a Triton kernel agrees with PyTorch on a device."""
    return folder_of(device) / f"{kind}.json"


def _is_stored(path: Path) -> bool:
    """Return whether a file with this path exists and belongs to this user or root; links do not count."""
    try:
        own_folder(path.parent, cache_folder())
        check_own(path)
    except OSError:
        return False
    return True


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file under an unpredictable name and rename it, so that nothing is written through a planted link."""
    aside = path.with_name(f"{path.stem}.{uuid4().hex}.part")
    try:
        with aside.open("x") as stream:
            stream.write(json.dumps(content, indent=2) + "\n")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _warn(kind: str, device: str, reason: str) -> None:
    details = environment(device)
    versions = ", ".join(f"{name} {details[name]}" for name in ("driver", "torch", "triton") if name in details)
    warnings.warn(
        f"the Triton kernel {kind} is not used on {details['device']} ({versions}): {reason}. The PyTorch form is used "
        'instead; backend="triton" raises the complete error.',
        RuntimeWarning,
        stacklevel=3,
    )


def _lacks_memory(error: Exception) -> bool:
    """Return whether an error reports lack of memory, which is not a fault of the kernel."""
    return isinstance(error, torch.OutOfMemoryError) or any(fragment in str(error) for fragment in EXHAUSTED)
