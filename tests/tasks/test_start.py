"""Imports of a command at its start: no library that it does not use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import END, IN_TURN

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torchmetrics.functional.image", "torchvision.datasets.mnist", "scipy", "transformers", "diffusers", "pandas",
)  # fmt: skip
"""Libraries that Lightning, torchmetrics or a domain would import, and that a classification run does not use."""


def modules_after(program: str, *arguments: str) -> tuple[int, set[str], str]:
    """Run a command, and return its exit status, the imported modules, and its output."""
    code = (
        f"import atexit, sys; atexit.register(lambda: print('MODULES', *sys.modules, file=sys.__stderr__))\n{program}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, timeout=240
    )
    said, _, modules = done.stderr.rpartition("MODULES ")
    return done.returncode, set(modules.split()), done.stdout + said


MAIN = "from mhla_tasks.commandline.main import main; main()"


def test_help_and_versions_need_no_torch() -> None:
    status, modules, said = modules_after(MAIN, "--help")
    assert status == 0
    assert all(word in said for word in ("fit ", "validate ", "test ", "predict ", "doctor "))
    assert not {"torch", "lightning"} & modules
    status, modules, said = modules_after(MAIN, "doctor", "--json", "--only", "versions", "storage")
    assert status == 0, said
    assert not {"torch", "lightning", "numpy"} & modules


def test_a_mistake_is_told_without_what_a_run_would_need() -> None:
    mistakes = [
        ["--config=configs/classification/digits.yaml", "--model.nope=1"],
        ["--config=configs/classification/digits.yaml", "--trainer.max_epochs=many"],
        ["--config=configs/classification/digits.yaml", "--config=missing.yaml"],
        ["--config=configs/classification/mnist.yaml", "--data.nope=1"],
    ]
    status, modules, text = modules_after(IN_TURN, json.dumps([["fit", *mistake] for mistake in mistakes]))
    assert status == 0, text
    parts = text.split(END)
    for mistake, said, code in zip(mistakes, parts[:-1:2], parts[1::2], strict=True):
        assert code == "2", (mistake, said)
        assert said.startswith("error: "), (mistake, said)
    assert not modules.intersection(HEAVY)


@pytest.mark.parametrize(
    ("config", "mistake"),
    [
        ("diffusion/digits", "--model.attention.nope=1"),
        ("language/stdlib", "--data.nope=1"),
        ("video/digits_finetune", "--model.nope=1"),
    ],
)
def test_a_mistake_is_told_in_domains_that_import_large_libraries(config: str, mistake: str) -> None:
    status, _, said = modules_after(MAIN, "fit", "--config", f"configs/{config}.yaml", mistake)
    assert status == 2
    (error,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert f"{mistake.lstrip('-').partition('=')[0]} is not an option" in error


def test_packages_that_are_put_off_lack_nothing() -> None:
    program = """
from mhla_tasks.commandline.late_imports import put_off_imports
put_off_imports()
put_off_imports()
import sys, pickle
import torchmetrics
from torchmetrics import MeanMetric, Metric
assert "torchmetrics.functional.image" not in sys.modules
import torchmetrics.metric
assert Metric is torchmetrics.metric.Metric
assert type(pickle.loads(pickle.dumps(MeanMetric()))) is MeanMetric
assert torchmetrics.classification.MulticlassF1Score(num_classes=3).num_classes == 3
assert torchmetrics.Accuracy is not None and MeanMetric is torchmetrics.MeanMetric
assert torchmetrics.functional.accuracy.__module__.startswith("torchmetrics.functional")
assert not hasattr(torchmetrics, "nothing")
"""
    status, modules, said = modules_after(program)
    assert status == 0, said
    assert "torchmetrics.functional.image" in modules
    program = """
from mhla_tasks.commandline.late_imports import put_off_imports
put_off_imports()
from torchmetrics.classification import *
assert BinaryAccuracy is not None
"""
    status, _, said = modules_after(program)
    assert status == 0, said


def test_packages_of_packages_are_put_off() -> None:
    program = """
from mhla_tasks.commandline.late_imports import put_off_imports
put_off_imports()
import sys
import torchvision
assert "torchvision.datasets.mnist" not in sys.modules
assert torchvision.datasets.MNIST.__module__ == "torchvision.datasets.mnist"
assert not hasattr(torchvision.datasets, "nothing")
"""
    status, _, said = modules_after(program)
    assert status == 0, said


def test_garbage_is_searched_for_again_after_the_imports() -> None:
    program = """
import gc
from mhla_tasks.commandline.late_imports import without_collection
with without_collection():
    assert not gc.isenabled()
assert gc.isenabled() and not gc.get_freeze_count()
gc.disable()
with without_collection():
    pass
assert not gc.isenabled()
"""
    status, _, said = modules_after(program)
    assert status == 0, said


def test_imported_objects_are_never_scanned_by_the_garbage_collector() -> None:
    watched = """
import gc
scanned = []
gc.callbacks.append(lambda phase, _: phase == "start" and scanned.append(len(gc.get_objects())))
try:
    {}
finally:
    assert max(scanned) < 60_000, max(scanned)
"""
    status, _, said = modules_after(
        watched.format(MAIN), "fit", "--config=configs/classification/digits.yaml", "--model.nope=1"
    )
    assert status == 2, said
    assert "AssertionError" not in said


def test_nothing_is_said_at_the_end_of_a_command() -> None:
    status, _, said = modules_after(MAIN, "fit", "--config", "configs/language/stdlib.yaml", "--print_config")
    assert status == 0
    assert "leaked" not in said, "extensions complain of what is not collected when Python ends"
