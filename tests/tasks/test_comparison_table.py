"""Runs that are read, grouped by seed, and compared in tables."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from mhla_tasks.commandline import registry
from mhla_tasks.tools.comparison import curves, formats
from mhla_tasks.tools.comparison.groups import Group, all_metrics, common_name, direction, group_runs, remarks
from mhla_tasks.tools.comparison.options import flat, short_names
from mhla_tasks.tools.comparison.runs import Run, as_json, differences, folder_names, read_runs, unrecorded
from mhla_tasks.tools.comparison.table import Table, tabulate


def run(folder: str, options: dict[str, Any] | None = None, **changes: Any) -> Run:
    record = {
        "finished": True, "steps": 1200, "seconds": 65.0, "parameters": 1_234_567, "versions": {"torch": "2.14"},
        "best": {"metric": "val/loss", "mode": "min", "value": 0.123456, "step": 1200},
        "metrics": {"val/loss": [[600, 0.25], [1200, 0.123456]], "val/samples": [[1200, 10]]},
    }  # fmt: skip
    return Run(Path(folder), {**record, **changes}, options or {})


def scored(kind: str, seed: Any, accuracy: float | None, **changes: Any) -> Run:
    """A run with one metric, whose best value is its last one."""
    best = {"metric": "val/accuracy", "mode": "max", "value": accuracy}
    metrics = {"val/accuracy": [[600, 0.1], [1200, accuracy]]}
    options = {"seed_everything": seed, "model.kind": kind}
    return run(f"runs/kind={kind},seed={seed}", options, **{"best": best, "metrics": metrics, **changes})


def cells(table: Table) -> list[dict[str, str]]:
    return [{column.name: str(cell) for column, cell in zip(table.columns, row, strict=True)} for row in table.rows]


def compared(*runs: Run, metrics: list[str] | None = None) -> list[dict[str, str]]:
    return cells(tabulate(group_runs(runs), metrics))


def printed(capsys: pytest.CaptureFixture[str], *runs: Run) -> list[str]:
    groups = group_runs(runs)
    formats.print_table(tabulate(groups), [])
    return [line for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]


def save_run(folder: Path, options: str = "seed_everything: 0", **changes: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({**run("x").record, **changes}))
    (folder / "config.yaml").write_text(options)


def test_linked_folders_are_runs_too(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_run(tmp_path / "elsewhere" / name)
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / name).symlink_to(f"../elsewhere/{name}")
    save_run(tmp_path / "runs/three")
    (tmp_path / "runs/circle").symlink_to(tmp_path / "runs")
    (tmp_path / "runs/again").symlink_to(tmp_path / "elsewhere/one")
    (tmp_path / "elsewhere/unfinished").mkdir()
    (tmp_path / "elsewhere/unfinished/sweep.json").write_text("{}")
    (tmp_path / "runs/unfinished").symlink_to(tmp_path / "elsewhere/unfinished")
    assert len(read_runs([tmp_path / "runs"])) == 3
    assert unrecorded([tmp_path / "runs"]) == [tmp_path / "runs/unfinished"]


def test_of_several_links_to_a_run_the_first_by_name_is_shown(tmp_path: Path) -> None:
    save_run(tmp_path / "elsewhere/run")
    links = tmp_path / "links"
    links.mkdir()
    for name in ("c", "a", "b"):
        (links / name).symlink_to(tmp_path / "elsewhere/run")
    assert [one.folder.name for one in read_runs([links])] == ["a"]


def test_numbers_in_the_names_of_folders_are_sorted_as_numbers(tmp_path: Path) -> None:
    names = ["lr=1e-05", "lr=0.0003", "lr=0.001", "lr=0.002", "lr=0.25", "lr=0.5", "lr=9", "lr=10"]
    for name in sorted(names):
        save_run(tmp_path / name)
    assert [run.folder.name for run in read_runs([tmp_path])] == names


def test_the_order_of_a_sweep_also_holds_below_the_given_folder(tmp_path: Path) -> None:
    for sweep, names in {"first": ("b", "c", "a"), "second": ("z", "y")}.items():
        for name in sorted(names):
            save_run(tmp_path / sweep / name)
        (tmp_path / sweep / "runs.json").write_text(json.dumps({"runs": list(names)}))
    assert [run.folder.name for run in read_runs([tmp_path])] == ["b", "c", "a", "z", "y"]


@pytest.mark.parametrize("options", ["", "{}", "null"])
def test_an_empty_configuration_says_nothing_about_options(options: str, tmp_path: Path) -> None:
    save_run(tmp_path / "a", options)
    save_run(tmp_path / "b", "model: {x: 1}\nseed_everything: 0\n")
    groups = group_runs(read_runs([tmp_path]))
    assert groups[0].notes == ("options unknown, config.yaml is missing or empty",)
    assert differences([run for group in groups for run in group.runs]) == []


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [
        ({"trainer.gradient_clip_val": 1}, {"trainer.gradient_clip_val": 1.0}, 1),
        ({"model.betas": [0, 1]}, {"model.betas": [0.0, 1.0]}, 1),
        ({"model.x": {"a": 2.0}}, {"model.x": {"a": 2}}, 1),
        ({"model.x": True}, {"model.x": 1}, 2),
        ({"model.x": 1}, {"model.x": 1.5}, 2),
        ({"trainer.callbacks.ModelCheckpoint.dirpath": "/a"}, {"trainer.callbacks.ModelCheckpoint.dirpath": "/b"}, 1),
        (
            {"trainer.callbacks.ModelCheckpoint-2.dirpath": "/a"},
            {"trainer.callbacks.ModelCheckpoint-2.dirpath": "/b"},
            1,
        ),
        ({"trainer.logger.CSVLogger.save_dir": "/a"}, {"trainer.logger.CSVLogger.save_dir": "/b"}, 1),
        ({"data.dirpath": "/a"}, {"data.dirpath": "/b"}, 2),
    ],
)
def test_only_options_that_matter_tell_rows_apart(one: dict[str, Any], other: dict[str, Any], rows: int) -> None:
    runs = [run("a", {"seed_everything": 0, **one}), run("b", {"seed_everything": 1, **other})]
    assert len(group_runs(runs)) == rows


def test_metrics_that_are_not_finite_are_empty_cells_of_csv() -> None:
    runs = [scored("a", 0, 0.5), scored("a", 1, None), scored("b", 0, 0.25), scored("b", 1, 0.75)]
    groups = group_runs(runs)
    table = tabulate(groups)
    assert cells(table)[0]["val/accuracy"] == "not finite in 1 of 2"
    rows = list(csv.DictReader(io.StringIO(formats.as_csv(table, groups))))
    assert [row["val/accuracy"] for row in rows] == ["", "0.5"]
    assert rows[0]["model.kind"] == "a"


def test_cosines_near_one_are_not_rounded_to_one() -> None:
    values = (0.99999, 0.9999999, 1.0)
    runs = [run(f"{value}", {"x": value}, metrics={"val/cosine": [[1200, value]]}, best={}) for value in values]
    table = tabulate(group_runs(runs), ["val/cosine"])
    assert [row["val/cosine"] for row in cells(table)] == ["0.99999", "0.9999999", "1"]
    assert [row[-1].best for row in table.without("note").rows] == [False, False, True]


def test_a_mean_that_is_equal_when_rounded_like_the_best_one_is_best_too() -> None:
    for high, wanted in ((1.22, ["0.94 ± 0.40"]), (1.2198, ["0.93 ± 0.40", "0.934 ± 0"])):
        values = {"a": (0.65, high), "b": (0.9340, 0.9340), "c": (0.2, 0.2)}
        runs = [scored(kind, seed, value) for kind, pair in values.items() for seed, value in enumerate(pair)]
        table = tabulate(group_runs(runs), ["val/accuracy"])
        assert [str(row[-1]) for row in table.rows if row[-1].best] == wanted


def test_a_metric_that_is_asked_for_twice_is_one_column() -> None:
    table = tabulate(group_runs([scored("a", 0, 0.5)]), ["val/accuracy", "steps", "val/accuracy"])
    assert [column.name for column in table.columns if column.kind == "number"] == ["val/accuracy", "steps"]


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("-1.234e-05", r"$-$1.234$\cdot 10^{-5}$"),
        ("1e+20", r"1$\cdot 10^{20}$"),
        ("-0.5", "$-$0.5"),
        ("1,234", "1,234"),
        ("a-b", "a-b"),
        ("-x", "-x"),
        ("1e-3 s", "1e-3 s"),
    ],
)
def test_numbers_in_latex(text: str, latex: str) -> None:
    assert formats.latex_text(text) == latex


def test_seeds_are_averaged_and_the_best_mean_is_marked() -> None:
    values = {"mhla": (0.91, 0.93, 0.95), "linear": (0.90, 0.901, 0.8995), "softmax": (0.5,)}
    runs = [scored(kind, seed, value) for kind, of_kind in values.items() for seed, value in enumerate(of_kind)]
    groups = group_runs(runs)
    table = tabulate(groups)
    rows = cells(table)
    assert [row["kind"] for row in rows] == ["mhla", "linear", "softmax"]
    assert [row["runs"] for row in rows] == ["3", "3", "1"]
    assert [row["val/accuracy"] for row in rows] == ["0.930 ± 0.020", "0.90017 ± 0.00076", "0.5"]
    assert [row["run"] for row in rows] == ["kind=mhla,seed=*", "kind=linear,seed=*", "kind=softmax,seed=0"]
    column = [column.name for column in table.columns].index("val/accuracy")
    assert [row[column].best for row in table.rows] == [True, False, False]
    assert table.rows[1][column].value == pytest.approx(math.fsum(values["linear"]) / 3)
    mean = math.fsum(values["linear"]) / 3
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values["linear"]) / 2)
    assert table.rows[1][column].spread_value == pytest.approx(deviation)
    assert [group.seeds for group in groups] == [["0", "1", "2"], ["0", "1", "2"], ["0"]]
    assert remarks(groups) == ["The rows do not have the same seeds."]


def test_runs_that_are_not_comparable_are_not_averaged() -> None:
    """Unfinished, with different numbers of steps, without options, or with the same seed: rows of their own with notes."""
    shorter = {"steps": 600, "metrics": {"val/accuracy": [[600, 0.7]]}}
    runs = [
        scored("mhla", 0, 0.9), scored("mhla", 1, 0.8), scored("mhla", 2, 0.99, finished=False), scored("mhla", 3, 0.7, **shorter),
        Run(Path("runs/again"), scored("mhla", 0, 0.9).record, scored("mhla", 0, 0.9).options),
        Run(Path("runs/bare"), scored("mhla", 4, 0.6).record, {}), Run(Path("runs/bare2"), scored("mhla", 4, 0.6).record, {}),
    ]  # fmt: skip
    groups = group_runs(runs)
    rows = cells(tabulate(groups))
    assert [(row["runs"], row["val/accuracy"]) for row in rows] == [
        ("2", "0.850 ± 0.071"), ("1", "0.99"), ("1", "0.7"), ("1", "0.9"), ("1", "0.6"), ("1", "0.6"),
    ]  # fmt: skip
    assert [row["notes"] for row in rows] == [
        "", "not finished", "600 steps, the longest run 1,200", "repeats a seed",
        "options unknown, config.yaml is missing or empty", "options unknown, config.yaml is missing or empty",
    ]  # fmt: skip
    table = tabulate(groups)
    best = [row[[column.name for column in table.columns].index("val/accuracy")].best for row in table.rows]
    assert best == [False, False, False, True, False, False], "an unfinished run is never the best"
    assert len({group.label for group in groups}) == len(groups)


@pytest.mark.parametrize(
    "other",
    [
        [{"class_path": "a.B"}, {"class_path": "a.C"}],
        [{"class_path": "b.B"}],
        [{"class_path": "a.B", "dict_kwargs": {"x": 1}}],
    ],
    ids=["without options", "other module", "keyword arguments"],
)
def test_a_run_with_a_different_callback_is_a_row_of_its_own(other: list[dict[str, Any]]) -> None:
    runs = [
        run(str(seed), {"seed_everything": seed, **flat({"trainer": {"callbacks": callbacks}})})
        for seed, callbacks in enumerate(([{"class_path": "a.B"}], other))
    ]
    assert [len(group.runs) for group in group_runs(runs)] == [1, 1]


def test_a_run_with_a_different_number_of_parameters_is_a_row_of_its_own() -> None:
    rows = compared(scored("a", 0, 0.5), scored("a", 1, 0.6, parameters=7))
    assert [(row["val/accuracy"], row["parameters"]) for row in rows] == [("0.5", "1,234,567"), ("0.6", "7")]


def test_runs_without_a_fixed_seed_are_different_runs() -> None:
    (row,) = compared(scored("a", None, 0.5), scored("a", None, 0.6), scored("a", True, 0.7), scored("a", True, 0.8))
    assert row["runs"] == "4"


def test_a_mean_is_not_made_of_some_of_the_runs() -> None:
    missing = {"metrics": {"val/loss": [[1200, 1.0]]}}
    infinite = {"metrics": {"val/accuracy": [[600, 0.1], [1200, None]], "val/loss": [[1200, 2.0]]}}
    rows = compared(
        scored("a", 0, 0.5), scored("a", 1, 0.6, **missing), scored("a", 2, 0.6, **missing),
        scored("b", 0, 0.5), scored("b", 1, None, **infinite),
        scored("c", 0, None, **infinite),
    )  # fmt: skip
    assert [row["val/accuracy"] for row in rows] == ["missing in 2 of 3", "not finite in 1 of 2", "not finite"]
    assert [row["val/loss"] for row in rows] == ["missing in 1 of 3", "missing in 1 of 2", "2"]


def test_a_value_from_before_the_last_step_is_marked() -> None:
    late = {"val/accuracy": [[600, 0.1], [1200, 0.5]], "val/fid": [[400, 9.0]]}
    rows = compared(scored("a", 0, 0.5, metrics=late), scored("b", 0, 0.5, metrics=late, steps=1500))
    assert [row["notes"] for row in rows] == [
        "1,200 steps, the longest run 1,500; val/fid at step 400, not 1,200",
        "val/accuracy at step 1,200, not 1,500; val/fid at step 400, not 1,500",
    ]


def test_metrics_can_be_chosen_and_an_unknown_one_is_told() -> None:
    metrics = {"val/loss": [[1200, 2.0]], "val/accuracy": [[1200, 0.5]], "val/other": [[1200, 1.0]]}
    rows = compared(run("a", metrics=metrics), run("b", metrics=metrics), metrics=["val/other", "val/accuracy"])
    assert [name for name in rows[0] if name.startswith("val/")] == ["val/other", "val/accuracy"]
    columns = "val/loss, val/accuracy, val/other, best val/loss, steps, time, parameters"
    with pytest.raises(ValueError, match=f"no run recorded the metric val/nope; the columns are {columns}"):
        compared(run("a", metrics=metrics), metrics=["val/nope"])
    assert list(rows[0]) == ["run", "val/other", "val/accuracy", "notes"], "no other numbers"
    best = {"metric": "val/loss", "mode": "min", "value": 1.5, "step": 600}
    one = run("a", metrics={**metrics, "val/loss": [[600, 1.5], [1200, 2.0]]}, best=best)
    (row,) = compared(one, metrics=["parameters", "best val/loss", "steps", "val/accuracy", "time"])
    assert list(row) == ["run", "parameters", "best val/loss", "steps", "val/accuracy", "time", "notes"]
    assert (row["best val/loss"], row["steps"]) == ("1.5", "1,200")
    with pytest.raises(ValueError, match="no run recorded the metric best val/accuracy; the columns are"):
        compared(one, metrics=["best val/accuracy"])


def test_a_best_value_stands_under_its_metric() -> None:
    best = {"metric": "val/accuracy", "mode": "max", "value": 0.9}
    accuracy = {"val/accuracy": [[600, 0.9], [1200, 0.8]], "val/loss": [[1200, 1.0]]}
    rows = compared(
        run("a/1", {"x": 1}), run("a/2", {"x": 2}, best=best, metrics=accuracy), run("a/3", {"x": 3}, best={})
    )
    assert [row["best val/accuracy"] for row in rows] == ["", "0.9", ""]
    assert "best val/loss" in rows[0], "the second and third run did not choose by it"
    assert "best val/accuracy" not in compared(scored("a", 0, 0.5), scored("b", 0, 0.6))[0], "it is the last value"


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("val/loss", "min"), ("val/bits_per_byte", "min"), ("val/perplexity", "min"), ("val/fid", "min"), ("val/kid", "min"),
        ("val/accuracy_top5", "max"), ("val/recall_at_10", "max"), ("val/cosine", "max"), ("val/inception_score", "max"),
        ("val/inception_score_std", None), ("val/samples", None), ("val/loss_precision", None), ("val/floss", None),
    ],
)  # fmt: skip
def test_the_direction_of_a_metric(metric: str, better: str | None) -> None:
    assert (
        direction(metric, group_runs([run("a")]) if metric == "val/loss" else group_runs([run("a", best={})])) == better
    )


def test_the_mode_of_the_checkpoints_decides_and_two_modes_do_not() -> None:
    def bests(*modes: str) -> list[Group]:
        return group_runs([run(mode, best={"metric": "val/loss", "mode": mode, "value": 1.0}) for mode in modes])

    assert direction("val/loss", bests("max")) == "max"
    assert direction("val/loss", bests("max", "min")) is None
    assert direction("val/loss", bests("odd")) is None


def test_equal_values_and_single_rows_have_no_best() -> None:
    nearly = [scored("a", 0, 0.500001), scored("b", 0, 0.500002)]
    means = [
        scored(kind, seed, 0.5 + seed / 10 + tiny) for kind, tiny in {"a": 0, "b": 1e-9}.items() for seed in (0, 1)
    ]
    equal = [scored("a", 0, 0.5), scored("b", 0, 0.5)]
    for runs in (equal, nearly, means, [*nearly, scored("c", 0, 0.9, finished=False)], equal[:1], [run("a", best={})]):
        assert not any(cell.best for row in tabulate(group_runs(runs)).rows for cell in row)
    table = tabulate(group_runs([scored("a", 0, 0.500001), scored("b", 0, 0.500002), scored("c", 0, 0.4)]))
    assert [row[2].best for row in table.rows] == [True, True, False], "they are rounded to the same text"
    runs = [scored("a", 0, 0.76), scored("a", 1, 0.74), scored("b", 0, 0.75), scored("c", 0, 0.5)]
    table = tabulate(group_runs(runs))
    assert [(row[3].text, row[3].best) for row in table.rows] == [("0.750", True), ("0.75", True), ("0.5", False)]


def test_markdown_csv_and_latex() -> None:
    runs = [
        scored(kind, seed, value) for kind, seed, value in (("m|h_la", 0, 0.9), ("m|h_la", 1, 0.8), ("x&y%", 0, 0.5))
    ]
    groups = group_runs(runs)
    table = tabulate(groups)
    assert formats.as_markdown(table).splitlines() == [
        "| kind | runs | val/accuracy ↑ | steps | time | parameters |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| m\\|h_la | 2 | **0.850** ± 0.071 | 1,200 | 1 min 05 s | 1,234,567 |",
        "| x&y% | 1 | 0.5 | 1,200 | 1 min 05 s | 1,234,567 |".replace("&", "\\&"),
    ]
    lines = formats.as_latex(table).splitlines()
    assert lines[1:4] == [
        "\\begin{tabular}{lrrrrr}",
        "\\toprule",
        "kind & runs & val/accuracy $\\uparrow$ & steps & time & parameters \\\\",
    ]
    assert lines[5:] == [
        "m\\textbar{}h\\_la & 2 & \\textbf{0.850} $\\pm$ 0.071 & 1,200 & 1 min 05 s & 1,234,567 \\\\",
        "x\\&y\\% & 1 & 0.5 & 1,200 & 1 min 05 s & 1,234,567 \\\\",
        "\\bottomrule", "\\end{tabular}",
    ]  # fmt: skip
    first, second = csv.DictReader(io.StringIO(formats.as_csv(table, groups)))
    assert (first["model.kind"], first["seeds"], first["folders"]) == (
        "m|h_la", "0 1", '["runs/kind=m|h_la,seed=0", "runs/kind=m|h_la,seed=1"]',
    )  # fmt: skip
    assert float(first["val/accuracy"]) == pytest.approx(0.85, abs=1e-15)
    assert float(first["val/accuracy std"]) == pytest.approx(statistics.stdev((0.9, 0.8)), abs=1e-15)
    assert (second["val/accuracy"], second["val/accuracy std"], second["time"]) == ("0.5", "", "65.0")


def test_rows_keep_their_folders_where_options_do_not_tell_them_apart() -> None:
    alone = [scored("a", 0, 0.5)]
    again = [Run(Path(f"runs/again-{number}"), run.record, run.options) for number in range(2) for run in alone]
    for runs, named in (
        (alone, True),
        ([*alone, scored("b", 0, 0.5)], False),
        ([*alone, again[0], scored("b", 0, 0.5)], False),  # a note tells it apart
        ([*alone, *again, scored("b", 0, 0.5)], True),
    ):
        table = tabulate(group_runs(runs))
        for text in (formats.as_markdown(table).removeprefix("| "), formats.as_latex(table).splitlines()[3]):
            assert text.startswith("run ") is named, text


@pytest.mark.parametrize(
    "text",
    ["\\input{x}", "a & b", "50% $x$ #1", "~^<>|\"", "[2ex] x", "*", "-5", "line\nbreak\x1b[31m", "\\\\[3cm]", "{", "}", "ü ±↑", "it's `x`"],
)  # fmt: skip
def test_no_text_breaks_a_latex_table(text: str) -> None:
    """Rows have the same number of cells, and nothing of a value is a command, a group or a comment."""
    runs = [run("a", {"x": text, "y": "b"}), run("b", {"x": "other", "y": text})]
    lines = formats.as_latex(tabulate(group_runs(runs))).splitlines()
    rows = [line for line in lines if line.endswith(" \\\\")]
    assert len(rows) == 3
    for row in rows:
        inside = row.removesuffix(" \\\\")
        assert not inside.startswith(("[", "*")), "an argument of the line before"
        printed = re.sub(
            r"\\text(backslash|asciitilde|asciicircum|less|greater|bar|quotedbl|quotesingle|asciigrave)\{\}", "", inside
        )
        printed = re.sub(r"\$\\(pm|uparrow|downarrow)\$|\$-\$|\\textbf\{([\d.,]*)\}|^\{\}", "", printed)
        assert len(re.findall(r"(?<!\\)&", printed)) == 5
        assert not re.search(r"(?<!\\)[%$#_{}]|[~^<>|\"'`\x00-\x1f]|\\(?![&%$#_{}])", printed), printed


def test_hyphens_stay_hyphens_in_latex() -> None:
    assert [formats.latex_text(text) for text in ("a-b", "--x", "a---b")] == ["a-b", "-{}-x", "a-{}--b"]


def test_formulas_of_a_spreadsheet_are_texts() -> None:
    values = {
        "=HYPERLINK(1)": "'=HYPERLINK(1)", "@y\nz": "'@y\\nz", "-1+cmd": "'-1+cmd", "-": "'-",
        -1: "-1", -2.5e-07: "-2.5e-07", "+.5": "+.5",
    }  # fmt: skip
    groups = group_runs([run(str(value), {"x": value}) for value in values])
    rows = list(csv.reader(io.StringIO(formats.as_csv(tabulate(groups), groups))))
    assert [row[1] for row in rows] == ["x", *values.values()], "a negative number stays a number"


def test_no_text_has_a_meaning_in_markdown() -> None:
    texts = {
        "__init__": "\\_\\_init\\_\\_", "_a_ b_c": "\\_a\\_ b_c", "~~x~~": "\\~\\~x\\~\\~", "$x$": "\\$x\\$", "*a*": "\\*a\\*",
    }  # fmt: skip
    table = tabulate(group_runs([run(text, {"x": text}) for text in texts]))
    assert [line.split(" | ")[0] for line in formats.as_markdown(table).splitlines()[2:]] == [
        f"| {escaped}" for escaped in texts.values()
    ]


def test_metrics_with_the_names_of_other_columns() -> None:
    best = {"metric": "val/loss", "mode": "min", "value": 0.25, "step": 600}
    metrics = {"val/loss": [[600, 0.25], [1200, 0.5]], "time": [[1200, 3.0]], "best val/loss": [[1200, 7.0]]}
    (row,) = compared(run("a", best=best, metrics=metrics))
    assert (row["val/loss"], row["time"], row["best val/loss"]) == ("0.5", "3", "7")
    assert (row["time (run)"], row["best val/loss (run)"]) == ("1 min 05 s", "0.25")
    rows = compared(run("a", {"model.steps": 5}), run("b", {"model.steps": 6}))
    assert [(row["model.steps"], row["steps"]) for row in rows] == [("5", "1,200"), ("6", "1,200")], "an option"
    rows = compared(run("a", {"data.notes": "x"}), run("b", {"data.notes": "y"}, finished=False))
    assert [(row["data.notes"], row["notes"]) for row in rows] == [("x", ""), ("y", "not finished")]
    (row,) = compared(run("a", best=best, metrics=metrics), metrics=["time (run)", "time"])
    assert list(row.items())[1:3] == [("time (run)", "1 min 05 s"), ("time", "3")]


def test_options_stand_left_and_numbers_right(capsys: pytest.CaptureFixture[str]) -> None:
    header, one, two = printed(
        capsys, run("runs/a", {"model.kind": "mhla"}), run("runs/longer", {"model.kind": "x"}, seconds=5.0)
    )
    for name, texts in {"kind": ("mhla", "x"), "run": ("a", "longer")}.items():
        start = header.index(name)
        assert [line[start : start + len(text)] for line, text in zip((one, two), texts, strict=True)] == list(texts), (
            "left"
        )
    for name, texts in {"val/loss ↓": ("0.1235",) * 2, "steps": ("1,200",) * 2, "time": ("1 min 05 s", "5 s")}.items():
        end = header.index(name) + len(name)
        assert [line[end - len(text) : end] for line, text in zip((one, two), texts, strict=True)] == list(texts), (
            "right"
        )
    assert one.rstrip().endswith("1,234,567")


def test_a_table_is_as_wide_as_its_content(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file or a pipe; markup and control characters of a configuration are text."""
    monkeypatch.setenv("COLUMNS", "40")
    long = "x" * 300
    header, one, two = printed(capsys, run("runs/a", {"name": long}), run("runs/b", {"name": "[red]\x1b[31m"}))
    assert long in one
    assert "[red]" in two
    assert "\x1b" not in one + two + header


