"""Folders of swapped models of diffusers and timm: right where the swap is known, an error everywhere else."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import timm
import torch

from lightning_mhla import AttentionConfig, load_swapped, swap_attention
from lightning_mhla.swap import SAVED, save_swapped
from lightning_mhla.swap.saved import restored

TEXT = {"encoder_hidden_states": torch.ones(1, 5, 16)}
SQUARE, CLIP = AttentionConfig(block_grid=[2, 2]), AttentionConfig(block_grid=[1, 2, 2], normalize=False)
SMALL = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4}
MODELS: dict[str, tuple[dict[str, Any], AttentionConfig, dict[str, Any]]] = {
    "DiTTransformer2DModel": (
        {**SMALL, "sample_size": 8, "num_embeds_ada_norm": 10}, SQUARE, {"class_labels": torch.tensor([3])},
    ),
    "PixArtTransformer2DModel": (
        {**SMALL, "out_channels": 8, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 16}, SQUARE,
        {**TEXT, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "SanaTransformer2DModel": (
        {
            **SMALL, "out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
            "cross_attention_dim": 32, "caption_channels": 16, "sample_size": 8,
        },
        SQUARE, TEXT,
    ),
    "WanTransformer3DModel": ({**SMALL, "out_channels": 4, "text_dim": 16, "ffn_dim": 64}, CLIP, TEXT),
}  # fmt: skip


def inputs(name: str) -> dict[str, Any]:
    shape = (1, 4, 2, 8, 8) if "3D" in name else (1, 4, 8, 8)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return {"hidden_states": noise, "timestep": torch.tensor([10]), **MODELS[name][2]}


@torch.no_grad()
def shaken(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def swapped(name: str = "DiTTransformer2DModel", seed: int = 0) -> Any:
    """A small model of a class, one layer of two swapped, with weights that differ from their start."""
    options, attention, _ = MODELS[name]
    torch.manual_seed(seed)
    model = getattr(diffusers, name)(**options)
    swap_attention(model, attention, layers=[1])
    return shaken(model)


@torch.no_grad()
def output(model: Any, name: str = "DiTTransformer2DModel") -> torch.Tensor:
    result: torch.Tensor = model(**inputs(name)).sample
    return result


def vision(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5)
    swap_attention(model, SQUARE, layers=[1])
    return shaken(model)


def image() -> torch.Tensor:
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def run(program: str, *arguments: Any) -> Any:
    """The JSON that a program prints last, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each class, pipelines, a model of timm, and what they compute."""
    where = tmp_path_factory.mktemp("swapped")
    for name in MODELS:
        model = swapped(name)
        model.save_pretrained(where / name)
        torch.save((inputs(name), output(model, name)), where / f"{name}.pt")
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    pipeline = diffusers.DiTPipeline(swapped(), vae, diffusers.DDIMScheduler())
    for name in ("pipeline", "copied"):
        pipeline.save_pretrained(where / name)
    index = where / "copied" / "model_index.json"  # a pipeline whose transformer was replaced by hand
    parts = json.loads(index.read_text())
    index.write_text(json.dumps({**parts, "transformer": ["diffusers", "DiTTransformer2DModel"]}))
    model = vision()
    save_swapped(model, where / "timm", label_names=list("abcde"))
    torch.save((image(), model(image()).detach()), where / "timm.pt")
    return where


OPEN = """
import json, sys, diffusers, timm, torch
from pathlib import Path
where, how, found = Path(sys.argv[1]), sys.argv[2], {}
if how == "imported":
    import lightning_mhla.timm

def opened(name, load):
    given, expected = torch.load(where / f"{name}.pt")
    try:
        model = load()
    except Exception as error:
        return str(error)
    with torch.no_grad():
        out = model.eval()(**given).sample if isinstance(given, dict) else model.eval()(given)
    return float((out - expected).abs().max()) if out.shape == expected.shape else -1

def vision(name="vit_tiny_patch16_224", classes=5, **options):
    size = {} if ":" in name else {"img_size": 32, "depth": 2}
    return lambda: timm.create_model(name, num_classes=classes, **size, **options)

dit, file, folder = "DiTTransformer2DModel", str(where / "timm" / "model.safetensors"), f"local-dir:{where / 'timm'}"
found["pipeline"] = opened(dit, lambda: diffusers.DiffusionPipeline.from_pretrained(where / "pipeline").transformer)
found["timm"] = opened("timm", vision(folder, pretrained=True))
for name in json.loads(sys.argv[3]):
    host, automatic = getattr(diffusers, name), diffusers.AutoModel
    found[f"{name}, trusted"] = opened(name, lambda: automatic.from_pretrained(str(where / name), trust_remote_code=True))
    found[f"{name}, host"] = opened(name, lambda: host.from_pretrained(where / name))
    found[f"{name}, host, loosely"] = opened(
        name, lambda: host.from_pretrained(where / name, low_cpu_mem_usage=False, ignore_mismatched_sizes=True)
    )
    found[f"{name}, automatic"] = opened(name, lambda: automatic.from_pretrained(str(where / name)))
