"""Callbacks that log the training speed of a language model and sample text from it.

Lightning's ThroughputMonitor also measures speed, but it is not used here for two reasons. It needs functions of a batch as
arguments, which a configuration file cannot hold. It excludes only the time of validation, so evaluations with
lm-evaluation-harness would count as training time.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_mhla.callbacks.sample_texts import fenced
from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.data.module import process_share
from lightning_mhla.data.sampling import kept_random_state, seed_step
from lightning_mhla.system.folders import run_folder
from lightning_mhla.system.lightning_private import accumulates_gradients, logger_connector

log = logging.getLogger(__name__)


class TokenThroughput(Callback):
    """Callback that logs the training speed in tokens per second and, if possible, the model FLOPs utilization (MFU).

    ``train/tokens_per_second`` is the speed of all processes together. ``train/mfu`` is the fraction of a device's peak
    performance that training uses: the model's floating-point operations per token, times the tokens per second of one process,
    divided by the peak. ``train/mfu`` is logged only if the peak performance is known.

    Args:
        peak_flops: peak performance of one device in FLOP/s; null for the value that Lightning lists for the GPU and the
            training precision, if any.

    Raises:
        ValueError: if ``peak_flops`` is not positive.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(f"peak_flops={peak_flops} must be positive, or null for the value that Lightning lists")
        self.peak_flops = peak_flops
        self._start, self._tokens = 0.0, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look up the peak performance of the GPU unless it was given, and start the timer."""
        device, half = trainer.strategy.root_device, str(trainer.precision).startswith(("bf16", "16"))
        if self.peak_flops is None and device.type == "cuda":
            self.peak_flops = get_available_flops(device, torch.bfloat16 if half else torch.float32)
        self.restart(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the timer, so that validation does not count as training time."""
        self.restart(trainer)

    def exclude(self, seconds: float) -> None:
        """Exclude the duration of a periodic evaluation, in seconds, from the measured training time."""
        self._start += seconds

    def restart(self, trainer: Trainer) -> None:
        """Restart the timer and the token count, to exclude the time of work such as validation from the training speed.

        A GPU is synchronized first, because its kernels run asynchronously.
        """
        device = trainer.strategy.root_device
        if device.type == "cuda":  # kernels run asynchronously: time only finished work
            torch.cuda.synchronize(device)
        self._start, self._tokens = time.perf_counter(), 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the tokens of the batch, and log the training speed at the interval that ``Trainer.log_every_n_steps`` sets."""
        # Without labels, the last token of a row is only a target.
        inputs = batch["tokens"] if "labels" in batch else batch["tokens"][:, :-1]
        self._tokens += inputs.numel()
        if accumulates_gradients(trainer) or not logger_connector(trainer).should_update_logs:
            return
        tokens, start = self._tokens, self._start
        self.restart(trainer)
        process_speed = tokens / (self._start - start)
        total_speed = process_speed * process_share(trainer)[1]
        pl_module.log("train/tokens_per_second", total_speed, prog_bar=True, batch_size=1)
        if self.peak_flops:
            utilization = total_speed / trainer.world_size * float(pl_module.flops_per_token) / self.peak_flops  # type: ignore[arg-type]
            pl_module.log("train/mfu", utilization, batch_size=1)


class TextSamples(Callback):
    """Callback that generates continuations of given prompts at the end of each validation during training.

    The continuations are appended to ``samples.md`` in the log folder and logged to TensorBoard. They are generated with the
    weights that the validation uses. With sharded weights (FSDP), no continuations are generated.

    Args:
        prompts: texts to continue.
        seed: seed of sampling, the same at each validation.

    Raises:
        ValueError: if there are no prompts, or one of them is empty.
    """

    def __init__(self, prompts: list[str], seed: int = 0) -> None:
        if not prompts or not all(prompts):
            raise ValueError(f"prompts={prompts} must be texts that are not empty")
        self.prompts, self.seed = prompts, seed

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate continuations of the prompts on the first process, and write them to ``samples.md`` and TensorBoard.

        Nothing is generated outside training, in the sanity check, or if the weights are sharded over processes.
        """
        folder = run_folder(trainer)
        elsewhere = shards_weights(trainer) or not trainer.is_global_zero
        if trainer.sanity_checking or trainer.state.fn != "fit" or elsewhere:
            return
        with kept_random_state():  # sampling must not change the random numbers of training
            seed_step(self.seed, 0, 0)
            texts = pl_module.continue_prompts(self.prompts)  # type: ignore[operator]
        rows = [fenced(f"{prompt}{text}") for prompt, text in zip(self.prompts, texts, strict=True)]
        page = f"## step {trainer.global_step}\n\n" + "\n\n".join(rows) + "\n\n"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "samples.md").open("a") as stream:
            stream.write(page)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("samples", page, trainer.global_step)