def test_a_terminal_folds_long_cells_and_shows_the_best_in_bold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    better = {"val/loss": [[1200, 0.01]]}
    styled = printed(capsys, run("runs/a", {"name": "x" * 60 + "y" * 60}), run("runs/b", {"name": "z"}, metrics=better))
    assert sum(bool(re.search(r"\x1b\[1m *0\.01\b", line)) for line in styled) == 1
    lines = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in styled]
    assert sum(line.count("x") for line in lines) >= 60
    assert sum(line.count("y") for line in lines) >= 60, "nothing is cut off"
    assert max(map(len, lines)) <= 100


def test_keys_have_the_shortest_names_that_tell_them_apart() -> None:
    assert short_names(["model.init_args.optimizer.lr", "model.init_args.dim"]) == {
        "model.init_args.optimizer.lr": "lr", "model.init_args.dim": "dim",
    }  # fmt: skip
    assert short_names(["model.init_args.a.lr", "data.lr", "lr"]) == {
        "model.init_args.a.lr": "a.lr", "data.lr": "data.lr", "lr": "lr",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["k=a,s=0", "k=a,s=1"], "k=a,s=*"), (["s=0,k=a", "s=11,k=a"], "s=*,k=a"), (["s=10", "s=11"], "s=*"),
        (["a"], "a"), (["a", "a"], "a"), (["x", "y"], "*"), (["ab", "abab"], "ab*"), (["s=1,s2=5", "s=2,s2=5"], "s=*,s2=5"),
    ],
)  # fmt: skip
def test_folders_of_seeds_have_one_name(names: list[str], name: str) -> None:
    assert common_name(names) == name


