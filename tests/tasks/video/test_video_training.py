"""Training, resume, sampling and prediction of video models, by the command line as users call it.

One file, since most tests start from one run that it trains first.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from lightning import Trainer
from mhla_tasks.captioned.sampling import latent_shape
from mhla_tasks.captioned.text import TextConfig
from mhla_tasks.commandline import parser, registry
from mhla_tasks.video import MovingDigits, VideoDiffusion
from mhla_tasks.video.clips import read_clip
from mhla_tasks.video.sampling import WanSamplingConfig
from mhla_tasks.video.strips import write_animation
from peft import PeftModel
from PIL import Image
from processes import run_cli
from wan import PAPER, ROOT, TINY, digits_config, tiny_wan, video_file

from lightning_mhla import AttentionConfig, load_swapped
from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.generative.distillation import DistillationConfig
from lightning_mhla.generative.flow import FlowConfig
from lightning_mhla.swap import swapped_layers
from lightning_mhla.swap.adapters import LoraOptions

DDP = ["--config", str(ROOT / "configs/trainer/ddp.yaml"), "--trainer.accelerator=cpu", "--trainer.devices=2"]
FSDP = ["--config", str(ROOT / "configs/trainer/fsdp.yaml"), "--trainer.accelerator=cpu", "--trainer.devices=2"]


def column(folder: Path, name: str = "train/loss") -> dict[int, str]:
    with (folder / "log/metrics.csv").open() as stream:
        return {int(row["step"]): row[name] for row in csv.DictReader(stream) if row.get(name)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed pretraining of eight steps, over the end of an epoch (5 batches)."""
    folder = tmp_path_factory.mktemp("whole")
    parser.main(["fit", "--config", str(digits_config(folder)), "--trainer.max_steps=8"])
    return folder


@pytest.mark.parametrize("step", [3, 6])
def test_resume_is_bitwise_exact(whole: Path, tmp_path: Path, step: int) -> None:
    start = whole / f"checkpoints/step={step}.ckpt"
    parser.main(["fit", "--config", str(digits_config(tmp_path)), "--trainer.max_steps=8", f"--ckpt_path={start}"])
    assert column(tmp_path) == {k: v for k, v in column(whole).items() if k >= step}
    one, two = (torch.load(f / "checkpoints/step=8.ckpt", weights_only=True) for f in (whole, tmp_path))
    for key in ("state_dict", "current_model_state"):
        assert all(torch.equal(value, two[key][name]) for name, value in one[key].items()), key


def test_strips_and_animations_are_drawn(whole: Path) -> None:
    drawn = sorted(path.name for path in (whole / "log/pictures").glob("*.*"))
    assert drawn == [f"clips-step{step:07d}.{kind}" for step in (2, 4, 6, 8) for kind in ("gif", "png")]


