"""The web page of a comparison: its numbers, its curves, its safety."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from matplotlib.figure import Figure
from mhla_tasks.commandline import registry
from mhla_tasks.tools.comparison.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw, panel
from mhla_tasks.tools.comparison.groups import group_runs
from mhla_tasks.tools.comparison.runs import Run, read_runs
from PIL import Image
from PIL.PngImagePlugin import PngInfo

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Page(HTMLParser):
    """Tags with their attributes, and the text of each table row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.rows: list[list[str]] = []
        self.text, self.inside = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.inside = self.inside or tag == "table"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "table"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.inside and self.rows[-1]:
            self.rows[-1][-1] += data

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def save(folder: Path, kind: str, seed: int, accuracy: float, **changes: Any) -> None:
    (folder / "pictures").mkdir(parents=True)
    record = {
        "finished": True, "steps": 200, "seconds": 65.0, "parameters": 1234, "versions": {}, "best": {},
        "metrics": {"val/accuracy": [[100, 0.25], [200, accuracy]]},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({**record, **changes}))
    options = {"seed_everything": seed, "model": {"kind": kind, "note": EVIL, "api_key": "planted"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(options))


def page_of(folder: Path) -> Page:
    registry.run("compare", [str(folder), "--html", str(folder / "compared.html")])
    return Page((folder / "compared.html").read_text())


def test_the_page_shows_means_links_and_notes(tmp_path: Path) -> None:
    for kind, values in {"mhla": (0.75, 0.5), "linear": (0.5, 0.25)}.items():
        for seed, value in enumerate(values):
            save(tmp_path / f"kind={kind}:{seed}", kind, seed, value)
    save(tmp_path / "slow", "mhla", 2, 0.125, finished=False)
    (tmp_path / "kind=mhla:1/report.html").write_text("x")
    page = page_of(tmp_path)
    assert page.rows[:4] == [
        ["row", "kind", "runs", "val/accuracy\u00a0↑", "steps", "time", "parameters", "seeds"],
        [" 1", "linear", "2", "0.38 ± 0.18", "200", "1 min 05 s", "1,234", "0, 1"],
        [" 2", "mhla", "2", "0.62 ± 0.18", "200", "1 min 05 s", "1,234", "0, 1"],
        [" 3*", "mhla", "1", "0.125", "200", "1 min 05 s", "1,234", "2"],
    ]
    assert "Best val/accuracy ↑:  2 kind=mhla with 0.62 ± 0.18; next:  1 kind=linear with 0.38 ± 0.18." in page.text
    assert " 3: not finished" in page.text
    values = [attributes["data-v"] for attributes in page.named("td") if "data-v" in attributes]
    assert values[1] == repr((0.5 + 0.25) / 2), "sorted by the unrounded mean"
    (link,) = page.named("a")
    assert (tmp_path / unquote(link["href"])).is_file()
    assert ":" not in link["href"], "a name with a colon is not the scheme of a URL"
    assert [tag for tag, _ in page.tags].count("b") == 2, "the best value, and the title of the one plot"


def test_nothing_of_a_run_is_interpreted_and_foreign_scripts_are_forbidden(tmp_path: Path) -> None:
    folder = tmp_path / "<b>x"
    save(
        folder / "javascript:alert(3)",
        EVIL,
        0,
        0.5,
        metrics={f"val/{EVIL}": [[1, 0.5], [2, 0.25]]},
        versions={EVIL: EVIL},
    )
    save(folder / "b", "b", 0, 0.5, versions={EVIL: "2"})
    (folder / "b/samples.md").write_text(f"{EVIL} https://planteduser:pw@host/x\n</pre>")
    (folder / "b/pictures/a<i>-step1.png").write_text(EVIL)
    page = page_of(folder)
    text = (folder / "compared.html").read_text()
    assert page.named("img") == []
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert len(page.named("script")) == 1
    assert "planted" not in text
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    policy = next(attributes["content"] for attributes in page.named("meta") if "http-equiv" in attributes)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in policy
    assert f"{EVIL} https://***@host/x" in page.text
    assert "are not pictures" in page.text
    assert not re.findall(r"(?:src|href)=\"?https?:", text), "no network"


@pytest.mark.parametrize("direction", ["\u202e", "\u2066", "\u200f"])
def test_characters_that_reverse_a_text_are_escaped(direction: str, tmp_path: Path) -> None:
    for number, name in enumerate((f"{direction}evil", "b")):
        save(
            tmp_path / str(number), name, 0, 0.5 + number, metrics={f"val/{direction}x": [[1, 0.5], [2, 0.25 + number]]}
        )
    page = page_of(tmp_path)
    assert direction not in (tmp_path / "compared.html").read_text()
    assert f"kind=\\u{ord(direction):04x}evil" in page.text


def test_secrets_are_not_in_the_titles_of_points(tmp_path: Path) -> None:
    save(tmp_path / "a", "https://planteduser:planted@host/x", 0, 0.5)
    save(tmp_path / "b", "b", 0, 0.25)
    page = page_of(tmp_path)
    assert "kind=https://***@host/x: 0.5 at step 200" in page.text
    assert "planted" not in (tmp_path / "compared.html").read_text()


def test_all_rows_that_share_the_best_value_are_named(tmp_path: Path) -> None:
    for kind, value in {"a": 0.500001, "b": 0.25, "c": 0.500002}.items():
        save(tmp_path / kind, kind, 0, value)
    text = page_of(tmp_path).text
    assert "Best val/accuracy ↑:  1 kind=a with 0.5,  3 kind=c with 0.5; next:  2 kind=b with 0.25." in text


def test_keys_break_after_their_parts(tmp_path: Path) -> None:
    for kind in "ab":
        save(tmp_path / kind, kind, 0, 0.5)
        options = {"seed_everything": 0, "model": {"init_args": {"some_option": kind}}}
        (tmp_path / kind / "config.yaml").write_text(yaml.safe_dump(options))
    page_of(tmp_path)
    assert "<td class=name>model.<wbr>some_<wbr>option<td" in (tmp_path / "compared.html").read_text()


def test_pictures_stand_side_by_side_at_their_last_step(tmp_path: Path) -> None:
    for kind, shade in (("a", 10), ("b", 20)):
        save(tmp_path / kind, kind, 0, 0.5 if kind == "a" else 0.75)
        for step in (5, 40, 100):
            Image.new("L", (2, 2), shade + step).save(tmp_path / f"{kind}/pictures/attention-step{step:04d}.png")
    described = PngInfo()
    described.add_text("Description", "What <b> to see")
    Image.new("L", (2, 2), 99).save(tmp_path / "b/pictures/mixing-step0100.png", pnginfo=described)
    (tmp_path / "b/pictures/dark").mkdir()
    Image.new("L", (2, 2), 1).save(tmp_path / "b/pictures/dark/mixing-step0100.png")
    (tmp_path / "a/checkpoints").mkdir()
    Image.new("L", (2, 2)).save(tmp_path / "a/checkpoints/learning_curves.png")
    Image.new("L", (2, 2)).save(tmp_path / "b/pictures/mixing-step0100.gif")
    page = page_of(tmp_path)
    shown = [base64.b64decode(attributes["src"].partition(",")[2]) for attributes in page.named("img")]
    paths = [
        "a/pictures/attention-step0100.png", "b/pictures/attention-step0100.png", "b/pictures/mixing-step0100.gif",
        "b/pictures/mixing-step0100.png",
    ]  # fmt: skip
    assert shown == [(tmp_path / path).read_bytes() for path in paths]
    (dark,) = page.named("source")
    assert dark["media"] == "(prefers-color-scheme: dark)"
    assert (
        base64.b64decode(dark["srcset"].partition(",")[2])
        == (tmp_path / "b/pictures/dark/mixing-step0100.png").read_bytes()
    )
    assert "mixingWhat <b> to see" in page.text
    assert "1 kind=a has no such picture" in page.text
    assert "2 kind=b step 100" in page.text


def test_curves_are_where_their_values_are() -> None:
    def run(kind: str, seed: int, *values: float | None) -> Run:
        points = [[step, value] for step, value in zip((50, 100, 200), values, strict=True)]
        record = {
            "finished": True, "steps": 200, "seconds": 1.0, "parameters": 1, "versions": {}, "best": {},
            "metrics": {"val/loss": points},
        }  # fmt: skip
        return Run(Path(f"{kind}{seed}"), record, {"kind": kind, "seed_everything": seed})

    groups = group_runs([run("a", 0, 4.0, 2.0, 0.0), run("a", 1, 2.0, None, 1.0), run("b", 0, 3.0, 3.0, 3.0)])
    drawn = panel("val/loss", groups)

    def pixels(step: float, value: float) -> str:  # the axis has a margin of a twentieth of the range of values, 0 to 4
        x = LEFT + step / 200 * (WIDTH - LEFT - RIGHT)
        y = TOP + (4.2 - value) / 4.4 * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{y:.1f}"

    lines = re.findall(r'<polyline class="(\w+)" points="([^"]*)"', drawn)
    expected = [
        ("thin", [(50, 4), (100, 2), (200, 0)]), ("thin", [(50, 2), (200, 1)]), ("mean", [(50, 3), (200, 0.5)]),
        ("mean", [(50, 3), (100, 3), (200, 3)]),
    ]  # fmt: skip
    assert lines == [(name, " ".join(pixels(*point) for point in points)) for name, points in expected]
    assert re.findall(r'class="series (g\d)" data-group="(\d)"', drawn) == [("g0", "0"), ("g1", "1")]
    assert "<title>kind=a (mean of 2 runs): 0.5 at step 200</title>" in drawn
    labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="end">([\d.]+)</text>', drawn)
    for _, y, label in labels[:5]:
        assert float(y) - 4 == pytest.approx(TOP + (4.2 - float(label)) / 4.4 * (HEIGHT - TOP - BOTTOM), abs=0.06)
    assert [label for _, _, label in labels[:5]] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("scale", [1e-300, 1e-7, 3e-3, 0.07, 1.0, 2.5, 40.0, 12345.0, 3e9])
def test_ticks_are_few_distinct_and_say_their_value(scale: float) -> None:
    record = {
        "finished": True, "steps": 7, "seconds": 1.0, "parameters": 1, "versions": {}, "best": {},
        "metrics": {"m": [[1, scale], [7, 2 * scale]]},
    }  # fmt: skip
    drawn = panel("m", group_runs([Run(Path("a"), record, {})]))
    labels = re.findall(r'<text x="[\d.]+" y="([\d.]+)" text-anchor="end">([^<]+)</text>', drawn)
    labels = [(y, label) for y, label in labels if float(y) < HEIGHT - BOTTOM + 10]  # without those of the steps
    assert 3 <= len(labels) <= 7
    assert len({label for _, label in labels}) == len(labels)
    for y, label in labels:
        position = TOP + (2.05 * scale - float(label.replace(",", ""))) / (1.1 * scale) * (HEIGHT - TOP - BOTTOM)
        assert float(y) - 4 == pytest.approx(position, abs=0.06), label


def test_a_run_has_one_color_in_the_picture_and_on_the_page(tmp_path: Path) -> None:
    """Ten runs: the last two have the colors of the first two, with dashes."""
    for seed, kind in enumerate("abcdefghij"):
        save(tmp_path / kind, kind, 0, 0.3 + seed / 20)
    picture = tmp_path / "compared.png"
    registry.run("compare", [str(tmp_path), "--picture", str(picture), "--html", str(tmp_path / "compared.html")])
    text = (tmp_path / "compared.html").read_text()
    light = dict(
        re.findall(r"\.(g\d) { --color: #(\w{6}) }", text.partition("@media (prefers-color-scheme: dark) { .g")[0])
    )
    lines = re.findall(r'class="series (g\d)" data-group="\d"( stroke-dasharray)?', text)
    assert [bool(dashes) for _, dashes in lines] == [False] * 8 + [True] * 2
    with Image.open(picture) as image:
        pixels = image.convert("RGB")
    rows: dict[str, int] = {}  # lowest row of pixels of each color, which is that of its entry in the legend
    for y in range(pixels.height):
        for x in range(60):
            rows["{:02x}{:02x}{:02x}".format(*pixels.getpixel((x, y)))] = y  # type: ignore[misc]  # an RGB picture
    order = sorted(set(light.values()), key=rows.__getitem__)
    assert order == [light[name] for name in ("g2", "g3", "g4", "g5", "g6", "g7", "g0", "g1")], (
        "in the order of the table"
    )


def test_folders_with_odd_names_are_in_the_legend_and_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label that begins with an underscore, which matplotlib leaves out by default, and a byte that is not UTF-8."""
    names = ["_first", os.fsdecode(b"\xff")]
    for name, accuracy in zip(names, (0.5, 0.75), strict=True):
        save(tmp_path / name, "mhla", 0, accuracy)
        (tmp_path / name / "report.html").touch()
    legends = []

    def savefig(figure: Figure, *_: Any, **__: Any) -> None:
        legends.append([text.get_text() for text in figure.legends[0].get_texts()])

    monkeypatch.setattr(Figure, "savefig", savefig)
    draw(group_runs(read_runs([tmp_path])), tmp_path / "compared.png")
    assert legends == [["_first", "\\udcff"]]
    page = page_of(tmp_path)
    assert [link["href"] for link in page.named("a")] == ["_first/report.html", "%FF/report.html"]


def test_one_run_without_curves_and_options_makes_a_page(tmp_path: Path) -> None:
    save(tmp_path / "a", "x", 0, 0.5, metrics={})
    (tmp_path / "a/config.yaml").unlink()
    page = page_of(tmp_path)
    assert "There is one run, so there is nothing to compare it with." in page.text
    assert "No metric has more than one value." in page.text
    assert "options unknown, config.yaml is missing or empty" in page.text


def test_numbers_of_options_are_sorted_as_numbers(tmp_path: Path) -> None:
    """The script sorts by ``data-v``, and texts after numbers."""
    for number, rate in enumerate(("0.001", "1.0e-05", "0.25", "word")):
        save(tmp_path / f"run{number}", "mhla", 0, 0.5)
        config = tmp_path / f"run{number}/config.yaml"
        config.write_text(f"{config.read_text()}\nrate: {rate}\n")
    registry.run("compare", [str(tmp_path), "--html", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r'<td class="option"(?: data-v="([^"]*)")?>(?:[\d.e-]+|word)', text) == [
        "0.001",
        "1e-05",
        "0.25",
        "",
    ]


def test_a_page_of_figures_that_have_no_curve_says_nothing_of_curves(tmp_path: Path) -> None:
    save(tmp_path / "a", "mhla", 0, 0.5)
    registry.run("compare", [str(tmp_path), "--html", str(tmp_path / "page.html"), "--metrics", "steps"])
    assert "Curves" not in (tmp_path / "page.html").read_text()
