"""Texts that a language model generated during training: how callbacks write them, and their sections in ``report.html``."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from lightning_mhla.callbacks.markup import html_text
from lightning_mhla.system.numbers import plural

LONGEST = 20_000
"""Maximum number of characters of a text file that a page shows. A longer file is cut at its beginning."""


def fenced(text: str, language: str = "") -> str:
    """Format text as a code block in Markdown, with a fence that does not occur in the text.

    Args:
        text: content of the code block.
        language: name of the language for syntax highlighting; empty for none.
    """
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def sample_sections(folder: Path) -> list[str]:
    """Return an HTML section for each file ``samples*.md`` with texts that the model generated.

    A section shows the texts of the latest step. Texts of earlier steps are collapsed, newest first.

    Args:
        folder: folder of the run, which contains the files.
    """
    sections = []
    for path in sorted(folder.glob("samples*.md")):
        blocks = _sample_blocks(_newest(path.read_text("utf-8", "replace")))
        if not blocks:
            continue
        (title, texts), *older = reversed(blocks)
        parts = [f"<h2>Samples, {html_text(title)}</h2>", *_listed(texts)]
        if older:
            folded = "".join(f"<h3>{html_text(name)}</h3>{''.join(_listed(block))}" for name, block in older)
            summary = plural(len(older), "earlier step")
            parts.append(f"<details><summary>{summary}</summary>{folded}</details>")
        sections.append("".join(parts))
    return sections


def _newest(page: str) -> str:
    """Return the complete sections in the last 20,000 characters of a page of samples. A shorter page stays unchanged."""
    if len(page) <= LONGEST:
        return page
    # What is left of a section may begin inside a code block, whose closing fence would be taken for an opening one.
    page = page[-LONGEST:]
    heading = re.search(r"^## step \d+$", page, flags=re.M)
    return page[heading.start() :] if heading else ""


def _listed(texts: Sequence[str]) -> list[str]:
    return [f'<pre class="sample">{html_text(text, lines=True)}</pre>' for text in texts]


def _sample_blocks(page: str) -> list[tuple[str, list[str]]]:
    """Split a Markdown page of samples into its sections, each with a title and the texts of its code blocks.

    A resumed run repeats the steps after its checkpoint. The sections that the stopped run wrote at these steps are left out.
    Sections of the same step that follow each other are those of several callbacks, and become one section.
    """
    blocks: list[tuple[str, list[str]]] = []
    fence, lines = "", io.StringIO()
    for line in page.splitlines(keepends=True):
        mark = re.match(r"(`{3,})\w*$", line.rstrip("\n"))
        # `fenced` makes a fence longer than any in the text, so shorter ones belong to the text.
        if fence and mark and mark[1] == fence:
            if blocks:
                blocks[-1][1].append(lines.getvalue().rstrip("\n"))
            fence = ""
        elif fence:
            lines.write(line)
        elif mark:
            fence, lines = mark[1], io.StringIO()
        elif line.startswith("#"):
            title = line.lstrip("# ").rstrip()
            step = _step(title)
            if blocks and _step(blocks[-1][0]) > step >= 0:  # the run was resumed
                while blocks and _step(blocks[-1][0]) >= step:
                    blocks.pop()
            blocks.append((title, []))
    merged: list[tuple[str, list[str]]] = []
    for title, texts in blocks:
        if merged and merged[-1][0] == title and _step(title) >= 0:
            merged[-1][1].extend(text for text in texts if text not in merged[-1][1])
        elif texts:
            merged.append((title, texts))
    return merged


def _step(title: str) -> int:
    """Return the optimizer step in the title of a section such as ``step 600``; -1 for any other title."""
    match = re.fullmatch(r"step (\d{1,18})", title)
    return int(match[1]) if match else -1
