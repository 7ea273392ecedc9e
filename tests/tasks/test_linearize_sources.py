"""Sources of ``lightning linearize``: what a name means, and files that are converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mhla_tasks.tools.linearize.conversion import convert_gguf, convert_onnx
from mhla_tasks.tools.linearize.source import find_domain, open_source
from torch import nn
from transformers import Dinov2Config, Dinov2Model


class Classifier(nn.Module):
    """DINOv2 with a classifier, as part of which it is exported."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "image_size": 56,
            "patch_size": 14,
            **options,
        }
        self.encoder = Dinov2Model(Dinov2Config(**sizes, num_attention_heads=sizes["hidden_size"] // 64))
        self.head = nn.Linear(sizes["hidden_size"], 3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)  # the exporter merges equal constants

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x).last_hidden_state[:, 0])
        return out


def export(model: nn.Module, file: Path, pixels: int = 56, channels: int = 3) -> Path:
    torch.onnx.export(model.eval(), (torch.randn(1, channels, pixels, pixels),), str(file), dynamo=False)
    return file


@pytest.mark.parametrize(
    "options", [{}, {"num_hidden_layers": 11}, {"image_size": 42}, {"hidden_size": 64}, {"mlp_ratio": 2}], ids=str
)
@pytest.mark.filterwarnings("ignore")  # of the exporter
@torch.no_grad()
def test_a_dinov2_in_an_onnx_file_is_the_model_that_was_exported(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Classifier(**options)
    file = export(model, tmp_path / "model.onnx", options.get("image_size", 56))
    assert find_domain(str(file)) == find_domain(str(tmp_path)) == "image"
    source = open_source(str(tmp_path), tmp_path / "converted")
    assert (source.domain, source.depth) == ("image", options.get("num_hidden_layers", 2))
    converted, x = Dinov2Model.from_pretrained(source.path).eval(), torch.randn(2, 3, 56, 56)
    torch.testing.assert_close(converted(x).last_hidden_state, model.encoder(x).last_hidden_state, rtol=1e-4, atol=1e-5)
    other = export(Classifier(**{**options, "num_hidden_layers": 3}), file, options.get("image_size", 56))
    assert open_source(str(other), tmp_path / "converted", reuse=True).depth == source.depth
    assert open_source(str(other), tmp_path / "converted").depth == 3, "converted again, as a new working folder needs"


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_other_onnx_files_are_refused(tmp_path: Path) -> None:
    export(
        nn.Sequential(nn.Conv2d(3, 8, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
        tmp_path / "other.onnx",
        20,
    )
    broken = {"other": b"", "text": b"no model", "empty": b""}
    for name, content in broken.items():
        if name != "other":
            (tmp_path / f"{name}.onnx").write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.onnx (contains no DINOv2|is not an ONNX file)"):
            convert_onnx(tmp_path / f"{name}.onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    torch.manual_seed(0)
    export(Classifier(), tmp_path / "dino.onnx")
    import onnx

    model = onnx.load(tmp_path / "dino.onnx")
    lost = next(i for i, x in enumerate(model.graph.initializer) if x.name.endswith("layer.1.norm1.bias"))
    del model.graph.initializer[lost]
    onnx.save(model, tmp_path / "part.onnx")
    with pytest.raises(ValueError, match=r"part.onnx lacks encoder.layer.1.norm1.bias and 0 more"):
        convert_onnx(tmp_path / "part.onnx", tmp_path / "out")
    export(Classifier(use_swiglu_ffn=True), tmp_path / "gated.onnx")
    with pytest.raises(ValueError, match=r"gated.onnx has a gated MLP"):
        convert_onnx(tmp_path / "gated.onnx", tmp_path / "out")


def test_a_name_means_one_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.onnx does not exist"):
        find_domain(str(tmp_path / "none.onnx"))
    for name in ("a.onnx", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match="2 GGUF or ONNX files; name one of them"):
        find_domain(str(tmp_path))
    assert find_domain(str(tmp_path / "b.gguf")) == "language"


@pytest.mark.parametrize(
    "content", [b"", b"GGUF and nothing else", b"GGUF" + bytes(60), b"GGUF" + b"\xff" * 60, b"PK" + bytes(99)], ids=str
)
def test_a_broken_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"transformers cannot read .*a.gguf"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "out")
