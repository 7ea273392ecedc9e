"""Mutation testing by random mutants: how many small changes of the product do the tests notice?

    python tests/random_mutants.py record               run the tests of `make test`, and record which lines each test runs
    python tests/random_mutants.py run --count 150      draw mutants and run the tests that execute the changed lines
    python tests/random_mutants.py report               score by area, and the mutants that nothing noticed

A mutant changes one expression or statement of the product: a comparison, a number, a sign, a Boolean, the value that a
function returns, or a call whose result is not used. The draw depends only on the seed and on the code. Each mutant runs in a
copy of the tree with the tests that execute its line, the fastest first, until one fails. ``record`` needs the package
coverage. Results are stored in .mutations/random, so that a stopped run resumes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from xml.etree import ElementTree

from fork_server import ForkServer
from mutate import BROKEN, NOTICED, PASSED, RESULTS, ROOT, TREE

PLACE = RESULTS / "random"
AREAS = ("kernels/mhla_kernels", "lightning_mhla", "tasks/mhla_tasks")
SECONDS = 300.0
"""Longest total duration of the tests that a mutant runs, in seconds as recorded; at least one test runs in any case."""

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
MESSAGES = (
    "ValueError",
    "TypeError",
    "RuntimeError",
    "warn",
    "info",
    "debug",
    "warning",
    "write",
    "print",
    "extra_repr",
)
"""Functions whose arguments are text for people; numbers and operators in them are not mutated."""


@dataclass(frozen=True)
class Mutant:
    """One change of the product: characters ``start`` to ``end`` of ``file`` become ``new``."""

    file: str
    line: int
    function: str
    kind: str
    start: int
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """Short name, unique for the mutant and the code of its file."""
        source = (ROOT / self.file).read_bytes()
        return hashlib.sha256(json.dumps(asdict(self)).encode() + source).hexdigest()[:16]

    @property
    def area(self) -> str:
        """Package of the file, such as ``lightning_mhla/data``."""
        parts = Path(self.file).parts
        package = parts[2:-1] if parts[0] in ("kernels", "tasks") else parts[1:-1]
        return "/".join((parts[1] if parts[0] in ("kernels", "tasks") else parts[0], *package[:1]))


def mutants_of(file: str) -> Iterator[Mutant]:
    """Yield all mutants of a file, in the order of the syntax tree."""
    source = (ROOT / file).read_text()
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def position(line: int, column: int) -> int:  # columns count bytes
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    def text_of(node: ast.expr | ast.stmt) -> str:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return source[position(node.lineno, node.col_offset) : position(node.end_lineno, node.end_col_offset)]

    def change(node: ast.expr | ast.stmt, function: str, kind: str, new: str) -> Mutant:
        old = text_of(node)
        start = position(node.lineno, node.col_offset)
        return Mutant(file, node.lineno, function, kind, start, start + len(old), old, new)

    def visit(node: ast.AST, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = text_of(node.left), text_of(node.comparators[0])
            yield change(node, function, "comparison", f"(({left}) {COMPARISONS[type(node.ops[0])]} ({right}))")
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = text_of(node.left), text_of(node.right)
            yield change(node, function, "operator", f"(({left}) {OPERATORS[type(node.op)]} ({right}))")
        elif isinstance(node, ast.BoolOp):
            values = [f"({text_of(value)})" for value in node.values]
            joined = (" or " if isinstance(node.op, ast.And) else " and ").join(values)
            yield change(node, function, "boolean", f"({joined})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            operand = text_of(node.operand)
            yield change(node, function, "sign", f"({operand})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield change(node, function, "constant", str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield change(
                node,
                function,
                "constant",
                repr(node.value + 1 if isinstance(node.value, int) else node.value * 1.5 or 0.5),
            )
        elif isinstance(node, ast.Return) and not _is_falsy(node.value):
            yield change(node, function, "return", "return None")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield change(node, function, "call", "pass")
        for child in _children(node):
            yield from visit(child, function)

    yield from visit(ast.parse(source), "")


def _is_falsy(node: ast.expr | None) -> bool:
    """Return whether a returned value is None or False, which callers rarely tell apart."""
    return node is None or (isinstance(node, ast.Constant) and not node.value)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the child nodes that can matter at run time: no annotations, messages, f-strings or ``if TYPE_CHECKING``."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in MESSAGES:
            return
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw ``count`` mutants. Every mutant of the product has the same probability."""
    files = sorted(str(path.relative_to(ROOT)) for area in AREAS for path in (ROOT / area).rglob("*.py"))
    every = [mutant for file in files for mutant in mutants_of(file)]
    return random.Random(seed).sample(every, count)


