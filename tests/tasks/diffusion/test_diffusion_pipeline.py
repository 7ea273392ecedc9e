"""The exported DiT draws in three lines, in a new process, what the module draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler
from lightning import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from mhla_tasks.diffusion import ClassToImage, DiTPipeline, DiTShape
from mhla_tasks.diffusion.pretrained import load_pretrained
from mhla_tasks.diffusion.process import ProcessConfig
from mhla_tasks.diffusion.sampling import DiTSamplingConfig
from processes import fork_server

from lightning_mhla import AttentionConfig

CASES: dict[str, dict[str, Any]] = {
    "ddpm, learned variance, guidance, VAE": {
        "process": ProcessConfig("ddpm", learn_sigma=True),
        "sampling": DiTSamplingConfig("ddpm", 5, 2.0),
        "channels": 4,
        "vae": True,
    },
    "ddim": {"process": ProcessConfig("ddpm", learn_sigma=True), "sampling": DiTSamplingConfig("ddim", 4), "channels": 3},
    "ddpm, fixed variance, no label dropout": {
        "process": ProcessConfig("ddpm", learn_sigma=False, label_dropout=0.0),
        "sampling": DiTSamplingConfig("ddpm", 4),
        "channels": 3,
    },
    "flow, grey": {"process": ProcessConfig("flow"), "sampling": DiTSamplingConfig("euler", 4, 1.5), "channels": 1},
    "flow, dpm-solver++": {"process": ProcessConfig("flow"), "sampling": DiTSamplingConfig("dpm-solver++", 4), "channels": 3},
}  # fmt: skip

PROGRAM = """
import sys, torch
from mhla_tasks.diffusion import DiTPipeline
for folder in sys.argv[1:]:
    pipe = DiTPipeline.from_pretrained(folder)
    torch.save(pipe(class_labels=[3, 7], seed=11, output_type="pt").images, folder + "/images.pt")
    pipe(class_labels=[3]).images[0].save(folder + "/image.png")
"""


def make_module(case: dict[str, Any], folder: Path) -> ClassToImage:
    torch.manual_seed(0)
    vae = None
    if case.get("vae"):
        kinds = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
        AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, **kinds).save_pretrained(folder / "vae")
        vae = str(folder / "vae")
    module = ClassToImage(
        AttentionConfig(block_grid=[2, 2]), sample_size=8, channels=case["channels"], num_classes=10,
        shape=DiTShape(dim=16, depth=2, heads=2), process=case["process"], sampling=case["sampling"], vae=vae,
    )  # fmt: skip
    for parameter in module.network.parameters():  # a fresh DiT draws nothing: its branches are switched off
        torch.nn.init.normal_(parameter, std=0.1)
    return module.eval()


def test_a_new_process_draws_what_the_module_draws(tmp_path: Path) -> None:
    folders, wanted = [], []
    for number, case in enumerate(CASES.values()):
        folders.append(tmp_path / str(number) / "exported")
        module = make_module(case, tmp_path / str(number))
        wanted.append(module.draw(torch.tensor([3, 7]), [0, 1], 11, case["sampling"]))
        DiTPipeline.of_module(module).save_pretrained(folders[-1])
    status, said = fork_server().program(PROGRAM, *folders)
    assert status == 0, said[-2000:]
    for name, folder, want in zip(CASES, folders, wanted, strict=True):
        found = torch.load(folder / "images.pt", weights_only=True)
        assert (found.int() - want.cpu().int()).abs().max() <= 1, name  # another number of threads
        assert (folder / "image.png").stat().st_size > 0


def test_another_scheduler_precision_and_errors(tmp_path: Path) -> None:
    module = make_module(CASES["ddpm, learned variance, guidance, VAE"], tmp_path)
    DiTPipeline.of_module(module).save_pretrained(tmp_path / "exported")
    pipe = DiTPipeline.from_pretrained(tmp_path / "exported", torch_dtype=torch.bfloat16)
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, variance_type=None)
    images = pipe([1, 2], num_inference_steps=3, output_type="np", generator=torch.Generator().manual_seed(0)).images
    assert images.shape == (2, 8, 8, 3)
    assert images.dtype == np.uint8
    with pytest.raises(ValueError, match="class 10 is not one of 0 to 9"):
        pipe([10])
    with pytest.raises(ValueError, match="num_inference_steps=0 must lie between"):
        pipe([1], num_inference_steps=0)
    with pytest.raises(ValueError, match="output_type='png' is not one of 'pil', 'np', 'pt', 'latent'"):
        pipe([1], num_inference_steps=3, output_type="png")
    with pytest.raises(ValueError, match="num_inference_steps=1 must lie between 2 and"):
        DiTPipeline.from_pretrained(tmp_path / "exported")([1], num_inference_steps=1)
    plain = make_module(CASES["ddpm, fixed variance, no label dropout"], tmp_path)
    with pytest.raises(ValueError, match="also trained without labels"):
        DiTPipeline.of_module(plain)([1], guidance_scale=2.0)


def test_training_starts_from_an_exported_pipeline(tmp_path: Path) -> None:
    module = make_module(CASES["flow, grey"], tmp_path)
    DiTPipeline.of_module(module).save_pretrained(tmp_path / "exported")
    fresh = make_module(CASES["flow, grey"], tmp_path)
    torch.nn.init.zeros_(
        fresh.network.label.weight if hasattr(fresh.network.label, "weight") else fresh.network.position
    )
    load_pretrained(fresh.network, str(tmp_path / "exported"))
    for name, tensor in fresh.network.state_dict().items():
        assert torch.equal(tensor, module.network.state_dict()[name]), name


def test_samples_of_nan_are_an_error_and_in_training_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = make_module(CASES["flow, grey"], tmp_path)
    torch.nn.init.constant_(next(module.network.parameters()), torch.nan)
    pipeline = DiTPipeline.of_module(module)
    drawn = torch.tensor([3]), [0], 11, module.sampling
    for draw in (lambda: module.draw(*drawn), lambda: pipeline(class_labels=[3], seed=11)):
        with pytest.raises(ValueError, match="samples hold NaN or infinity"):
            draw()
    module.trainer = trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    for function in (TrainerFn.FITTING, TrainerFn.PREDICTING):
        trainer.state.fn = function
        if function == TrainerFn.FITTING:
            assert module.draw(*drawn).dtype == torch.uint8
            assert "samples hold NaN or infinity" in caplog.text
        else:
            with pytest.raises(ValueError, match="samples hold NaN or infinity"):
                module.draw(*drawn)
