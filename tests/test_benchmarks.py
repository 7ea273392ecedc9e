"""The benchmark runs, its baseline computes the same function, and its files are written."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from mhla_kernels import mhla_attention
from mhla_tasks.classification import Mnist
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import (
    architectures,
    attention,
    everyday,
    full_size,
    generation,
    layers,
    linearize,
    loss_identity,
    models,
    peers,
    real_language,
    roofline,
    sana,
    wan,
)
from benchmarks.generation import build
from benchmarks.shapes import MODELS, SMALL, Rates, Shape, least_cost
from lightning_mhla.attention.inputs import AttentionInputs

ROOT = Path(__file__).parents[1]


def test_the_baseline_loop_computes_the_operator() -> None:
    q, k, v, mixing = torch.rand(1, 64, 2, 8), torch.rand(1, 64, 2, 8), torch.randn(1, 64, 2, 6), torch.rand(4, 4)
    want = mhla_attention(q, k, v, mixing, block_size=16, causal=True, normalize=False)
    torch.testing.assert_close(peers.loop_over_blocks(q, k, v, mixing, 16), want, rtol=1e-4, atol=1e-5)


def test_the_benchmark_writes_table_and_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = [Shape(f"LM {n}", 1, 1, n, 16, 8, 16, True) for n in (32, 64)]
    monkeypatch.setattr(attention, "SMALL", [*shapes, Shape("image", 1, 2, 16, 4, 8, 8, False)])
    monkeypatch.setattr(sys, "argv", ["attention", "--device", "cpu", "--seconds", "0", "--out", str(tmp_path)])
    attention.main()
    assert "softmax /" in capsys.readouterr().out
    result = json.loads((tmp_path / "attention-cpu.json").read_text())
    assert {row["method"] for row in result["rows"]} == {
        "auto",
        "chunked",
        "parallel",
        "exponential",
        "loop",
        "softmax",
    }
    assert all(row["both_ms"] > 0 for row in result["rows"])
    assert result["machine"]["torch"] == torch.__version__
    assert (tmp_path / "attention-cpu.png").stat().st_size > 10_000


def test_the_floors_are_those_of_the_operators_documentation() -> None:
    """Microseconds on an H200, forward: the smaller of both forms, each the longer of bytes and arithmetic."""
    wanted = {
        "DeiT-S 224": 23,
        "DiT-XL/2 512 px": 149,
        "SANA-0.6B 1024 px": 53,
        "LM 340M, 2k": 131,
        "LM 340M, 32k, C=256": 101,
    }
    for shape in MODELS:
        if shape.name in wanted:
            floor = least_cost(shape, Rates(), backward=False).milliseconds(Rates()) * 1e3
            assert round(floor) == pytest.approx(wanted[shape.name], abs=1), shape.name


def test_kernels_compile_ahead_of_time_within_their_limits(tmp_path: Path) -> None:
    """A sample over chips, dtypes, widths and forms, in a process of its own: interpreted kernels do not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.resources", "--sample", "20", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    kernels = json.loads((tmp_path / "resources.json").read_text())["kernels"]
    assert sum(kernel["launches"] for kernel in kernels) == 20
    assert {kernel["chip"] for kernel in kernels} == {80, 86, 89, 90, 100, 120}
    assert all(kernel["registers"] > 0 and kernel["shared_bytes"] >= 0 for kernel in kernels)


