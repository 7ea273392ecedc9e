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
from fork_server import ForkServer
from mhla_tasks.classification import ImageNetShards
from mhla_tasks.classification.data import AugmentConfig
from mhla_tasks.classification.encoder import LinearizedImageEncoder
from mhla_tasks.commandline import registry
from mhla_tasks.tools.export import load_trained
from mhla_tasks.tools.linearize.report import loading_code
from mhla_tasks.tools.linearize.source import find_domain, image_side, open_source
from PIL import Image
from timm.models import save_for_hf
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTModel

from lightning_mhla import AttentionConfig, load_swapped
from lightning_mhla.swap import swapped_layers
from lightning_mhla.training.encoder_libraries import describe_encoder, library_of, load_encoder

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


def change_config(folder: Path, **entries: Any) -> None:
    """Change entries of ``config.json``; those of ``model_args`` are added if they are a dict."""
    config = json.loads((folder / "config.json").read_text())
    if isinstance(arguments := entries.get("model_args"), dict):
        entries["model_args"] = {**config["model_args"], **arguments}
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


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


@pytest.mark.parametrize(
    ("folder", "title"),
    [("clinic/model", "clinic/model"), ("clinic/Models", "clinic/Models"), ("clinic/vit", "vit"), ("onnx", None)],
)
def test_a_report_names_the_model(folder: str, title: str | None, tmp_path: Path) -> None:
    """A folder that is called model is named together with its parent."""
    (tmp_path / folder).mkdir(parents=True)
    save_encoder(tmp_path / folder, VIT, num_classes=0)
    title = title or f"{tmp_path.name}/{folder}"
    assert open_source(str(tmp_path / folder), tmp_path / "converted").name == title


