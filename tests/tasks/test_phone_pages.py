"""Web pages of runs, comparisons and linearizations on the screen of a phone, which is 390 pixels wide."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mhla_tasks.commandline import registry
from mhla_tasks.tools.linearize.report import write_report

from lightning_mhla.callbacks.page import write_page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
LONG = "a_very_long_name_without_any_space_in_it" * 2
NAMES = ["val/accuracy", "val/loss", f"val/{LONG}"]
RECORD: dict[str, Any] = {
    "finished": True, "steps": 2_345_678, "seconds": 276_480.0, "parameters": 1_234_567_890, "trained_parameters": 5,
    "processes": 8, "pretrained": f"/models/{LONG}", "skipped": [LONG], "versions": {"torch": "2.9.0"}, "data": LONG,
    "best": {"metric": "val/accuracy", "mode": "max", "value": 0.75, "step": 200, "file": f"{LONG}.ckpt"},
    "metrics": {name: [[100, 0.5], [200, 0.75]] for name in NAMES},
}  # fmt: skip


def run_page(folder: Path) -> Path:
    """Write the report of a run of a classifier whose classes have long names."""
    folder.mkdir()
    classes = [f"{LONG}{number}" for number in range(12)]
    confusion = [[label, predicted, 1234] for label in range(12) for predicted in range(12)]
    content = {"step": 5, "names": classes, "confusion": confusion, "mistakes": []}
    (folder / "classes.json").write_text(json.dumps(content))
    (folder / "config.yaml").write_text(f"model: {LONG * 3}\n")
    write_page(folder, folder / "checkpoints", RECORD)
    return folder / "report.html"


def comparison_page(folder: Path) -> Path:
    """Write the comparison of runs with long options."""
    for number in range(3):
        run = folder / f"{LONG}{number}"
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps({**RECORD, "finished": number > 0}))
        (run / "config.yaml").write_text(
            yaml.safe_dump({"model": {LONG: f"{LONG}{number}" * 2, "list": [number] * 30}})
        )
    registry.run("compare", [str(folder), "--html", str(folder / "compared.html")])
    return folder / "compared.html"


def linearization_page(folder: Path) -> Path:
    """Write the report of the linearization of a language model."""
    folder.mkdir()
    values = {"val/perplexity": 123_456.0, "val/bits_per_byte": 0.98765, "val/loss": 12.3456}
    stage = {"metrics": values, "seconds": 4000.0, "steps": 400, "curves": {"val/loss": [[0, 5.0], [400, 2.5]]}}
    speed = {str(length): {"original": length / 1e3, "linearized": length / 2e3} for length in (512, 1024, 65536)}
    cache = {"seconds": 12.5, "bytes": 2**40}
    results = {
        "original": values, "swapped": values, "matching": stage, "tuning": stage, "speed": speed, "break_even": 512,
        "positions": {"bounds": [0, 512, 1024, 16384, 32768], "original": [12.5] * 4, "linearized": [23.75] * 4},
        "generation": {"65536": {"original": cache, "linearized": cache}},
        "layers": {"original": 2.5, "unit": "token of held-out text", "kept": [1], "alone": {"0": 2.6, "1": 2.7}},
    }  # fmt: skip
    source: Any = SimpleNamespace(name=f"meta/{LONG}", depth=2, domain="language", images=None)
    settings: Any = SimpleNamespace(kind="mhla_window", length=2048)
    write_report(folder / "model", folder, source, settings, results)
    return folder / "report.html"


PAGES = [run_page, comparison_page, linearization_page]


@pytest.mark.parametrize("write", PAGES, ids=lambda write: write.__name__)
def test_every_table_scrolls_inside_its_own_box(write: Any, tmp_path: Path) -> None:
    text = write(tmp_path / "folder").read_text()
    assert text.count("<table") == len(re.findall(r'<div class="scroll"><table', text)) > 0


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("write", PAGES, ids=lambda write: write.__name__)
def test_a_page_does_not_scroll_sideways_on_a_phone(write: Any, tmp_path: Path) -> None:
    page = write(tmp_path / "folder")
    frame = tmp_path / "frame.html"  # a window of the browser has a minimum width, a frame has none
    measure = "onload = () => { document.title = page.contentDocument.documentElement.scrollWidth }"
    frame.write_text(f'<iframe id=page src="{page.as_uri()}" style="width: 390px"></iframe><script>{measure}</script>')
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        "--dump-dom",
    ]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [str(BROWSER), *options, profile, frame.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "<title>390</title>" in done.stdout, done.stdout[-300:] + done.stderr[-300:]


def test_the_stages_of_a_linearization_fit_on_a_phone(tmp_path: Path) -> None:
    """A fifth column would hide the number that matters most, that of the trained model."""
    table = (
        linearization_page(tmp_path / "folder").read_text().partition("<h2>Quality</h2>")[2].partition("</table>")[0]
    )
    rows = table.split("<tr")[1:]
    assert max(row.count("<td") + row.count("<th") for row in rows) == 4
    assert "<th class=n>trained" in rows[0]