def test_an_animation_shows_every_frame_of_every_clip(tmp_path: Path) -> None:
    """Five grey clips of three frames, in rows of four, small ones enlarged."""
    shades = torch.arange(15, dtype=torch.uint8).view(5, 3, 1, 1, 1) * 16
    write_animation(tmp_path / "clips.gif", shades.expand(5, 3, 1, 10, 14), fps=5)
    with Image.open(tmp_path / "clips.gif") as image:
        assert (image.n_frames, image.info["duration"], image.info["loop"]) == (3, 200, 0)
        assert image.size == (4 * 100 - 2, 2 * 72 - 2)
        for frame in range(3):
            image.seek(frame)
            pixels = image.convert("L")
            found = [pixels.getpixel((100 * (clip % 4) + 40, 72 * (clip // 4) + 40)) for clip in range(5)]
            assert found == [pytest.approx(int(shades[clip, frame]), abs=4) for clip in range(5)]


def test_clips_that_fill_up_a_batch_do_not_count(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = VideoDiffusion.load_from_checkpoint(whole / "checkpoints/step=8.ckpt", weights_only=True).eval()
    monkeypatch.setattr(made, "log", lambda *_, **__: None)
    clips = {"video": torch.rand(3, 1, 3, 10, 14), "caption": ["a one", "a two", "a six"], "index": torch.arange(3)}
    losses = []
    for rows in ([0, 1, 2], [0, 2]):
        batch = {name: [v[row] for row in rows] if isinstance(v, list) else v[rows] for name, v in clips.items()}
        made.val_loss.reset(), made.val_samples.reset()
        made.validation_step({**batch, "valid": torch.tensor([row != 1 for row in rows])}, 0)
        losses.append(float(made.val_loss.compute()))
        assert made.val_samples.compute() == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "layer_kinds"),
    [
        ("mhla", None),
        ("linear", None),
        ("softmax", None),
        ("mhla", ["keep", "mhla"]),
        ("gla", None),
    ],
)
def test_fine_tuning_starts_from_the_checkpoint(
    whole: Path, tmp_path: Path, kind: str, layer_kinds: list[str] | None
) -> None:
    """An odd clip (3 x 5 x 7 tokens in 2 x 2 x 2 blocks); at the start softmax resumes from the pretrained model's loss."""
    source = whole / "checkpoints/step=8.ckpt"
    attention = {"kind": kind, "block_grid": [2, 2, 2], "normalize": False, "gate": True}
    config = digits_config(
        tmp_path, "digits_finetune", attention=attention, layer_kinds=layer_kinds, pretrained=str(source)
    )
    once = ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    parser.main(["fit", "--config", str(config), "--trainer.max_steps=2", *once])
    assert list((tmp_path / "log/pictures").glob("attention-*.png")), "attention inside the model is drawn too"
    weights = torch.load(tmp_path / "checkpoints/step=2.ckpt", weights_only=True)["current_model_state"]
    before = torch.load(source, weights_only=True)["state_dict"]
    assert set(before) < set(weights)
    assert (
        0 < (weights["network.blocks.0.attn1.to_q.weight"] - before["network.blocks.0.attn1.to_q.weight"]).norm() < 0.1
    )
    if kind == "softmax":  # with an open gate it is the pretrained model: training resumes where that one stood
        kept = digits_config(tmp_path / "kept", layer_kinds=["keep"], pretrained=str(source))
        parser.main(["fit", "--config", str(kept), "--trainer.max_steps=1", *once])
        assert float(column(tmp_path)[0]) == pytest.approx(float(column(tmp_path / "kept")[0]), rel=1e-4)


def test_train_lora_and_export(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(whole / "checkpoints/step=8.ckpt")
    config = digits_config(
        tmp_path, "digits_finetune", train="lora", lora={"rank": 2}, pretrained=source, ema_decay=None
    )
    parser.main(["fit", "--config", str(config), "--trainer.max_steps=2"])
    last = tmp_path / "checkpoints/step=2.ckpt"
    registry.run("export", [str(last), str(tmp_path / "out")])
    exported = load_swapped(tmp_path / "out")
    trained = VideoDiffusion.load_from_checkpoint(last, weights_only=True).eval()
    before = torch.load(source, weights_only=True)["state_dict"]
    frozen = "network.blocks.0.ffn.net.0.proj.weight"
    assert torch.equal(trained.state_dict()[frozen], before[frozen])
    noisy, times, text = torch.randn(1, 1, 3, 10, 14), torch.tensor([500.0]), torch.randn(1, 4, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            exported(noisy, times, text).sample, trained(noisy, times, text), atol=1e-5, rtol=1e-4
        )
    parts = [str(tmp_path / "base"), "--adapters", str(tmp_path / "adapters")]
    registry.run("export", [str(last), *parts])
    base = load_swapped(tmp_path / "base")
    with torch.no_grad():
        want, alone = exported(noisy, times, text).sample, base(noisy, times, text).sample
        assert not torch.allclose(alone, want, atol=1e-6)
        base.load_lora_adapter(tmp_path / "adapters", weight_name="pytorch_lora_weights.safetensors")
        torch.testing.assert_close(base(noisy, times, text).sample, want, atol=1e-5, rtol=1e-4)
        adapted = PeftModel.from_pretrained(load_swapped(tmp_path / "base"), tmp_path / "adapters")
        torch.testing.assert_close(adapted(noisy, times, text).sample, want, atol=1e-5, rtol=1e-4)
    again = digits_config(tmp_path / "again", "digits_finetune", pretrained=str(tmp_path / "out"))
    parser.main(["fit", "--config", str(again), "--trainer.max_steps=1"])
    assert "model.safetensors" in capsys.readouterr().out


def test_distillation_matches_layers_then_the_velocity(whole: Path, tmp_path: Path) -> None:
    source = str(whole / "checkpoints/step=8.ckpt")
    distillation = {"teacher": source, "layer_steps": 2, "velocity_weight": 0.5, "flow_weight": 2.0}
    config = digits_config(
        tmp_path, "digits_finetune", train="attention", pretrained=source, distillation=distillation, ema_decay=0.5
    )
    parser.main(["fit", "--config", str(config), "--trainer.max_steps=4"])
    layer, flow, teacher = (
        column(tmp_path, f"train/{name}") for name in ("layer_distance", "flow_loss", "teacher_distance")
    )
    assert list(flow) == list(teacher) == [2, 3]
    total = column(tmp_path)
    assert [total[step] for step in (0, 1)] == [layer[step] for step in (0, 1)]
    for step in (2, 3):
        assert float(total[step]) == pytest.approx(2 * float(flow[step]) + 0.5 * float(teacher[step]), rel=1e-5)
    content = torch.load(tmp_path / "checkpoints/step=4.ckpt", weights_only=True)
    assert not [name for name in content["state_dict"] if "teacher" in name], "the teacher is not kept"
    resumed = tmp_path / "resumed"
    options = ["--config", str(digits_config(resumed, "digits_finetune", train="attention", distillation=distillation))]
    parser.main(["fit", *options, "--trainer.max_steps=4", f"--ckpt_path={tmp_path / 'checkpoints/step=1.ckpt'}"])
    assert column(resumed) == {step: loss for step, loss in total.items() if step >= 1}


def test_layers_improve_by_matching(whole: Path, tmp_path: Path) -> None:
    source = str(whole / "checkpoints/step=8.ckpt")
    config = digits_config(
        tmp_path,
        "digits_finetune",
        train="new",
        pretrained=source,
        distillation={"teacher": source, "layer_steps": 12},
        optimizer={"lr": 0.03, "weight_decay": 0.0},
        ema_decay=None,
    )
    small = ["--trainer.max_steps=12", "--data.batch_size=100", "--trainer.limit_val_batches=0"]
    parser.main(["fit", "--config", str(config), *small])
    distance = [float(value) for value in column(tmp_path, "train/layer_distance").values()]
    assert sum(distance[-3:]) < 0.8 * sum(distance[:3]), distance


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distillation": {"layer_steps": 3}}, "distillation.layer_steps=3 needs distillation.teacher"),
        ({"distillation": {"teacher": "nowhere"}}, "nowhere is neither a file, nor a folder of a Wan transformer"),
        ({"flow": {"caption_dropout": 0.0}}, "guidance=3.0 needs training without captions: flow.caption_dropout"),
        ({"flow": {"caption_dropout": 1.0}}, "caption_dropout=1.0 must be at least 0 and below 1"),
        ({"flow": {"shift": 0}}, "flow.shift=0.0 must be above 0"),
        ({"sampling": {"steps": 0}}, "sampling.steps=0 must lie between 1 and 1,000"),
        ({"sampling": {"guidance": 0.5}}, "sampling.guidance=0.5 must be at least 1"),
        ({"layer_kinds": ["keep", "mhla", "mhla"]}, "its length must divide the 2 layers"),
        ({"train": "new", "layer_kinds": ["keep"]}, "no layer is replaced; set train: all"),
        ({"pretrained": "nowhere.ckpt"}, "nowhere.ckpt is neither a file, nor a folder of a Wan transformer"),
        ({"transformer": {"in_channels": 3}}, "clips of 1 channels for a transformer of 3"),
        ({"transformer": {"patch_size": [2, 2, 2]}}, "do not divide into patches of [2, 2, 2]"),
        ({"transformer": {"num_layer": 2}}, "num_layer"),
        ({"vae": "nowhere"}, "vae nowhere is neither a folder nor a model on the hub"),
    ],
)  # fmt: skip
def test_wrong_options_are_short_errors(
    tmp_path: Path,
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = digits_config(tmp_path, "digits_finetune")
    config = yaml.safe_load(path.read_text())
    for name, value in options.items():
        known = config["model"]["init_args"].get(name)
        config["model"]["init_args"][name] = {**known, **value} if isinstance(known, dict) else value
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["lightning", "fit", "--config", str(path)])
    with pytest.raises(SystemExit):
        parser.main()
    error = capsys.readouterr().err
    assert message in error, error
    assert "Traceback" not in error


def module(**options: Any) -> VideoDiffusion:
    """Build a model of tiny latents, in which every weight is changed, so that every input matters."""
    sampling = WanSamplingConfig(steps=3, guidance=2.0, frames=5, height=16, width=32)
    torch.manual_seed(3)
    made = VideoDiffusion(PAPER, TINY, flow=FlowConfig(), sampling=sampling, **options)
    made.network.load_state_dict(tiny_wan().state_dict(), strict=False)
    return made.eval()


def test_clips_are_the_pipelines_own(pipeline: Path) -> None:
    """Text encoder, guidance, sampler and VAE: the same clip as diffusers' pipeline draws with the same noise."""
    made = module(text=TextConfig(str(pipeline), 8), vae=str(pipeline))
    clips = made.draw(["a seven moving right", "a zero moving up"], [0, 1], 5)
    assert clips.shape == (2, 5, 3, 16, 32)
    wan = WanPipeline.from_pretrained(pipeline, transformer=made.network)
    wan.text_encoder.to(torch.bfloat16)
    from diffusers import UniPCMultistepScheduler

    wan.scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    for number, prompt in enumerate(["a seven moving right", "a zero moving up"]):
        noise = torch.randn(1, 4, 2, 2, 4, generator=sample_generator(5, number))
        frames = wan(
            prompt,
            negative_prompt="",
            height=16,
            width=32,
            num_frames=5,
            latents=noise,
            num_inference_steps=3,
            guidance_scale=2.0,
            max_sequence_length=8,
            output_type="np",
        ).frames[0]
        theirs = torch.from_numpy(frames).permute(0, 3, 1, 2) * 255
        assert (theirs - clips[number].float()).abs().max() <= 2


def test_euler_sampler_and_seeds() -> None:
    made = module(text=TextConfig(length=4))
    config = WanSamplingConfig(sampler="euler", steps=2, guidance=1.0, frames=3, height=4, width=6)
    made.sampling = config
    both = made.draw(["a one", "a two"], [4, 9], 1)
    assert torch.equal(made.draw(["a two"], [9], 1), both[1:]), "a clip depends on its index, not on the batch"
    assert not torch.equal(made.draw(["a two"], [9], 2), both[1:])
    assert not torch.equal(made.draw(["a one"], [9], 1), both[1:])
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)
    scheduler.set_timesteps(2)
    noise = torch.randn(1, 4, 3, 4, 6, generator=sample_generator(1, 9))
    text = made.captions.encode(["a two"], torch.device("cpu"))
    with torch.no_grad():
        for time in scheduler.timesteps:
            noise = scheduler.step(made(noise, time[None], text), time, noise).prev_sample
    expected = ((noise.transpose(1, 2) + 1) * 127.5).round().clamp(0, 255)
    assert (both[1:].float() - expected).abs().max() <= 1


def test_many_prompts_are_drawn_as_each_alone() -> None:
    """Also those after the first 32, which are drawn in a second part."""
    made = module(text=TextConfig(length=4))
    made.sampling = WanSamplingConfig(sampler="euler", steps=1, guidance=1.0, frames=1, height=4, width=6)
    prompts = [f"{number} digits" for number in range(35)]
    clips = made.draw_prompts(prompts, 1)
    assert clips.shape[:2] == (35, 1)
    for index in (0, 31, 32, 34):
        alone = made.draw([prompts[index]], [index], 1)[0]
        near = [int((clip.float() - alone.float()).abs().max() <= 1) for clip in clips]
        assert near == [int(number == index) for number in range(35)]


def test_sizes_that_patches_or_the_vae_do_not_divide(pipeline: Path) -> None:
    made = module(text=TextConfig(length=4))
    with pytest.raises(ValueError, match=r"clips of \[5, 15, 24\] frames, rows and columns do not divide into patches"):
        latent_shape(made.network, None, WanSamplingConfig(frames=5, height=15, width=24), "clips")
    made = module(text=TextConfig(length=4), vae=str(pipeline))
    with pytest.raises(ValueError, match=r"latents of \[2, 2, 3\] frames, rows and columns do not divide into patches"):
        latent_shape(made.network, made.codec, WanSamplingConfig(frames=5, height=16, width=24), "clips")
    with pytest.raises(ValueError, match="the VAE requires 1 frame more than a multiple of 4"):
        latent_shape(made.network, made.codec, WanSamplingConfig(frames=6, height=16, width=32), "clips")


def test_validation_is_the_same_each_time_and_counts_every_clip(whole: Path) -> None:
    values = []
    for batch_size in (360, 100):
        made = VideoDiffusion.load_from_checkpoint(whole / "checkpoints/step=8.ckpt", weights_only=True)
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
        data = MovingDigits(3, 10, 14, batch_size=batch_size)
        values += trainer.validate(made, data, verbose=False)
    assert values[0]["val/samples"] == values[1]["val/samples"] == 360
    assert values[0]["val/loss"] == pytest.approx(values[1]["val/loss"], rel=1e-5)


def predict(folder: Path, start: Path, *options: str, processes: int = 1) -> Path:
    """Draw clips from a checkpoint, and return the log folder of the run."""
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": "", "version": ""}}
    folder.mkdir()
    (folder / "logger.yaml").write_text(yaml.safe_dump({"trainer": {"logger": logger}}))
    arguments = ["predict", f"--ckpt_path={start}", "--config", str(folder / "logger.yaml"), *options]
    arguments += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--data.batch_size=2"]
    if processes == 1:
        parser.main(arguments)
    else:
        run_cli(*arguments, *DDP)
    return folder


def test_predict_writes_what_vbench_reads(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a one moving up\na two moving left\nthree\ta three moving down, slowly\n")
    options = [f"--data.prompts.prompts={prompts}", "--data.prompts.per_prompt=3"]
    options += ["--model.sampling.crf=0"]  # otherwise x264 puts equal frames 8 levels apart, at times
    start = whole / "checkpoints/step=8.ckpt"
    folder = predict(tmp_path / "one", start, *options)
    files = sorted(path.name for path in (folder / "videos").iterdir())
    assert files == sorted(
        f"{name}-{i}.mp4" for name in ("a one moving up", "a two moving left", "three") for i in range(3)
    )
    rows = [json.loads(line) for line in (folder / "videos.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(9))
    assert rows[8] | {"seconds": 0, "at_once": 0} == {
        "file": "three-2.mp4",
        "prompt": "a three moving down, slowly",
        "index": 8,
        "seed": 0,
        "seconds": 0,
        "at_once": 0,
        "frames": 3,
        "height": 10,
        "width": 14,
    }
    assert all(row["seconds"] > 0 for row in rows)
    assert "9 videos of 3 frames of 10 x 14 in" in capsys.readouterr().out.replace("\n", "")
    assert (folder / "videos.png").is_file()
    again = predict(tmp_path / "two", start, *options, processes=2)
    one, two = (
        [read_clip((f / "videos" / n).read_bytes(), n, 3, None, 0.0).float() for n in files] for f in (folder, again)
    )
    same = [float((a - b).abs().max()) for a, b in zip(one, two, strict=True)]
    others = [float((a - b).abs().mean()) for a, b in zip(one, two[1:], strict=False)]
    assert max(same) <= 2 < 16 < min(others), "the number of processes does not change a clip, but for rounding"
    assert len((again / "videos.jsonl").read_text().splitlines()) == 9


def test_predict_goes_on_where_it_was_stopped(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, output = whole / "checkpoints/step=8.ckpt", tmp_path / "clips"
    options = [f"--model.output={output}", "--data.prompts.prompts=[one,two,three,four,five]"]
    drawn: list[list[int]] = []
    draw = VideoDiffusion.draw

    def stopping(self: VideoDiffusion, prompts: list[str], indices: list[int], seed: int) -> torch.Tensor:
        if len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append(indices)
        return draw(self, prompts, indices, seed)

    with monkeypatch.context() as patch:
        patch.setattr(VideoDiffusion, "draw", stopping)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            predict(tmp_path / "first", start, *options)
    assert drawn == [[0, 1], [2, 3]]
    (output / "videos/three-0.mp4").unlink()
    origin = json.loads((output / "videos-origin.json").read_text())
    del origin["attention"]["options"], origin["sampling"]["crf"]  # as before there were any
    (output / "videos-origin.json").write_text(json.dumps(origin))
    drawn.clear()
    monkeypatch.setattr(VideoDiffusion, "draw", lambda *given: drawn.append(given[2]) or draw(*given))
    predict(tmp_path / "second", start, *options)
    assert drawn == [[2], [4]]
    rows = [json.loads(line) for line in (output / "videos.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == [f"{name}-0.mp4" for name in ("one", "two", "three", "four", "five")]
    for number, other in enumerate(
        ["--data.prompts.seed=1", "--model.sampling.steps=3", "--trainer.precision=bf16-mixed"]
    ):
        with pytest.raises(SystemExit):
            predict(tmp_path / f"other{number}", start, *options, other)
    written = {"weights": str(start), "written": start.stat().st_mtime_ns}  # as an earlier version recorded the weights
    for number, change in enumerate(({"weights": "other.ckpt"}, {"written": 1}, {})):
        origin = {**json.loads((output / "videos-origin.json").read_text()), **written, **change}
        origin.pop("precision", None)
        (output / "videos-origin.json").write_text(json.dumps(origin))
        if change:
            with pytest.raises(SystemExit):
                predict(tmp_path / f"earlier{number}", start, *options)
        else:
            predict(tmp_path / f"earlier{number}", start, *options)


@pytest.mark.parametrize("option", ["ckpt_path", "model.pretrained", "export"])
def test_clips_of_weights_that_were_replaced_are_not_kept(
    option: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path is the same, but a checkpoint, a run folder or an export holds other weights than before."""
    config, output = digits_config(tmp_path / "config"), f"--model.output={tmp_path / 'clips'}"
    place = tmp_path / ("weights" if option == "export" else "weights.ckpt")
    name = "model.pretrained" if option == "export" else option
    arguments = ["predict", "--config", str(config), f"--{name}={place}", output, "--data.prompts.prompts=[one]"]
    for step in (8, 6):
        checkpoint = whole / f"checkpoints/step={step}.ckpt"
        if option == "export":
            shutil.rmtree(place, ignore_errors=True)
            registry.run("export", [str(checkpoint), str(place)])
        else:
            shutil.copyfile(checkpoint, place)
        os.utime(place, (1, 1))
        if step == 8:
            parser.main(arguments)
        else:
            with pytest.raises(SystemExit):
                parser.main(arguments)
    assert "were drawn with different weights" in capsys.readouterr().err


def test_predict_from_weights_without_a_checkpoint(whole: Path, tmp_path: Path) -> None:
    """Weights without a checkpoint, such as the authors', give the same clip as the checkpoint with these weights."""
    start = whole / "checkpoints/step=8.ckpt"
    config = digits_config(tmp_path / "config")
    for name, source in (("a", f"--ckpt_path={start}"), ("b", f"--model.pretrained={start}")):
        output = f"--model.output={tmp_path / name}"
        parser.main(["predict", "--config", str(config), source, output, "--data.prompts.prompts=[one]"])
    one, two = (read_clip((tmp_path / name / "videos/one-0.mp4").read_bytes(), name, 3, None, 0.0) for name in "ab")
    assert torch.equal(one, two)


def test_training_and_prediction_in_bfloat16(whole: Path, pipeline: Path, tmp_path: Path) -> None:
    source = str(whole / "checkpoints/step=8.ckpt")
    config = digits_config(
        tmp_path,
        "digits_finetune",
        pretrained=source,
        distillation={"teacher": source, "layer_steps": 1},
        checkpointing=True,
    )
    parser.main(["fit", "--config", str(config), "--trainer.max_steps=2", "--trainer.precision=bf16-mixed"])
    assert all(0 < float(loss) < 5 for loss in column(tmp_path).values())
    made = module(text=TextConfig(str(pipeline), 8), vae=str(pipeline))
    precise = made.draw(["a seven"], [0], 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = made.draw(["a seven"], [0], 0)
    assert (precise.float() - rough.float()).abs().mean() < 8, "text encoder and VAE stay out of autocast"


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [(TextConfig(length=8), 8, "without text.encoder prompts would be encoded otherwise"), (None, 6, "set them alike")],
)
def test_encoded_captions_go_with_the_prompts(
    pipeline: Path, text: TextConfig | None, length: int, message: str
) -> None:
    made = module(text=text or TextConfig(str(pipeline), 8), vae=str(pipeline))
    made.trainer = SimpleNamespace(datamodule=SimpleNamespace(text_length=length))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=message):
        made._check_encoded_captions()


def test_latents_without_a_vae_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="clips of 4 channels are latents; name the autoencoder"):
        module(text=TextConfig(length=4)).check_drawable()


@pytest.fixture(scope="module")
def unmoved(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Held-out loss of the swapped model, computed by one process."""
    return column(at_rest(whole, tmp_path_factory.mktemp("one"), []), "val/loss")


def at_rest(whole: Path, folder: Path, overlay: list[str]) -> Path:
    """Fine-tune a run with steps that do not change the weights, and return its folder."""
    config = digits_config(
        folder,
        "digits_finetune",
        pretrained=str(whole / "checkpoints/step=8.ckpt"),
        ema_decay=None,
        optimizer={"lr": 0.0, "weight_decay": 0.0, "mixing_lr_scale": 0.0},
    )
    pictures = "[{class_path: mhla_tasks.video.ClipPictures, init_args: {prompts: [a one moving up]}}]"
    quiet = ["--trainer.max_steps=1", f"--trainer.callbacks={pictures}", "--trainer.val_check_interval=1"]
    arguments = ["fit", "--config", str(config), *quiet, "--trainer.enable_checkpointing=false", *overlay]
    if overlay:
        run_cli(*arguments)
    else:
        parser.main(arguments)
    return folder


@pytest.mark.parametrize("overlay", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_two_processes_see_the_model_that_one_sees(
    whole: Path, unmoved: dict[int, str], tmp_path: Path, overlay: list[str]
) -> None:
    found = column(at_rest(whole, tmp_path, overlay), "val/loss")
    assert (tmp_path / "log/pictures/clips-step0000001.png").exists(), "processes that gather weights draw together"
    assert list(found) == list(unmoved)
    assert [float(loss) for loss in found.values()] == pytest.approx(
        [float(loss) for loss in unmoved.values()], rel=1e-5
    )


def test_layers_cannot_be_matched_where_weights_are_sharded(whole: Path, tmp_path: Path) -> None:
    source = str(whole / "checkpoints/step=8.ckpt")
    distillation = {"teacher": source, "layer_steps": 2}
    config = digits_config(tmp_path, "digits_finetune", distillation=distillation, ema_decay=None, train="attention")
    with pytest.raises(AssertionError, match=r"distillation\.layer_steps calls layers by themselves"):
        run_cli("fit", "--config", str(config), *FSDP)


def test_train_on_encoded_clips_and_on_the_fly(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From video files to a step on latents, by shards and by folder; encoding first or on the fly gives the same loss."""
    clips = tmp_path / "clips"
    clips.mkdir()
    for number in range(4):
        video_file(clips / f"{number}.mp4", frames=9, height=32, width=32, seed=number)
        (clips / f"{number}.txt").write_text("a seven moving right")
    sizes = {"frames": 9, "height": 32, "width": 32, "fps": 8.0}
    arguments = [str(clips), str(tmp_path / "latents"), "--model", str(pipeline), "--text_width", "16"]
    arguments += [f"--{name}={value}" for name, value in sizes.items()]
    registry.run("prepare clip-latents", [*arguments, "--text_length", "8"])
    import tarfile

    with tarfile.open(tmp_path / "clips.tar", "w") as archive:
        for path in sorted(clips.iterdir()):
            archive.add(path, path.name)
    from mhla_tasks.video import VideoLatentShards, VideoShards

    losses = []
    given = {"batch_size": 2, "num_workers": 0, "seed": 0}
    for data in (
        VideoLatentShards(str(tmp_path / "latents"), str(tmp_path / "latents"), text_length=8, **given),
        VideoShards(str(tmp_path / "clips.tar"), str(tmp_path / "clips.tar"), **sizes, **given),
    ):
        options = {"text": TextConfig(str(pipeline), 8), "vae": str(pipeline)}
        trainer = Trainer(
            accelerator="cpu",
            max_steps=2,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        losses.append(trainer.validate(module(**options), data, verbose=False)[0]["val/loss"])
        trainer.fit(module(**options), data)
        assert torch.isfinite(trainer.callback_metrics["train/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_captions_of_another_width_are_refused(pipeline: Path) -> None:
    made = module(text=TextConfig(length=4))
    with pytest.raises(ValueError, match=r"captions are encoded in width 8, the transformer takes 16"):
        made.encode_captions({"text": torch.zeros(1, 4, 8)})


def test_options_survive_a_checkpoint(whole: Path) -> None:
    made = VideoDiffusion.load_from_checkpoint(whole / "checkpoints/step=8.ckpt", weights_only=True)
    assert made.flow == FlowConfig(shift=1.0)
    assert (made.sampling.steps, made.sampling.height) == (2, 10)
    assert made.distillation == DistillationConfig()
    assert swapped_layers(made.network) == {}
    other = VideoDiffusion(
        AttentionConfig(block_grid=[1, 1, 1], normalize=False), TINY, train="lora", lora=LoraOptions(rank=3)
    )
    assert other.hparams["lora"] == {"rank": 3, "alpha": 64, "dropout": 0.0}


def test_training_drops_the_share_of_captions_asked_for() -> None:
    made = module(text=TextConfig(length=4))
    made.log_loss = lambda loss, count: loss  # type: ignore[method-assign]
    made._empty = torch.full((1, 4, 16), 9.0)
    seen: list[torch.Tensor] = []
    made.network.register_forward_pre_hook(
        lambda network, args: seen.append(args[2]) if args[2].shape[1] == 4 else None
    )
    batch = {"latent": torch.randn(300, 4, 1, 2, 2), "text": torch.zeros(300, 4, 16)}
    made.training_step(batch, 0)
    assert 0.04 < float((seen[0] == 9).all(-1).all(-1).float().mean()) < 0.18


def test_guidance_leads_away_from_the_negative_prompt() -> None:
    """All the way from the prompt itself is nowhere: the clip without guidance."""
    made = module(text=TextConfig(length=4))
    sizes: dict[str, Any] = {"sampler": "euler", "steps": 2, "frames": 3, "height": 4, "width": 6}
    clips = {}
    for guidance, negative in ((1.0, ""), (4.0, "a two"), (4.0, "")):
        made.sampling = WanSamplingConfig(guidance=guidance, negative_prompt=negative, **sizes)
        clips[guidance, negative] = made.draw(["a two"], [0], 1).int()
    assert (clips[4.0, "a two"] - clips[1.0, ""]).abs().max() <= 1
    assert (clips[4.0, ""] - clips[1.0, ""]).abs().max() > 1
