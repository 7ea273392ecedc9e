"""How tests with made-up input are run: the same few examples in the suite, many random ones under ``make fuzz``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("FUZZ", "1"))
"""How many times the examples of the suite are tried; more than once, they are others in every run."""


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Marks a test of hypothesis and says how many examples the suite tries."""
    chosen = settings(
        max_examples=examples * TIMES,
        deadline=None,
        derandomize=TIMES == 1,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    return lambda test: pytest.mark.fuzz(chosen(test))
