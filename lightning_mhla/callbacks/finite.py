"""Detection of non-finite losses and gradients before an optimizer step, and search for the module that causes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_mhla.callbacks.seeding import StepSeed
from lightning_mhla.system.folders import gather_rows
from lightning_mhla.system.processes import Agreement
from lightning_mhla.system.sharding import is_shard
from lightning_mhla.system.torch_private import tree_leaves

log = logging.getLogger(__name__)

NOT_AGAIN = "in a gradient, but not again when the step was repeated"
"""Cause that is reported if all values of the repeated step are finite."""


class FiniteWatch(Callback):
    """Callback that checks before each optimizer step that the loss and the norm of all gradients are finite.

    If one of them is NaN or infinite, the step is repeated with hooks that inspect the values of every module. Training then
    stops or skips the step. If the gradients overflowed only because of the loss scale of 16-mixed precision, the gradient
    scaler skips the step instead. The error or warning names the first module with a non-finite output or, in the backward
    pass, the module where the gradient stops being finite. All processes make the same decision.

    Args:
        action: ``stop`` to stop the run, or ``skip`` to skip the optimizer step: the weights, the running statistics of batch
            norms and the optimizer stay unchanged, and the data and the learning rate advance.
        max_skipped: total number of steps that may be skipped before the run stops.

    Raises:
        ValueError: if ``action`` is unknown, or ``max_skipped`` is negative.
    """

    def __init__(self, action: Literal["stop", "skip"] = "stop", max_skipped: int = 10) -> None:
        if action not in ("stop", "skip"):
            raise ValueError(f"action={action!r} is not one of 'stop', 'skip'")
        if max_skipped < 0:
            raise ValueError(f"max_skipped={max_skipped} must not be negative")
        self.action, self.max_skipped = action, max_skipped
        self.skipped = 0
        self._seen: list[tuple[Any, int, Tensor | None]] = []
        self._checked = False
        self._statistics: list[tuple[Tensor, Tensor]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the number of skipped steps. Warn if the module optimizes manually, because then nothing is checked.

        Every process must call this method.
        """
        if stage == "fit" and not pl_module.automatic_optimization:
            log.warning("%s optimizes manually: losses and gradients are not checked", type(pl_module).__name__)
        self.skipped, self._seen, self._checked, self._statistics = 0, [], False, []
        self._agreement = Agreement() if stage == "fit" else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Store the batch until the next optimizer step and, if steps may be skipped, copies of the running statistics.

        The running statistics are those of layers such as batch norms.
        """
        if self.action == "skip" and not self._seen:
            self._statistics = [(buffer, buffer.clone()) for buffer in _running_statistics(pl_module)]
        self._seen.append((batch, batch_idx, None))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Store the loss of the current batch until it is checked before the optimizer step."""
        if not pl_module.automatic_optimization:
            return
        batch, batch_idx, _ = self._seen[-1]
        self._seen[-1] = (batch, batch_idx, loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check the losses of the accumulated batches and the norm of their gradients.

        If a value is not finite and the step may be skipped, the gradients are discarded, so that the optimizer changes
        nothing. Gradients that overflow only because of the loss scale of 16-mixed precision are left to the gradient scaler.

        Raises:
            ValueError: if a value is not finite and the step may not be skipped. This is the case if ``action`` is ``stop``, if
                the weights already contain non-finite values, or if ``max_skipped`` steps have already been skipped.
        """
        # Freed at the end of the batch, because an optimizer such as LBFGS computes the loss several times for one step.
        self._checked = True
        # set when the trainer is created
        if trainer.fast_dev_run or not pl_module.automatic_optimization:  # type: ignore[attr-defined]
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = get_total_norm(gradients)
        # Under FSDP2, each process has the norm of its shards only. `full_tensor` combines them, and is collective.
        norm = norm.full_tensor() if is_shard(norm) else norm
        # A training step that returns None leaves its batch out.
        batches = [entry for entry in self._seen if entry[2] is not None] or self._seen[-1:]
        losses = [loss.reshape(()) for _, _, loss in batches if loss is not None]
        # One stacked tensor, so that the check synchronizes with the accelerator only once per step.
        finite = torch.stack([norm.float(), *(loss.float() for loss in losses)]).isfinite().tolist()
        assert self._agreement is not None
        # All processes must skip the same steps; otherwise their weights would diverge, and collectives would not match.
        wrong = self._agreement.any(*(not good for good in finite))
        if not any(wrong):
            return
        # The votes make this index equal on all processes, which then repeat the same batch together.
        first = next((i for i, bad in enumerate(wrong[1:]) if bad), len(batches) - 1)
        batch, batch_idx, loss = batches[first]
        problem = (
            f"the loss is {float(loss)}" if loss is not None and not loss.isfinite() else "the gradient is not finite"
        )
        cause = _everywhere(trainer, explain(trainer, pl_module, batch, batch_idx))
        if cause == NOT_AGAIN and getattr(trainer.precision_plugin, "scaler", None) is not None:
            return  # only the scaled gradients overflowed: with 16-mixed, the scaler skips the step and lowers its scale
        message = f"{problem} at step {trainer.global_step}: {cause}"
        # Skipping steps does not help once a weight is NaN.
        if self.action == "stop" or "the weights hold" in cause:
            raise ValueError(
                f"{message}. The weights are unchanged by this step; lower the learning rate, warm up longer, clip "
                "gradients (trainer.gradient_clip_val), or skip such steps: "
                "--trainer.callbacks+=lightning_mhla.callbacks.FiniteWatch --trainer.callbacks.action=skip"
            )
        self.skipped += 1
        if self.skipped > self.max_skipped:
            raise ValueError(f"{message}. {self.skipped} steps were skipped, more than max_skipped={self.max_skipped}")
        log.warning("skipped a step (%d of at most %d): %s", self.skipped, self.max_skipped, message)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # Not zeros, with which weight decay and momentum would still change the weights.
                parameter.grad = None
        for buffer, value in self._statistics:
            buffer.copy_(value)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Free the batches of a completed optimizer step, and log the number of skipped steps, if there are any."""
        if self._checked:
            self._seen, self._checked = [], False
        if self.skipped:
            pl_module.log("train/skipped_steps", float(self.skipped))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: a dict with ``skipped``, the number of skipped steps."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of skipped steps from a checkpoint."""
        self.skipped = int(state_dict["skipped"])


def explain(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> str | None:
    """Repeat a training step to find where values first become NaN or infinite.

    Every process must call this function, because a sharded forward pass needs all of them.

    Args:
        trainer: trainer of the run.
        module: module that is trained.
        batch: batch of the step.
        batch_idx: index of the batch in its epoch.

    Returns:
        Phrase that says where the first non-finite value occurs: in the batch, the weights, the output of a module, the loss or
        a gradient. None if all values of the repeated step are finite.
    """
    bad_inputs = [name for name, value in _named(batch) if not _is_finite(value)]
    bad_weights = [name for name, parameter in module.named_parameters() if not _is_finite(parameter.detach())]
    seeding = [callback for callback in trainer.callbacks if isinstance(callback, StepSeed)]  # type: ignore[attr-defined]
    for seeds in seeding:  # the same dropout and the same mixing of samples as in the step that failed
        seeds.on_train_batch_start(trainer, module, batch, batch_idx)
    forward: list[str] = []
    backward: list[str] = []
    first_bad: list[str] = []
    with _silent(module), _watched(module, forward, backward, first_bad), trainer.precision_plugin.train_step_context():
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        output: Any = module.training_step(batch, batch_idx) if takes_index else module.training_step(batch)
        loss = output["loss"] if isinstance(output, dict) else output
        if loss is not None:
            # Added to the gradients of the failed step, which no optimizer step uses.
            loss.backward()
    if bad_inputs:
        return f"the batch itself holds such numbers ({', '.join(bad_inputs[:3])})"
    if bad_weights:
        return f"the weights hold such numbers already ({', '.join(bad_weights[:3])})"
    if forward:
        return f"first in the output of {forward[0]}"
    if loss is not None and not loss.detach().isfinite():
        return "first in the loss itself, every module's output is finite"
    if first_bad:
        return f"first in the gradient inside {backward[-1] if backward else 'the loss'}, on the way back to {first_bad[0]}"
    return None


def _everywhere(trainer: Trainer, where: str | None) -> str:
    """Gather the results of :func:`explain` from all processes, and choose the first in rank order that is not None.

    Args:
        trainer: trainer of the run.
        where: result of :func:`explain` on this process.

    Returns:
        The chosen phrase, the same on every process. With several processes, it ends with the rank of the process that reported
        it. If all results are None, the phrase only says that the problem did not recur when the step was repeated.
    """
    for rank, answer in enumerate(gather_rows(trainer, [where])):
        if answer is not None:
            return f"{answer} (process {rank})" if trainer.world_size > 1 else answer
    return NOT_AGAIN


def _named(batch: Any) -> Iterator[tuple[str, Tensor]]:
    items = batch.items() if isinstance(batch, dict) else enumerate(tree_leaves(batch))
    for name, value in items:
        if isinstance(value, Tensor) and value.is_floating_point():
            yield str(name), value


def _running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the buffers of layers with running statistics, such as batch norms. Forward passes in training change them."""
    layers = [part for part in module.modules() if getattr(part, "running_mean", None) is not None]
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


def _is_finite(value: Tensor) -> bool:
    local = value.to_local() if is_shard(value) else value
    return bool(local.isfinite().all())


@contextmanager
def _silent(module: LightningModule) -> Iterator[None]:
    """Context manager that makes the methods ``log`` and ``log_dict`` of a module do nothing."""
    nothing: Any = lambda *_, **__: None  # noqa: E731
    module.log, module.log_dict = nothing, nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log, module.log_dict


@contextmanager
def _watched(module: LightningModule, forward: list[str], backward: list[str], first_bad: list[str]) -> Iterator[None]:
    """Context manager that records which submodules have non-finite outputs, and where gradients stop being finite.

    Args:
        module: module whose submodules are all watched.
        forward: list to which the names of submodules with non-finite outputs are appended, in the order of the forward pass.
        backward: list to which the names of submodules whose outputs have finite gradients are appended, in the order of the
            backward pass, until the first gradient that is not finite.
        first_bad: list to which the name of the first submodule whose output has a non-finite gradient is appended.
    """

    def note_gradient(name: str, gradient: Tensor) -> None:
        if not first_bad:
            (backward if _is_finite(gradient) else first_bad).append(name)

    def note_output(name: str, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                if not _is_finite(tensor.detach()):
                    forward.append(name)
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: note_gradient(name, gradient))

    handles = [part.register_forward_hook(partial(note_output, name)) for name, part in module.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