class Recording:
    """Record of the tests that execute each line, and of the duration of each test."""

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = {}
        for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
            module, _, owner = case.attrib["classname"].partition(".Test")
            file = f"{module.replace('.', '/')}.py"
            name = "::".join(part for part in (f"Test{owner}" if owner else "", case.attrib["name"]) if part)
            self.seconds[f"{file}::{name}"] = float(case.attrib["time"])
        self._base = sqlite3.connect(folder / "coverage.sqlite", check_same_thread=False)

    def tests_of(self, mutant: Mutant, lines: range) -> list[str]:
        """Return the names of the tests that execute one of the ``lines`` of the mutant's file, the fastest first."""
        rows = self._base.execute(
            "select context.context, line_bits.numbits from line_bits join context on context.id = line_bits.context_id "
            "join file on file.id = line_bits.file_id where file.path like ?",
            (f"%/{mutant.file}",),
        )
        tests = set()
        for context, bits in rows:
            if any(line // 8 < len(bits) and bits[line // 8] >> line % 8 & 1 for line in lines):
                tests.add(context.rpartition("|")[2].removesuffix(" (call)").removesuffix(" (setup)"))
        return sorted(tests & set(self.seconds), key=self.seconds.__getitem__)


def _lines_of(mutant: Mutant) -> range:
    """Return the lines whose execution can show the mutant: its statement, or more if Python evaluates it only once.

    A default value is evaluated when its function is defined, so the lines of the function are returned. A constant of a module
    or a class is evaluated on import, so all lines of the file are returned.
    """
    source = (ROOT / mutant.file).read_text()
    within: list[ast.stmt] = [
        node for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0)
    ]  # fmt: skip
    functions = [node for node in within if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not functions:
        return range(1, source.count("\n") + 2)
    inner, innermost = functions[-1], within[-1]
    if mutant.line < inner.body[0].lineno:
        return range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
    body = getattr(innermost, "body", None)
    end = body[0].lineno - 1 if isinstance(body, list) and body else innermost.end_lineno or innermost.lineno
    return range(innermost.lineno, max(end, innermost.lineno) + 1)


PROGRAM = """
import os, sys
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
import pytest
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "@names"]))
"""


def run(mutant: Mutant, recording: Recording, server: ForkServer) -> dict[str, Any]:
    """Apply a mutant to a copy of the tree and run the tests that execute it, in a process that has the libraries."""
    place = PLACE / f"{mutant.name}.json"
    if place.exists():
        result: dict[str, Any] = json.loads(place.read_text())
        return result
    tests, total = [], 0.0
    for test in recording.tests_of(mutant, _lines_of(mutant)):
        total += recording.seconds[test]
        if tests and total > SECONDS:
            break
        tests.append(test)
    outcome, tail = PASSED, "no recorded test executes the line"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in TREE:
            skipped = shutil.ignore_patterns("__pycache__", ".pytest_cache")
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=skipped)
            else:
                shutil.copy(source, copy / name)
        target = copy / mutant.file
        text = target.read_text()
        target.write_text(f"{text[: mutant.start]}{mutant.new}{text[mutant.end :]}")
        paths = os.pathsep.join(str(copy / part) for part in ("kernels", "tasks", ""))
        environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if tests:
            (copy / "names").write_text("\n".join(tests))
            child = server.start(PROGRAM, module="-c", folder=copy, output=copy / "output", **environment)
            try:
                status = child.wait(3 * SECONDS)
            except AssertionError:
                child.kill()
                status, tail = 1, "the tests did not end"
            # 2 and 4: the mutant breaks an import, so that nothing can be collected; below 0: it crashes the process
            outcome = PASSED if status == 0 else NOTICED if status in (1, 2, 4) or status < 0 else BROKEN
            tail = "\n".join((copy / "output").read_text(errors="replace").strip().splitlines()[-3:])
    result = {**asdict(mutant), "area": mutant.area, "outcome": outcome, "tests": len(tests), "tail": tail}
    PLACE.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(result) + "\n")
    return result


