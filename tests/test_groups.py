"""The lists of slow and long tests in ``conftest.py`` name tests that exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
GROUPS = runpy.run_path(str(FOLDER / "conftest.py"))  # not by import: several folders have a module of this name
TESTS = {path.stem: path.read_text() for path in FOLDER.rglob("test_*.py")}


@pytest.mark.parametrize("name", [*GROUPS["LONG"], *GROUPS["SLOW"], *GROUPS["LONGEST"]])
def test_every_name_is_that_of_a_test(name: str) -> None:
    """A test that is renamed would silently become a short one."""
    file, _, function = name.partition("::")
    assert file in TESTS
    assert not function or re.search(rf"^def {function}\(", TESTS[file], re.MULTILINE)
