"""Options of classes, as configurations give them: their names, and the classes that may stand below them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from lightning import Callback, Trainer
from mhla_tasks.classification import ImageClassifier
from mhla_tasks.commandline.signatures import (
    accepts_null,
    option_classes,
    option_dataclasses,
    option_names,
    parameter_bases,
)
from typing_extensions import TypeAliasType

from lightning_mhla import AttentionConfig


@dataclass
class Node:
    """Class with a parameter of its own type."""

    share: float = 1.0
    following: Node | None = None
    computed: int = field(default=0, init=False)


class Open:
    def __init__(self, known: int, **others: int) -> None:
        pass


class Passing(Open):
    def __init__(self, own: int, **others: int) -> None:
        super().__init__(**others)


class Parts(Open):
    def __init__(
        self,
        root: Node | None = None,
        parts: dict[str, Node] | None = None,
        several: Sequence[Node] | Mapping[str, Trainer] = (),
        word: Literal["a", "b"] = "a",
        function: Callable[[Node], Node] | None = None,
        anything: Any = None,
        plain: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(1)


def test_the_models_take_options_of_options() -> None:
    names = option_names(ImageClassifier)
    assert names is not None
    assert {"attention", "shape"} <= names
    assert option_dataclasses(ImageClassifier, "attention") == [AttentionConfig]
    assert {"kind", "block_size"} <= (option_names(AttentionConfig) or set())
    assert option_dataclasses(ImageClassifier, "drop_path") == []
    assert option_classes(Trainer)["callbacks"] == (Callback,)


@pytest.mark.parametrize(
    ("name", "below", "anywhere"),
    [
        ("root", (Node,), (Node,)),
        ("parts", (), (Node,)),  # the keys of a mapping are its user's
        ("several", (Node,), (Node, Trainer)),
        ("word", (), ()),
        ("function", (), ()),
        ("anything", (), ()),
        ("plain", (), ()),
    ],
)
def test_classes_below_an_option(name: str, below: tuple[type, ...], anywhere: tuple[type, ...]) -> None:
    assert option_classes(Parts)[name] == below
    assert parameter_bases(Parts)[name] == anywhere


def test_options_of_a_base_count_where_they_are_passed_on() -> None:
    assert "known" not in option_classes(Parts)
    assert set(option_classes(Passing)) == {"own", "known"}


def test_a_class_may_name_itself() -> None:
    assert option_dataclasses(Node, "following") == [Node]


def test_fields_that_no_caller_gives_are_no_options() -> None:
    assert option_names(Node) == {"share", "following"}


def test_options_of_any_name_are_not_checked() -> None:
    assert option_names(Open) is None
    assert option_names(Parts) == {"root", "parts", "several", "word", "function", "anything", "plain"}


Number = TypeAliasType("Number", int | None)


class Aliased:
    def __init__(self, number: Number = 3, plain: int = 3, text: str | None = "a", anything: Any = 1) -> None:
        pass


def test_null_is_accepted_behind_an_alias() -> None:
    assert [accepts_null(Aliased, name) for name in ("number", "plain", "text", "anything")] == [
        True,
        False,
        True,
        True,
    ]
