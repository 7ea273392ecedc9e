"""Small Wan transformers, pipelines, videos and configurations, shared by the tests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from grouped import grouped
from mhla_tasks.video.clips import write_clip
from mhla_tasks.video.model import WanTransformerConfig
from mhla_tasks.video.sources import CaptionedClips
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from lightning_mhla import AttentionConfig
from lightning_mhla.data import ShardReader
from lightning_mhla.data.captioned import FolderFiles, ShardFiles

ROOT = Path(__file__).parents[3]
SHAPE: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}
TINY = WanTransformerConfig(**SHAPE)
PAPER = AttentionConfig(block_grid=[2, 2, 3], normalize=False, gate=True)
"""Attention options of the paper's video models, with a small block grid."""


def shaken(model: Any, seed: int = 1) -> Any:
    """Add noise to all weights of a model, so that none are zero, one or equal by initialization, and return it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tiny_wan(**options: Any) -> WanTransformer3DModel:
    """Build a small Wan with random weights and softmax attention."""
    return shaken(WanTransformer3DModel(**{**SHAPE, **options}))


def inputs(grid: tuple[int, int, int] = (5, 3, 5), batch: int = 2, channels: int = 4) -> tuple[torch.Tensor, ...]:
    """Draw latents, times and text as inputs of a Wan, for a token grid."""
    frames, rows, columns = grid
    latent = torch.randn(batch, channels, frames, 2 * rows, 2 * columns)
    return latent, torch.linspace(3, 900, batch), torch.randn(batch, 7, 16)


def shard_clips(reader: ShardReader, *size: int, caption_key: str = "caption", **options: Any) -> CaptionedClips:
    """Return the clips of captioned videos in shards."""
    return CaptionedClips(ShardFiles(reader, caption_key), *size, **options)


def folder_clips(folder: Path, **options: Any) -> CaptionedClips:
    """Return the clips of captioned videos in a folder."""
    return CaptionedClips(FolderFiles(folder, ("mp4",), "caption"), **options)


def save_pipeline(folder: Path) -> Path:
    """Write a tiny, random Wan pipeline with a VAE, a UMT5 encoder and a tokenizer, and return its folder."""
    torch.manual_seed(2)
    words = [
        "<pad>",
        "</s>",
        "<unk>",
        *["a", "zero", "one", "two", "three", "four", "five", "six", "seven", "moving", "up", "down", "left", "right"],
    ]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=len(words), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[0.5, 1.0, 2.0, 1.5],
    )
    WanPipeline(
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ),
        text_encoder=encoder,
        vae=vae,
        transformer=tiny_wan(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    ).save_pretrained(folder)
    return folder


def video_file(path: Path, frames: int = 12, height: int = 32, width: int = 48, seed: int = 0) -> Path:
    """Write a video whose frames become brighter, and return its path."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 40, (1, 3, height, width), generator=generator)
    ramp = torch.linspace(0, 200, frames).view(-1, 1, 1, 1)
    write_clip(path, (noise + ramp).to(torch.uint8), 8)
    return path


def digits_config(folder: Path, name: str = "digits_pretrain", **model: Any) -> Path:
    """Write a smaller version of a configuration for moving digits, which logs to a CSV file, and return its path.

    Args:
        folder: folder of the configuration and the log.
        name: name of the shipped configuration.
        model: changed options of the model.
    """
    config = yaml.safe_load((ROOT / f"configs/video/{name}.yaml").read_text())
    arguments = config["model"]["init_args"]
    arguments.pop("pretrained", None)
    arguments["transformer"] |= {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 2}
    arguments["sampling"] |= {"steps": 2, "frames": 3, "height": 10, "width": 14}
    arguments |= grouped(arguments, **{"ema_decay": 0.5, **model})
    config["data"]["init_args"] = {"frames": 3, "height": 10, "width": 14, "batch_size": 1000}
    checkpoint = {
        "filename": "{step}",
        "every_n_train_steps": 1,
        "save_top_k": -1,
        "dirpath": str(folder / "checkpoints"),
    }
    pictures = {
        "class_path": "mhla_tasks.video.ClipPictures",
        "init_args": {"prompts": ["a one moving up", "a two moving left"], "every_n_steps": 2},
    }
    config["trainer"] = {
        "accelerator": "cpu",
        "max_steps": 3,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [
            {"class_path": "ModelCheckpoint", "init_args": checkpoint},
            pictures,
            {"class_path": "lightning_mhla.callbacks.AttentionPictures"},
        ],
        "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": "log", "version": ""}}],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def make_shard(path: Path, samples: list[dict[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for number, members in enumerate(samples):
            for extension, data in members.items():
                add(archive, f"{number:04d}.{extension}", data)
    return path