def test_differences_are_those_of_configured_runs() -> None:
    first, second = (
        {"a": 1, "b": [1], "run_dir": "x", "trainer.logger.x": 1},
        {"a": 1, "b": [2], "run_dir": "y", "c": None},
    )
    assert differences([run("1", first), run("2", second), run("3")]) == ["b"]
    assert differences([run("1", first), run("3")]) == []
    assert differences([run("1", first), run("2", {**first, "trainer.logger.x": 2, "ckpt_path": 3})]) == []


def test_the_metric_that_chose_checkpoints_comes_first_and_equal_ones_last() -> None:
    def metrics(*runs: Run) -> list[str]:
        return all_metrics(group_runs(runs))

    same = {"val/a": [[1, 1.0]], "val/b": [[1, 2.0]], "val/samples": [[1, 9]]}
    other = {"val/a": [[1, 1.0]], "val/b": [[1, 3.0]]}
    assert metrics(run("1", metrics=same), run("2", metrics={**other, "val/samples": [[1, 9]]})) == ["val/b", "val/a"]
    assert metrics(run("1", metrics=same), run("2", metrics={**other, "val/samples": [[1, 8]]})) == ["val/b", "val/samples", "val/a"]  # fmt: skip
    assert (
        metrics(run("1", {"x": 1}, metrics={**same, "val/loss": [[1, 1.0]]}), run("2", metrics=other))[0] == "val/loss"
    )
    assert run("1", metrics={"val/a": []}).final("val/a") is None
    assert run("1").final("val/loss") == 0.123456
    assert run("1").final("val/none") is None


