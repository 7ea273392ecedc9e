"""Compare the code of two revisions, ignoring docstrings, comments, messages and the names of local variables.

    python tests/same_code.py BEFORE [AFTER]

BEFORE and AFTER are revisions of git. Without AFTER, BEFORE is compared with the working tree. The program prints the Python
files whose code differs, and exits with status 1 if there are any. For a change of prose alone it prints nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

MESSAGE_CALLS = ("debug", "info", "warning", "error", "warn", "write", "print", "add_argument")
"""Names of functions and methods whose text arguments are messages."""

MESSAGE_KEYWORDS = ("help", "description", "epilog", "title", "reason", "usage")
"""Names of keyword arguments whose values are messages, in any call."""

PROSE = ast.Constant("prose")


class WithoutProse(ast.NodeTransformer):
    """Syntax tree transformer that removes docstrings, reduces messages to their values, and numbers local variables."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Remove statements that are string literals: docstrings of modules, classes, functions and constants."""
        super().generic_visit(node)
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                setattr(node, block, [one for one in statements if not _is_text(one)])
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Replace the message of an exception with the values in it."""
        if isinstance(node.exc, ast.Call):
            node.exc.args = [_without_text(argument) for argument in node.exc.args]
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Remove the message of an assertion."""
        node.msg = None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace messages among the arguments of a call with the values in them."""
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        if name in MESSAGE_CALLS:
            first = node.args[:1] if name == "add_argument" else []  # the name of an option is not a message
            node.args = [*first, *(_without_text(argument) for argument in node.args[len(first) :])]
        for keyword in node.keywords:
            if keyword.arg in MESSAGE_KEYWORDS:
                keyword.value = _without_text(keyword.value)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Replace the names of a function's local variables by numbers, including those of functions inside it."""
        self.generic_visit(node)
        return _number_variables(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        """Replace the names of a function's local variables by numbers, including those of functions inside it."""
        self.generic_visit(node)
        return _number_variables(node)


def code_of(source: str) -> str:
    """Return the syntax tree of a module, without its prose, as text."""
    return ast.dump(WithoutProse().visit(ast.parse(source)))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _without_text(node: ast.expr) -> ast.expr:
    """Replace a message with the values in it, sorted. Expressions other than strings stay unchanged."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return PROSE
    if isinstance(node, ast.JoinedStr):
        values = {ast.dump(part.value): part.value for part in node.values if isinstance(part, ast.FormattedValue)}
        return ast.Tuple([values[key] for key in sorted(values)], ast.Load())
    if isinstance(node, ast.BinOp):
        return ast.BinOp(_without_text(node.left), node.op, _without_text(node.right))
    return node


def _number_variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    shared = {name for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    stored = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    caught = [node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and node.name]
    names = [name for name in dict.fromkeys([*stored, *caught]) if name not in arguments | shared]
    numbers = {name: f"variable {number}" for number, name in enumerate(names)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            node.id = numbers.get(node.id, node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            node.name = numbers.get(node.name, node.name)
    return function


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def different_files(before: str, after: str | None = None) -> list[str]:
    """Return the paths of the Python files whose code differs between two revisions.

    Args:
        before: earlier revision of git.
        after: later revision; None for the working tree.
    """
    revisions = [before] if after is None else [before, after]
    changed = _git("diff", "--name-only", "--no-renames", *revisions, "--", "*.py").splitlines()
    different = []
    for name in changed:
        try:
            old = _git("show", f"{before}:{name}")
            new = Path(name).read_text(encoding="utf-8") if after is None else _git("show", f"{after}:{name}")
        except (subprocess.CalledProcessError, FileNotFoundError):  # only one of the revisions has the file
            different.append(name)
            continue
        if code_of(old) != code_of(new):
            different.append(name)
    return different


if __name__ == "__main__":
    files = different_files(*sys.argv[1:3])
    sys.stdout.write("".join(f"{name}\n" for name in files))
    sys.exit(bool(files))
