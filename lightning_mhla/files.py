"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file, its folder too; whoever stops in between leaves the old one, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}.part")
    aside.write_text(text)
    aside.replace(path)