def test_what_makes_runs_hard_to_compare_is_said() -> None:
    assert remarks(group_runs([run("a")])) == ["There is one run, so there is nothing to compare it with."]
    assert remarks(group_runs([scored("a", 0, 0.5), scored("a", 1, 0.6)])) == [
        "All runs differ only in their seed, so there is one row."
    ]
    unknown = group_runs([scored("a", 0, 0.5), scored("b", 0, 0.5), run("c")])
    assert remarks(unknown)[0].startswith("Each row is a single run"), "an unknown seed is not a different seed"
    assert remarks(group_runs([scored("a", 0, 0.5), scored("b", 1, 0.5)]))[0] == "The rows do not have the same seeds."
    other = run("b", {"x": 2}, versions={"torch": "2.15"}, metrics={"val/samples": [[1200, 11]]})
    assert remarks(group_runs([run("a", {"x": 1}), other])) == [
        "Each row is a single run, so the numbers do not say how much they depend on the seed.",
        "The runs were trained with different versions of torch: 2.14, 2.15.",
        "The runs were validated on different numbers of samples.",
    ]


def test_one_run_and_equal_folders_are_named_in_full() -> None:
    for runs in ([run("some/where")], [run("some/where"), run("some/where")]):
        assert {row["run"] for row in compared(*runs)} == {"some/where"}
    assert folder_names([run("some/where"), run("some")]) == ["where", "."]


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["r/a/logs/version_0", "r/b/logs/version_0"], ["a", "b"]),
        (["r/a/version_0", "r/a/version_1"], ["version_0", "version_1"]),
        (["r/a/version_0", "r/b/version_1", "r/c/version_0"], ["a/version_0", "b/version_1", "c/version_0"]),
        (["r/version_0", "r/a/version_0"], ["version_0", "a/version_0"]),
        (["r/a/x/version_0", "r/b/x/version_0", "s/a/x/version_0"], ["r/a", "r/b", "s/a"]),
    ],
)
def test_folders_that_end_alike_are_named_by_what_differs(folders: list[str], names: list[str]) -> None:
    assert folder_names([run(folder) for folder in folders]) == names


