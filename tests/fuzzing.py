"""Settings for tests with generated input: the same few examples in every test run, many random ones in ``make fuzz``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("FUZZ", "1"))
"""Factor on the number of examples. If it is above 1, every run tries different examples."""


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Return a decorator that marks a hypothesis test for ``make fuzz`` and limits its number of examples.

    Args:
        examples: number of examples in a normal test run.
    """
    chosen = settings(
        max_examples=examples * TIMES,
        deadline=None,
        derandomize=TIMES == 1,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    return lambda test: pytest.mark.fuzz(chosen(test))
