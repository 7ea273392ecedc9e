"""An attention kind from a file outside the package, with a gate that the tokens open and an option: used as shipped ones are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import fork_server

from lightning_mhla.attention import Attention, AttentionConfig, BlockLayout, attention_per_layer, build_attention

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "own_kind/toykind.py"
KIND = [
    "--allow=toykind",
    "--model.attention.kind=toy",
    "--model.attention.options={sharpness: 2.0}",
]
SHORT = ["--trainer.max_steps=4", "--trainer.max_epochs=-1", "--trainer.val_check_interval=2", "--model.shape.depth=1",
         "--trainer.check_val_every_n_epoch=null", "--trainer.limit_val_batches=2", "--trainer.accelerator=cpu",
         "--trainer.enable_progress_bar=false"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Working folder with the module of an attention kind."""
    (tmp_path / FILE.name).write_text(FILE.read_text())
    return tmp_path


def run(folder: Path, *words: str, module: str = "mhla_tasks.commandline.parser", status: int = 0) -> str:
    found, said = fork_server().run(*words, module=module, folder=folder)
    assert found == status, said[-4000:]
    return said


def last_checkpoint(folder: Path) -> str:
    return str(next(folder.glob("runs/*/version_0/checkpoints/last.ckpt")).relative_to(folder))


def test_it_classifies_images(folder: Path) -> None:
    config = str(ROOT / "configs/classification/digits.yaml")
    run(folder, "fit", "--config", config, *KIND, *SHORT)
    checkpoint = last_checkpoint(folder)
    assert "val/accuracy" in run(folder, "validate", "--ckpt_path", checkpoint, "--allow=toykind")
    run(folder, "export", checkpoint, "exported", "--allow", "toykind", module="mhla_tasks")
    status, said = fork_server().program(
        "import toykind\n"
        "from mhla_tasks.classification import VisionTransformer\n"
        "print(VisionTransformer.from_pretrained('exported').backbone.layers[0].attn.options)\n",
        folder=folder,
    )
    assert status == 0, said
    assert "ToyOptions(sharpness=2.0)" in said


def test_it_models_language(folder: Path, cache_dir: Path) -> None:
    config = str(ROOT / "configs/language/stdlib.yaml")
    small = ["--model.shape.dim=32", "--model.context=64", "--model.vocab_size=512",
             "--data.vocab_size=512", f"--data.cache_dir={cache_dir}",
             "--model.generation.max_new_tokens=4"]  # fmt: skip
    run(folder, "fit", "--config", config, *KIND, "--model.attention.rotary=false", *small, *SHORT)
    checkpoint = last_checkpoint(folder)
    streamed = run(
        folder, "generate", checkpoint, "import", "--allow=toykind", "--max-new-tokens=8", module="mhla_tasks"
    )
    assert streamed.rpartition("\nimport")[2].strip()
    run(folder, "export", checkpoint, "exported", "--allow=toykind", module="mhla_tasks")
    status, said = fork_server().program(
        "import toykind, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained('exported', trust_remote_code=True).eval()\n"
        "ids = AutoTokenizer.from_pretrained('exported')('def main', return_tensors='pt')['input_ids']\n"
        "found = model.generate(ids, max_new_tokens=6, do_sample=False)\n"
        "for end in range(ids.shape[1], found.shape[1]):\n"
        "    assert model(found[:, :end]).logits[0, -1].argmax() == found[0, end]\n"
        "print('same words')\n",
        folder=folder,
    )
    assert status == 0, said
    assert "same words" in said


def test_an_unknown_kind_is_met_with_the_way_to_it() -> None:
    with pytest.raises(ValueError, match=r"'toy' is not one of \['gated_conv', .*'softmax'\]; .* --allow=MODULE"):
        AttentionConfig(kind="toy")


def test_the_error_for_an_unknown_kind_names_it(folder: Path) -> None:
    config = str(ROOT / "configs/classification/digits.yaml")
    words = ["fit", "--config", config, "--allow=toykind", "--model.attention.kind=nothing"]
    said = run(folder, *words, status=1)
    assert "attention kind 'nothing' is not one of ['gated_conv', " in said
    assert "'softmax', 'toy']" in said


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Attention kind that is registered in this process during a test."""
    monkeypatch.syspath_prepend(str(FILE.parent))
    import toykind

    yield toykind
    del Attention.kinds["toy"], sys.modules["toykind"]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "toy", "options": {"sharpnes": 1.0}}, "has no option 'sharpnes'; did you mean 'sharpness'"),
        ({"kind": "toy", "options": {"sharpness": "high"}}, "sharpness='high' is not float"),
        ({"kind": "mhla", "options": {"sharpness": 1.0}}, "'mhla' has no options of its own"),
        ({"kind": "tyo"}, "did you mean 'toy'"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**options)


@pytest.mark.usefixtures("toy")
def test_help_is_the_same_with_it_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes add themselves to the table of kinds, and change no text."""
    said = AttentionConfig.__doc__ or ""
    monkeypatch.setitem(Attention.kinds, "tiny", None)

    class Tiny(Attention, kind="tiny"):
        pass

    assert Attention.kinds["tiny"] is Tiny
    assert Tiny.kind == "tiny"
    assert AttentionConfig(kind="tiny").kind == "tiny"
    assert AttentionConfig.__doc__ == said
    assert "toy" not in said
    with pytest.raises(ValueError, match=r"'softmax', 'tiny', 'toy'\]"):
        AttentionConfig(kind="xyzzy")


@pytest.mark.usefixtures("toy")
def test_options_go_where_the_kind_is() -> None:
    config = AttentionConfig(kind="toy", options={"sharpness": 3})
    layers = attention_per_layer(config, ["softmax", "toy"], 4)
    assert [layer.options for layer in layers] == [None, {"sharpness": 3}] * 2
    with pytest.raises(ValueError, match="which layer_kinds does not list"):
        attention_per_layer(config, ["softmax"], 4)


@pytest.mark.usefixtures("toy")
def test_it_is_a_layer_like_others() -> None:
    """Packed documents are alone, tokens one by one are one pass, hidden tokens are not seen, and the weights are those applied."""
    layer = build_attention(AttentionConfig(kind="toy"), 16, 2, BlockLayout((12,), (1,)), causal=True)
    x = torch.randn(1, 12, 16)
    packed = layer(x, cu_seqlens=[0, 5, 12])
    torch.testing.assert_close(packed, torch.cat([layer(x[:, :5]), layer(x[:, 5:])], 1))
    state, parts = None, []
    for piece in x.split([4, 1, 1, 6], 1):
        out, state = layer.next_tokens(piece, state, [piece.shape[1]])
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    turned = build_attention(
        AttentionConfig(kind="toy", rotary=True, normalize=False), 16, 2, layer.layout, causal=True
    )
    with pytest.raises(ValueError, match="kind 'toy' does not take rotary: set rotary: false"):
        turned(x)
    weights = layer.attention_matrix(x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 12), rtol=1e-3, atol=1e-3)
    assert (weights.triu(1) == 0).all()
