"""The table, the picture and the plain data of a comparison of runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from mhla_tasks.tools import compare
from mhla_tasks.tools.compare import Run


def run(folder: str, options: dict[str, Any] | None = None, **changes: Any) -> Run:
    record = {
        "finished": True, "steps": 1200, "seconds": 65.0, "parameters": 1_234_567,
        "best": {"metric": "val/loss", "mode": "min", "value": 0.25, "step": 600},
        "metrics": {"val/loss": [[600, 0.25], [1200, 0.123456]], "val/samples": [[1200, 10]]},
    }  # fmt: skip
    return Run(Path(folder), {**record, **changes}, options or {})


def printed(capsys: pytest.CaptureFixture[str], *runs: Run) -> list[str]:
    compare.print_table(runs)
    return [line for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]


def test_options_stand_left_and_numbers_right(capsys: pytest.CaptureFixture[str]) -> None:
    header, one, two = printed(
        capsys, run("runs/a", {"model.kind": "mhla"}), run("runs/longer", {"model.kind": "x"}, steps=3, finished=False)
    )
    for name, cells in {"kind": ("mhla", "x"), "run": ("a", "longer")}.items():
        start = header.index(name)
        assert [line[start : start + len(cell)] for line, cell in zip((one, two), cells, strict=True)] == list(cells), (
            "left"
        )
    for name, cells in {
        "val/loss": ("0.1235",) * 2,
        "steps": ("1,200", "3, unfinished"),
        "time": ("1 min 05 s",) * 2,
    }.items():
        end = header.index(name) + len(name)
        assert [line[end - len(cell) : end] for line, cell in zip((one, two), cells, strict=True)] == list(cells), (
            "right"
        )
    assert one.rstrip().endswith("1,234,567")


def test_without_options_only_the_folder_stands_left(capsys: pytest.CaptureFixture[str]) -> None:
    header, one, two = printed(capsys, run("runs/a"), run("runs/b", metrics={"val/loss": [[1, 123456.0]]}))
    assert header.split() == ["run", "val/loss", "best", "val/loss", "steps", "time", "parameters"]
    end = header.index("val/loss") + len("val/loss")
    assert one[:end].rstrip().endswith("0.1235")
    assert len(one[:end].rstrip()) == end
    assert two[:end].endswith("1.235e+05")


def test_a_table_is_as_wide_as_its_content(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file or a pipe; markup and control characters of a configuration are text."""
    monkeypatch.setenv("COLUMNS", "40")
    long = "x" * 300
    header, one, two = printed(capsys, run("runs/a", {"name": long}), run("runs/b", {"name": "[red]\x1b[31m"}))
    assert long in one
    assert "[red]" in two
    assert "\x1b" not in one + two + header


def test_a_terminal_folds_long_cells(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    styled = printed(capsys, run("runs/a", {"name": "x" * 60 + "y" * 60}), run("runs/b", {"name": "z"}))
    lines = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in styled]
    assert sum(line.count("x") for line in lines) >= 60
    assert sum(line.count("y") for line in lines) >= 60, "nothing is cut off"
    assert max(map(len, lines)) <= 100


def test_runs_have_the_shortest_names_that_tell_them_apart() -> None:
    assert compare.short_names(["model.init_args.optimizer.lr", "model.init_args.dim"]) == {
        "model.init_args.optimizer.lr": "lr", "model.init_args.dim": "dim",
    }  # fmt: skip
    assert compare.short_names(["model.init_args.a.lr", "data.lr", "lr"]) == {
        "model.init_args.a.lr": "a.lr", "data.lr": "data.lr", "lr": "lr",
    }  # fmt: skip


def test_differences_are_those_of_configured_runs() -> None:
    first, second = (
        {"a": 1, "b": [1], "run_dir": "x", "trainer.logger.x": 1},
        {"a": 1, "b": [2], "run_dir": "y", "c": None},
    )
    assert compare.differences([run("1", first), run("2", second), run("3")]) == ["b"]
    assert compare.differences([run("1", first), run("3")]) == []
    assert compare.differences([run("1", first), run("2", {**first, "trainer.logger.x": 2, "ckpt_path": 3})]) == []


def test_metrics_that_differ_come_first() -> None:
    same, other = (
        {"val/a": [[1, 1.0]], "val/b": [[1, 2.0]], "val/samples": [[1, 9]]},
        {"val/a": [[1, 1.0]], "val/b": [[1, 3.0]]},
    )
    assert compare.common_metrics([run("1", metrics=same), run("2", metrics=same)]) == ["val/a", "val/b"]
    assert compare.common_metrics([run("1", metrics=same), run("2", metrics={**other, "val/samples": [[1, 9]]})]) == [
        "val/b",
        "val/a",
    ]
    assert compare.common_metrics([run("1", metrics=same), run("2", metrics={**other, "val/samples": [[1, 8]]})]) == ["val/b", "val/samples", "val/a"]  # fmt: skip
    assert compare.common_metrics([run("1", metrics=same), run("2", metrics=other)]) == ["val/b", "val/a"]
    assert run("1", metrics={"val/a": []}).final("val/a") is None
    assert run("1").final("val/loss") == 0.123456
    assert run("1").final("val/none") is None