found["copied"] = opened(dit, lambda: diffusers.DiTPipeline.from_pretrained(where / "copied").transformer)
overlay = {"file": file, "num_classes": 5}
found["timm, checkpoint"] = opened("timm", vision(checkpoint_path=file))
found["timm, file"] = opened("timm", vision(pretrained=True, pretrained_cfg_overlay=overlay))
found["timm, file, classes"] = opened("timm", vision(classes=3, pretrained=True, pretrained_cfg_overlay=overlay))
print()
print(json.dumps(found))
"""


@pytest.mark.parametrize("how", ["plain", "imported"])
def test_what_opens_it_is_right_and_everything_else_fails(how: str, folders: Path) -> None:
    """Plain classes, Auto classes, pipelines, and timm by folder, by checkpoint and by file with other classes."""
    found = run(OPEN, folders, how, json.dumps(list(MODELS)))
    right = {f"{name}, trusted" for name in MODELS} | ({"pipeline", "timm"} if how == "imported" else set())
    for way, result in found.items():
        if way in right:
            assert isinstance(result, float), f"{way}: {result}"
            assert 0 <= result < 1e-5, f"{way}: {result}"
        else:
            assert isinstance(result, str), f"{way}: {result}"
    for name in MODELS:
        assert "lightning_mhla.load_swapped" in found[f"{name}, host"]
        assert "trust_remote_code=True" in found[f"{name}, automatic"]
    assert "lightning_mhla.load_swapped" in found["copied"]
    if how == "plain":
        assert "mhla_swapped" in found["timm"]
        assert "import lightning_mhla.swap.diffusers_classes" in found["pipeline"]


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_saved_and_loaded_again(name: str, folders: Path, tmp_path: Path) -> None:
    first = load_swapped(folders / name)
    first.save_pretrained(tmp_path / "again", max_shard_size="30KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    torch.testing.assert_close(output(load_swapped(tmp_path / "again"), name), output(first, name))
    saved, again = (json.loads((folder / "config.json").read_text()) for folder in (folders / name, tmp_path / "again"))
    del again["_name_or_path"]  # where diffusers loaded it from
    assert again == saved
    other = pickle.loads(pickle.dumps(first))
    assert type(other) is type(first)
    torch.testing.assert_close(output(other, name), output(first, name))


SHARDS = {"max_shard_size": "30KB"}
SAVES = {
    "sharded over whole": ({}, SHARDS), "whole over sharded": (SHARDS, {}), "fewer shards": (SHARDS, {"max_shard_size": "60KB"}),
    "bin over safetensors": ({}, {"safe_serialization": False}), "safetensors over bin": ({"safe_serialization": False}, {}),
    "bin over shards": (SHARDS, {"safe_serialization": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVES)
def test_the_last_save_is_what_is_loaded(name: str, tmp_path: Path) -> None:
    first, second = SAVES[name]
    old, new = swapped(), swapped(seed=1)
    old.save_pretrained(tmp_path, **first)
    new.save_pretrained(tmp_path, **second)
    torch.testing.assert_close(output(load_swapped(tmp_path)), output(new))


def test_variants_and_options_are_those_of_the_library(tmp_path: Path) -> None:
    old, new = swapped(), swapped(seed=1)
    old.save_pretrained(tmp_path / "inside")
    new.save_pretrained(tmp_path / "inside", variant="tuned")
    torch.testing.assert_close(output(load_swapped(tmp_path / "inside")), output(old))
    given = {"variant": "tuned", "device_map": "cpu", "subfolder": "inside"}
    torch.testing.assert_close(output(load_swapped(tmp_path, **given)), output(new))
    half = load_swapped(tmp_path, subfolder="inside", torch_dtype="bfloat16")
    assert half.pos_embed.proj.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="no option 'revison' for models of diffusers; its options are dtype, variant"):
        load_swapped(tmp_path / "inside", revison="main")
    with pytest.raises(OSError, match=r"no file named diffusion_pytorch_model"):
        load_swapped(tmp_path / "inside", variant="other")


def test_folders_that_were_saved_before_load(tmp_path: Path) -> None:
    """In bfloat16, which diffusers does not record; and in timm's layout under the model's own name."""
    model = swapped().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = restored(json.loads((tmp_path / "config.json").read_text()))
    del config[SAVED]["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_swapped(tmp_path).proj_out_1.weight.dtype == torch.bfloat16
    vit = vision()
    timm.models.save_for_hf(vit, str(tmp_path / "timm"), {SAVED: getattr(vit, SAVED)}, safe_serialization=True)
    torch.testing.assert_close(load_swapped(tmp_path / "timm")(image()), vit(image()))


def test_a_model_of_timm_keeps_classes_and_arguments(folders: Path, tmp_path: Path) -> None:
    model = load_swapped(folders / "timm")
    assert model.pretrained_cfg["label_names"] == list("abcde")
    save_swapped(model, tmp_path, label_names=list("abcde"))
    saved, again = (json.loads((folder / "config.json").read_text()) for folder in (folders / "timm", tmp_path))
    assert again.pop("model_args").items() >= saved.pop("model_args").items()
    assert again["pretrained_cfg"].pop("label_names") == list("abcde")
    assert again == saved
    assert torch.equal(load_swapped(tmp_path)(image()), model(image()))
    with pytest.raises(ValueError, match="no option 'variant' for models of timm; its options are dtype, cache_dir"):
        load_swapped(folders / "timm", variant="x")
    other = vision(1)
    save_swapped(other, tmp_path)  # again, into the same folder
    torch.testing.assert_close(load_swapped(tmp_path)(image()), other(image()))
