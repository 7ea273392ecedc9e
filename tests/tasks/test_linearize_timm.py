"""Encoders of timm in ``lightning linearize``: sources, vectors, the classifier, the export, and what is not supported."""

from __future__ import annotations

import html
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from mhla_tasks.classification import ImageNetShards
from mhla_tasks.classification.data import AugmentConfig
from mhla_tasks.classification.encoder import LinearizedImageEncoder
from mhla_tasks.tools.export import load_trained
from mhla_tasks.tools.linearize.report import loading_code
from mhla_tasks.tools.linearize.source import find_domain, image_side, open_source
from PIL import Image
from timm.models import save_for_hf

from lightning_mhla import AttentionConfig, load_swapped
from lightning_mhla.swap import swapped_layers

SIZES: dict[str, Any] = {"patch_size": 14, "embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 56}
VIT, DISTILLED = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "classifier with registers": (VIT, {"reg_tokens": 2, "num_classes": 5}),
    "mean of patches": (VIT, {"class_token": False, "global_pool": "avg", "num_classes": 5}),
    "distilled": (DISTILLED, {"num_classes": 5}),
    "DINOv2": ("vit_small_patch14_reg4_dinov2", {}),
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "EVA": ("eva02_tiny_patch14_224", {"num_classes": 0}),
    "attention pooling": ("vit_base_patch16_siglip_224", {"num_classes": 0}),
}


