"""Base class of all training modules, with optimizer, weight average, seeds, sharding, and resuming from a checkpoint."""

# Longer than other modules because Lightning calls all of these hooks on one object, so they are in one class.

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_mhla.attention.mixing import MixingCoefficients
from lightning_mhla.callbacks.averaging import ExponentialMovingAverage
from lightning_mhla.callbacks.finite import FiniteWatch
from lightning_mhla.callbacks.forecast import Forecast
from lightning_mhla.callbacks.kernels import KernelAgreement
from lightning_mhla.callbacks.recovery import Recovery
from lightning_mhla.callbacks.seeding import StepSeed
from lightning_mhla.callbacks.stalls import StallWatch
from lightning_mhla.checkpoints.compat import (
    check_attention,
    check_optimizer,
    check_weights,
    log_changed_options,
    log_origin,
    saved_groups,
)
from lightning_mhla.checkpoints.former_names import TakesFormerNames, present_options
from lightning_mhla.checkpoints.io import replace_checkpoint_io
from lightning_mhla.checkpoints.weights import LIVE, load_weights, shards_weights
from lightning_mhla.data.module import data_batch_size
from lightning_mhla.system.hyperparameters import LoggedApart
from lightning_mhla.system.lightning_private import batches_done, inside_accumulation, steps_between_saves
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.sharding import SEQUENCE, is_sharded_module, shard
from lightning_mhla.system.steps import accumulation, steps_of_epochs, steps_of_run
from lightning_mhla.system.torch_private import flatten_mesh
from lightning_mhla.training.agreement import check_agreement
from lightning_mhla.training.batches import check_batch
from lightning_mhla.training.compilation import CompileReport, compile_layers
from lightning_mhla.training.optim import (
    BETAS,
    OptimizerConfig,
    asked_options,
    build_optimizer,
    parameter_groups,
    take_over,
)
from lightning_mhla.training.options import TrainingOptions

log = logging.getLogger(__name__)