def test_options_of_lists_of_classes_are_named_by_class() -> None:
    callbacks = [{"class_path": f"a.{name}", "init_args": {"n": n}} for n, name in enumerate(("M", "M", "Mx", "M"))]
    assert flat({"t": {"c": callbacks}}) == {
        "t.c.M": "a.M", "t.c.M.n": 0, "t.c.M-2": "a.M", "t.c.M-2.n": 1, "t.c.Mx": "a.Mx", "t.c.Mx.n": 2,
        "t.c.M-3": "a.M", "t.c.M-3.n": 3,
    }  # fmt: skip
    assert flat({"a": {}, "b": [], "c": [{"class_path": "x"}, 1], "d": {"e": {"f": None}}}) == {
        "a": {}, "b": [], "c": [{"class_path": "x"}, 1], "d.e.f": None,
    }  # fmt: skip
    assert flat({"c": [{"class_path": "a.B"}]}) == {"c.B": "a.B"}
    assert flat({"c": [{"class_path": "a.B", "init_args": [1]}]}) == {"c.B": [1]}, "a broken configuration"
    assert flat(3) == {"": 3}


def test_labels_name_what_differs() -> None:
    runs = [run("a", {"x": 1, "y": "t"}), run("b", {"x": [2], "y": "t"}), run("c", {"y": "t"})]
    assert [group.label for group in group_runs(runs)] == ["x=1", "x=[2]", "no x"]
    runs = [run("a", {"x": 1, "y": "t"}), run("b", {"x": 1}), run("c", {"x": 2, "y": None}), run("d", {})]
    assert [group.label for group in group_runs(runs)] == ["x=1, y=t", "x=1", "x=2", "d"]
    assert [group.label for group in group_runs(runs[:1])] == ["a"]