def test_tiles_are_measured_one_change_at_a_time(tmp_path: Path) -> None:
    """In Triton's interpreter, whose times say nothing: this tests the program that measures on a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.tiles", "--seconds", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "tiles-cpu.json").read_text())["rows"]
    assert [(row["kernel"], row["change"]) for row in rows] == [
        ("", {}),
        ("attend", {"stages": 1}),
        ("mix", {"stages": 1}),
    ]
    assert all(row["both_ms"] > 0 for row in rows)


def test_times_on_a_gpu_in_the_documentation_are_measured() -> None:
    """Every pair of times in the table is that of a row of the committed results, and the ratios are theirs."""
    folder = ROOT / "benchmarks/results/nvidia-h200"
    pairs = {
        (f"{row['forward_ms']:.3f}, {row['both_ms']:.3f}", row.get("method", "tiles")): row
        for name in ("attention-cuda", "tiles-cuda")
        for row in json.loads((folder / f"{name}.json").read_text())["rows"]
        if not row.get("kernel")
    }
    page = (ROOT / "docs/operator.md").read_text()
    table = page.partition("| shape | tokens | flash attention, ms |")[2].partition("\n\n")[0].splitlines()[2:]
    for line in table:
        _, tokens, flash, ours, ratios = (cell.strip() for cell in line.strip("|").split("|"))
        softmax = pairs[flash, "softmax"]
        measured = pairs.get((ours, "auto")) or pairs[ours, "tiles"]
        assert softmax["tokens"] == int(tokens.replace(",", ""))
        assert measured.get("name", measured.get("shape")) == softmax["name"]
        assert ratios == ", ".join(f"{softmax[key] / measured[key]:.1f}" for key in ("forward_ms", "both_ms"))
    assert len(table) == 8


def test_the_operator_is_compared_with_its_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["roofline", "--runs", "1", "--longest", "512", "--out", str(tmp_path)])
    roofline.main()
    rows = json.loads((tmp_path / "roofline-cpu.json").read_text())["rows"]
    assert {row["name"] for row in rows} == {shape.name for shape in SMALL if shape.tokens <= 512}
    for row in rows:
        times = {name: values[0] for name, values in row["milliseconds"].items()}
        bound = min(times["chunked"], times["parallel"])
        assert row["share"] == pytest.approx({"forward": bound / times["forward"], "both": 3 * bound / times["both"]})


@pytest.mark.parametrize("causal", [False, True])
def test_the_products_are_those_of_the_operator(causal: bool) -> None:
    """Torch counts the operations that the documentation of the operator gives for each form."""
    shape = Shape("small", 2, 3, 64, 16, 8, 4, causal)
    n, m, k, v = shape.tokens, shape.blocks, shape.key_width, shape.value_width
    chunked = 4 * n * k * v + 2 * m * m * k * v + (2 * n * shape.block * (k + v) if causal else 0)
    expected = {"chunked": 6 * chunked, "parallel": 6 * 2 * n * n * (k + v)}
    for name, function in roofline.products(shape).items():
        with FlopCounterMode(display=False) as counter:
            function()
        assert counter.get_total_flops() == expected[name]


def test_everyday_work_is_measured_in_turn_with_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"BATCH_TOKENS": 512, "PATCHES": 4, "CONTEXT": 64, "STEPS": 1, "IMAGES": 50}
    for name, value in small.items():
        monkeypatch.setattr(everyday, name, value)
    options = [
        "--only",
        "vision",
        "text 512",
        "images, 0",
        "generation",
        "--runs",
        "1",
        "--profile",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["everyday", *options])
    everyday.main()
    rows = json.loads((tmp_path / "everyday-cpu.json").read_text())["rows"]
    names = ["text 512", "vision", "vision training", "images, 0 workers", "generation 1", "generation 16"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        ((ours, peer),) = row["seconds"]
        assert row["ratio"] == pytest.approx(peer / ours)
        assert 0 < sum(row["profile"].values()) <= 1.001


def test_models_of_everyday_work_have_the_size_of_their_peers() -> None:
    ours, peer = (
        sum(x.numel() for x in model.parameters()) for model in (build("exponential", 512), everyday.llama(512))
    )
    assert ours == pytest.approx(peer, rel=0.1)


def test_the_bound_of_training_on_texts_leaves_out_the_operator_alone() -> None:
    """All parameters take part but those of the operator, and the products are those outside it."""
    model, bound = (change(build("exponential", 64)) for change in (lambda model: model, everyday.without_attention))
    tokens = torch.zeros(2, 64, dtype=torch.long)
    counts = []
    for network in (model, bound):
        with FlopCounterMode(display=False) as counter:
            network.train()(input_ids=tokens, labels=tokens).loss.backward()
        counts.append(counter.get_flop_counts()["Global"])
    product, batched = torch.ops.aten.mm, torch.ops.aten.bmm
    assert counts[0][product] == counts[1][product]
    assert counts[0][batched] > 0
    assert batched not in counts[1]
    unused = {name.rpartition(".")[2] for name, weight in bound.named_parameters() if weight.grad is None}
    assert unused <= {name.rpartition(".")[2] for name, _ in model.named_parameters() if "mixing" in name}


@pytest.mark.parametrize("config", everyday.FITS)
def test_a_fit_is_measured_beside_a_bare_loop(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(everyday.FITS, config, (2, ["--trainer.max_steps=2", "--trainer.limit_val_batches=1"]))
    ours, peer = everyday.fit(config, tmp_path)
    assert ours() > 0
    assert peer() > 0
    (run,) = tmp_path.glob("run*")
    assert json.loads((run / "run.json").read_text())["steps"] == 2


def test_the_bare_loop_takes_as_many_steps_as_the_fit() -> None:
    steps, options = everyday.FITS["classification/mnist"]
    data = Mnist(augment=False)
    data.prepare_data()
    data.setup("fit")
    assert options == ["--trainer.max_epochs", str(steps // len(data.train_dataloader()))]
    assert steps % len(data.train_dataloader()) == 0
    steps, options = everyday.FITS["language/stdlib"]
    assert f"--trainer.max_steps={steps}" in options


def test_everyday_work_in_the_documentation_is_measured() -> None:
    """Times and ratios in the table are those of the committed results."""
    rows = json.loads((ROOT / "benchmarks/results/everyday-cpu.json").read_text())["rows"]
    page = (ROOT / "docs/operator.md").read_text()
    table = page.partition("| work | peer |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    expected = []
    for row in rows:
        by_run = sorted(peer / ours for ours, peer in row["seconds"])
        ratio = f"{row['ratio']:.2f} ({by_run[0]:.2f} to {by_run[-1]:.2f})"
        expected.append([*(f"{median(side):.2f}" for side in zip(*row["seconds"], strict=True)), ratio])
    assert [row[2:] for row in cells] == expected
    assert "64 tokens after 8,192" in cells[8][0]
    elsewhere = json.loads((ROOT / "benchmarks/results/everyday-cpu-amx.json").read_text())["rows"]
    ratio_of = {row["name"]: f"{row['ratio']:.2f}" for row in elsewhere}
    names = ("text 512", "text 4096", "vision", "generation 1", "fit classification/mnist", "fit language/stdlib")
    sentence = page.partition("On an Intel Xeon with AMX")[2].partition(" (2026")[0]
    assert re.findall(r"\d\.\d\d", sentence) == [ratio_of[name] for name in names]
    assert ratio_of["vision training"] == ratio_of["vision"]
    shares = [f"{100 * row['profile']['aten::mm']:.0f}" for row in rows[:2]]
    assert "Linear layers take {} and {}% of our time".format(*shares) in page
    assert (everyday.BATCH_TOKENS, everyday.PATCHES, everyday.IMAGES, everyday.STEPS) == (4096, 16, 1500, 64)


def test_shares_of_the_roofline_in_the_documentation_are_measured() -> None:
    rows = json.loads((ROOT / "benchmarks/results/roofline-cpu.json").read_text())["rows"]
    page = (ROOT / "docs/operator.md").read_text()
    table = page.partition("| shape | products, ms |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == len(rows)
    for line, row in zip(table, rows, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == row["name"]
        times = {name: median(values) for name, values in row["milliseconds"].items()}
        bound = min(times[form] for form in ("chunked", "parallel") if form in times)
        assert cells[1:3] == [f"{bound:.1f}", f"{times['forward']:.1f}"]
        assert cells[-2:] == [f"{row['share'][key]:.2f}" for key in ("forward", "both")]


def test_losses_are_compared_to_the_last_bit(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        status, text = server.run(*command[3:])
        return SimpleNamespace(returncode=status, stdout=text, stderr="")

    monkeypatch.setattr(loss_identity.subprocess, "run", run)
    options = ["--only", "classification", "--steps", "3", "--reference", str(tmp_path / "losses.json")]
    for more in (["--write"], []):
        monkeypatch.setattr(sys, "argv", ["loss_identity", *options, *more])
        loss_identity.main()
    assert "1 configurations have the losses of the reference" in capsys.readouterr().out
    reference = json.loads((tmp_path / "losses.json").read_text())
    losses = reference["losses"]["classification/digits"]
    losses[1] = str(math.nextafter(float(losses[1]), 0))
    (tmp_path / "losses.json").write_text(json.dumps(reference))
    with pytest.raises(SystemExit, match="classification/digits: 1 losses differ, first at step 1"):
        loss_identity.main()


def test_generation_is_measured_and_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--contexts", "128", "256", "--steps", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["generation", *options])
    generation.main()
    rows = json.loads((tmp_path / "generation-cpu.json").read_text())["rows"]
    size = {(row["kind"], row["context"]): row["state_bytes"] for row in rows}
    assert size["exponential", 128] == size["exponential", 256]
    assert size["softmax", 128] < size["softmax", 256]
    assert (tmp_path / "generation-cpu.png").stat().st_size > 10_000


def test_models_are_measured_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, so that it is quick; one case that fails is a row too, and is said."""
    measured = []

    def apart(model: str, pixels: int, kind: str, *rest: Any) -> dict[str, Any]:
        measured.append(kind)
        if kind == "linear":
            return {"model": model, "pixels": pixels, "kind": kind, "images": rest[0], "failed": "no memory"}
        return models.measure(model, pixels, kind, *rest)

    monkeypatch.setattr(models, "measure_apart", apart)
    options = ["--device", "cpu", "--models", "S/2", "--pixels", "64", "--seconds", "0", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["models", *options])
    models.main()
    models.main()
    assert measured == [*models.KINDS, "linear"], "what was measured is not measured again, what failed is"
    rows = json.loads((tmp_path / "models-cpu.json").read_text())["rows"]
    assert [row["tokens"] for row in rows if "tokens" in row] == [16, 16]
    assert all(row["images_per_second"] > 0 and row["peak_bytes"] > 1e8 for row in rows if "seconds" in row)
    assert "failed: no memory" in capsys.readouterr().out


