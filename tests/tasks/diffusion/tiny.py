"""Small diffusion models, VAEs and configurations, shared by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import AutoencoderKL
from grouped import grouped
from mhla_tasks.diffusion import DiT

from lightning_mhla import AttentionConfig

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/diffusion/digits.yaml"


def tiny_dit(kind: str = "mhla", sample_size: int = 8, channels: int = 4, **options: Any) -> DiT:
    """Build a small DiT with nonzero outputs and gates, which are zero in a new DiT."""
    attention = AttentionConfig(kind=kind, block_grid=[2, 2], **options.pop("attention", {}))
    sizes = {"dim": 16, "depth": 2, "heads": 2, "patch_size": 2, **options}
    torch.manual_seed(1)
    model = DiT(sample_size, channels, 10, attention, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def save_vae(folder: Path) -> Path:
    """Write a random VAE that halves the height and width of images, in diffusers' layout, and return its folder."""
    torch.manual_seed(2)
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )
    vae.save_pretrained(folder)
    return folder


def digits_config(folder: Path, **model: Any) -> Path:
    """Write a smaller version of the digits configuration, which logs to a CSV file, and return its path."""
    config = yaml.safe_load(CONFIG.read_text())
    sizes = {"dim": 16, "depth": 2, "heads": 2, "ema_decay": 0.5}
    config["model"]["init_args"] = grouped(config["model"]["init_args"], **{**sizes, **model})
    config["data"]["init_args"] = {"batch_size": 240}
    metrics = {
        "class_path": "mhla_tasks.diffusion.GenerationMetrics",
        "init_args": {
            "samples": 35,
            "features": {"class_path": "mhla_tasks.diffusion.DigitFeatures", "init_args": {"epochs": 1}},
            "sampling": {"sampler": "euler", "steps": 3, "guidance": 1.5},
            "every_n_steps": None,
            "batch_size": 8,
        },
    }
    checkpoint = {
        "filename": "{step}",
        "every_n_train_steps": 1,
        "save_top_k": -1,
        "dirpath": str(folder / "checkpoints"),
    }
    config["trainer"] = {
        "accelerator": "cpu",
        "max_steps": 3,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": checkpoint}, metrics],
        "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": "log", "version": ""}}],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
