"""Pytest plugin that records the lines that each test executes, in its own process and in those that it starts.

``tests/random_mutants.py record`` uses it. The variable ``RECORD_COVERAGE`` names a configuration file of the package coverage,
which takes the name of the test from ``PYTEST_CURRENT_TEST``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import coverage
import pytest

_SETTINGS = os.environ.get("RECORD_COVERAGE", "")
_recording: list[coverage.Coverage] = []


def pytest_configure() -> None:
    """Start recording in a worker of pytest-xdist and in its child processes."""
    if _SETTINGS and "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["PYTEST_CURRENT_TEST"] = "import"
        _recording.append(coverage.Coverage(config_file=_SETTINGS))
        _recording[0].start()
        os.environ["COVERAGE_PROCESS_START"] = _SETTINGS


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Assign the lines that are executed during a test to it."""
    for recording in _recording:
        recording.switch_context(item.nodeid)
    yield


def pytest_unconfigure() -> None:
    """Write the recorded coverage."""
    for recording in _recording:
        recording.stop()
        recording.save()