def test_architectures_are_measured_by_kind_and_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the smallest images that all blocks fit; operations grow with the pixels, softmax's faster."""
    monkeypatch.setattr(architectures, "PIXELS", {"VLT": (64, 128), "DiG": (64, 128)})
    growth = {
        kind: architectures.count("VLT-T", kind, 128)["gmacs"] / architectures.count("VLT-T", kind, 64)["gmacs"] / 4
        for kind in architectures.KINDS["VLT"]
    }
    for kind in ("linear", "rala", "mala", "mhla"):
        assert growth[kind] < 1.02 < growth["softmax"], growth
    kinds = architectures.KINDS
    monkeypatch.setattr(architectures, "KINDS", {"VLT": ("mhla",), "DiG": ("gla",)})
    options = ["--device", "cpu", "--models", "VLT-T", "DiG-S/2", "--seconds", "0", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["architectures", *options])
    architectures.main()
    rows = json.loads((tmp_path / "architectures-cpu.json").read_text())["rows"]
    assert [(row["model"], row["kind"], row["pixels"]) for row in rows] == [
        ("VLT-T", "mhla", 64), ("VLT-T", "mhla", 128), ("DiG-S/2", "gla", 64), ("DiG-S/2", "gla", 128),
    ]  # fmt: skip
    assert all(row["milliseconds"] > 0 for row in rows)
    assert "operations over pixels" in capsys.readouterr().out
    monkeypatch.setattr(architectures, "KINDS", kinds)
    monkeypatch.setattr(sys, "argv", ["architectures", "--count", "--models", "DiG-B/2", "--pixels", "256"])
    architectures.main()
    printed = capsys.readouterr().out
    assert all(f"| `{kind}` |" in printed for kind in kinds["DiG"])
    assert "| `gla` | 130.55M |" in printed
    assert " ms" not in printed
    assert "over pixels" not in printed


