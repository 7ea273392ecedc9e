"""Location of SLURM's programs: on the PATH, or unpacked from Debian's packages without installing them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mhla_kernels.own_files import own_folder

PACKAGES = ("slurmctld", "slurmd", "slurm-client")
DAEMONS = ("slurmctld", "slurmd", "slurmstepd")


class SlurmUnavailable(RuntimeError):  # noqa: N818 (a state of the machine, not a fault of the caller)
    """Error if SLURM cannot be found, unpacked or started on this machine. The message gives the reason in one sentence."""


@dataclass(frozen=True)
class Installation:
    """Paths of the programs, plugins and libraries of a SLURM installation.

    Attributes:
        controller: path of slurmctld.
        daemon: path of slurmd.
        stepd: path of slurmstepd; None for an installed SLURM, which finds its own.
        commands: folder of srun, sbatch and other commands.
        plugins: folder of the plugins; None for an installed SLURM, which finds its own.
        libraries: folders of shared libraries.
    """

    controller: Path
    daemon: Path
    stepd: Path | None
    commands: Path
    plugins: Path | None = None
    libraries: tuple[Path, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for SLURM's programs: those of this process, without those of an enclosing SLURM job."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH_", "SRUN_", "SCANCEL_"))}
        variables["PATH"] = os.pathsep.join([str(self.commands), variables.get("PATH", os.defpath)])
        if self.libraries:
            inherited = [variables["LD_LIBRARY_PATH"]] if variables.get("LD_LIBRARY_PATH") else []
            variables["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, self.libraries), *inherited])
        return variables


def find_or_unpack(cache: Path) -> Installation:
    """Find SLURM on the PATH, or unpack Debian's packages into `cache` (once, in 1 to 5 s, with the network).

    Raises:
        SlurmUnavailable: if there is no SLURM, and apt cannot download it.
    """
    return _installed() or _unpacked(cache.resolve())


def _installed() -> Installation | None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    programs = [shutil.which(name, path=path) for name in ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")]
    if None in programs:
        return None
    controller, daemon, srun = (Path(str(program)) for program in programs[:3])
    return Installation(controller, daemon, stepd=None, commands=srun.parent)


def _unpacked(cache: Path) -> Installation:
    root = cache / "root"
    complete = cache / "complete-2"  # increase the number when the unpacked files change
    try:
        own_folder(cache, cache.parent)  # programs run from there, so nobody else may write to it
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits here, then finds the marker
            if not complete.exists():
                shutil.rmtree(root, ignore_errors=True)
                for archive in _download(cache):
                    _apt("dpkg", "-x", str(archive), str(root))
                    archive.unlink()
                for name in DAEMONS:  # a daemon under another name ignores Gres in slurm.conf
                    (root / "usr/sbin" / name).symlink_to(f"{name}-wlm")
                complete.touch()
    except OSError as error:
        raise SlurmUnavailable(f"SLURM could not be unpacked into {cache}: {error}.") from error
    plugins = next(root.glob("usr/lib/*/slurm-wlm"), None)
    if plugins is None:
        raise SlurmUnavailable(f"The packages unpacked into {root} hold no folder slurm-wlm.")
    programs = root / "usr/sbin"
    return Installation(
        controller=programs / "slurmctld",
        daemon=programs / "slurmd",
        stepd=programs / "slurmstepd",
        commands=root / "usr/bin",
        plugins=plugins,
        libraries=(plugins, plugins.parent),
    )


def _download(cache: Path) -> list[Path]:
    """Download SLURM's packages and missing libraries, and return the archives.

    The system's package lists are used, or new ones if these are missing or outdated.
    """
    archives = cache / "archives"
    shutil.rmtree(archives, ignore_errors=True)
    archives.mkdir()
    # Without a sandbox user, apt does not change to the user _apt, who may not write to the folder.
    common = ["-o", "APT::Sandbox::User=", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15"]
    try:
        _fetch(archives, common)
    except SlurmUnavailable:  # there are no lists, or they name versions that no longer exist
        _fetch(archives, [*common, *_own_lists(cache, common)])
    return sorted(archives.glob("*.deb"))


def _own_lists(cache: Path, common: list[str]) -> list[str]:
    """Download package lists without root access, and return the options with which apt-get uses these lists.

    Only the sources of the distribution are used if they are in a separate file.

    Args:
        cache: folder for the lists.
        common: options for every call of apt-get.
    """
    for name in ("lists/partial", "apt/archives/partial"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    options = ["-o", f"Dir::State::lists={cache / 'lists'}", "-o", f"Dir::Cache={cache / 'apt'}"]
    for sources in ("debian.sources", "ubuntu.sources"):
        path = Path("/etc/apt/sources.list.d") / sources
        if path.exists():
            options += ["-o", f"Dir::Etc::sourcelist={path}", "-o", "Dir::Etc::sourceparts=-"]
    _apt("apt-get", *common, *options, "-o", "APT::Update::Error-Mode=any", "update")
    return options


def _fetch(archives: Path, options: list[str]) -> None:
    plan = _apt("apt-get", *options, "install", "--simulate", "--no-install-recommends", *PACKAGES)
    names = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
    _apt("apt-get", *options, "download", *names, folder=archives)


def _apt(*command: str, folder: Path | None = None) -> str:
    variables = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmUnavailable(f"SLURM is not installed, and {command[0]} could not fetch it: {error}.") from error
    if done.returncode:
        message = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise SlurmUnavailable(f"SLURM is not installed, and {command[0]} could not fetch it: {message}")
    return done.stdout
