"""Fixtures of several test files of the video domain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mhla_tasks.video.clips import write_clip
from wan import save_pipeline


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan pipeline in diffusers' layout."""
    return save_pipeline(tmp_path_factory.mktemp("pipeline") / "wan")


@pytest.fixture(scope="module")
def ramp(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """24 frames, 8 a second, frame i of brightness 10 i."""
    path = tmp_path_factory.mktemp("ramp") / "ramp.mp4"
    write_clip(path, (10 * torch.arange(24).view(-1, 1, 1, 1).expand(-1, 3, 16, 24)).to(torch.uint8), 8)
    return path.read_bytes()
