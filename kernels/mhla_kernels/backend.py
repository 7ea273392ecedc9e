"""Choice between PyTorch and the Triton kernels for an attention call."""

from __future__ import annotations

import os
import re
import warnings
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

Form = Literal["auto", "parallel", "chunked", "spanning", "reference"]
ChosenForm = Literal["parallel", "chunked", "spanning"]
"""Attention algorithms that ``form="auto"`` chooses from."""
Backend = Literal["auto", "torch", "triton"]
FORMS, BACKENDS = get_args(Form), get_args(Backend)

INSTALLED = find_spec("triton") is not None
"""Whether triton is installed. It is imported by the first call that needs it."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the Triton kernels run in Triton's interpreter on the CPU, as in tests."""

AUTOMATIC = os.environ.get("MHLA_BACKEND") or "auto"
"""Value of the environment variable ``MHLA_BACKEND``. With ``"torch"``, ``backend="auto"`` never uses the Triton kernels."""

WIDEST = 256
"""Largest width of keys and values that the Triton kernels support."""

LEAST_CAPABILITY = (8, 0)
"""Lowest compute capability that the Triton kernels support: the first with bfloat16 matrix units."""

LEAST_TRITON = {9: (3, 9), 10: (3, 9)}
"""Oldest version of Triton that ``backend="auto"`` uses, by the major compute capability of the GPU.

Older compilers can overlap two products that share an accumulator on datacenter Blackwell (triton-lang/triton #10821, fixed
by #10988), and read shared memory or registers of Hopper's matrix products out of order (#9433, #11366)."""


def check_form_and_backend(form: str, backend: str) -> None:
    """Check that ``form`` names a known attention algorithm and ``backend`` a known backend.

    Raises:
        ValueError: if a name is unknown; the message lists the known ones.
    """
    for option, value, choices in (("form", form, FORMS), ("backend", backend, BACKENDS)):
        if value not in choices:
            raise ValueError(f"{option}={value!r} is not one of {', '.join(map(repr, choices))}")


def choose_backend(backend: str, q: Tensor, k: Tensor, v: Tensor, form: str) -> Literal["torch", "triton"]:
    """Choose whether PyTorch or the Triton kernels compute an attention call.

    Args:
        backend: requested backend. ``"torch"`` is returned as it is, and so is ``"triton"`` if the kernels support the call.
            ``"auto"`` chooses Triton on a GPU if the kernels support the call, unless the installed version of Triton may
            miscompile the kernels for this GPU, or the environment variable ``MHLA_BACKEND`` is ``"torch"``.
        q: queries, ``[B, N, H, Dk]``.
        k: keys, ``[B, N, Hkv, Dk]``.
        v: values, ``[B, N, Hkv, Dv]``.
        form: requested algorithm, such as ``"chunked"`` or ``"auto"``. ``"reference"`` runs in PyTorch only.

    Raises:
        ValueError: if ``backend`` is ``"triton"`` and the kernels cannot run the call; the message states the reason. Also if
            ``backend`` is ``"auto"`` and the environment variable has an unknown value.
    """
    if backend == "auto" and AUTOMATIC not in ("auto", "torch"):
        raise ValueError(f"the environment variable MHLA_BACKEND={AUTOMATIC!r} is not 'auto' or 'torch'")
    if backend == "torch" or (backend == "auto" and (AUTOMATIC == "torch" or not is_native(q))):
        return "torch"
    obstacle = _obstacle(q, k, v, form)
    if backend == "triton":
        if obstacle:
            raise ValueError(f"backend='triton' cannot run this: {obstacle}; use backend='torch' or 'auto'")
        return "triton"
    return "triton" if obstacle is None and not _doubt(q) else "torch"


def is_native(q: Tensor) -> bool:
    """Return whether the queries ``q`` are on a GPU, for which Triton compiles its kernels instead of interpreting them."""
    return q.is_cuda


def _doubt(q: Tensor) -> str | None:
    """Return the reason why ``backend="auto"`` must not use the installed Triton on the GPU of ``q``, or None if it may.

    Old versions of Triton miscompile the kernels on some GPUs. The reason is also issued as a warning, once for each major
    compute capability. For a tensor on a CPU, the result is None.
    """
    if not q.is_cuda:
        return None
    return _distrust(_capability(q.device.index or 0)[0], _triton_version())


@lru_cache
def _triton_version() -> str:
    import triton

    return triton.__version__


@lru_cache
def _distrust(major: int, installed_version: str) -> str | None:
    oldest_trusted = LEAST_TRITON.get(major, (0, 0))
    if tuple(int(number) for number in re.findall(r"\d+", installed_version)[:2]) >= oldest_trusted:
        return None
    text = (
        f"Triton {installed_version} can miscompile matrix products for compute capability {major}.x; the PyTorch form is "
        f'used. Triton {".".join(map(str, oldest_trusted))} is trusted there, and backend="triton" uses the kernels in spite '
        "of it."
    )
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return text


def _obstacle(q: Tensor, k: Tensor, v: Tensor, form: str) -> str | None:
    """Return the reason why Triton cannot compute attention for q, k and v with the algorithm ``form``, or None if it can."""
    if form == "reference":
        return "the reference form exists only in PyTorch"
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return "the kernels take float32 and bfloat16, not float64"
    widest = max(q.shape[-1], v.shape[-1])
    if widest > WIDEST:
        return f"keys and values may have at most {WIDEST} features, not {widest}"
    if not INSTALLED:
        return "triton is not installed"
    if q.is_cuda and torch.version.hip is not None:
        return "the kernels are built for NVIDIA GPUs, and are untested on AMD GPUs"
    if q.is_cuda and not torch.cuda.is_available():
        return "there is no GPU, only fake tensors"
    if q.is_cuda:
        capability = _capability(q.device.index or 0)
        if capability < LEAST_CAPABILITY:
            return f"the GPU has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
        return None
    if q.device.type == "cpu" and INTERPRETED:
        return None
    return f"the tensors are on {q.device.type!r}, and TRITON_INTERPRET=1 was not set when the process started"


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