def test_the_picture_has_a_line_for_each_run_and_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **o: (figures.append(self), save(self, *a, **o))[1])
    runs = [
        run("a", {"x": "$1$", "seed_everything": 0}, metrics={"val/$x$": [[1, 2.0], [2, 9.0], [3, 4.0]]}),
        run("b", {"x": "$1$", "seed_everything": 1}, metrics={"val/$x$": [[1, 4.0], [2, None], [3, 5.0]]}),
        run("c", {"x": 2, "seed_everything": 0}, metrics={"val/$x$": [[1, 5.0]], "val/same": [[1, 1.0]]}),
    ]
    path = tmp_path / "new/picture.png"
    curves.draw(group_runs(runs), path)
    assert path.stat().st_size > 1000
    (figure,) = figures
    (axis,) = [axis for axis in figure.axes if axis.lines]
    assert axis.get_title() == "val/$x$"
    lines = [[list(line.get_xdata()), list(line.get_ydata())] for line in axis.lines]
    assert lines == [[[1, 2, 3], [2, 9, 4]], [[1, 3], [4, 5]], [[1, 3], [3, 4.5]], [[1], [5]]]
    colors = [line.get_color() for line in axis.lines]
    assert colors[:3] == [colors[0]] * 3
    assert colors[3] != colors[0]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["x=$1$ (mean of 2 runs)", "x=2"]
    assert not any(text.get_parse_math() for text in legend.get_texts())
    with pytest.raises(ValueError, match="no metric of these runs changes"):
        curves.draw(group_runs([run("a", metrics={}), run("b", metrics={"val/loss": [[1, None], [2, 3.0]]})]), path)


