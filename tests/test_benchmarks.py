"""The benchmark runs, its baseline computes the same function, and its files are written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from mhla_kernels import mhla_attention

from benchmarks import attention


def test_the_baseline_loop_computes_the_operator() -> None:
    q, k, v, mixing = torch.rand(1, 64, 2, 8), torch.rand(1, 64, 2, 8), torch.randn(1, 64, 2, 6), torch.rand(4, 4)
    want = mhla_attention(q, k, v, mixing, block_size=16, causal=True, normalize=False)
    torch.testing.assert_close(attention.loop_over_blocks(q, k, v, mixing, 16), want, rtol=1e-4, atol=1e-5)


def test_the_benchmark_writes_table_and_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = [attention.Shape(f"LM {n}", 1, 1, n, 16, 8, 16, True) for n in (32, 64)]
    monkeypatch.setattr(attention, "LANGUAGE", shapes)
    monkeypatch.setattr(attention, "IMAGES", [attention.Shape("image", 1, 2, 16, 4, 8, 8, False)])
    monkeypatch.setattr(sys, "argv", ["attention", "--device", "cpu", "--seconds", "0", "--out", str(tmp_path)])
    attention.main()
    assert "softmax / ours" in capsys.readouterr().out
    result = json.loads((tmp_path / "attention-cpu.json").read_text())
    assert {row["method"] for row in result["rows"]} == {"auto", "chunked", "parallel", "loop", "softmax"}
    assert all(row["both_ms"] > 0 for row in result["rows"])
    assert result["machine"]["torch"] == torch.__version__
    assert (tmp_path / "attention-cpu.png").stat().st_size > 10_000
