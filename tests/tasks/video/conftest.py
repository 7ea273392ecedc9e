"""What several test files of the video domain start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from wan import save_pipeline


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan pipeline in diffusers' layout."""
    return save_pipeline(tmp_path_factory.mktemp("pipeline") / "wan")
