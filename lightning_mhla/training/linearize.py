"""Two-stage training of a model whose attention was replaced (LoLCATs, arXiv 2410.10254, section 3).

In the first ``layer_steps`` optimizer steps, each replaced layer learns to reproduce the output of its original attention
(attention transfer). Later steps train the complete model on its data and, if there is a teacher, on the teacher's predictions
(distillation). The teacher is the model before its attention was replaced. A training module holds a :class:`Linearization`,
which uses a :class:`LinearizedHost` for the operations that depend on the library of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.swap import swapped_layers, transfer_loss
from lightning_mhla.swap.swapping import host_of
from lightning_mhla.system.lightning_private import ddp_options
from lightning_mhla.system.ranges import check_range
from lightning_mhla.training.module import TrainingModule


class TwoStageOptions(Protocol):
    """Protocol for the options of training a model in two stages after its attention was replaced.

    The first stage trains each replaced layer to reproduce the output of its original attention. The second stage trains the
    complete model on the data and, if there is a teacher, on the predictions of the model before the replacement.
    """

    @property
    def layer_steps(self) -> int:
        """Number of optimizer steps of the first stage, which trains each replaced layer on its own."""

    @property
    def teacher(self) -> str | None:
        """Path or name of the weights of the teacher, the model before its attention was replaced; None for no teacher."""


class DistillationOptions(TwoStageOptions, Protocol):
    """Protocol for the options of two-stage training whose second stage adds a distance from a teacher to a loss on data."""

    def weighted(self, plain: Tensor, distance: Tensor) -> Tensor:
        """Return the weighted sum of the loss on the data and the distance from the teacher's predictions.

        Args:
            plain: loss on the data, a scalar.
            distance: distance of the model's predictions from those of the teacher, a scalar.
        """


@dataclass(frozen=True)
class TransferOptions:
    """Options for training a model after its attention was replaced, so that it behaves like the original model.

    Args:
        layer_steps: number of optimizer steps at the beginning of training, in which each replaced layer learns to match the
            output of its original attention for the same input. These steps train only the parameters of the new attention.
        teacher: path or name of the weights of the model before its attention was replaced, in any form that the model's
            ``pretrained`` accepts. The steps after ``layer_steps`` match the predictions of this model; null for no teacher.
        logits_weight: weight of the divergence from the teacher's predictions.
        loss_weight: weight of the loss on the data.

    Raises:
        ValueError: if ``layer_steps`` or a weight is negative.
    """

    layer_steps: int = 0
    teacher: str | None = None
    logits_weight: float = 1.0
    loss_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("layer_steps", "logits_weight", "loss_weight"):
            check_range("distillation.", least=0, **{name: getattr(self, name)})

    def weighted(self, plain: Tensor, distance: Tensor) -> Tensor:
        """Return the weighted sum of the loss on the data and the distance from the teacher's predictions.

        Args:
            plain: loss on the data, a scalar, with the weight ``loss_weight``.
            distance: distance from the teacher's predictions, a scalar, with the weight ``logits_weight``.
        """
        return self.loss_weight * plain + self.logits_weight * distance


class LinearizedHost(ABC):
    """Operations of two-stage training that depend on the library of a model, such as timm or transformers.

    The first stage trains each replaced layer to reproduce the output of its original attention. The second stage trains the
    complete model on the data and, if there is a teacher, on the predictions of the model before the replacement.

    Attributes:
        loss_name: name under which the loss on the data is logged if there is a teacher.
        distance_name: name under which the distance from the teacher's predictions is logged.
    """

    loss_name: str
    distance_name: ClassVar[str]

    @abstractmethod
    def check(self, trainer: Trainer, network: nn.Module, trained: str) -> None:
        """Check that each replaced layer of a model can be trained on its own to match its original attention.

        Args:
            trainer: trainer of the run.
            network: model with replaced attention.
            trained: part of the model that the second stage trains: ``"all"``, ``"attention"``, ``"new"`` (parameters that the
                replacement added) or ``"lora"``.

        Raises:
            ValueError: if the strategy or the model does not support such training. The message says what to change.
        """

    def place(self, teacher: nn.Module, network: nn.Module, device: torch.device) -> None:
        """Move the teacher, in place, to a device. Subclasses can also convert it to the dtype of ``network``.

        Args:
            teacher: model before its attention was replaced.
            network: model that learns from the teacher; not changed.
            device: device of ``network``.
        """
        teacher.to(device)

    @abstractmethod
    def layer_loss(self, network: Any, teacher: Any, *inputs: Tensor) -> Tensor:
        """Return the mean distance between the outputs of replaced layers and those of their original attention, a scalar.

        Args:
            network: model with replaced attention.
            teacher: model before its attention was replaced; None without a teacher.
            *inputs: inputs of both models, ``[B, ...]`` for a batch of B samples.
        """

    @abstractmethod
    def predict(self, network: Any, *inputs: Tensor) -> Tensor:
        """Return the predictions of a model or its teacher, such as class scores, in the form that :meth:`distance` compares.

        Args:
            network: model with replaced attention, or its teacher.
            *inputs: inputs of the model, ``[B, ...]`` for a batch of B samples.
        """

    @abstractmethod
    def distance(self, predicted: Tensor, expected: Tensor) -> Tensor:
        """Return the distance between the predictions of a model and those of its teacher, a scalar.

        Args:
            predicted: result of :meth:`predict` for the model.
            expected: result of :meth:`predict` for the teacher.
        """


@dataclass(frozen=True)
class ScoringHost(LinearizedHost):
    """Operations of two-stage training for models from timm and transformers.

    Replaced layers of these models can still compute their original attention. The first stage, which trains each layer to
    reproduce its original output, therefore needs no teacher. It trains only the parameters of the new attention. The second
    stage compares the class or token scores of the model with those of the teacher, if there is one.

    Args:
        loss_name: name under which the loss on the data is logged if there is a teacher.
        run: function that takes a model and one or more input tensors ``[B, ...]``, and runs the model without its head. B is
            the batch size. The result is not used.
        scores: function that takes the same arguments, and returns class or token scores ``[B, ..., classes]``.
    """

    distance_name = "train/teacher_divergence"
    loss_name: str
    run: Callable[..., Any]
    scores: Callable[..., Tensor]

    @override
    def check(self, trainer: Trainer, network: nn.Module, trained: str) -> None:
        check_layer_steps(trainer, network, trained, ("new",))
        layers = swapped_layers(network).values()
        if idle := next((layer for layer in layers if not any(p.requires_grad for p in layer.parameters())), None):
            raise ValueError(
                f"distillation.layer_steps trains what the replacement added, and attention kind {idle.config.kind!r} "
                "added nothing that is trained; set distillation.layer_steps=0, or feature_map: learned"
            )

    @override
    def place(self, teacher: nn.Module, network: nn.Module, device: torch.device) -> None:
        teacher.to(device, next(network.parameters()).dtype)

    @override
    def layer_loss(self, network: Any, teacher: Any, *inputs: Tensor) -> Tensor:
        return transfer_loss(network, partial(self.run, network, *inputs))

    @override
    def predict(self, network: Any, *inputs: Tensor) -> Tensor:
        return self.scores(network, *inputs)

    @override
    def distance(self, predicted: Tensor, expected: Tensor) -> Tensor:
        """Return the Kullback-Leibler divergence of the model's class probabilities from the teacher's, a scalar.

        The divergence is averaged over all axes but the last.

        Args:
            predicted: scores of the model, ``[B, ..., classes]``.
            expected: scores of the teacher, with the same shape.
        """
        learned, target = (scores.float().log_softmax(-1).flatten(0, -2) for scores in (predicted, expected))
        return F.kl_div(learned, target, reduction="batchmean", log_target=True)


class Linearization:
    """Teacher and losses of two-stage training after the attention of a model was replaced.

    A training module calls :meth:`start` before its first batch. The first stage trains each replaced layer to reproduce its
    original attention; in each of its steps, the training module calls :meth:`layer_loss`. The second stage trains the complete
    model. A ``Linearization`` is not an ``nn.Module``, and copies of the training module share it. The frozen teacher that it
    holds is therefore not trained, averaged or saved.

    Args:
        options: number of steps of the first stage, and path or name of the teacher.
        host: operations that depend on the library of the model.

    Attributes:
        teacher: model before its attention was replaced; None until it is loaded.
    """

    def __init__(self, options: TwoStageOptions, host: LinearizedHost) -> None:
        self.options, self.host = options, host
        self.teacher: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Linearization:
        return self  # a weight average copies the training module, which must not copy the teacher

    def start(self, module: TrainingModule, read_teacher: Callable[[str], Any]) -> None:
        """Load the teacher, if the options name one. In a fit that trains layers on their own first, also check that it works.

        Args:
            module: training module at the start of a fit, a validation or a test.
            read_teacher: function that takes the path or name of weights and returns the model with its original attention.

        Raises:
            ValueError: if replaced layers cannot be trained one by one, for example because the strategy shards weights.
        """
        if self.options.layer_steps and module.trainer.state.fn == "fit":
            self.host.check(module.trainer, module.network, module.hparams["train"])
        if self.options.teacher is not None and self.teacher is None:
            self.teacher = read_teacher(self.options.teacher).eval().requires_grad_(False)
        if self.teacher is not None:
            self.host.place(self.teacher, module.network, module.device)

    def matches_layers(self, module: TrainingModule) -> bool:
        """Return whether the current step belongs to the first stage, which trains each replaced layer on its own."""
        return self.options.layer_steps > 0 and module.trainer.global_step < self.options.layer_steps

    def layer_loss(self, module: TrainingModule, *inputs: Tensor) -> Tensor:
        """Compute and log the mean distance between the outputs of replaced layers and those of their original attention.

        Args:
            module: training module.
            *inputs: inputs of the network, ``[B, ...]`` for a batch of B samples.

        Returns:
            The distance, a scalar to use as the training loss.
        """
        loss = self.host.layer_loss(module.network, self.teacher, *inputs)
        module.log("train/layer_distance", loss.detach(), batch_size=len(inputs[0]))
        return module.log_loss(loss, len(inputs[0]))


class DistilledLinearization(Linearization):
    """Two-stage training whose second stage adds the distance from the teacher's predictions to the loss on the data.

    The constructor takes the arguments of :class:`Linearization`. The options also have the weights of the two losses.
    """

    def __init__(self, options: DistillationOptions, host: LinearizedHost) -> None:
        super().__init__(options, host)
        self._weighted = options.weighted

    def distilled_loss(self, module: TrainingModule, plain: Tensor, predicted: Tensor, *inputs: Tensor) -> Tensor:
        """Add the weighted distance from the teacher's predictions to the weighted loss on the data; log and return the sum.

        Both parts are also logged by themselves. Without a teacher, the loss on the data is logged and returned unchanged.

        Args:
            module: training module.
            plain: loss on the data, a scalar.
            predicted: result of :meth:`LinearizedHost.predict` for the module's network and ``inputs``.
            *inputs: inputs of the network and the teacher, ``[B, ...]`` for a batch of B samples.

        Returns:
            The weighted sum, a scalar; ``plain`` without a teacher.
        """
        size = len(inputs[0])
        if self.teacher is None:
            return module.log_loss(plain, size)
        with torch.no_grad():
            expected = self.host.predict(self.teacher, *inputs)
        distance = self.host.distance(predicted, expected)
        for name, value in ((self.host.loss_name, plain), (self.host.distance_name, distance)):
            module.log(name, value.detach(), batch_size=size, sync_dist=True)
        return module.log_loss(self._weighted(plain, distance), size)


def check_layer_steps(
    trainer: Trainer, network: nn.Module, trained: str, complete: tuple[str, ...] = ("attention", "new", "lora")
) -> None:
    """Check that a strategy and a model support training each replaced layer on its own to match its original attention.

    Args:
        trainer: trainer of the run.
        network: model with replaced attention.
        trained: part of the model that is trained after its layers have been trained on their own: ``"all"``, ``"attention"``,
            ``"new"`` (parameters that the replacement added) or ``"lora"``.
        complete: values of ``trained`` for which training each layer on its own computes gradients of all trained parameters.
            DDP requires such a value, unless it is told to find unused parameters.

    Raises:
        ValueError: if the strategy or the model does not support such training. The message says what to change.
    """
    strategy = trainer.strategy
    if not host_of(network).replaced(network):
        raise ValueError("distillation.layer_steps matches replaced layers, and none is replaced; see layer_kinds")
    if shards_weights(trainer):
        raise ValueError(
            f"distillation.layer_steps calls layers by themselves, whose weights {type(strategy).__name__} shards with "
            "their blocks; match layers on one device or under DDP, and shard in a run that starts from its checkpoint"
        )
    # DDP waits for the gradient of every trained parameter, and fails if a step computes none
    unused = ddp_options(strategy).get("find_unused_parameters", False)
    if isinstance(strategy, DDPStrategy) and trained not in complete and not unused:
        raise ValueError(
            f"distillation.layer_steps leaves some of the trained parameters (train={trained!r}) without gradients: set "
            f"--model.train={' or '.join(complete)}, or --trainer.strategy=ddp_find_unused_parameters_true"
        )
