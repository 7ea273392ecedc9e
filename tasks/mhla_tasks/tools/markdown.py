"""Escaping of texts from other people's files in Markdown."""

from __future__ import annotations

import re
from typing import Any

from mhla_tasks.commandline.console import harmless


def escaped(text: Any) -> str:
    """Convert a text to one line, and escape the characters that Markdown or HTML would interpret."""
    line = " ".join(harmless(str(text)).split())
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", line)


def inline_code(text: Any) -> str:
    """Format a text as inline code in Markdown, or escape it if it contains a character that would end the code."""
    line = str(text)
    return f"`{line}`" if re.fullmatch(r"[^`|<>\n\r\\]+", line) and harmless(line) == line else escaped(line)
