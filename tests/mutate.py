"""Mutation testing with hand-picked mutations: each breaks the product in one place, and its tests have to fail.

    python tests/mutate.py                 all of tests/mutations.yaml, two at a time; results of unchanged code are reused
    python tests/mutate.py ID ..           only the mutations with these ids
    python tests/mutate.py --report        results so far

A mutation names a file, a text that occurs there once, its replacement, the consequence for a user, and the tests that have to
notice it. They run in a copy of the tree. A mutation counts as noticed if a test fails, as broken if the tests cannot run.
Results are stored in .mutations/ under a hash of everything that they depend on, so a stopped run resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".mutations"
TREE = (
    "kernels",
    "lightning_mhla",
    "tasks",
    "tests",
    "benchmarks",
    "configs",
    "pyproject.toml",
    "README.md",
    "docs",
    "Makefile",
)
NOTICED, PASSED, BROKEN = "noticed", "not noticed", "broken"


def read_mutations() -> list[dict[str, Any]]:
    """Read all mutations, and check that each replaced text occurs exactly once in its file.

    Raises:
        ValueError: if a mutation no longer matches the code. The message names it.
    """
    mutations: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/mutations.yaml").read_text())
    for mutation in mutations:
        occurrences = (ROOT / mutation["file"]).read_text().count(mutation["old"])
        if occurrences != 1:
            raise ValueError(f"{mutation['id']}: its text occurs {occurrences} times in {mutation['file']}")
    return mutations


def key_of(mutation: dict[str, Any]) -> str:
    """Return a hash of a mutation, its file and its tests, under which its result is stored."""
    parts = [json.dumps(mutation, sort_keys=True), (ROOT / mutation["file"]).read_text()]
    files = sorted({argument.split("::")[0] for argument in mutation["tests"] if argument.startswith("tests/")})
    parts += [(ROOT / file).read_text() for file in files if (ROOT / file).is_file()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def run(mutation: dict[str, Any]) -> dict[str, str]:
    """Apply a mutation to a copy of the tree and run its tests there."""
    result_file = RESULTS / f"{mutation['id']}-{key_of(mutation)}.json"
    if result_file.exists():
        result: dict[str, str] = json.loads(result_file.read_text())
        return result
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in TREE:
            source = ROOT / name
            skipped = shutil.ignore_patterns("__pycache__", ".pytest_cache")
            shutil.copytree(source, copy / name, ignore=skipped) if source.is_dir() else shutil.copy(
                source, copy / name
            )
        target = copy / mutation["file"]
        target.write_text(target.read_text().replace(mutation["old"], mutation["new"]))
        paths = os.pathsep.join(str(copy / part) for part in ("kernels", "tasks", ""))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation["tests"]]
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=900, check=False
            )
            outcome = {0: PASSED, 1: NOTICED}.get(done.returncode, BROKEN)
            tail = "\n".join(done.stdout.strip().splitlines()[-3:])
        except subprocess.TimeoutExpired:
            outcome, tail = NOTICED, "the tests did not end"
    result = {"id": mutation["id"], "outcome": outcome, "tail": tail}
    RESULTS.mkdir(exist_ok=True)
    result_file.write_text(json.dumps(result) + "\n")
    return result


def main() -> int:
    """Run the mutations that the command line names.

    Returns:
        The exit status: 1 if fewer than 90% of the mutations are noticed or one is broken, otherwise 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", help="mutations to run (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutations to test at a time (default: 2)")
    parser.add_argument("--report", action="store_true", help="only show the results so far")
    args = parser.parse_args()
    mutations = [m for m in read_mutations() if not args.ids or m["id"] in args.ids]
    if args.report:
        finished = [m for m in mutations if (RESULTS / f"{m['id']}-{key_of(m)}.json").exists()]
        sys.stdout.write(f"{len(finished)} of {len(mutations)} are known\n")
        mutations = finished
    results = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(run, mutations):
            results.append(result)
            sys.stdout.write(f"[{len(results)}/{len(mutations)}] {result['outcome']:12} {result['id']}\n")
            sys.stdout.flush()
    explained = {m["id"]: m.get("why_not") for m in mutations}
    noticed = sum(result["outcome"] == NOTICED for result in results)
    sys.stdout.write(f"{noticed} of {len(results)} noticed\n")
    for result in results:
        if result["outcome"] != NOTICED:
            sys.stdout.write(f"{result['outcome']}: {result['id']}: {explained[result['id']] or result['tail']}\n")
    broken = any(result["outcome"] == BROKEN for result in results)
    return int(broken or noticed < 0.9 * len(results))


if __name__ == "__main__":
    sys.exit(main())
