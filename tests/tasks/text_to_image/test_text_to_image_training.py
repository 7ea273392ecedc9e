"""Training by the command line: what is trained, distillation, adapters, several processes, resuming; the swap keeps the loss."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import DiTTransformer2DModel
from fork_server import ForkServer
from mhla_tasks.captioned.host import build_transformer
from mhla_tasks.text_to_image import DigitScenes, TextToImage
from mhla_tasks.text_to_image.pretrained import SANA
from sana import SHAPE

from lightning_mhla import AttentionConfig, CrossAttentionConfig, load_swapped
from lightning_mhla.swap import swapped_layers

PIXELS = {**SHAPE, "in_channels": 3, "out_channels": 3, "patch_size": 4}
UNIFORM = {"kind": "mhla", "feature_map": "sana", "block_grid": [2, 2], "mixing_init": "uniform"}


def config(folder: Path, name: str, model: dict[str, Any] | None = None, steps: int = 4) -> str:
    """Write a configuration of a small SANA for the scenes, with a CSV log."""
    settings = {
        "transformer": PIXELS,
        "text": {"length": 8},
        "sampling": {"steps": 2, "height": 32, "width": 32},
        "training": {"optimizer": {"lr": 1e-2, "warmup_steps": 0}},
        "flow": {"shift": 1.0},
        **(model or {"attention": {"kind": "linear"}, "layer_kinds": ["keep"]}),
    }
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": name, "version": ""}}
    checkpoints = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 2, "save_top_k": -1}}
    content = {
        "seed_everything": 0,
        "model": {"class_path": "mhla_tasks.text_to_image.TextToImage", "init_args": settings},
        "data": {"class_path": "mhla_tasks.text_to_image.DigitScenes", "init_args": {"batch_size": 4}},
        "trainer": {
            "max_steps": steps, "accelerator": "cpu", "logger": [logger], "log_every_n_steps": 1, "limit_val_batches": 1,
            "enable_progress_bar": False, "num_sanity_val_steps": 0, "callbacks": [checkpoints],
        },
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def column(folder: Path, name: str) -> dict[int, str]:
    with (folder / "metrics.csv").open() as stream:
        return {int(row["step"]): row[name] for row in csv.DictReader(stream) if row.get(name)}


def fit(server: ForkServer, folder: Path, *arguments: str, module: str = "mhla_tasks") -> str:
    status, said = server.run(*arguments, module=module, folder=folder)
    assert status == 0, said[-4000:]
    return said


@pytest.fixture(scope="module")
def pretrained(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of a SANA with its own attention."""
    folder = tmp_path_factory.mktemp("pretrained")
    fit(server, folder, "fit", "--config", config(folder, "plain"))
    return folder / "plain"


def checkpoint(run: Path, step: int) -> Path:
    return next(path for path in run.rglob("*.ckpt") if f"step={step}" in path.name)


def test_the_swap_keeps_the_loss(pretrained: Path) -> None:
    source = str(checkpoint(pretrained, 4))
    data = DigitScenes(batch_size=8)
    batch = next(iter(data.val_dataloader()))
    losses = []
    for kind, same in (
        ({"kind": "linear", "feature_map": "sana"}, True),
        (UNIFORM, True),
        ({**UNIFORM, "mixing_init": "locality"}, False),
    ):
        for options in ({"layer_kinds": ["keep"]}, {}):
            module = TextToImage(
                kind, PIXELS, text={"length": 8}, pretrained=source, **options,  # type: ignore[arg-type]
            ).eval()  # fmt: skip
            module.configure_model()
            generators = [torch.Generator().manual_seed(index) for index in range(8)]
            with torch.no_grad():
                losses.append(module.sample_losses(batch, generators))
        difference = ((losses[-1] - losses[-2]) / losses[-2]).abs().max().item()
        assert (difference < 1e-5) == same, (kind, difference)


def test_resume_is_bitwise_exact(server: ForkServer, pretrained: Path, tmp_path: Path) -> None:
    again = config(tmp_path, "plain")
    fit(server, tmp_path, "fit", "--config", again, "--ckpt_path", str(checkpoint(pretrained, 2)))
    want, found = column(pretrained, "train/loss"), column(tmp_path / "plain", "train/loss")
    assert list(found) == [2, 3]
    assert found == {step: want[step] for step in (2, 3)}


def test_pictures_and_scores_are_drawn_on_two_processes(server: ForkServer, tmp_path: Path) -> None:
    """The first process alone draws and writes; what all of them have to call together, all of them call."""
    path = Path(config(tmp_path, "drawn", steps=2))
    content = yaml.safe_load(path.read_text())
    prompts = {"prompts": ["a red three", "two blue fives"]}
    content["trainer"]["callbacks"] += [
        {"class_path": "mhla_tasks.text_to_image.ImagePictures", "init_args": {**prompts, "at_start": True}},
        {"class_path": "mhla_tasks.text_to_image.SceneScores", "init_args": prompts},
    ]
    path.write_text(yaml.safe_dump(content))
    fit(server, tmp_path, "fit", "--config", str(path), "--trainer.devices=2", "--trainer.strategy=ddp")
    pictures = sorted(file.name for file in (tmp_path / "drawn/pictures").glob("*.*"))
    assert pictures == ["images-step0000000.png", "images-step0000002.png"]
    (line,) = (tmp_path / "drawn/scenes.jsonl").read_text().splitlines()
    assert json.loads(line)["images"] == 2


