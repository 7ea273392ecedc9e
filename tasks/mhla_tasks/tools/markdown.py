"""Functions that escape text from untrusted files for use in Markdown."""

from __future__ import annotations

import re
from typing import Any

from mhla_tasks.commandline.console import harmless


def escaped(text: Any) -> str:
    """Convert a value to one line of text, and escape links, code, emphasis, formulas, tables and HTML in it.

    An underscore inside a word, as in ``block_size``, has no meaning in Markdown and is not escaped.
    """
    line = " ".join(harmless(str(text)).split())
    return re.sub(r"([\\`*~$\[\]<>|&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", line)


def inline_code(text: Any) -> str:
    """Format a value as inline code in Markdown, or as escaped text if it contains a character that would end the code."""
    line = str(text)
    return f"`{line}`" if re.fullmatch(r"[^`|<>\n\r\\]+", line) and harmless(line) == line else escaped(line)