def save_encoder(folder: Path, name: str, bin_file: bool = False, **options: Any) -> Any:
    """Save an encoder with random weights as timm does, and return it."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SIZES, **options}).eval()
    labels = {"label_names": [f"class {number}" for number in range(model.num_classes)]} if model.num_classes else {}
    save_for_hf(model, str(folder), labels, safe_serialization=not bin_file)
    return model


def save_photos(folder: Path) -> Path:
    for stage, count in (("train", 8), ("val", 4)):
        (folder / stage / "photo").mkdir(parents=True)
        for number in range(count):
            pixels = torch.randint(256, (60, 70, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
            Image.fromarray(pixels.numpy()).save(folder / stage / "photo" / f"{number}.png")
    return folder


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "mhla_tasks", "linearize", *words]


def encoder(folder: Path, **options: Any) -> LinearizedImageEncoder:
    model = LinearizedImageEncoder(str(folder), **{"pooling": "head", **options}).eval()
    model.configure_model()
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_with_softmax_it_is_the_original_at_any_size(kind: str, tmp_path: Path) -> None:
    name, options = MODELS[kind]
    original = save_encoder(tmp_path, name, **options)
    model = encoder(tmp_path, attention=AttentionConfig(kind="softmax"))
    blocks = encoder(tmp_path, attention=AttentionConfig(kind="mhla_window", block_grid=[2, 2]))
    assert len(swapped_layers(model.network)) == len(model.layers()) == 2
    images = torch.randn(3, 3, 56, 56)
    with torch.no_grad():
        vectors = model.encode(model.network, images)
        torch.testing.assert_close(vectors, original.forward_features(images), atol=1e-5, rtol=1e-4)
        pooled = original.forward_head(original.forward_features(images), pre_logits=True)
        torch.testing.assert_close(model.embed(vectors, None), pooled, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(model.network(images), original(images), atol=1e-5, rtol=1e-4)
        larger = blocks.encode(blocks.network, torch.randn(1, 3, 84, 112))
    assert larger.shape == (1, original.num_prefix_tokens + 6 * 8, 32)
    with pytest.raises(ValueError, match="images of 60 x 56 pixels are not divided into patches of 14 x 14"):
        model.encode(model.network, torch.randn(1, 3, 60, 56))


def test_what_does_not_reach_the_vectors_is_not_trained(tmp_path: Path) -> None:
    for kind in ("classifier with registers", "mean of patches", "distilled", "attention pooling"):
        name, options = MODELS[kind]
        save_encoder(tmp_path / kind, name, **options)
        model = encoder(tmp_path / kind, attention=AttentionConfig(kind="softmax"), pooling="mean")
        model.train()({"image": torch.randn(2, 3, 56, 56)}).square().sum().backward()
        for parameter_name, parameter in model.network.named_parameters():
            assert parameter.requires_grad == (parameter.grad is not None), parameter_name
        assert any(not parameter.requires_grad for parameter in model.network.parameters())


def test_a_checkpoint_needs_no_folder(tmp_path: Path) -> None:
    from lightning import Trainer

    save_encoder(tmp_path / "vit", VIT, reg_tokens=2, num_classes=5)
    model = encoder(tmp_path / "vit", attention=AttentionConfig(block_grid=[2, 2]))
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    shutil.rmtree(tmp_path / "vit")
    loaded, images = load_trained(tmp_path / "model.ckpt").eval(), torch.randn(1, 3, 56, 56)
    assert torch.equal(loaded.network(images), model.network(images))
    again = encoder(
        tmp_path / "model.ckpt", attention=AttentionConfig(block_grid=[2, 2]), layer_kinds=["keep", "replace"]
    )
    assert list(swapped_layers(again.network)) == [1]


def test_size_and_normalization_are_timms(tmp_path: Path) -> None:
    save_encoder(tmp_path / "vit", VIT, in_chans=1, num_classes=0)
    source = open_source(str(tmp_path / "vit"), tmp_path / "converted")
    assert (source.domain, source.depth, source.path) == ("image", 2, str(tmp_path / "vit"))
    assert source.images is not None
    assert (source.images.patch, source.images.pooling) == (14, "head")
    preprocessing = source.images.preprocessing
    assert (preprocessing.image_size, preprocessing.channels, preprocessing.crop_share) == (56, 1, 0.9)
    assert (preprocessing.mean, preprocessing.std) == ((0.5,), (0.5,))
    pixels = preprocessing(Image.new("RGB", (80, 70), (255, 255, 255)))
    assert pixels.shape == (1, 56, 56)
    assert pixels.allclose(torch.ones(())), "white is 1"
    assert image_side(str(tmp_path / "vit")) == 56
    assert find_domain("timm:vit_small_patch14_dinov2") == "image"
    assert image_side("timm:vit_small_patch14_dinov2.lvd142m") == 518
    assert image_side("timm:vit_so400m_patch14_siglip_384.webli") == 378, "complete patches"


def test_other_crops_and_interpolations_of_timm_are_named(tmp_path: Path) -> None:
    differences = {"center": "", "squash": "crop_mode=center in place of timm's squash"}
    for mode, difference in differences.items():
        save_encoder(tmp_path / mode, VIT, num_classes=0, pretrained_cfg_overlay={"crop_mode": mode})
        images = open_source(str(tmp_path / mode), tmp_path / "converted").images
        assert images is not None
        assert images.differences == difference
    save_encoder(tmp_path / "bilinear", VIT, num_classes=0, pretrained_cfg_overlay={"interpolation": "bilinear"})
    images = open_source(str(tmp_path / "bilinear"), tmp_path / "converted").images
    assert images is not None
    assert images.differences == "interpolation=bicubic in place of timm's bilinear"


def test_images_are_normalized_as_the_data_says(tmp_path: Path) -> None:
    for stage in ("train", "val"):
        (tmp_path / stage / "white").mkdir(parents=True)
        Image.new("RGB", (40, 40), (255, 255, 255)).save(tmp_path / stage / "white/0.png")
    plain = AugmentConfig(auto_augment=None, color_jitter=0.0, random_erasing=0.0)
    folders = {stage: str(tmp_path / stage) for stage in ("train", "val")}
    options: dict[str, Any] = {**folders, "batch_size": 1, "num_workers": 0, "image_size": 32, "augment": plain}
    data = ImageNetShards(**options, mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 1.0))
    for stage in ("train", "validate"):
        image = data.source(stage)[0]["image"]
        torch.testing.assert_close(image, torch.tensor([2.0, 1.0, 0.5])[:, None, None].expand(3, 32, 32))
    with pytest.raises(ValueError, match="one value for each of 3 colors"):
        ImageNetShards(**options, mean=(0.5, 0.5))


@pytest.mark.parametrize(
    ("options", "pooling"),
    [
        ({"num_classes": 5}, "head"),
        ({"global_pool": "", "num_classes": 0}, "first"),
        ({"global_pool": "", "class_token": False, "num_classes": 0}, "mean"),
    ],
    ids=["head", "first", "mean"],
)
def test_the_code_of_the_report_computes_the_trained_embedding(
    options: dict[str, Any], pooling: str, tmp_path: Path
) -> None:
    original, images = save_encoder(tmp_path, VIT, **options), torch.randn(2, 3, 56, 56)
    source = open_source(str(tmp_path), tmp_path / "converted")
    assert source.images is not None
    assert source.images.pooling == pooling
    trained = encoder(tmp_path, attention=AttentionConfig(kind="softmax"), pooling=pooling)
    code = loading_code(source, "folder", 56).partition("vectors =")
    results: dict[str, Any] = {"model": original, "images": images}
    with torch.no_grad():
        exec(f"{code[1]}{code[2]}", results)
        embeddings = trained.embed(trained.encode(trained.network, images), None)
    torch.testing.assert_close(results["embeddings"], embeddings, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "bin_file", "keep", "length"),
    [("classifier with registers", False, "0.5", None), ("distilled", True, "0", 84)],
    ids=["classifier", "distilled, larger images"],
)
def test_from_a_folder_to_an_export_in_another_process(
    kind: str, bin_file: bool, keep: str, length: int | None, tmp_path: Path
) -> None:
    name, options = MODELS[kind]
    if length is not None:
        options = {**options, "pretrained_cfg_overlay": {"crop_mode": "squash"}}
    original, photos = save_encoder(tmp_path / "vit", name, bin_file, **options), save_photos(tmp_path / "photos")
    done = subprocess.run(
        command(
            str(tmp_path / "vit"), str(tmp_path / "out"), "--train", str(photos / "train"), "--val", str(photos / "val"),
            "--steps", "4", "4", "--batch_size=4", "--val_batches=1", "--accelerator=cpu", f"--keep={keep}",
            *([] if length is None else [f"--length={length}"]),
        ),
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    warning = "warning: held-out images are resized with crop_mode=center in place of timm's squash\n"
    assert done.stderr.count(warning) == (length is not None)
    work = tmp_path / "out-work"
    data = yaml.safe_load((work / "tuning.yaml").read_text())["data"]["init_args"]
    saved = json.loads((tmp_path / "vit/config.json").read_text())
    wanted = timm.data.resolve_data_config(pretrained_cfg=saved["pretrained_cfg"])
    assert (data["image_size"], data["crop_share"]) == (length or 56, wanted["crop_pct"])
    assert (data["mean"], data["std"]) == (list(wanted["mean"]), list(wanted["std"]))
    results = json.loads((work / "results.json").read_text())
    assert results["original"]["val/cosine"] == pytest.approx(1, abs=1e-5)
    assert list(results["speed"])[:2] == ["224", "336"]
    page = (work / "report.html").read_text()
    code = html.unescape(page.partition("Use it</h2><pre>")[2].partition("</pre>")[0])
    assert "(prefers-color-scheme: dark)" in page.partition("</style>")[2], "the picture has a variant for dark screens"
    assert page.count("<svg") >= 2, "curves have the colors of the page"
    assert str(tmp_path) not in page
    program = (
        "import json, sys, timm, torch\n"
        "from lightning_mhla import load_swapped\n"
        "model = load_swapped(sys.argv[1])\n"
        "vectors = model.forward_features(torch.zeros(1, 3, 84, 84))\n"
        "print(tuple(vectors.shape), tuple(model(torch.zeros(2, 3, 56, 56)).shape))\n"
        "print(tuple(model.forward_head(vectors, pre_logits=True).shape))\n"
        "print(model.pretrained_cfg['label_names'][4])\n"
        "print(json.dumps(timm.data.resolve_data_config(model=model)))\n"
        f"images = torch.zeros(2, 3, 56, 56)\n{code}\nfrom PIL import Image\n"
        "print(tuple(embeddings.shape), tuple(outputs.shape), tuple(transform(Image.new('RGB', (200, 150))).shape))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")],
        capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    prefix = original.num_prefix_tokens
    assert loaded.stdout.splitlines()[:3] == [f"(1, {prefix + 36}, 32) (2, 5)", "(1, 32)", "class 4"]
    assert json.loads(loaded.stdout.splitlines()[3]) == json.loads(json.dumps(wanted))
    side = length or 56
    assert loaded.stdout.splitlines()[4] == f"(2, 32) (2, 5) (3, {side}, {side})", "images are those of training"
    exported = load_swapped(tmp_path / "out")
    assert len(swapped_layers(exported)) == (1 if keep == "0.5" else 2)
    assert torch.equal(exported.head.weight, original.head.weight), "the classifier is the original's"
    card = (tmp_path / "out/README.md").read_text()
    assert "load_swapped" in card
    with pytest.raises(ValueError, match="has replaced attention already"):
        open_source(str(tmp_path / "out"), tmp_path / "converted")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("empty", "empty has no weights (model.safetensors or pytorch_model.bin)"),
        ("unknown", "cannot build unknown (Unknown model (vit_nowhere))"),
        ("resnet", "resnet: ResNet is not a vision transformer with global attention"),
        ("broken", "timm cannot read the weights of broken"),
        ("timm:vit_nowhere", "cannot build timm:vit_nowhere (Unknown model (vit_nowhere))"),
        ("timm/vit_nowhere", "timm/vit_nowhere is not a folder, and timm cannot read it from the hub"),
        ("vit --length=60", "--length=60 is not a multiple of 14, the patch size of vit; use 56 or 70"),
        ("vit --length=0", "--length=0 is not a multiple of 14, the patch size of vit; use 14"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_one_line(words: str, message: str, tmp_path: Path) -> None:
    source, *options = words.split()
    save_encoder(tmp_path / "vit", VIT, num_classes=0)
    save_photos(tmp_path / "photos")
    config = json.loads((tmp_path / "vit/config.json").read_text())
    contents = {"empty": config, "unknown": {**config, "architecture": "vit_nowhere"}, "broken": config}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        if name != "empty":
            (tmp_path / name / "model.safetensors").write_bytes(b"no weights")
    if source == "resnet":
        save_for_hf(timm.create_model("resnet10t"), str(tmp_path / "resnet"), safe_serialization=True)
    done = subprocess.run(
        command(
            source, "out", "--train", "photos/train", "--val", "photos/val", "--steps", "4", "4", "--accelerator=cpu", *options
        ),
        capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-2000:]
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out-work").exists() == (source == "broken"), (
        "weights are read after the working folder is begun"
    )
