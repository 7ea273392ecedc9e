"""Training of every domain in one process group, for tests that compare numbers of processes.

    torchrun --nproc-per-node=2 worker.py FOLDER CACHE [--sequence 2] [--resume FOLDER] [--domains language hybrid]

Each domain trains ten steps under FullyShardedStrategy (or alone, without sharding, when it is not started by torchrun). A
sample's random numbers are those that it would have on one process, so that nothing but the sharding differs.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from grouped import grouped
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_mhla import AttentionConfig
from lightning_mhla.callbacks import ExponentialMovingAverage, seeding
from lightning_mhla.data.module import process_share
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.training.options import TrainingOptions
from lightning_mhla.training.strategies import FullyShardedStrategy

STEPS, SAVED, DECAY = 10, 5, 0.8
DOMAINS = ("classification", "language", "diffusion", "video")
SHARED = ("language", "hybrid")
"""Cases that train with sequence parallelism."""


def build(domain: str, cache: Path) -> tuple[LightningModule, Any]:
    """Build a small model of a domain and its data. It has two layers, so that blocks are sharded one by one."""
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-4, schedule="constant", mixing_lr_scale=2.0)
    training = TrainingOptions(optimizer, ema_decay=DECAY, checkpointing=True)
    if domain == "classification":
        from mhla_tasks.classification import Digits, ImageClassifier

        attention = AttentionConfig(kind="mhla", block_grid=[4, 4], lepe=3)
        sizes: dict[str, Any] = {"num_classes": 10, "image_size": 8, "channels": 1, "patch_size": 1, "stem": "conv"}
        model: LightningModule = ImageClassifier(
            attention, **grouped(**sizes, dim=16, depth=2, heads=2), training=training
        )
        return model, Digits(batch_size=240)
    if domain in SHARED:
        from mhla_tasks.language import LanguageModel, PythonSource

        attention = AttentionConfig(kind="mhla", block_size=16, normalize=False, rotary=True, gate=True)
        sizes = {"vocab_size": 300, "dim": 24, "depth": 2, "heads": 2, "mlp_width": 40, "context": 64}
        if domain == "hybrid":  # every kind of attention, fewer key heads, an odd number of blocks, the last one short
            attention = replace(attention, mixing="exponential", mixing_terms=2)
            sizes |= {"depth": 3, "layer_kinds": ["mhla", "softmax", "linear"], "key_value_heads": 1, "context": 72}
        data = PythonSource(batch_size=12, context=sizes["context"], vocab_size=300, cache_dir=str(cache))
        return LanguageModel(attention, **grouped(**sizes), training=training), data
    if domain == "diffusion":
        from mhla_tasks.diffusion import ClassToImage, DigitImages

        attention = AttentionConfig(kind="mhla", block_grid=[4, 4], lepe=3, gate=True)
        sizes = {"num_classes": 10, "sample_size": 8, "channels": 1, "patch_size": 1, "dim": 16, "depth": 2, "heads": 2}
        return ClassToImage(attention, **grouped(**sizes), training=training), DigitImages(batch_size=24)
    from mhla_tasks.captioned.text import TextConfig
    from mhla_tasks.video import MovingDigits, VideoDiffusion
    from mhla_tasks.video.model import WanTransformerConfig

    attention = AttentionConfig(kind="mhla", block_grid=[2, 2, 2], normalize=False, gate=True)
    transformer = WanTransformerConfig(
        patch_size=[1, 2, 2], num_attention_heads=2, attention_head_dim=12, in_channels=1, out_channels=1, text_dim=8,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    clips = MovingDigits(frames=4, height=8, width=8, batch_size=12)
    return VideoDiffusion(attention, transformer, text=TextConfig(length=4), training=training), clips


class SharedNumbers(TorchFunctionMode):
    """Function mode that draws random tensors for the global batch, of which each process takes its rows."""

    DRAWS = (torch.rand, torch.randn, torch.randint, torch.randn_like, torch.rand_like, torch.normal)

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.DRAWS:
            return func(*args, **kwargs)
        if func in (torch.rand_like, torch.randn_like):
            whole = func(torch.cat([args[0]] * self.world), **kwargs)
        elif func is torch.normal:
            size = list(kwargs.pop("size"))
            whole = func(*args, size=[size[0] * self.world, *size[1:]], **kwargs)
        else:
            bounds, shape = (args[:-1], args[-1]) if func is torch.randint else ((), args)
            shape = list(shape[0]) if isinstance(shape[0], list | tuple | torch.Size) else list(shape)
            whole = func(*bounds, [shape[0] * self.world, *shape[1:]], **kwargs)
        return whole.chunk(self.world)[self.rank]


class Record(Callback):
    """Callback that records losses over all processes, gradients of the first step, and an average of unsharded weights."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.losses = folder, {}
        self.gradients: dict[str, Tensor] = {}
        self.average: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.numbers = SharedNumbers(*process_share(trainer))
        self.numbers.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 0:
            for name, parameter in pl_module.named_parameters():
                if parameter.grad is not None:
                    self.gradients[name] = whole(parameter.grad).clone()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.numbers.__exit__(None, None, None)
        loss = outputs["loss"].detach().clone()
        if trainer.world_size > 1:
            dist.all_reduce(loss)
        self.losses[trainer.global_step] = float(loss) / trainer.world_size
        weights = {name: whole(p.detach()).clone() for name, p in pl_module.named_parameters()}
        before = self.average if trainer.global_step > 1 else weights
        self.average = {name: DECAY * before[name] + (1 - DECAY) * weight for name, weight in weights.items()}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        average = next(each for each in trainer.callbacks if isinstance(each, ExponentialMovingAverage))
        found = {name: whole(tensor) for name, tensor in average._average.items()}
        result = {"losses": self.losses, "gradients": self.gradients, "average": found, "expected": self.average}
        if trainer.is_global_zero:
            torch.save(result, self.folder / "result.pt")


class Save(Checkpoint):
    """Callback that saves a checkpoint in the middle. Lightning calls checkpoint callbacks after all others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.folder / "saved.ckpt")


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(domain: str, folder: Path, cache: Path, strategy: Any, resume: Path | None) -> None:
    """Train a domain for ten steps, or resume it. A language model is validated at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model, data = build(domain, cache)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy,
        max_steps=STEPS,
        limit_val_batches=3 if domain in SHARED else 0,
        check_val_every_n_epoch=100,
        num_sanity_val_steps=0,
        gradient_clip_val=0.1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Record(folder), Save(folder)],
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume, weights_only=True)
    if domain in SHARED:
        (metrics,) = trainer.validate(model, datamodule=data, verbose=False)
        if trainer.is_global_zero:
            torch.save(metrics, folder / "validation.pt")


def main() -> None:
    """Train the requested domains, from the start or from checkpoints of an earlier run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--sequence", type=int, default=1)
    parser.add_argument("--domains", nargs="+", default=DOMAINS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeding.process_share = lambda trainer: (0, 1)  # type: ignore[assignment]  # every process draws the numbers of one
    for domain in given.domains:
        share = given.sequence if domain in SHARED else 1
        sharded = FullyShardedStrategy(sequence_parallel_size=share) if "WORLD_SIZE" in os.environ else "auto"
        resume = given.resume and given.resume / domain / "saved.ckpt"
        train(domain, given.folder / domain, given.cache, sharded, resume)


if __name__ == "__main__":
    main()