def test_two_processes_train_as_one_does(server: ForkServer, pretrained: Path, tmp_path: Path) -> None:
    """The same samples; noise is each process's own, so losses agree as validation has them: before training."""
    options = ("--ckpt_path", str(checkpoint(pretrained, 4)))
    alone = fit(server, tmp_path, "validate", "--config", config(tmp_path, "one"), *options)
    both = fit(
        server, tmp_path, "validate", "--config", config(tmp_path, "two"), *options, "--trainer.devices=2",
        "--trainer.strategy=ddp", "--trainer.limit_val_batches=2", "--data.batch_size=4",
    )  # fmt: skip
    assert "val/samples" in alone
    assert "val/samples" in both
    one, two = (column(tmp_path / name, "val/loss") for name in ("one", "two"))
    assert len(one) == len(two) == 1


def test_distillation_then_adapters(server: ForkServer, pretrained: Path, tmp_path: Path) -> None:
    source = str(checkpoint(pretrained, 4))
    distillation = {"teacher": source, "layer_steps": 2}
    options = {"attention": {**UNIFORM, "mixing_init": "locality"}, "train": "lora", "lora": {"rank": 2}}
    path = config(tmp_path, "lora", {**options, "pretrained": source, "distillation": distillation})
    fit(server, tmp_path, "fit", "--config", path)
    run = tmp_path / "lora"
    layer, teacher = (column(run, f"train/{name}_distance") for name in ("layer", "teacher"))
    assert list(teacher) == [2, 3]
    assert list(layer)[:2] == [0, 1]
    last = checkpoint(run, 4)
    trained = torch.load(last, weights_only=True)["state_dict"]
    before = torch.load(source, weights_only=True)["state_dict"]
    frozen = "network.transformer_blocks.0.ff.conv_point.weight"
    assert torch.equal(trained[frozen], before[frozen])
    assert any(".lora_A." in name for name in trained)
    fit(server, tmp_path, "export", str(last), "merged")
    fit(server, tmp_path, "export", str(last), "base", "--adapters", "adapters")
    merged, base = load_swapped(tmp_path / "merged"), load_swapped(tmp_path / "base")
    torch.manual_seed(0)
    noisy, times, text = torch.randn(1, 3, 32, 32), torch.tensor([500.0]), torch.randn(1, 8, 8)
    with torch.no_grad():
        want = TextToImage.velocity(merged, noisy, times, text)
        assert not torch.allclose(TextToImage.velocity(base, noisy, times, text), want, atol=1e-6)
        base.load_lora_adapter(tmp_path / "adapters", weight_name="pytorch_lora_weights.safetensors")
        torch.testing.assert_close(TextToImage.velocity(base, noisy, times, text), want, atol=1e-5, rtol=1e-4)


def test_cross_attention_is_replaced_by_an_option(server: ForkServer, pretrained: Path, tmp_path: Path) -> None:
    """Layers are matched, trained, resumed, drawn and exported; options that do not fit a checkpoint are rejected."""
    source = str(checkpoint(pretrained, 4))
    options = {"attention": {"kind": "linear"}, "layer_kinds": ["keep"], "train": "attention", "pretrained": source}
    options |= {"cross_attention": {"block_grid": [2, 2], "key_block_size": 2, "key_tokens": 8}}
    path = config(tmp_path, "cross", {**options, "distillation": {"teacher": source, "layer_steps": 2}})
    more = ("--model.cross_attention.feature_map=elu", "--trainer.devices=1")
    fit(server, tmp_path, "fit", "--config", path, *more)
    run = tmp_path / "cross"
    assert list(column(run, "train/layer_distance"))[:2] == [0, 1]
    assert list(column(run, "train/teacher_distance")) == [2, 3]
    want, last = column(run, "train/loss"), checkpoint(run, 4)
    trained, original = (torch.load(x, weights_only=True)["state_dict"] for x in (last, source))
    new = "network.transformer_blocks.0.attn2.processor.attention.mixing.weight"
    assert trained[new].shape == (4, 4)
    assert not torch.equal(trained[new], torch.full((4, 4), 0.25)), "coefficients are not trained"
    changed = {name for name in original if not torch.equal(trained[name], original[name])}
    assert changed
    assert all(".attn2." in name for name in changed), "only replaced layers are trained"

    resumed = (*more, "--ckpt_path", str(checkpoint(run, 2)))
    fit(server, tmp_path, "fit", "--config", path, *resumed, f"--trainer.logger.save_dir={tmp_path / 'again'}")
    assert column(tmp_path / "again/cross", "train/loss") == {step: want[step] for step in (2, 3)}
    for wrong, message in (
        (("--model.cross_attention=null", "--model.train=all"), "cross_attention 'mhla', this run asks for none"),
        (("--model.cross_attention.kind=linear",), "set --model.cross_attention.kind=mhla"),
        (("--model.cross_attention.key_block_size=4",), "set --model.cross_attention.key_block_size=2"),
    ):
        status, said = server.run("fit", "--config", path, *resumed, *wrong, module="mhla_tasks", folder=tmp_path)
        assert status != 0
        assert message in " ".join(said.split()), said[-2000:]

    module = TextToImage.load_from_checkpoint(last, map_location="cpu").eval()
    fit(server, tmp_path, "export", str(last), "exported")
    assert "cross-attention: `mhla`" in (tmp_path / "exported/README.md").read_text()
    exported = load_swapped(tmp_path / "exported")
    assert list(swapped_layers(exported, cross=True)) == [0, 1]
    assert swapped_layers(exported) == {}
    torch.manual_seed(0)
    noisy, times, text = torch.randn(2, 3, 32, 32), torch.tensor([500.0, 20.0]), torch.randn(2, 8, 8)
    text[1, 5:] = 0
    with torch.no_grad():
        out = TextToImage.velocity(exported, noisy, times, text)
        assert torch.equal(out, module(noisy, times, text))
    drawn = module.draw(["a red three", "two blue fives"], [0, 1], 0)
    assert drawn.shape == (2, 3, 32, 32)
    again = TextToImage(
        {"kind": "linear"}, PIXELS, ["keep"], options["cross_attention"], text={"length": 8}, pretrained=str(last)
    )  # type: ignore[arg-type]
    again.configure_model()
    assert torch.equal(again.network.state_dict()[new.removeprefix("network.")], trained[new])