def test_a_complete_linearization_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command writes the report again from the stored results; the data are gone."""
    source, out, work = (tmp_path / name for name in ("vit", "out", "out-work"))
    save_encoder(source, VIT, num_classes=0)
    fit = {"curves": {"val/cosine": [[2, 0.5], [4, 0.75]]}, "seconds": 60, "steps": 4, "metrics": {"val/cosine": 0.75}}
    results = {
        "original": {"val/cosine": 1.0}, "swapped": {"val/cosine": 0.25}, "matching": fit, "tuning": fit, "speed": {},
        "layers": {"original": 0.5, "alone": {"0": 0.5, "1": 0.5625}, "kept": [1], "unit": "cosine"},
        "exported": str(out.resolve()),
    }  # fmt: skip
    for path, content in {
        out / "config.json": {}, work / "plan.json": {"steps": [4, 4]}, work / "results.json": results,
    }.items():  # fmt: skip
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    data = str(tmp_path / "gone")
    command = [str(source), str(out), "--train", data, "--val", data, "--steps", "4", "4"]
    registry.run("linearize", command)
    assert capsys.readouterr().err == f"model: {out}\nreport: {work / 'report.html'}\n"
    assert json.loads((work / "results.json").read_text()) == results
    page = (work / "report.html").read_text()
    assert all(number in page for number in ("0.25", "0.75", "attention of 1 of 2 layers", "+0.0625"))
    with pytest.raises(SystemExit, match="was begun with --steps=4 4, not 4 5"):
        registry.run("linearize", [*command[:-1], "5"])


def test_size_and_normalization_are_timms(tmp_path: Path) -> None:
    save_encoder(tmp_path / "vit", VIT, in_chans=1, num_classes=0)
    source = open_source(str(tmp_path / "vit"), tmp_path / "converted")
    assert (source.domain, source.depth, source.path, source.name) == ("image", 2, str(tmp_path / "vit"), "vit")
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
    kind: str, bin_file: bool, keep: str, length: int | None, server: ForkServer, tmp_path: Path
) -> None:
    name, options = MODELS[kind]
    if length is not None:
        options = {**options, "pretrained_cfg_overlay": {"crop_mode": "squash"}}
    original, photos = save_encoder(tmp_path / "vit", name, bin_file, **options), save_photos(tmp_path / "photos")
    status, said = server.run(
        "linearize", str(tmp_path / "vit"), str(tmp_path / "out"), "--train", str(photos / "train"), "--val", str(photos / "val"),
        "--steps", "4", "4", "--batch_size=4", "--val_batches=1", "--accelerator=cpu", f"--keep={keep}",
        *([] if length is None else [f"--length={length}"]), module="mhla_tasks",
    )  # fmt: skip
    assert status == 0, said[-3000:]
    warning = "warning: held-out images are resized with crop_mode=center in place of timm's squash\n"
    assert said.count(warning) == (length is not None)
    work = tmp_path / "out-work"
    data = yaml.safe_load((work / "tuning.yaml").read_text())["data"]["init_args"]
    saved = json.loads((tmp_path / "vit/config.json").read_text())
    wanted = timm.data.resolve_data_config(pretrained_cfg=saved["pretrained_cfg"])
    assert (data["image_size"], data["crop_share"]) == (length or 56, wanted["crop_pct"])
    assert (data["mean"], data["std"]) == (list(wanted["mean"]), list(wanted["std"]))
    results = json.loads((work / "results.json").read_text())
    assert results["original"]["val/cosine"] == pytest.approx(1, abs=1e-5)
    assert list(results["speed"])[:3] == [str(length or 56), "224", "336"], "the trained length is measured, too"
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
    ("name", "options", "rates"),
    [
        (VIT, {"num_classes": 0}, {"drop_path_rate": 0.5}),
        (VIT, {"num_classes": 0}, {"proj_drop_rate": 0.5, "attn_drop_rate": 0.5, "pos_drop_rate": 0.5}),
        (VIT, {"num_classes": 0}, {"patch_drop_rate": 0.5}),
        (DISTILLED, {"num_classes": 5}, {"drop_path_rate": 0.5}),
        ("eva02_tiny_patch14_224", {"num_classes": 0}, {"drop_path_rate": 0.5, "proj_drop_rate": 0.5}),
        ("vit_small_patch16_dinov3", {}, {"rope_rescale_coords": 4.0}),
        ("vit_base_patch16_sapiens2", {"num_classes": 0, "num_kv_heads": [2, 1]}, {}),  # random positions by default
    ],
    ids=str,
)
def test_training_mode_is_not_random(name: str, options: dict[str, Any], rates: dict[str, Any], tmp_path: Path) -> None:
    save_encoder(tmp_path, name, **options)
    change_config(tmp_path, model_args=rates)
    images = torch.randn(2, 3, 56, 56)
    original = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).train()
    assert not torch.equal(original.forward_features(images), original.forward_features(images))
    model = load_encoder(str(tmp_path)).train()
    assert torch.equal(model.forward_features(images), model.forward_features(images))
    assert not {rate for rate in describe_encoder(str(tmp_path))["model_args"] if "drop" in rate}


def test_training_mode_of_dinov2_of_transformers_is_not_random(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56}
    Dinov2Model(Dinov2Config(**sizes, drop_path_rate=0.5, hidden_dropout_prob=0.5)).save_pretrained(tmp_path)
    model, images = load_encoder(str(tmp_path)).train(), torch.randn(8, 3, 56, 56)
    library = library_of(describe_encoder(str(tmp_path)))
    assert torch.equal(library.encode_images(model, images), library.encode_images(model, images))


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("library_name", ["timm", "transformers"])
def test_images_with_wrong_channels_are_named(library_name: str, channels: int, tmp_path: Path) -> None:
    if library_name == "timm":
        save_encoder(tmp_path, VIT, in_chans=channels, num_classes=0)
    else:
        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        }
        ViTModel(ViTConfig(**sizes, num_channels=channels)).save_pretrained(tmp_path)
    model = encoder(tmp_path, attention=AttentionConfig(kind="softmax"), pooling="mean")
    assert model({"image": torch.randn(2, channels, 56, 56)}).shape == (2, 32)
    for shape in ((2, 4 - channels, 56, 56), (2, 4, 56, 56), (channels, 56, 56)):
        with pytest.raises(
            ValueError, match=rf"takes images \[batch, {channels}, height, width\], not .*{shape[1]}, 56"
        ):
            model({"image": torch.randn(*shape)})


FACTS = {"input_size": [3, 56, 56], "num_classes": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_args": None}, "model_args is missing"),
        ({"pretrained_cfg": None}, "pretrained_cfg is missing"),
        ({"foo": 1}, "foo is unknown"),
        ({"architecture": 5}, "architecture=5 must be the name"),
        ({"architecture": ["vit_tiny_patch16_224"]}, "architecture=.* must be the name"),
        ({"architecture": "vit_nowhere"}, "no architecture 'vit_nowhere'"),
        ({"architecture": "resnet10t"}, "ResNet is not a vision transformer"),
        ({"model_args": [1]}, r"model_args=\[1\] must be a mapping"),
        ({"pretrained_cfg": "abc"}, "pretrained_cfg=abc must be a mapping"),
        ({"pretrained_cfg": {**FACTS, "file": "w.pth"}}, "no entry 'file'"),
        ({"pretrained_cfg": {**FACTS, "url": "https://example.com/w.pth"}}, "no entry 'url'"),
        ({"pretrained_cfg": {**FACTS, "unheard": 1}}, "no entry 'unheard'"),
        *(
            ({"model_args": {**SIZES, option: value}}, f"no entry '{option}'")
            for option, value in {
                "pretrained_cfg_overlay": {"file": "w.pth"}, "pretrained": True, "pretrained_cfg": {}, "cache_dir": "cache",
                "pretrained_strict": False, "pretrained_filter_fn": "abc", "scriptable": True, "exportable": True,
                "no_jit": True, "features_only": True, "out_indices": [0], "pruned": True, "kwargs_filter": ["depth"],
                "device": "cuda", "unheard": 1,
            }.items()
        ),
        ({"model_args": {**SIZES, "depth": "abc"}}, "cannot build network .vit_tiny_patch16_224 with"),
    ],
    ids=str,
)  # fmt: skip
def test_a_description_is_checked(changes: dict[str, Any], message: str) -> None:
    plain = {"architecture": VIT, "model_args": SIZES, "pretrained_cfg": FACTS, **changes}
    network = {name: value for name, value in plain.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        LinearizedImageEncoder(None, AttentionConfig(kind="softmax"), pooling="mean", network=network)


def test_a_checkpoint_names_no_file_to_load(tmp_path: Path) -> None:
    from lightning import Trainer

    save_encoder(tmp_path / "vit", VIT, num_classes=0)
    model = encoder(tmp_path / "vit", attention=AttentionConfig(kind="softmax"), pooling="mean")
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    content = torch.load(tmp_path / "model.ckpt", weights_only=True)
    weights = tmp_path / "vit/model.safetensors"
    content["hyper_parameters"]["network"]["model_args"]["checkpoint_path"] = str(weights)
    torch.save(content, tmp_path / "model.ckpt")
    for load in (load_trained, lambda file: load_encoder(str(file))):
        with pytest.raises(ValueError, match="model_args of vit_tiny_patch16_224 has no entry 'checkpoint_path'"):
            load(tmp_path / "model.ckpt")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_args": [1]}, r"model_args=\[1\] must be a mapping"),
        ({"model_args": "abc"}, "model_args=abc must be a mapping"),
        ({"model_args": None}, "model_args=None must be a mapping"),
        ({"pretrained_cfg": 5}, "pretrained_cfg=5 must be a mapping"),
        ({"architecture": 3}, "architecture=3 must be the name"),
        ({"architecture": None}, "architecture=None must be the name"),
    ],
    ids=str,
)
def test_a_broken_folder_is_named(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_encoder(tmp_path / "vit", VIT, num_classes=0)
    change_config(tmp_path / "vit", **entries)
    for read in (load_encoder, lambda name: open_source(name, tmp_path / "converted"), image_side):
        with pytest.raises(ValueError, match=f"vit/config.json: {message}"):
            read(str(tmp_path / "vit"))


def test_options_of_a_folder_are_those_of_its_model(tmp_path: Path) -> None:
    save_encoder(tmp_path / "vit", VIT, num_classes=0)
    for option in ("pretrained_strict", "checkpoint_path", "device"):
        shutil.copytree(tmp_path / "vit", tmp_path / option)
        change_config(tmp_path / option, model_args={option: "cpu"})
        with pytest.raises(ValueError, match=f"{option}.*'{option}'"):
            load_encoder(str(tmp_path / option))


def test_a_broken_model_on_the_hub_is_named(tmp_path: Path) -> None:
    broken = {"options": {"model_args": [1]}, "name": {"architecture": 3}, "facts": {"pretrained_cfg": "abc"}}
    for repository in ("vit", *broken):
        cached = tmp_path / f"models--owner--{repository}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs/main").write_text("0" * 40)
        save_encoder(cached / "snapshots" / ("0" * 40), VIT, num_classes=0)
        change_config(cached / "snapshots" / ("0" * 40), **broken.get(repository, {}))
    program = (
        "import sys\n"
        "from lightning_mhla.training.encoder_libraries import load_encoder\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        print(len(load_encoder(f'timm:owner/{name}').blocks))\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "vit", *broken], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    blocks, *errors = done.stdout.splitlines()
    assert blocks == "2"
    assert [error.partition(" must be")[0] for error in errors] == [
        "config.json of timm:owner/options: model_args=[1]",
        "config.json of timm:owner/name: architecture=3",
        "config.json of timm:owner/facts: pretrained_cfg=abc",
    ]


@pytest.mark.parametrize(
    ("file", "is_read"),
    [
        ("training_args.bin", False),
        ("optimizer.bin", False),
        ("notes.txt", False),
        ("pytorch_model.bin", True),
        ("open_clip_pytorch_model.bin", True),
        ("model.pth", True),
        ("tuned.pth.tar", True),
    ],
)
def test_weights_are_the_files_that_timm_reads(file: str, is_read: bool, tmp_path: Path) -> None:
    original = save_encoder(tmp_path, VIT, True, num_classes=0)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / file)
    if is_read:
        assert torch.equal(load_encoder(str(tmp_path)).cls_token, original.cls_token)
    else:
        with pytest.raises(FileNotFoundError, match="has no weights"):
            open_source(str(tmp_path), tmp_path / "converted")


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
def test_what_is_not_supported_is_one_line(words: str, message: str, server: ForkServer, tmp_path: Path) -> None:
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
    status, said = server.run(
        "linearize", source, "out", "--train", "photos/train", "--val", "photos/val", "--steps", "4", "4", "--accelerator=cpu",
        *options, module="mhla_tasks", folder=tmp_path, HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert status == 1, said[-2000:]
    assert message in said
    assert "Traceback" not in said
    assert (tmp_path / "out-work").exists() == (source == "broken"), (
        "weights are read after the working folder is begun"
    )
