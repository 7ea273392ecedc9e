"""The comparison of code without its prose notices changed code and nothing else."""

from __future__ import annotations

import pytest
from same_code import code_of

BEFORE = '''
"""A module."""
LIMIT = 3
"""Of something."""


def area(width, height):
    """Area."""
    found = width * height
    if found > LIMIT:
        raise ValueError(f"{found} is no area below {LIMIT}")
    log.info("area %s", found)
    try:
        return [kept for kept in range(found)]
    except OSError as error:
        return error
'''

SAME = '''
"""The areas of rectangles."""
LIMIT = 3
"""Largest area, in square meters."""


def area(width, height):
    """Compute the area of a rectangle."""
    product = width * height  # may overflow
    if product > LIMIT:
        raise ValueError(f"the area must be below {LIMIT}, got {product}")
    log.info("the area is %s", product)
    try:
        return [side for side in range(product)]
    except OSError as failure:
        return failure
'''


def test_prose_and_names_of_variables_do_not_count() -> None:
    assert code_of(BEFORE) == code_of(SAME)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("width * height", "width + height"),
        ("> LIMIT:", ">= LIMIT:"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("ValueError", "TypeError"),
        ("below {LIMIT}", "below {width}"),
        ("log.info", "log.debug"),
        ('log.info("area %s", found)', "pass"),
        ("range(found)", "range(width)"),
        ("def area(width, height)", "def area(height, width)"),
        ("[kept for kept in", "[found for kept in"),
    ],
)
def test_changes_of_the_code_count(old: str, new: str) -> None:
    assert old in BEFORE
    assert code_of(BEFORE) != code_of(BEFORE.replace(old, new))
