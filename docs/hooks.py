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
            parts.append(f"### {name}\n\n{with_tables(text.strip())}")
    return "\n\n".join(parts)


def with_tables(text: str) -> str:
    """Convert the help of a command to Markdown: its options become tables, which wrap on a phone, and the rest code blocks.

    Args:
        text: help as argparse prints it, in which sections of options have a title that ends with a colon.
    """
    parts: list[str] = []
    for section in re.split(r"\n\n(?=[a-z][a-z ]*:\n {2}\S)", text):
        title, _, lines = section.partition(":\n")
        if re.fullmatch("[a-z][a-z ]*", title) and title != "usage":
            rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in _options(lines)]
            parts.append("\n".join([f"| {title.removeprefix('positional ')} | |", "| --- | --- |", *rows]))
        else:
            parts.append(f"```text\n{section.strip()}\n```")
    return "\n\n".join(parts)


def _options(lines: str) -> list[tuple[str, str]]:
    """Read the names of options and what they mean from a section of argparse's help."""
    options: list[tuple[str, str]] = []
    for line in lines.splitlines():
        if start := re.match(r" {2}(\S.*?)(?: {2,}(.*))?$", line):
            options.append((start[1], start[2] or ""))
        elif line.strip():
            name, meaning = options[-1]
            options[-1] = (name, f"{meaning} {line.strip()}".strip())
    return options


def _cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", text)


def on_page_content(html: str, **_: Any) -> str:
    """Add captions to pictures, choose where lines may break, and convert the markup of docstrings.

    A picture that is a paragraph of its own becomes a figure, whose caption is the alternative text. It links to the file,
    to be enlarged on a phone. The roles of reStructuredText (``:class:``) before code are dropped, and the path before a name
    (``~``).
    """
    html = re.sub(
        r'<p>(<img\b[^>]*?\balt="([^"]+)" src="([^"]+)"[^>]*>)</p>',
        r'<figure><a href="\3">\1</a><figcaption>\2</figcaption></figure>',
        html,
    )
    html = re.sub(r":(?:class|meth|func|mod|data|attr):(?=<code)", "", html)
    html = re.sub(r"(<code[^>]*>)~[\w.]*?(\w+</code>)", r"\1\2", html)
    html = re.sub(r"<pre\b.*?</pre>|(<code[^>]*>)(.*?)(</code>)", _breakable, html, flags=re.S)
    return re.sub(r"<td[^>]*>.*?</td>", _with_units, html, flags=re.S)


def _breakable(code: re.Match[str]) -> str:
    """Allow line breaks after punctuation in code within text, so that words are not split, and none after ``--``."""
    if code[1] is None:  # a block of code
        return code[0]
    parts = re.split("(<[^>]*>)", code[2])  # tags have attributes, in which nothing may change
    return code[1] + "".join(part if part.startswith("<") else _breakable_text(part) for part in parts) + code[3]


def _breakable_text(text: str) -> str:
    text = re.sub(r"([_/=,]|\.(?!\d))(?=\w)", r"\1<wbr>", text)
    return re.sub(r"(?<![\w-])(--?[a-z]+)", r'<span class="nowrap">\1</span>', text)


def _with_units(cell: re.Match[str]) -> str:
    """Keep a number of a table cell on one line with its unit, and a spread with its sign."""
    parts = re.split("(<code.*?</code>)", cell[0], flags=re.S)  # code is copied, so its spaces stay as they are
    for index, part in enumerate(parts[::2]):
        text = re.sub(r"(?<=\d) (?=(?:ms|s|min|[KMG]i?B|[GT]FLOP|points)\b|%)", "\N{NO-BREAK SPACE}", part)
        parts[2 * index] = text.replace("± ", "±\N{NO-BREAK SPACE}")
    return "".join(parts)
