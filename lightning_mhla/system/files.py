"""Atomic writes of files and folders."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file, its folder too; whoever stops in between leaves the old one, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as aside:
        aside.write_text(text)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives a path beside ``path`` to write a file to; at the end it is flushed to the disk and renamed.

    Whoever stops in between, or fails, leaves ``path`` as it was.
    """
    aside = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}.part")
    try:
        yield aside
        flush(aside)
        aside.replace(path)
        flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
