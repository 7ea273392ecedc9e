"""``make image`` with stand-ins for docker, podman and buildah, and what the image is made of."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BUILDER = """\
#!/bin/bash
echo "${0##*/} $*" >> "$CALLS"
case $1 in
  info) [ ! -e "$BROKEN" ] || { echo "Cannot connect to the daemon" >&2; exit 1; } ;;
  from) echo container-1 ;;
  images) echo 6.2 GB ;;
  --version) echo "builder 1.0" ;;
esac
[[ "$*" != *"${FAILS:-nothing}"* ]]
"""


class Machine:
    """PATH with some programs that build images, which record their calls."""

    def __init__(self, folder: Path, *builders: str) -> None:
        self.folder, self.calls_file = folder, folder / "calls"
        for name in ("bash", "make", "dirname", "tail"):
            (folder / name).symlink_to(str(shutil.which(name)))
        for name in builders:
            (folder / name).write_text(BUILDER)
            (folder / name).chmod(0o755)

    def make(self, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``make image``."""
        every = {
            "PATH": str(self.folder),
            "CALLS": str(self.calls_file),
            "BROKEN": str(self.folder / "broken"),
            **variables,
        }
        return subprocess.run(
            ["make", "--silent", "image", *options], cwd=ROOT, env=every, capture_output=True, text=True, timeout=60
        )

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_the_image_is_built_and_tried_with_what_is_there(tmp_path: Path, builder: str) -> None:
    machine = Machine(tmp_path, builder)
    done = machine.make()
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("lightning-mhla works: 6.2 GB, built with builder 1.0\n")
    assert f"{builder} build --file docker/Dockerfile --tag lightning-mhla ." in machine.calls
    runs = [call for call in machine.calls if call.startswith(f"{builder} run ")]
    assert any(call.endswith("lightning doctor") for call in runs)
    fits = [call for call in runs if "lightning fit" in call]
    assert [re.findall(r"--user (\S+)", call) for call in fits] == [["mhla"], ["4321:4321"]]


def test_options_of_make_reach_the_build(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "docker", "podman")
    assert machine.make("BUILDER=podman", "BASE=python:3.13-slim", "IMAGE=mine").returncode == 0
    assert "podman build --build-arg BASE=python:3.13-slim --file docker/Dockerfile --tag mine ." in machine.calls
    assert not [call for call in machine.calls if call.startswith("docker")]


def test_a_docker_without_a_daemon_gives_way(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "docker", "buildah")
    (tmp_path / "docker").write_text(BUILDER.replace('[ ! -e "$BROKEN" ]', "false"))
    done = machine.make()
    assert done.returncode == 0, done.stderr
    assert "building lightning-mhla with buildah" in done.stdout


@pytest.mark.parametrize(
    ("builders", "options", "reason"),
    [
        ([], [], "docker is not installed; podman is not installed; buildah is not installed"),
        (["docker"], [], "docker does not work: Cannot connect to the daemon; podman is not installed"),
        (["docker"], ["BUILDER=podman"], "(podman is not installed)"),
    ],
    ids=["none", "no daemon", "another asked for"],
)
def test_without_a_builder_there_is_one_clear_error(
    tmp_path: Path, builders: list[str], options: list[str], reason: str
) -> None:
    machine = Machine(tmp_path, *builders)
    (tmp_path / "broken").touch()
    done = machine.make(*options)
    said, *makes_own = done.stderr.splitlines()
    assert said.startswith("error: no program builds images here")
    assert reason in said
    assert len(makes_own) == 1, "make adds a line of its own, and nothing else is said"
    assert done.stdout == ""


@pytest.mark.parametrize("fails", ["build --file", "lightning doctor", "--user 4321:4321"])
def test_a_step_that_fails_fails_the_target(tmp_path: Path, fails: str) -> None:
    done = Machine(tmp_path, "buildah").make(FAILS=fails)
    assert done.returncode == 2
    assert "works" not in done.stdout


def test_buildah_leaves_no_container(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "buildah")
    machine.make(FAILS="lightning doctor")
    assert machine.calls[-1] == "buildah rm container-1"


def test_the_build_is_given_what_it_copies() -> None:
    """Each file that the Dockerfile copies is there, and not left out by .dockerignore."""
    given = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = re.findall(r"^COPY (.+) \S+$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    copied = {name for line in lines for name in line.split()}
    assert copied == given
    assert all((ROOT / name).exists() for name in copied)


def test_the_base_is_slim_and_the_user_ordinary() -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)", text, re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+-slim", base)
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE) == ["mhla"]
    assert all("--no-cache-dir" in call for call in re.findall(r"pip install.*", text))
