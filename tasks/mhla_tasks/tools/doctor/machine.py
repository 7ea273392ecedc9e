"""Checks of ``lightning doctor``: versions, devices, memory, disk, shared memory and the speed of decoding images."""

from __future__ import annotations

import io
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path

from lightning_mhla.system.numbers import rounded
from mhla_tasks.tools.doctor.report import Finding, Status

PROJECT = "lightning-mhla"
GIB = 2**30
PROBE_MIB = 64
"""Amount of data, in MiB, to write when the speed of a disk is measured."""
LEAST_DISK_GIB = 2.0
LEAST_SHARED_MIB = 256
"""Minimum free shared memory in MiB. Worker processes use it for batches, and are killed by a bus error if it is full."""
SLOW_DISK_MIB_S = 50
PICTURES = 48


def versions() -> Iterator[Finding]:
    """Check the versions of Python, of the required packages, and of the packages that only some tasks require.

    Yields:
        A finding for Python, for the required packages, and for each group of optional packages.
    """
    from packaging.markers import default_environment
    from packaging.requirements import Requirement

    yield Finding("versions", "python", "ok", platform.python_version(), values={"executable": sys.executable})
    requirements = [Requirement(line) for line in requires(PROJECT) or ()]
    extras = sorted(distribution(PROJECT).metadata.get_all("Provides-Extra") or [])
    for extra in ("", *(name for name in extras if name not in ("all", "test"))):
        environment = {**default_environment(), "extra": extra}
        selected = [
            requirement
            for requirement in requirements
            if (requirement.marker is None or requirement.marker.evaluate(environment))
            and (not extra or requirement.marker is not None)
        ]
        missing, installed = [], []
        for requirement in selected:
            try:
                number = version(requirement.name)
            except PackageNotFoundError:
                missing.append(f"{requirement.name} is not installed")
                continue
            installed.append(f"{requirement.name} {number}")
            if not requirement.specifier.contains(number, prereleases=True):
                missing.append(f"{requirement.name} {number} is not {requirement.specifier}")
        target = f"'{PROJECT}[{extra}]'" if extra else PROJECT
        status: Status = "ok" if not missing else "note" if extra else "wrong"
        advice = f"pip install -U {target}" if missing else ""
        yield Finding("versions", extra or "needed", status, "; ".join(missing) or ", ".join(installed), advice)


def devices() -> Iterator[Finding]:
    """Check the processor, the memory, and the GPUs with their driver, CUDA and NCCL.

    Yields:
        A finding for the processor and the memory, one for each GPU, and one for the driver. Without a GPU, one finding that
        there is none replaces those of the GPUs and the driver.
    """
    import torch

    cores, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    yield Finding(
        "devices",
        "processor",
        "ok",
        f"{cores} cores, {rounded(memory)} GiB",
        values={"cores": cores, "memory_gib": memory},
    )
    built = torch.version.cuda or torch.version.hip
    if not torch.cuda.is_available():
        advice = ""
        status: Status = "note"
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            advice = "CUDA_VISIBLE_DEVICES is empty, and hides all GPUs"
        elif Path("/proc/driver/nvidia/version").exists() and torch.version.cuda is None:
            advice, status = "this torch is built without CUDA: install one that is (pytorch.org)", "wrong"
        elif Path("/proc/driver/nvidia/version").exists():
            advice, status = "there is an NVIDIA driver: compare `nvidia-smi` with the CUDA version of torch", "wrong"
        yield Finding("devices", "GPU", status, f"none (torch {torch.__version__}, built for {built})", advice)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        old = (properties.major, properties.minor) < (8, 0)
        yield Finding(
            "devices", f"GPU {index}", "note" if old else "ok",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, {rounded(free / GIB)} of "
            f"{rounded(total / GIB)} GiB free, {properties.multi_processor_count} multiprocessors",
            "too old for the Triton kernels (8.0 and later): the PyTorch forms are used" if old else "",
            {"memory_gib": total / GIB, "free_gib": free / GIB},
        )  # fmt: skip
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text().splitlines()[0] if driver.exists() else "unknown"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    yield Finding("devices", "driver", "ok", f"{text}; CUDA {torch.version.cuda}, NCCL {nccl}")


def storage() -> Iterator[Finding]:
    """Check the free space and the write speed, both of the current directory's disk and of shared memory.

    Yields:
        A finding for the free disk space, one for the write speed of the disk, and one for shared memory if it exists.
    """
    free = shutil.disk_usage(Path.cwd()).free / GIB
    yield Finding(
        "storage", "room for runs", "ok" if free >= LEAST_DISK_GIB else "wrong", f"{rounded(free)} GiB free in {Path.cwd()}",
        "" if free >= LEAST_DISK_GIB else "make room, or choose another folder with --run_dir", {"free_gib": free},
    )  # fmt: skip
    try:
        speed = _write_speed(Path.cwd())
    except OSError as error:
        yield Finding("storage", "runs", "wrong", f"{error}", "go to a folder that you can write to, or give --run_dir")
    else:
        slow = speed < SLOW_DISK_MIB_S
        yield Finding(
            "storage", "runs", "note" if slow else "ok", f"{rounded(speed)} MiB/s written",
            "checkpoints will take long: a local disk for --run_dir is faster" if slow else "", {"mib_per_s": speed},
        )  # fmt: skip
    shared = Path("/dev/shm")
    if shared.is_dir():
        room = shutil.disk_usage(shared).free / 2**20
        small = room < LEAST_SHARED_MIB
        pace = f", {rounded(_write_speed(shared))} MiB/s" if room > 2 * PROBE_MIB else ""
        yield Finding(
            "storage", "shared memory", "wrong" if small else "ok",
            f"{rounded(room / 1024)} GiB free{pace}",
            "workers that load data need it: docker run --shm-size=8g, or --data.num_workers=0" if small else "",
            {"free_mib": room},
        )  # fmt: skip


def _write_speed(folder: Path) -> float:
    data = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder) as stream:
        start = time.perf_counter()
        for _ in range(PROBE_MIB):
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
        return PROBE_MIB / (time.perf_counter() - start)


def pictures() -> Iterator[Finding]:
    """Measure how fast one core decodes and resizes photographs, as data loading workers do in ImageNet training.

    Yields:
        One finding with the number of images per second.
    """
    import numpy as np
    from PIL import Image

    from lightning_mhla.data.images import open_image

    waves = np.sin(np.arange(500)[:, None, None] / 9 + np.arange(400)[None, :, None] / 7 + np.arange(3))
    noise = np.random.default_rng(0).normal(0, 20, (500, 400, 3))
    stream = io.BytesIO()
    Image.fromarray((127 + 80 * waves + noise).clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    start = time.perf_counter()
    for _ in range(PICTURES):
        with open_image(stream.getvalue()) as image:
            image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC, reducing_gap=2.0)
    rate = PICTURES / (time.perf_counter() - start)
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        "data", "JPEG files of 400 x 500", "ok",
        f"{rounded(rate)} a second on one core, at most {rounded(rate * cores)} on {cores}", values={"per_core_per_s": rate},
    )  # fmt: skip
