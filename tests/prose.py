"""Reject docstrings, comments and Markdown pages that contain a phrase from a word list, and names that say nothing.

    python tests/prose.py [FILE ...]

Without arguments, all Python files and Markdown pages of the repository are read. The program prints a line for each finding,
and exits with status 1 if there are any. Code in Markdown and between double backticks is not read. Local variables and
parameters are checked in the packages and the benchmarks, not in tests.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

OPENINGS = ("Of", "That", "Those", "Whose", "Which", "Likewise", "What", "As")
"""Words with which a docstring must not begin, because its first line has to say what the thing is or does."""

PHRASES = {
    r"likewise|besides": "also",
    r"anew": "again",
    r"(?<=[;:,.] )so (are|is|do|does)(?= \w)": "a sentence of its own",
    r"of ours": "our",
    r"what it takes": "requirements",
    r"(there )?whole or not at all": "atomic",
    r"no whole": "not a complete",
    r"furthest": "latest",
    r"mend|mends|mended|mending": "fix",
    r"(of|in|after|for|at) so many": "the number, such as n",
    r"the same bits": "bit-identical",
    r"never stopped": "undisturbed",
    r"that there (is|are) not": "unknown",
    r"(clock|process|run|training)\w* stands? still": "pause, stop",
    r"two looks": "polling interval",
    r"go(es)? over to": "switch to",
    r"make up for": "perform, compensate for",
    r"turns? (queries|keys|heads)": "rotate",
    r"(?<!there )(is|are|was|were) no (?!longer|more|less|better|different|faster|slower|larger|smaller|shorter|worse|good)\w+(?! to\b)":
        "is not a",
    r"of other (sizes|dtypes|shapes|lengths|widths|kinds)": "with different ...",
    r"be had": "be available, be obtained",
    r"no more(?=[.;,:)]|$)": "no longer",
    r"(?<!connection )(?<!connection was )refus(e|es|ed|al|als)": "reject, or is not supported",
    r"whereof|thereby|hereof|lest": "plain words",
    r"(run|training|sweep|command|loop) goes on": "continue, resume",
    r"\w*(optimis|normalis|linearis|tokenis|initialis|quantis|recognis|synchronis|utilis|serialis)(e|es|ed|er|ers|ing|ation)\b":
        "American spelling: z",
    r"(un)?colou?r(?<=our)\w*|behaviours?|neighbou?r(?<=our)\w*|licence[sd]?|labelled|misspelt|centre[sd]?": "American spelling",
}  # fmt: skip
"""Regular expressions of rejected phrases, whole words in any case, each with a substitute."""

NAMES = {"found", "own", "before", "kept", "known", "given", "each"}
"""Words with which no local variable or parameter is named, because they do not say what it holds."""

PRODUCT = ("kernels", "lightning_mhla", "tasks", "benchmarks")
"""Folders in which names are checked."""

QUOTED = re.compile(r"``[^`]*``|`[^`]*`|:\w+:`[^`]*`|https?://\S+|\"[^\"]*\"")
"""Code, references, addresses and quotations, which may contain any word."""

_REJECTED = [
    (re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE), advice) for pattern, advice in PHRASES.items()
]


class Finding(NamedTuple):
    """Rejected phrase or name with its line number and a substitute."""

    line: int
    phrase: str
    advice: str


def _texts_of_python(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line number and text of each docstring and comment, and whether it is a docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def _text_of_markdown(source: str) -> str:
    """Return a page with blank lines in place of its code blocks."""
    return re.sub(r"^( *)(```|~~~).*?^\1\2", lambda block: "\n" * block[0].count("\n"), source, flags=re.M | re.S)


def findings(source: str, suffix: str) -> list[Finding]:
    """Find the rejected phrases in a file, by line.

    Args:
        source: content of the file.
        suffix: suffix of the file's name, ``.py`` or ``.md``.
    """
    texts = _texts_of_python(source) if suffix == ".py" else [(1, _text_of_markdown(source), False)]
    result = []
    for first, text, is_docstring in texts:
        opening = text.split(maxsplit=1)[0] if text.strip() else ""
        if is_docstring and opening in OPENINGS:
            result.append(Finding(first, opening, "begin with what the thing is or does"))
        plain = QUOTED.sub(lambda quoted: re.sub(r"[^\n]", "_", quoted[0]), text)
        for pattern, advice in _REJECTED:
            result += [
                Finding(first + plain.count("\n", 0, match.start()), " ".join(match[0].split()), advice)
                for match in pattern.finditer(plain)
            ]
    return sorted(result)


def vague_names(source: str) -> list[Finding]:
    """Find the local variables and parameters of a Python file that have one of the rejected names, by line."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    bound: set[tuple[int, str]] = set()
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.arg):
            bound.add((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add((node.lineno, node.id))
    return [Finding(line, name, "a name that says what it holds") for line, name in sorted(bound) if name in NAMES]


def main(names: list[str]) -> int:
    """Print the findings in the named files, by default in all of the repository, and return the exit status."""
    if not names:
        listed = subprocess.run(
            ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        names = listed.stdout.splitlines()
    count = 0
    for name in names:
        path = ROOT / name
        source = path.read_text(encoding="utf-8")
        rejected = findings(source, path.suffix)
        if path.suffix == ".py" and any(path.is_relative_to(ROOT / folder) for folder in PRODUCT):
            rejected += vague_names(source)
        for line, phrase, advice in rejected:
            sys.stdout.write(f"{name}:{line}: {phrase!r}: write {advice}\n")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