def record() -> int:
    """Run the tests under coverage, write junit.xml and coverage.sqlite, and return the exit status."""
    PLACE.mkdir(parents=True, exist_ok=True)
    settings = PLACE / "coverage.ini"
    sources = "\n".join(f"    {ROOT / area}" for area in AREAS)
    settings.write_text(
        f"[run]\nparallel = True\ndata_file = {PLACE}/parts/coverage\ncontext = ${{PYTEST_CURRENT_TEST-}}\nsource =\n{sources}\n"
        "disable_warnings = module-not-imported,no-data-collected,module-not-measured,already-imported\n"
    )
    (PLACE / "parts").mkdir(exist_ok=True)
    (PLACE / "site").mkdir(exist_ok=True)
    (PLACE / "site/sitecustomize.py").write_text(
        "import os\nif os.environ.get('PYTEST_CURRENT_TEST'):\n    import coverage\n    coverage.process_startup()\n"
    )
    paths = os.pathsep.join([str(PLACE / "site"), *(str(ROOT / part) for part in ("kernels", "tasks", ""))])
    environment = {**os.environ, "PYTHONPATH": paths, "RECORD_COVERAGE": str(settings), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not long", "-q",
        "-p", "record_coverage", "--timeout", "900", f"--junitxml={PLACE / 'junit.xml'}",
    ]  # fmt: skip
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    combine = [sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={settings}"]
    subprocess.run(combine, cwd=PLACE / "parts", check=True)
    (PLACE / "parts/coverage").rename(PLACE / "coverage.sqlite")
    return status


def report(results: list[dict[str, Any]]) -> int:
    """Print the score of each area and the mutants that no test noticed. Return 1 if fewer than 90% were noticed, else 0."""
    areas: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        areas[result["area"]][result["outcome"]] += 1
    for area, outcomes in sorted(areas.items()):
        sys.stdout.write(f"{area:32} {outcomes[NOTICED]:4} of {sum(outcomes.values()):4}\n")
    for result in results:
        if result["outcome"] != NOTICED:
            change = f"{result['old']} -> {result['new']}".replace("\n", " ")
            sys.stdout.write(
                f"{result['outcome']}: {result['file']}:{result['line']} {result['function']}: {change[:150]}\n"
            )
    noticed = sum(result["outcome"] == NOTICED for result in results)
    sys.stdout.write(f"{noticed} of {len(results)} noticed\n")
    return int(noticed < 0.9 * len(results))


def main() -> int:
    """Run the command line, and return the exit status: 1 for ``run`` and ``report`` if fewer than 90% are noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "run", "report"))
    parser.add_argument("--count", type=int, default=150, help="number of mutants (default: 150)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants to test at a time (default: 2)")
    args = parser.parse_args()
    if args.command == "record":
        return record()
    mutants = draw(args.count, args.seed)
    if args.command == "report":
        places = [place for mutant in mutants if (place := PLACE / f"{mutant.name}.json").exists()]
        return report([json.loads(place.read_text()) for place in places])
    recording = Recording(PLACE)
    results = []
    servers: SimpleQueue[ForkServer] = SimpleQueue()
    for _ in range(args.jobs):
        servers.put(ForkServer())

    def with_server(mutant: Mutant) -> dict[str, Any]:
        server = servers.get()
        try:
            return run(mutant, recording, server)
        finally:
            servers.put(server)

    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(with_server, mutants):
            results.append(result)
            sys.stdout.write(
                f"[{len(results)}/{len(mutants)}] {result['outcome']:12} {result['file']}:{result['line']} {result['kind']}\n"
            )
            sys.stdout.flush()
    while not servers.empty():
        servers.get().close()
    return report(results)


if __name__ == "__main__":
    sys.exit(main())
