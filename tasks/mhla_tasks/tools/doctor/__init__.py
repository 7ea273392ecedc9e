"""Check this machine before a training run depends on it: lightning doctor.

The command checks versions, devices, memory, disk, shared memory and the speed of decoding images. It runs all algorithms of
the MHLA operator twice, forward and backward. It compares the results with a float64 reference, and checks that both runs are
bit-identical. It compares the speed of the operator with that of softmax attention, and trains a small model for twenty steps.
On a GPU it also tests the Triton kernels, and stores which of them backend="auto" may use.

The status of each check is ok, note (training works, but could be better) or wrong. The exit status is 1 if a check is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from lightning_mhla.system.files import to_json
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


def main(arguments: Sequence[str]) -> int:
    """Run the selected checks of this machine, and print their findings.

    Args:
        arguments: command-line arguments after ``lightning doctor``, such as ``--only`` to select groups of checks.

    Returns:
        The exit status: 1 if a finding has the status ``wrong``, otherwise 0.
    """
    parser = argparse.ArgumentParser(
        prog="lightning doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print only JSON on standard output")
    parser.add_argument(
        "--only",
        metavar="PART",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help=f"parts to run (default: all): {', '.join(PARTS)}",
    )
    options = parser.parse_args(arguments)
    findings: list[Finding] = []
    for part in options.only:
        part_findings = list(examine(part, PARTS[part]))
        findings += part_findings
        if not options.json:
            print_table(part, part_findings)
    if options.json:
        sys.stdout.write(to_json(as_json(findings), indent=2) + "\n")
    elif verdict(findings) == "wrong":
        wrong = [f"{finding.part}: {finding.name}" for finding in findings if finding.status == "wrong"]
        sys.stderr.write(f"wrong: {'; '.join(wrong)}\n")
    else:
        sys.stdout.write("Training will work here.\n")
    return int(verdict(findings) == "wrong")