def test_what_wan_takes_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Operations as by hand; the tracker's peak holds at least weights, gradients and the optimizer's state."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    latent, layers = (16, 6, 20, 20), 3
    rows = {name: full_size.count(wan.case(layers, latent), kinds) for name, kinds in wan.VARIANTS.items()}
    tokens, blocks = 6 * 10 * 10, 150
    gate, summaries = 2 * tokens * 1536**2, 2 * 12 * tokens * 2 * 128**2
    softmax = 2 * 2 * 1536 * tokens**2
    mixed = 2 * 12 * 128**2
    difference = rows["linear"]["forward_flops"] - rows["softmax"]["forward_flops"]
    assert difference == layers * (gate + summaries + mixed - softmax)
    more = rows["mhla"]["forward_flops"] - rows["linear"]["forward_flops"]
    assert 0 < more <= layers * (blocks**2 - 1) * mixed, "at most the mixing; less where pairs of tokens cost less"
    assert rows["mhla"]["parameters"] - rows["linear"]["parameters"] == layers * blocks**2

    hybrid = "mhla in 2 of 3 layers"
    monkeypatch.setattr(wan, "VARIANTS", {hybrid: wan.VARIANTS[hybrid]})
    options = ["--layers", str(layers), "--latent", *map(str, latent), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["wan", *options])
    wan.main()
    assert f"| `{hybrid}` |" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "wan-1.3b-meta.json").read_text())["rows"]
    assert row["forward_flops"] == rows[hybrid]["forward_flops"]
    assert row["peak_bytes"] > 16 * row["parameters"]