def test_a_best_value_stands_under_its_metric() -> None:
    best = {"metric": "val/accuracy", "mode": "max", "value": 0.9, "step": 1}
    header, rows = compare.table(
        [run("a/1"), run("a/2", best=best), run("a/3", best={}), run("a/4", best={**best, "value": None})]
    )
    columns = [header.index(f"best {metric}") for metric in ("val/loss", "val/accuracy")]
    assert [[row[column] for column in columns] for row in rows] == [["0.25", ""], ["", "0.9"], ["", ""], ["", ""]]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]


def test_one_run_and_equal_folders_are_named_in_full() -> None:
    for runs in ([run("some/where")], [run("some/where"), run("some/where")]):
        assert {row[0] for row in compare.table(runs)[1]} == {"some/where"}
    assert [row[0] for row in compare.table([run("some/where"), run("some")])[1]] == ["where", "."]


def test_options_of_lists_of_classes_are_named_by_class() -> None:
    callbacks = [{"class_path": f"a.{name}", "init_args": {"n": n}} for n, name in enumerate(("M", "M", "Mx", "M"))]
    assert compare.flat({"t": {"c": callbacks}}) == {"t.c.M.n": 0, "t.c.M-2.n": 1, "t.c.Mx.n": 2, "t.c.M-3.n": 3}
    assert compare.flat({"a": {}, "b": [], "c": [{"class_path": "x"}, 1], "d": {"e": {"f": None}}}) == {
        "a": {}, "b": [], "c": [{"class_path": "x"}, 1], "d.e.f": None,
    }  # fmt: skip
    assert compare.flat({"c": [{"class_path": "a.B"}]}) == {"c.B": None}
    assert compare.flat(3) == {"": 3}


def test_labels_name_what_differs() -> None:
    runs = [run("a", {"x": 1, "y": "t"}), run("b", {"x": [2], "y": "t"}), run("c", {"y": "t"})]
    assert compare.labels(runs) == ["x=1", "x=[2]", "x="]
    assert compare.labels(runs[:1]) == ["a"]


def test_the_picture_has_a_curve_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **o: (figures.append(self), save(self, *a, **o))[1])
    metrics = {"val/$x$": [[1, 2.0], [3, 4.0]], "val/b": [[1, 1.0]]}
    path = tmp_path / "new/picture.png"
    compare.draw(
        [run("a", {"x": "$1$"}, metrics=metrics), run("b", {"x": 2}, metrics={**metrics, "val/$x$": [[1, 5.0]]})], path
    )
    assert path.stat().st_size > 1000
    (figure,) = figures
    axes = [axis for axis in figure.axes if axis.lines]
    assert [axis.get_title() for axis in axes] == ["val/$x$", "val/b"]
    first, second = axes[0].lines
    assert [list(first.get_xdata()), list(first.get_ydata())] == [[1, 3], [2, 4]]
    assert [list(second.get_xdata()), list(second.get_ydata())] == [[1], [5]]
    assert {axis.get_xlabel() for axis in axes} == {"optimizer step"}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["x=$1$", "x=2"]
    assert not any(text.get_parse_math() for text in legend.get_texts())
    with pytest.raises(ValueError, match="no metric in common"):
        compare.draw([run("a", metrics={}), run("b")], path)


def test_plain_data_hold_everything() -> None:
    one, two = run("a", {"x": 1, "y": 2}), run("b", {"x": 3, "y": 2})
    assert compare.as_json([one, two]) == [
        {"folder": "a", "options": {"x": 1}, **one.record}, {"folder": "b", "options": {"x": 3}, **two.record},
    ]  # fmt: skip


def save(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({**run("").record, **changes}))
    return folder


def test_runs_are_read_once_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    numbers = [7, 12, 1, 10, 3, 11, 9, 2, 8]
    for name in ("w2/v1", "v", *(f"v{number}" for number in numbers)):
        save(tmp_path / name)
    (tmp_path / "v9/config.yaml").write_text("model: {init_args: {dim: 3, api_key: x}}\n")
    found = compare.read_runs([tmp_path, tmp_path / "v9"])
    names = [str(one.folder.relative_to(tmp_path)) for one in found]
    assert names == ["v", *(f"v{number}" for number in sorted(numbers)), "w2/v1"]
    (nine,) = [one for one in found if one.options]
    assert nine.options["model.init_args.dim"] == 3
    assert nine.options["model.init_args.api_key"] != "x", "secrets are left out"
    for changes in ({"seconds": "1"}, {"metrics": None}):
        save(tmp_path / f"broken-{len(changes)}-{next(iter(changes))}", **changes)
        with pytest.raises(ValueError, match="is not a record of a run: it has no metrics or no seconds"):
            compare.read_runs([tmp_path / f"broken-1-{next(iter(changes))}"])
