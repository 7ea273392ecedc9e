"""Print the installed versions of the packages that the project requires, in the format of pip's ``--constraint``.

Pip chooses the versions of their dependencies: if these were listed as well, one version that an index has withdrawn would make
all others unusable. Torch and packages built for it (torchvision, triton) are omitted, because their versions depend on the
machine.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

BUILDS = {"torch", "torchvision", "triton", "lightning-mhla"}


def main() -> None:
    """Print one package and its version per line, in alphabetical order."""
    names = {re.sub(r"[-_.]+", "-", Requirement(line).name).lower() for line in requires("lightning-mhla") or ()}
    sys.stdout.write("# Versions that all tests passed with. `make` installs them; `make constraints` renews them.\n")
    for name in sorted(names - BUILDS):
        try:
            sys.stdout.write(f"{name}=={version(name)}\n")
        except PackageNotFoundError:  # part of an extra that is not installed
            continue


if __name__ == "__main__":
    main()
