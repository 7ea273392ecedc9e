"""Fixtures of several test files of the diffusion domain."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_dit


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DiT of digits that makes something of noise."""
    folder = tmp_path_factory.mktemp("start") / "dit"
    tiny_dit(channels=1, patch_size=1, attention={"lepe": 3, "gate": True}).save_pretrained(folder)
    return folder