def test_characters_that_the_font_lacks_print_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curves.draw(group_runs([scored("日本", 0, 0.5), scored("b", 0, 0.6)]), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_plain_data_hold_everything() -> None:
    one, two = run("a", {"x": 1, "y": 2}), run("b", {"x": 3, "y": 2})
    assert as_json([one, two]) == [
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
    runs = read_runs([tmp_path, tmp_path / "v9"])
    names = [str(one.folder.relative_to(tmp_path)) for one in runs]
    assert names == ["v", *(f"v{number}" for number in sorted(numbers)), "w2/v1"]
    (nine,) = [one for one in runs if one.options]
    assert nine.options["model.init_args.dim"] == 3
    assert nine.options["model.init_args.api_key"] != "x", "secrets are left out"


def test_runs_of_a_sweep_have_its_order(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "z/d"):
        save(tmp_path / name)
    (tmp_path / "runs.json").write_text('{"runs": ["c", "gone", "a"]}')
    assert [one.folder.name for one in read_runs([tmp_path])] == ["c", "a", "b", "d"]
    (tmp_path / "runs.json").write_text('{"runs": [3]}')
    with pytest.raises(ValueError, match=r"runs.json does not list runs of a sweep"):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": "1"}, "it has no metrics or no seconds"),
        ({"metrics": None}, "it has no metrics or no seconds"),
        ({"seconds": True}, "it has no metrics or no seconds"),
        ({"steps": 1.5}, "steps is not a whole number"),
        ({"steps": -3}, "steps is not a whole number"),
        ({"parameters": 10**15}, "parameters is not a whole number"),
        ({"seconds": -5}, "it has no metrics or no seconds"),
        ({"seconds": 1e300}, "it has no metrics or no seconds"),
        ({"steps": 10**400}, "an entry is missing or has a wrong type"),
        ({"parameters": None}, "parameters is not a whole number"),
        ({"finished": "yes"}, "finished is neither true nor false"),
        ({"metrics": {"val/x": [["1", 2]]}}, "the points of val/x are not steps with values"),
        ({"metrics": {"val/x": [[1, "2"]]}}, "the points of val/x are not steps with values"),
        ({"metrics": {"val/x": 3}}, "the points of val/x are not steps with values"),
        ({"metrics": {"val/x": [[1]]}}, "the points of val/x are not steps with values"),
        ({"best": {"metric": 3}}, "the metric of best is not a name"),
        ({"best": ["x"]}, "an entry is missing or has a wrong type"),
    ],
)
def test_a_broken_record_is_an_error_that_names_the_file(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path / "broken", **changes)
    with pytest.raises(ValueError, match=rf"broken/run\.json is not a record of a run: ({message})"):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", "{", "is not a JSON file"),
        ("run.json", "", "is not a JSON file"),
        ("run.json", '{"metrics": {}, "seconds": -1}', "is not a record of a run: it has no metrics or no seconds"),
        ("config.yaml", "a: [", "cannot be read"),
        ("config.yaml", "a: &a [*a]", "cannot be read"),
        ("config.yaml", "3", "has no options"),
        ("config.yaml", "[a, b]", "has no options"),
    ],
)
@pytest.mark.parametrize("form", ["", "--csv", "--json", "--latex"])
def test_a_run_with_a_damaged_file_is_left_out_by_name(
    file: str, content: str, message: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "other", "zzz\x1b[1m"):
        save_run(tmp_path / name, f"seed_everything: 0\nmodel: {{kind: {name[:5]}}}\n")
    (tmp_path / "zzz\x1b[1m" / file).write_text(content)
    page = tmp_path / "page.html"
    registry.run("compare", [str(tmp_path), *filter(None, [form]), "--html", str(page)])
    out, err = capsys.readouterr()
    assert "zzz" not in out
    assert "good" in out
    (line,) = [line for line in err.splitlines() if "is left out" in line]
    assert line.startswith(f"{tmp_path}/zzz\\x1b[1m is left out: ")
    assert message in line
    assert "\x1b" not in err
    assert "zzz\\x1b[1m is left out: " in page.read_text()
    assert "2 runs in 2 rows" in page.read_text()


