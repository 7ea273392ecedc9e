"""Lists of class names: reading and writing them, and the labels that a part of a data set gets by name."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_mhla.data import BrokenSampleError, classes, images, write_shards
from lightning_mhla.data.classes import (
    check_count,
    data_set_classes,
    folder_classes,
    match_classes,
    read_classes,
    write_classes,
)
from lightning_mhla.data.module import ShardSets
from lightning_mhla.data.shards import find_shards
from lightning_mhla.data.write import Preparation


@pytest.mark.parametrize("count", [1, 2, 1 << 24])
def test_valid_numbers_of_classes(count: int) -> None:
    assert check_count(count) == count


@pytest.mark.parametrize("count", [0, -1, (1 << 24) + 1])
def test_invalid_numbers_of_classes(count: int) -> None:
    with pytest.raises(ValueError, match=f"num_classes={count} must be 1 to 16777216"):
        check_count(count)


def test_names_are_written_one_per_line_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "train-classes.txt"
    assert read_classes(file) is None
    write_classes(file, ["ant", "two words", "line\nbreak", "é"])
    assert file.read_text(encoding="utf-8") == "ant\ntwo words\nline\\nbreak\né\n"
    assert read_classes(file) == ["ant", "two words", "line\\nbreak", "é"]


@pytest.mark.parametrize(
    ("text", "names"),
    [("", []), ("a", ["a"]), ("a\n", ["a"]), ("a\nb", ["a", "b"]), ("a\nb\n", ["a", "b"]), ("a\r\n\r\n\n", ["a"])],
)
def test_the_last_line_may_end_or_not(tmp_path: Path, text: str, names: list[str]) -> None:
    (tmp_path / "classes.txt").write_text(text)
    assert read_classes(tmp_path / "classes.txt") == names


def test_a_blank_line_between_names_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("ant\n\nbee\n")
    with pytest.raises(ValueError, match=r"classes\.txt: line 2 is blank"):
        read_classes(tmp_path / "classes.txt")


def test_a_name_that_occurs_twice_is_told(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\nbee\n")
    with pytest.raises(ValueError, match=r"classes\.txt lists 'bee' twice"):
        read_classes(tmp_path / "classes.txt")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "classes.txt"
    file.touch()
    os.truncate(file, (1 << 26) + 1)  # a sparse file: no blocks on the disk
    with pytest.raises(ValueError, match=r"has 67108865 bytes, at most 67108864 are read"):
        read_classes(file)
    monkeypatch.setattr(classes, "LARGEST_LIST", 4)
    file.write_text("a\nb\n")
    assert read_classes(file) == ["a", "b"]
    file.write_text("a\nbc\n")
    with pytest.raises(ValueError, match="has 5 bytes, at most 4"):
        read_classes(file)


def test_classes_of_a_folder_are_its_visible_folders_in_order(tmp_path: Path) -> None:
    for name in ("dog", "cat", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "ant.txt").touch()
    assert folder_classes(tmp_path) == ["cat", "dog"]


def test_the_list_of_a_different_prefix_is_found(tmp_path: Path) -> None:
    assert data_set_classes(tmp_path, "val") is None
    write_classes(tmp_path / "val-classes.txt", ["bee", "cat"])
    assert data_set_classes(tmp_path, "val") is None, "its own list"
    assert data_set_classes(tmp_path, "train") == ["bee", "cat"]
    write_classes(tmp_path / "train-classes.txt", ["ant", "bee", "cat"])
    assert data_set_classes(tmp_path, "val") == ["ant", "bee", "cat"]
    write_classes(tmp_path / "extra-classes.txt", ["ant", "bee", "cat"])
    assert data_set_classes(tmp_path, "val") == ["ant", "bee", "cat"], "two lists that are the same"
    write_classes(tmp_path / "train-classes.txt", ["ant"])
    with pytest.raises(ValueError, match=r"extra-classes\.txt and .*train-classes\.txt do not list the same classes"):
        data_set_classes(tmp_path, "val")


def test_shards_keep_the_labels_of_their_list(tmp_path: Path) -> None:
    def write(names: list[str], force: bool = False) -> None:
        write_shards(range(2), lambda number: {"cls": number}, tmp_path, "train", 2, force=force, classes=names)

    write(["bee", "cat"])
    write(["bee", "cat"])
    for names in (["cat", "bee"], ["ant", "bee", "cat"], ["bee"]):
        with pytest.raises(
            ValueError, match=r"train-\*\.tar have the labels of train-classes\.txt, which lists other classes"
        ):
            write(names)
    assert read_classes(tmp_path / "train-classes.txt") == ["bee", "cat"]
    write(["bee", "cat", "dog"])
    assert read_classes(tmp_path / "train-classes.txt") == ["bee", "cat", "dog"], "existing labels have the same names"
    write(["cat", "bee"], force=True)
    assert read_classes(tmp_path / "train-classes.txt") == ["cat", "bee"]


def test_a_call_that_fails_at_once_leaves_no_list(tmp_path: Path) -> None:
    def fails(number: int) -> dict[str, int]:
        raise BrokenSampleError("broken")

    with pytest.raises(BrokenSampleError, match="more than --max_skipped 0"):
        write_shards(range(2), fails, tmp_path, "train", 2, classes=["bee", "cat"])
    assert data_set_classes(tmp_path, "val") is None
    (tmp_path / "train-classes.txt").write_text("ant\r\nbee")  # of the user
    with pytest.raises(BrokenSampleError, match="more than --max_skipped 0"):
        write_shards(range(2), fails, tmp_path, "train", 2, classes=["bee", "cat"])
    assert (tmp_path / "train-classes.txt").read_bytes() == b"ant\r\nbee"


def test_classes_are_matched_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert match_classes(["cat", "ant", "bee"], ["ant", "bee", "cat"], "val") == [2, 0, 1]
    assert not caplog.messages
    assert match_classes(["bee"], ["ant", "bee", "cat"], "val") == [1]
    assert caplog.messages == ["val has no images of the classes 'ant', 'cat'"]


@pytest.mark.parametrize(("count", "end"), [(5, ""), (6, ", .. (6 in all)"), (9, ", .. (9 in all)")])
def test_a_message_names_up_to_five_classes(count: int, end: str) -> None:
    names = [f"c{number}" for number in range(count)]
    listed = ", ".join(map(repr, names[:5])) + end
    with pytest.raises(ValueError) as error:  # noqa: PT011  compared below
        match_classes(names, ["ant"], "val")
    assert str(error.value) == f"val has classes that the training data does not have: {listed}; it has 'ant'"


def write(folder: Path, prefix: str, names: list[str] | None, count: int = 4) -> str:
    """Shards of two samples each, with the names of their classes beside them."""
    write_shards(range(count), lambda number: {"cls": number % 2}, folder, prefix, 2)
    if names is not None:
        write_classes(folder / f"{prefix}-classes.txt", names)
    return f"{folder}/{prefix}-*.tar"


@pytest.mark.parametrize(
    ("own", "wanted", "labels"),
    [
        (["bee", "cat"], ["ant", "bee", "cat"], [1, 2]),
        (["cat", "bee"], ["bee", "cat"], [1, 0]),
        (["bee", "cat"], ["bee", "cat"], None),  # the same: nothing to change
        (["bee", "cat"], None, None),
        (None, ["bee", "cat"], None),
    ],
)
def test_labels_of_shards_become_those_of_the_data_set(
    tmp_path: Path, own: list[str] | None, wanted: list[str] | None, labels: list[int] | None
) -> None:
    sets = ShardSets(write(tmp_path / "a", "train", None), write(tmp_path / "b", "val", own))
    assert images.class_names(sets, "validate") == own
    for as_given in (list, tuple):
        assert images.shard_labels(sets, "validate", None if wanted is None else as_given(wanted)) == labels
    assert images.class_names(sets) is None, "the training shards name none"


def test_a_label_that_cannot_be_matched_names_the_shards(tmp_path: Path) -> None:
    where = write(tmp_path, "val", ["bee", "dog"])
    with pytest.raises(
        ValueError, match=r"val-\*\.tar \(classes\.txt\) has classes that .* not have: 'dog'; it has 'bee'"
    ):
        images.shard_labels(ShardSets(where, where), "validate", ["bee"])


def test_shards_of_two_prefixes_have_one_list(tmp_path: Path) -> None:
    names: Any = ["bee", "cat"]
    for prefix in ("one", "two"):
        write(tmp_path, prefix, names)
    shards = sorted(tmp_path.glob("*.tar"))
    assert len(shards) == 4
    assert images.shard_classes(shards) == names
    write_classes(tmp_path / "two-classes.txt", names[::-1])
    with pytest.raises(ValueError, match=r"two-classes\.txt"):
        images.shard_classes(shards)
    (tmp_path / "two-classes.txt").unlink()
    with pytest.raises(ValueError, match=r"two-classes\.txt"):
        images.shard_classes(shards)
    assert images.shard_classes(sorted(tmp_path.glob("one-*.tar"))) == names


def test_a_mark_at_the_beginning_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfcat\ndog\n")
    assert read_classes(tmp_path / "classes.txt") == ["cat", "dog"]


def test_names_in_another_encoding_are_an_error_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_bytes("café\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"classes\.txt"):
        read_classes(tmp_path / "classes.txt")


def test_shards_of_a_pattern_are_those_of_its_folder(tmp_path: Path) -> None:
    for name in ("train-0.tar", "._train-0.tar", ".hidden.tar"):
        (tmp_path / name).write_bytes(b"")
    assert find_shards(str(tmp_path / "*.tar")) == find_shards(str(tmp_path)) == [tmp_path / "train-0.tar"]
    with pytest.raises(FileNotFoundError, match="the list of locations of shards is empty"):
        find_shards([])


@pytest.mark.parametrize("count", [0, -1])
def test_shards_of_no_samples_are_refused_before_anything_is_deleted(count: int, tmp_path: Path) -> None:
    (tmp_path / "train-0000.tar").write_bytes(b"mine")
    with pytest.raises(ValueError, match=f"per_shard={count} must be at least 1"):
        Preparation(tmp_path, "train", {}, [], per_shard=count, force=True)
    assert (tmp_path / "train-0000.tar").read_bytes() == b"mine"
