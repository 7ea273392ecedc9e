"""Options read from the text of a class are those that Python finds when it imports the class."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from mhla_tasks.commandline import signatures
from mhla_tasks.commandline.signatures import OWN, imported_signature, written_signature

from lightning_mhla import BlockLayout

ROOT = Path(__file__).parents[2]
NAMED = sorted(
    {
        path
        for file in (ROOT / "configs").rglob("*.yaml")
        for path in re.findall(r"class_path: *([\w.]+)", file.read_text())
        if path.split(".")[0] in OWN
    }
)


@pytest.mark.parametrize("class_path", [*NAMED, "lightning_mhla.AttentionConfig"])
def test_as_written_and_as_imported(class_path: str) -> None:
    module, _, name = class_path.rpartition(".")
    assert written_signature(class_path) == imported_signature(getattr(import_module(module), name))


def test_a_class_whose_constructor_is_another_packages_is_not_guessed() -> None:
    assert written_signature("lightning_mhla.checkpoints.io.WholeCheckpointIO") is None


def test_the_models_take_options_of_options() -> None:
    found = written_signature("mhla_tasks.classification.ImageClassifier")
    assert found is not None
    assert {"kind", "block_size"} <= set(found.options["attention"][0].options)
    assert found.options["depth"] == []


@dataclass
class Node:
    """Names itself."""

    share: float = 1.0
    following: Node | None = None


class Open:
    def __init__(self, known: int, **others: int) -> None:
        pass


class Parts:
    def __init__(self, root: Node | None = None, parts: dict[str, Node] | None = None) -> None:
        pass


@pytest.mark.parametrize("kind", ["imported", "written"])
def test_options_of_classes_that_name_themselves_and_of_mappings(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "imported":
        found = imported_signature(Parts)
    else:
        (tmp_path / "own").mkdir()
        (tmp_path / "own/__init__.py").write_text(Path(__file__).read_text())
        monkeypatch.setattr(signatures, "OWN", ("own",))
        monkeypatch.syspath_prepend(tmp_path)
        found = written_signature("own.Parts")
    assert found is not None
    assert found.options["parts"] == [], "the keys of a mapping are its user's"
    (node,) = found.options["root"]
    assert node.options == {"share": [], "following": []}


@pytest.mark.parametrize(
    "class_path",
    [
        "lightning.pytorch.callbacks.ModelCheckpoint",  # not the suite's
        "mhla_tasks.classification.NoSuchClass",
        "mhla_tasks.nowhere.ImageClassifier",
        "mhla_tasks.tools.doctor.machine",  # a module that its package imports from itself
        "mhla_tasks./etc/x.Y",
        "ImageClassifier",
        "",
    ],
)
def test_what_the_text_does_not_settle(class_path: str) -> None:
    assert written_signature(class_path) is None


def test_options_of_any_name_are_not_checked() -> None:
    assert imported_signature(Open) is None


def test_fields_that_no_caller_gives_are_no_options() -> None:
    written = written_signature("lightning_mhla.attention.layout.BlockLayout")
    assert written is not None
    assert written == imported_signature(BlockLayout)