class TrainingModule(LoggedApart, TakesFormerNames, LightningModule):
    """Base class of the LightningModules that train a network.

    Subclasses set ``self.network`` and define methods such as ``training_step``.

    Args:
        training: options of the training, such as the optimizer.

    Attributes:
        training_options: options of the training. Lightning's tuners may have changed the learning rate in them.
    """

    logged_as = "model"
    network: nn.Module
    shares_sequences: ClassVar[bool] = False
    """Whether the steps support sequence parallelism, see :attr:`sequence_group`."""
    train_batch: ClassVar[tuple[str, ...]] = ()
    """Keys that a training batch must have. A key such as ``a|b`` requires ``a`` or ``b``."""
    evaluation_batch: ClassVar[tuple[str, ...]] = ()
    """Keys that a validation or test batch must have. A key such as ``a|b`` requires ``a`` or ``b``."""
    predict_batch: ClassVar[tuple[str, ...]] = ()
    """Keys that a batch for prediction must have. A key such as ``a|b`` requires ``a`` or ``b``."""
    output_names: tuple[str, ...] = ("head",)
    """Name prefixes of the parameters after the last layer, for layer decay."""
    _pretrained: str | None = None
    """Path or name of the weights to start from; None if there are none, or once they are loaded."""

    def __init__(self, training: TrainingOptions) -> None:
        super().__init__()
        self.training_options = as_dataclass(TrainingOptions, training, "training")
        self._builds_optimizer = False

    @property
    def usage(self) -> dict[str, str]:
        """Commands that use a trained model, by purpose, for the report of a run.

        ``{run}`` stands for the option that names the run, and ``{folder}`` for the folder of the run.
        """
        return {}

    @property
    def optimizer_config(self) -> OptimizerConfig:
        """Options of the optimizer and its learning-rate schedule."""
        return self.training_options.optimizer

    @property
    def ema_decay(self) -> float | None:
        """Decay of the moving average of the weights, or None if no average is kept."""
        return self.training_options.ema_decay

    @property
    def lr(self) -> float:
        """Peak learning rate, which Lightning's LearningRateFinder reads and sets."""
        return self.optimizer_config.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.training_options = replace(self.training_options, optimizer=replace(self.optimizer_config, lr=value))
        if "training" in self.hparams:  # checkpoints must record the rate that was found
            self.hparams["training"] = asdict(self.training_options)

    def setup(self, stage: str) -> None:
        """Check that the model and its data agree on options that both have, such as the image size.

        Raises:
            ValueError: if the values of an option do not agree.
        """
        check_agreement(self, getattr(self.trainer, "datamodule", None))

    def average_decay(self, decay: float) -> float:
        """Convert a decay of the moving average from the reference batch size ``ema_batch`` to the batch size of this run.

        Args:
            decay: decay per step of ``ema_batch`` samples. Without ``ema_batch``, it is returned unchanged.

        Raises:
            ValueError: if ``ema_batch`` is set and the data has no batch size.
        """
        reference = self.training_options.ema_batch
        if reference is None:
            return decay
        size = getattr(getattr(self.trainer, "datamodule", None), "batch_size", None)
        if size is None:
            raise ValueError("ema_batch needs data with a batch_size; leave it out, and give the decay itself")
        # A step on k times the reference batch replaces k reference steps, so the average decays k times.
        return decay ** (size * self.trainer.accumulate_grad_batches / reference)

    def layers(self) -> list[nn.Module]:
        """Return the repeated blocks of the network, first to last, for compilation, sharding and layer decay."""
        raise NotImplementedError

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that the trainer needs for its current task: fit, validation, test or prediction.

        A fit gets callbacks for random seeds and for failing Triton kernels and, if they are enabled, for compile times, the
        moving average of the weights, and checkpoints. It also gets :class:`FiniteWatch` (check for NaN),
        :class:`StallWatch` (warning when training makes no progress) and :class:`Forecast` (memory and time of the run), unless
        the trainer already has them. Prediction gets the callbacks that write predictions to files. Validation and test get
        none.

        The method also replaces Lightning's default checkpoint plugin with one that writes atomically and reads safely, because
        Lightning calls this hook before it reads or writes a checkpoint.
        """
        replace_checkpoint_io(self.trainer.strategy)
        if self.trainer.state.fn == "predict":
            return self.prediction_callbacks()
        if self.trainer.state.fn != "fit":
            return []
        decay = self.ema_decay
        average = [] if decay is None else [ExponentialMovingAverage(partial(self.average_decay, decay))]
        callback_types = {type(callback) for callback in self.trainer.callbacks}  # type: ignore[attr-defined]
        # The user may have added these with other options, which then apply.
        guards: list[type[Callback]] = [FiniteWatch, StallWatch, Forecast]
        compiled = [CompileReport()] if self.training_options.compile else []
        return [
            StepSeed(),
            KernelAgreement(),
            *compiled,
            *average,
            *(guard() for guard in guards if guard not in callback_types),
            *self._recovery(),
        ]

    def _recovery(self) -> list[Callback]:
        """Return a list with a :class:`Recovery` callback, or an empty list if checkpoints are disabled in the trainer.

        This callback writes all checkpoints of a run. If the trainer already has one, this method removes it from the trainer's
        list and returns it. Lightning then adds it at the end, so that it runs after all others and saves the state that they
        reach at the same step.
        """
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # the trainer's own list
        recovery_callbacks: list[Callback] = [callback for callback in callbacks if isinstance(callback, Recovery)]
        for callback in recovery_callbacks:
            callbacks.remove(callback)
        return recovery_callbacks if recovery_callbacks or not self.trainer.checkpoint_callbacks else [Recovery()]

    def prediction_callbacks(self) -> list[Callback]:
        """Return callbacks that write predictions to files; none in this base class."""
        return []

    def start_from(self, pretrained: str) -> None:
        """Load pretrained weights, from which training starts, into the network.

        Subclasses with the option ``pretrained`` override this method.

        Args:
            pretrained: path or name of the weights, as the user gave it.
        """
        raise NotImplementedError

    def configure_model(self) -> None:
        """Load pretrained weights, if any, compile the network block by block if requested, and shard it.

        The network is sharded if the strategy has a device mesh (FSDP2).

        Raises:
            ValueError: if sequence parallelism is on and this module does not support it.
        """
        if self._pretrained is not None:
            self.start_from(self._pretrained)
            self._pretrained = None  # Lightning calls this hook again for each stage; trained weights must stay
        if (compilation := self.training_options.compilation) is not None:
            compile_layers(self.layers(), compilation)
        if self.device_mesh is None or is_sharded_module(self.network):
            return
        mesh = self.device_mesh["data_parallel"]
        if self.sequence_group is not None:
            if not self.shares_sequences:
                raise ValueError(f"{type(self).__name__} does not share sequences; leave sequence_parallel_size at 1")
            # weights are sharded over all processes, those that share a sequence included
            mesh = flatten_mesh(self.device_mesh["data_parallel", SEQUENCE], "all")
        gathered = getattr(self.trainer.strategy, "gather_dtype", "float32")
        # mixing coefficients stay in float32 even if other weights are gathered in bfloat16
        float32_modules = [module for module in self.network.modules() if isinstance(module, MixingCoefficients)]
        shard(self.network, self.layers(), mesh, getattr(torch, gathered), float32_modules)

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """Group of processes that split each sequence of a batch among them; None without sequence parallelism."""
        mesh = self.device_mesh
        if mesh is None or SEQUENCE not in (mesh.mesh_dim_names or ()) or mesh[SEQUENCE].size() == 1:
            return None
        return mesh[SEQUENCE].get_group()

    def configure_optimizers(self) -> Any:
        """Build the optimizer and its learning-rate schedule, which advances with every optimizer step.

        Returns:
            Dict with the entries ``optimizer`` and ``lr_scheduler``, in Lightning's format.

        Raises:
            ValueError: if the schedule needs the length of the run or of an epoch, and this length is not known.
        """
        self.trainer.fit_loop.setup_data()  # otherwise the length of an epoch is unknown if max_steps ends the run
        optimizer, schedule = build_optimizer(
            self.network, self.optimizer_config, *self._lengths(), self._layer_names()
        )
        self._builds_optimizer = True
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"}}

    def _lengths(self) -> tuple[float, float]:
        """Return the number of optimizer steps in the run, and the mean number per epoch of the warm-up.

        The first number is infinite for a run without an end. The second is 1 if the length of the warm-up is not given in
        epochs; it is then not used.

        Raises:
            ValueError: if the length of the warm-up is given in epochs, and the data has no length.
        """
        epochs = self.optimizer_config.warmup_epochs
        if not epochs:
            return steps_of_run(self.trainer), 1.0
        warmup = steps_of_epochs(self.trainer, epochs)
        if not math.isfinite(warmup):
            raise ValueError(f"warmup_epochs={epochs:g} needs data with a length; give warmup_steps instead")
        return steps_of_run(self.trainer), warmup / epochs

    def log_loss(self, loss: Tensor, batch_size: int) -> Tensor:
        """Log the training loss of a batch and return it unchanged.

        The logged value is the mean over all processes or, with sequence parallelism, this process's own loss.

        Args:
            loss: scalar loss.
            batch_size: number of samples in the batch of this process.
        """
        self.log("train/loss", loss, prog_bar=True, batch_size=batch_size, sync_dist=self.sequence_group is None)
        return loss

    def on_train_start(self) -> None:
        """Apply the current optimizer options in place of those restored from a checkpoint, and check the checkpoint callbacks.

        The method warns about a ``ModelCheckpoint`` that saves every few steps but selects weights by a validation metric,
        because it saves before the validation of the same step.

        Raises:
            ValueError: if the checkpoint was saved while gradients were being accumulated, because it does not contain these
                gradients.
        """
        # GradientAccumulationScheduler sets this only at the start of the epoch, which follows this hook.
        self.trainer.accumulate_grad_batches = accumulation(self.trainer, self.trainer.current_epoch)
        if inside_accumulation(self.trainer):
            raise ValueError(
                f"the checkpoint was saved after {batches_done(self.trainer)} batches of its epoch, and gradients of "
                f"{self.trainer.accumulate_grad_batches} batches are accumulated for a step: those of the first ones are not "
                "in it. Resume from last.ckpt of the run, with accumulate_grad_batches as it was, or start a new run from the "
                "weights alone (--model.pretrained)"
            )
        for callback in self.trainer.checkpoint_callbacks:
            if (
                self.trainer.is_global_zero
                and isinstance(callback, ModelCheckpoint)
                and steps_between_saves(callback)
                and str(callback.monitor).startswith("val/")
            ):
                log.warning(
                    "ModelCheckpoint saves every %d steps, before the validation of the same step, and so judges weights "
                    "by %s of the validation before; leave every_n_train_steps out to save after validations that are better",
                    steps_between_saves(callback),
                    callback.monitor,
                )
        schedules: Any = self.lr_schedulers()
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        # A subclass with its own `configure_optimizers` has other groups and another schedule.
        if self._builds_optimizer and isinstance(schedules, LambdaLR):
            # Lightning's tuners may have changed learning rate and batch size since the optimizer was built
            options = asked_options(self.network, self.optimizer_config, *self._lengths(), self._layer_names())
            changes = take_over(optimizers, schedules, options, self.trainer.global_step)
            for change in changes if self.trainer.global_step else ():
                log.info("resumed with a changed optimizer: %s", change)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        check_batch(batch, self.train_batch, "training")

    @override
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        check_batch(batch, self.evaluation_batch, "validation")

    @override
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        check_batch(batch, self.evaluation_batch, "test")

    @override
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        check_batch(batch, self.predict_batch, "prediction")

    def _layer_names(self) -> Iterable[Iterable[str]]:
        if self.optimizer_config.layer_decay == 1:
            return []
        blocks = {id(layer) for layer in self.layers()}
        # With the dot, so that `blocks.1.` is not a prefix of `blocks.10.`.
        names = [f"{name}." for name, module in self.network.named_modules() if id(module) in blocks]
        # parameters outside the blocks are counted with the input, unless their names mark them as part of the output
        root = names[0].split(".")[0]
        after = (root, *self.output_names)
        input_names = [name for name, _ in self.network.named_parameters() if not name.startswith(after)]
        return [input_names, *[[name] for name in names]]

    def on_train_batch_end(self, *_: Any) -> None:
        """Log the number of distinct broken samples that this process's data loader has skipped, if any."""
        if skipped := getattr(self.trainer.train_dataloader, "skipped", None):
            self.log("data/skipped", float(len(skipped)))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint fits this model and this run, and prepare to resume from it.

        Raises:
            ValueError: if the checkpoint does not fit. The message names the attention option, the optimizer or the size that
                differs, and says what to do.
        """
        if self._trainer is None or self._trainer.is_global_zero:
            log_origin(checkpoint)
        if memory := checkpoint.get("hyper_parameters"):
            checkpoint["hyper_parameters"] = present_options("model", type(self), memory)
        check_attention(checkpoint, self.hparams)
        if self._trainer is not None and self._trainer.state.fn == "fit":
            self._prepare_resume(checkpoint)
        # Last, since `_prepare_resume` may replace `state_dict` with the trained weights.
        check_weights(checkpoint, self.state_dict())

    def _prepare_resume(self, checkpoint: dict[str, Any]) -> None:
        """Log options that differ from the checkpoint, select the weights to resume from, and check the optimizer's state.

        If the checkpoint has a moving average of the weights and this run keeps none, the run resumes from the trained weights.

        Raises:
            ValueError: if the optimizer state in the checkpoint does not fit the optimizer of this run.
        """
        # At step 0, the tuners themselves load the checkpoint that they saved before their trials.
        if checkpoint.get("global_step"):
            self._leave_out_tuners(checkpoint)
        data = self.trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        log_changed_options("model", checkpoint.get("hyper_parameters"), self.hparams)
        if data is not None:
            memory = checkpoint.get("datamodule_hyper_parameters") or {}
            log_changed_options("data", present_options("data", type(data), memory), data.hparams)
        if self.ema_decay is None and LIVE in checkpoint:
            log.warning(
                "the checkpoint keeps a weight average, which this run does not: it resumes from the live weights"
            )
            checkpoint["state_dict"] = checkpoint[LIVE]
            if shards_weights(self.trainer):  # a strategy that shards weights has already loaded the average
                load_weights(self, checkpoint[LIVE])
        if (saved := saved_groups(checkpoint)) is not None:
            groups = parameter_groups(self.network, self.optimizer_config, self._layer_names())
            sizes = [len(group["params"]) for group in groups]
            check_optimizer(saved, self.optimizer_config.kind, len(BETAS[self.optimizer_config.kind]), sizes)

    def _leave_out_tuners(self, checkpoint: dict[str, Any]) -> None:
        """Remove Lightning's tuners from the trainer's callbacks, and take batch size and learning rate from the checkpoint."""
        data, callbacks = self.trainer.datamodule, self.trainer.callbacks  # type: ignore[attr-defined]  # set when it is made
        for tuner in [callback for callback in callbacks if isinstance(callback, BatchSizeFinder | LearningRateFinder)]:
            callbacks.remove(tuner)
            log.info("%s is left out: the run resumes with what it found", type(tuner).__name__)
            if isinstance(tuner, LearningRateFinder):
                self.lr = checkpoint["hyper_parameters"]["training"]["optimizer"]["lr"]
            elif data is not None and (size := data_batch_size(checkpoint.get(type(data).__qualname__) or {})):
                data.batch_size = size
