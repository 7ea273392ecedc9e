"""Print the installed versions of all packages that the project depends on, as pip's ``--constraint`` takes them.

Torch and what comes with its builds (torchvision, triton, setuptools, packages of CUDA) are left out: their versions depend on the machine.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

BUILDS = re.compile(r"torch$|torchvision$|triton$|setuptools$|nvidia-|cuda-")


def main() -> None:
    """Print them in alphabetical order."""
    found: dict[str, str] = {}
    left = {("lightning-mhla", extra) for extra in ("", "all", "test")}
    done: set[tuple[str, str]] = set()
    while left:
        name, extra = left.pop()
        done.add((name, extra))
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of an extra that is not installed, or for another system
            continue
        found[re.sub(r"[-_.]+", "-", name).lower()] = package.version
        for line in package.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                left |= {(needed.name, each) for each in ("", *needed.extras)} - done
    sys.stdout.write("# Versions that all tests passed with. `make` installs them; `make constraints` renews them.\n")
    for name in sorted(found):
        if name != "lightning-mhla" and not BUILDS.match(name):
            sys.stdout.write(f"{name}=={found[name]}\n")


if __name__ == "__main__":
    main()
