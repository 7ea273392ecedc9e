"""Hooks of MkDocs that add the help of every command to the site, and convert the markup of docstrings."""

from __future__ import annotations

import os
import re
from typing import Any

os.environ["COLUMNS"] = "100"  # argparse breaks lines there

from mhla_tasks.commandline.registry import TOOLS, function_of, help_text, parser_of


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Append the help of every tool to ``commands.md``."""
    if page.file.src_uri != "commands.md":
        return markdown
    parts = [markdown]
    for group, tools in TOOLS.items():
        parts.append(f"## {group.capitalize()}")
        for name in tools:
            function = function_of(name)
            passes_on = getattr(function, "passes_on", False)
            text = help_text(function) if passes_on else parser_of(name)[0].format_help()
            parts.append(f"### {name}\n\n```text\n{text.strip()}\n```")
    return "\n\n".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles of reStructuredText (``:class:``) before code, and the path before a name (``~``)."""
    html = re.sub(r":(?:class|meth|func|mod|data|attr):(?=<code)", "", html)
    return re.sub(r"(<code[^>]*>)~[\w.]*?(\w+</code>)", r"\1\2", html)
