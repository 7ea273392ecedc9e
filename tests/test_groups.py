"""The lists of slow and long tests in ``conftest.py`` name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import conftest
import pytest

TESTS = {path.stem: path.read_text() for path in Path(__file__).parent.rglob("test_*.py")}


@pytest.mark.parametrize("name", [*conftest.LONG, *conftest.SLOW, *conftest.LONGEST])
def test_every_name_is_that_of_a_test(name: str) -> None:
    """A test that is renamed would silently become a short one."""
    file, _, function = name.partition("::")
    assert file in TESTS
    assert not function or re.search(rf"^def {function}\(", TESTS[file], re.MULTILINE)
