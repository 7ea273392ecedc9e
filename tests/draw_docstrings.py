"""Print docstrings drawn at random, each with its path and signature, for a review by a reader who does not see the code.

    python tests/draw_docstrings.py SEED [COUNT]

The docstrings are those of all functions and classes of the product, private ones included. COUNT is 60 by default.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "lightning_mhla", "tasks")


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, name: str) -> str:
    """Return the signature of a function, or the bases of a class with its constructor or fields."""
    if not isinstance(node, ast.ClassDef):
        return f"def {name}({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    constructor = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
    fields = [ast.unparse(x) for x in node.body if isinstance(x, ast.AnnAssign)]
    members = [f"__init__({ast.unparse(constructor[0].args)})"] if constructor else fields
    return f"class {name}({', '.join(map(ast.unparse, node.bases))})  # {'; '.join(members)}"


def documented(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield signature and docstring of the functions and classes inside a node, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = prefix + child.name
        if text := ast.get_docstring(child):
            yield signature(child, name), text
        yield from documented(child, f"{name}.")


def main() -> None:
    """Print the drawn docstrings, and their number in all."""
    seed, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    entries = [(path.relative_to(ROOT), *entry) for path in paths for entry in documented(ast.parse(path.read_text()))]
    for number, (path, header, text) in enumerate(random.Random(seed).sample(entries, count), 1):
        sys.stdout.write(f"[{number}] {path}\n{header}\n\n{text}\n{'-' * 60}\n")
    sys.stderr.write(f"{count} of {len(entries)} docstrings, seed {seed}\n")


if __name__ == "__main__":
    main()