def test_what_sana_takes_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Softmax grows with the square of the tokens, all others with their number. Memory is tracked for one variant."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flops = {
        variant: [full_size.count(sana.case("0.6B", pixels, 2), kinds)["forward_flops"] for pixels in (512, 1024)]
        for variant, kinds in sana.VARIANTS.items()
    }
    text = 2 * 300 * (2304 * 1152 + 1152 * 1152 + 2 * 2 * 1152 * 1152)  # caption and its keys and values: once an image
    for kind in ("SANA's own", "linear"):
        small, large = flops[kind]
        assert (large - text) / (small - text) == pytest.approx(4, rel=0.02)
    squares = [flops["softmax"][i] - flops["linear"][i] for i in range(2)]
    summaries = [2 * 36 * tokens * 2 * 32 * 33 for tokens in (256, 1024)]
    for tokens, square, own in zip((256, 1024), squares, summaries, strict=True):
        assert square == pytest.approx(2 * (2 * 2 * 1152 * tokens**2 - own), rel=0.15)

    monkeypatch.setattr(sana, "VARIANTS", {"mhla": sana.VARIANTS["mhla"]})
    arguments = ["--size", "0.6B", "--pixels", "512", "--layers", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["sana", *arguments])
    sana.main()
    (row,) = json.loads((tmp_path / "sana-0.6b-512-meta.json").read_text())["rows"]
    assert row["forward_flops"] == flops["mhla"][0]
    assert row["peak_bytes"] > 16 * row["parameters"]


@pytest.mark.parametrize("name", linearize.STEPS)
def test_a_step_of_linearising_a_1b_llama_is_counted_on_fake_tensors(name: str) -> None:
    row = linearize.peak(name, 16, 4096)
    committed = json.loads((Path(linearize.__file__).parent / "results/llama-1b-linearize-meta.json").read_text())
    want = next(one for one in committed["rows"] if one["step"] == name)
    assert row["peak_bytes"] == pytest.approx(want["peak_bytes"], rel=0.02)


def test_layers_are_measured_for_each_image_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layers, "TOKENS", 64)
    monkeypatch.setattr(sys, "argv", ["layers", "--sides", "4", "9", "--runs", "2", "--out", str(tmp_path)])
    layers.main()
    assert "softmax = 1" in capsys.readouterr().out
    rows = json.loads((tmp_path / "layers-cpu.json").read_text())["rows"]
    assert [(row["tokens"], row["images"]) for row in rows] == [(17, 4), (82, 1)]
    for row in rows:
        for part in ("forward_ms", "both_ms"):
            assert list(row[part]) == ["softmax", "linear", "mhla", "mhla_window"]
            assert all(len(times) == 2 and min(times) > 0 for times in row[part].values())


@pytest.mark.parametrize(("knows", "digits"), [(True, 1.0), (False, 0.0)])
def test_hidden_numbers_are_found_by_a_model_that_reads_them(knows: bool, digits: float) -> None:
    """One that repeats what followed the same six characters before, and one that always predicts a space."""

    class Model:
        def model(self, tokens: torch.Tensor, use_cache: bool) -> SimpleNamespace:
            text = bytes(tokens[0].tolist())
            after = [text.find(text[place - 6 : place]) + 6 for place in range(1, len(text) + 1)]
            guesses = [text[place] if knows and place < len(text) else 32 for place in after]
            return SimpleNamespace(last_hidden_state=torch.eye(256)[torch.tensor(guesses)][None])

        def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    def tokenizer(text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))

    hay = torch.tensor(list(b"abcdefghijklmnopqrstuvwxyz ,.") * 40)
    assert real_language.recall(Model(), tokenizer, hay, 400, 8) == {"texts": 8, "digits": digits, "numbers": digits}


def test_cross_entropy_of_equal_attention_weights_is_their_entropy() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    inputs = AttentionInputs(torch.randn(1, 6, 32), q, k, v)

    def softmax(inputs: AttentionInputs) -> torch.Tensor:
        heads = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)

    def uniform(inputs: AttentionInputs) -> torch.Tensor:
        counts = torch.arange(1, 7)[:, None, None]
        return (inputs.v.cumsum(1) / counts).repeat_interleave(2, 2)

    scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(2, 2)) * 8**-0.5
    weights = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    entropy = -(weights * weights.clamp(min=1e-9).log()).sum(-1).mean()
    assert real_language.weight_distance(inputs, softmax).item() == pytest.approx(entropy.item(), rel=1e-4)
    of_uniform = sum(math.log(count) for count in range(1, 7)) / 6
    assert real_language.weight_distance(inputs, uniform).item() == pytest.approx(of_uniform, rel=1e-4)


def test_features_keep_the_norms_of_queries_and_keys() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8) * 4
    f, divisor, g = real_language.NormKeepingFeatures(3, 8)(q, k)
    torch.testing.assert_close(f.norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(g.norm(dim=-1), k.norm(dim=-1))
    assert not divisor.any()
    assert real_language.measured_steps(480, 5) == [30, 60, 120, 240, 480]
    assert real_language.measured_steps(40, 0) == []