@pytest.mark.parametrize(
    ("cross", "message"),
    [
        ({"kind": "gla"}, "cross_attention: attention kind 'gla' reads its own tokens only"),
        ({"kind": "mhla"}, "cross_attention: attention kind 'mhla' needs block_grid"),
        ({"block_grid": [2, 2], "lepe": 3}, "lepe=3 needs queries and keys of the same tokens"),
    ],
)
def test_cross_attention_that_does_not_exist_is_rejected(cross: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextToImage({"kind": "linear"}, PIXELS, ["keep"], cross)  # type: ignore[arg-type]


def test_a_host_without_cross_attention_says_so() -> None:
    @dataclass
    class Shape:
        num_attention_heads: int = 2
        attention_head_dim: int = 8
        in_channels: int = 4
        num_layers: int = 1
        sample_size: int = 8

    host = replace(SANA, transformer=DiTTransformer2DModel)
    options = AttentionConfig(kind="linear"), None, CrossAttentionConfig(kind="linear")
    with pytest.raises(
        ValueError, match=r"cross_attention: DiTTransformer2DModel .*cross_attention: null keeps the original"
    ):
        build_transformer(host, Shape(), *options)


@pytest.mark.parametrize("option", ["", "--model.distillation.teacher={pretrained}"])
def test_training_in_bfloat16_alone(option: str, server: ForkServer, pretrained: Path, tmp_path: Path) -> None:
    """Captions that are dropped and the teacher have the precision of the weights."""
    start = checkpoint(pretrained, 4)
    options = [option.format(pretrained=start)] if option else []
    path = config(tmp_path, "half", {"attention": {"kind": "mhla", "block_grid": [2, 2]}, "pretrained": str(start)})
    fit(server, tmp_path, "fit", "--config", path, "--trainer.precision=bf16-true", *options)
    losses = [float(value) for value in column(tmp_path / "half", "train/loss").values()]
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))


def test_fid_during_training(server: ForkServer, tmp_path: Path) -> None:
    """By the callback that class-to-image uses, on the prompts of the data."""
    path = Path(config(tmp_path, "fid", steps=2))
    content = yaml.safe_load(path.read_text())
    features = {"class_path": "lightning_mhla.generative.fidelity.RandomFeatures"}
    options = {"samples": 6, "batch_size": 4, "reference": "validate", "features": features, "sampling": {"steps": 3}}
    callback = {"class_path": "lightning_mhla.generative.fidelity.GenerationMetrics", "init_args": options}
    content["trainer"]["callbacks"].append(callback)
    content["model"]["init_args"]["sampling"]["guidance"] = 2.0
    path.write_text(yaml.safe_dump(content))
    fit(server, tmp_path, "fit", "--config", str(path))
    (line,) = (tmp_path / "fid/generation.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["samples"], found["sampling_steps"], found["reference_images"]) == (6, 3, 400)
    assert found["guidance"] == 2.0, "options that are left out are the model's"
    assert found["fid"] > 0
    content["model"]["init_args"]["flow"] = {"caption_dropout": 0.0}
    content["model"]["init_args"]["sampling"]["guidance"] = 1.0
    content["trainer"]["callbacks"][-1]["init_args"]["sampling"] = {"guidance": 5.0}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(AssertionError, match=r"guidance=5.0 needs training without captions"):
        fit(server, tmp_path, "fit", "--config", str(path))
    assert list((tmp_path / "fid/pictures").glob("generation-step*.png"))
