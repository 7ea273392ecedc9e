"""Check this machine before a training run depends on it: lightning doctor.

Looks at versions, devices, memory, disk, shared memory and the speed of reading pictures; runs the operator in every form
against float64, forward and backward, twice for equal bits; times it against softmax attention; and trains twenty steps. On
a GPU it also tries the Triton kernels, and keeps the verdicts that backend="auto" goes by.

A line is ok, a note (training works, but could be better) or wrong. Ends with status 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from mhla_tasks.tools.doctor import machine, training
from mhla_tasks.tools.doctor.report import Examination, Finding, as_json, examine, print_table, verdict


def _operator() -> Iterator[Finding]:
    from mhla_tasks.tools.doctor import operator

    yield from operator.forms()


def _speed() -> Iterator[Finding]:
    from mhla_tasks.tools.doctor import operator

    yield from operator.speed()


PARTS: dict[str, Examination] = {
    "versions": machine.versions,
    "devices": machine.devices,
    "storage": machine.storage,
    "data": machine.pictures,
    "operator": _operator,
    "speed": _speed,
    "training": training.fit,
}


def main(words: Sequence[str]) -> int:
    """Run the examination that the words ask for; the exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON on standard output, and nothing else")
    parser.add_argument(
        "--only", metavar="PART", nargs="+", choices=PARTS, default=list(PARTS), help=f"parts: {', '.join(PARTS)}"
    )
    asked = parser.parse_args(words)
    findings: list[Finding] = []
    for part in asked.only:
        found = list(examine(part, PARTS[part]))
        findings += found
        if not asked.json:
            print_table(part, found)
    if asked.json:
        sys.stdout.write(json.dumps(as_json(findings), indent=2) + "\n")
    elif verdict(findings) == "wrong":
        wrong = [f"{finding.part}: {finding.name}" for finding in findings if finding.status == "wrong"]
        sys.stderr.write(f"wrong: {'; '.join(wrong)}\n")
    else:
        sys.stdout.write("Training will work here.\n")
    return int(verdict(findings) == "wrong")