def test_numbers_that_are_not_finite_are_no_values(tmp_path: Path) -> None:
    save(tmp_path / "a", metrics={"val/loss": [[2, float("nan")], [1, 1.0], [0, 1e308]]})
    (one,) = read_runs([tmp_path])
    assert one.points("val/loss") == [(0, None), (1, 1.0), (2, None)]
    assert compared(one)[0]["val/loss"] == "not finite"


def test_folders_of_runs_without_a_record_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "good")
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    (waiting / "config.yaml").write_text("model: {}\n")
    assert unrecorded([tmp_path]) == [], "a configuration alone is not a run"
    (waiting / "lock").write_text(json.dumps({"host": "h", "pid": 1, "job": None}))
    assert unrecorded([tmp_path, waiting]) == [waiting]
    registry.run("compare", [str(tmp_path), "--csv"])
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert "There is one run, so there is nothing to compare it with.\n" in err, "remarks do not get into the CSV"
    assert f"Left out, because they have no run.json, which RunReport writes at each validation: {waiting}.\n" in err
    with pytest.raises(SystemExit, match=r"nowhere is not a folder"):
        registry.run("compare", [str(tmp_path / "nowhere")])


@pytest.mark.parametrize("name", ["picture.foo", "picture"])
def test_a_picture_of_an_unknown_kind_is_refused_before_it_is_drawn(name: str, tmp_path: Path) -> None:
    runs = [run("a", {"x": 1}, metrics={"val/x": [[1, 2.0], [2, 1.0]]})]
    with pytest.raises(ValueError, match=r"picture.*\.png"):
        curves.draw(group_runs(runs), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    curves.draw(group_runs(runs), tmp_path / "picture.PNG")
    assert (tmp_path / "picture.PNG").stat().st_size > 1000
