"""The benchmark of cross-attention runs, and the documentation shows its committed figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cross_attention

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/cross-attention-cpu.json"
GENERATION = RESULT.with_name("cross-generation-cpu.json")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["cross_attention", *arguments])
    threads = torch.get_num_threads()
    try:
        cross_attention.main()
    finally:
        torch.set_num_threads(threads)


def test_losses_and_times_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SCENES": 40, "HELD_OUT_SCENES": 12, "BATCH": 4, "DRAWS": 1}.items():
        monkeypatch.setattr(cross_attention, name, value)
    lengths = ["--queries", "64", "--keys", "32", "48", "--runs", "2"]
    steps = ["--pretrain_steps", "3", "--steps", "2", "--seeds", "2"]
    run(monkeypatch, *lengths, *steps, "--parts", "losses", "--out", str(tmp_path))
    assert "held-out loss" in capsys.readouterr().out
    result = json.loads((tmp_path / "cross-attention-cpu.json").read_text())
    softmax, linear, mhla = result["losses"]["rows"]
    assert softmax["swapped"] == result["losses"]["before"]["original"], "the control starts as the original"
    assert linear["swapped"] != softmax["swapped"]
    assert mhla["swapped"] == pytest.approx(linear["swapped"], rel=1e-3), (
        "uniform coefficients start as linear attention"
    )
    assert all(len(row["tuned"]) == 2 and row["tuned"][0] != row["tuned"][1] for row in (softmax, linear, mhla))
    assert len(result["times"]) == 2 * 3
    assert all(min(row["forward_ms"] + row["both_ms"]) >= 0 for row in result["times"])


def test_times_of_written_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cross_attention, "WRITTEN", 5)
    monkeypatch.setitem(cross_attention.DECODER, "num_decoder_layers", 1)
    lengths = ["--encoder_tokens", "70", "130", "--runs", "3"]
    run(monkeypatch, "--parts", "generation", *lengths, "--out", str(tmp_path))
    printed = " ".join(capsys.readouterr().out.split())
    assert "a written token, from the third one on, without the cost of computing the summaries" in printed
    rows = json.loads((tmp_path / GENERATION.name).read_text())["rows"]
    assert [(row["keys"], row["attention"]) for row in rows] == [
        (n, x) for n in (70, 130) for x in cross_attention.READERS
    ]
    assert all(len(row["token_ms"]) == 3 and min(row["token_ms"]) >= 0 for row in rows)


def test_the_page_on_attention_shows_the_committed_figures() -> None:
    result, page = json.loads(RESULT.read_text()), (ROOT / "docs/attention.md").read_text()
    losses, times = cross_attention.loss_table(result["losses"]), cross_attention.time_table(result["times"])
    generation = json.loads(GENERATION.read_text())["rows"]
    for row in (*losses, *times, *cross_attention.generation_table(generation)):
        assert f"| {' | '.join(row)} |" in page, row
    assert "the second one computes the summaries from all keys of the encoder, and this cost is not counted" in page
    assert {row["attention"] for row in result["losses"]["rows"]} == set(cross_attention.KINDS)
    assert all(len(row["tuned"]) == 3 for row in result["losses"]["rows"])
    assert all(len(row["token_ms"]) == 5 for row in generation)
    assert {row["keys"] for row in generation} >= {4096}
