"""Training of encoders whose attention was replaced, so that they compute the same vectors as the original model.

An encoder computes one vector for each token of a text or each patch of an image. Its embedding of a sample is the mean of
these vectors, the first of them, or the vector that a timm encoder passes to its classifier. There are no labels: the model
before its attention was replaced, the teacher, supplies the targets. The first ``distillation.layer_steps`` steps train each
replaced layer on its own (attention transfer, LoLCATs, arXiv 2410.10254, section 3.2). Later steps train the complete model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from typing_extensions import override

from lightning_mhla import AttentionConfig, swap_attention
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart, choose_trained
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.lightning_private import saved_hyperparameters
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from lightning_mhla.training.encoder_libraries import describe_encoder, library_of, load_encoder
from lightning_mhla.training.linearize import Linearization, ScoringHost
from lightning_mhla.training.module import TrainingModule
from lightning_mhla.training.neighbors import EmbeddingPairs
from lightning_mhla.training.options import TrainingOptions

Pooling = Literal["mean", "first", "head"]


@dataclass(frozen=True)
class EncoderDistillation:
    """Options for training an encoder with replaced attention so that it matches the model before the replacement.

    Args:
        layer_steps: number of optimizer steps at the beginning of training, in which each replaced layer learns to match the
            output of its original attention for the same input. These steps train only the parameters of the new attention.
        teacher: path or name of the model before its attention was replaced, in any form that ``pretrained`` accepts. Training
            and evaluation require it.
        tokens_weight: weight of the distance of the token vectors from those of the teacher. The distance is the mean squared
            difference, divided by the variance of the teacher's vectors.
        embedding_weight: weight of one minus the cosine similarity between a sample's embedding and that of the teacher.
        similarity_weight: weight of the mean squared difference between the encoder's and the teacher's cosine similarity, over
            all pairs of samples in a batch.

    Raises:
        ValueError: if ``layer_steps`` or a weight is negative, or all weights are zero.
    """

    layer_steps: int = 0
    teacher: str | None = None
    tokens_weight: float = 1.0
    embedding_weight: float = 1.0
    similarity_weight: float = 1.0

    def __post_init__(self) -> None:
        weights = ("tokens_weight", "embedding_weight", "similarity_weight")
        for name in ("layer_steps", *weights):
            check_range("distillation.", least=0, **{name: getattr(self, name)})
        if not any(getattr(self, name) for name in weights):
            raise ValueError(f"one of distillation.{', distillation.'.join(weights)} must be positive")


class LinearizedEncoder(TrainingModule):
    """Base class of modules that train an encoder with replaced attention to match the original encoder.

    The encoder comes from transformers or timm. The constructor of a subclass calls
    ``save_hyperparameters(ignore=["pretrained"])`` and then :meth:`assemble`.

    Args:
        distillation: teacher, and weights of the distances from it.
        pooling: vector that is the embedding of a sample: ``"mean"`` for the mean of its token vectors without padding,
            ``"first"`` for the vector of its first token, or ``"head"`` for the vector that an encoder of timm passes to its
            classifier.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        ValueError: if ``pooling`` is not one of these values, or an option in ``distillation`` is not valid.
    """

    network: Any

    def __init__(self, distillation: EncoderDistillation, pooling: Pooling, training: TrainingOptions) -> None:
        super().__init__(training)
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling={pooling!r} is not one of {', '.join(get_args(Pooling))}")
        self.distillation, self.pooling = as_dataclass(EncoderDistillation, distillation), pooling
        encode: Callable[..., Any] = self.encode
        self.linearization = Linearization(self.distillation, ScoringHost("train/loss", encode, encode))

    def assemble(
        self,
        pretrained: str | None,
        attention: AttentionConfig,
        layer_kinds: list[str] | None,
        train: TrainedPart,
        lora: LoraOptions,
        network: dict[str, Any] | None,
    ) -> None:
        """Build the encoder with replaced attention, choose the parameters to train, and create empty metrics.

        Parameters that do not contribute to the token vectors, such as those of a pooling head, are frozen.

        Args:
            pretrained: path or name of the encoder to start from. Its weights are loaded before training. None to load no
                weights; ``network`` is then required.
            attention: options of the new attention.
            layer_kinds: list with an entry ``"keep"`` or ``"replace"`` for each layer; a shorter list is repeated. None to
                replace the attention of all layers.
            train: part of the model that is trained after the first ``distillation.layer_steps`` steps: ``"all"``,
                ``"attention"``, ``"new"`` (parameters that the replacement added) or ``"lora"``.
            lora: rank, alpha and dropout of the adapters for ``train="lora"``.
            network: description of the encoder, as :func:`describe_encoder` returns it; None to read it from ``pretrained``.

        Raises:
            FileNotFoundError: if there is no such encoder.
            ValueError: if ``pretrained`` and ``network`` are both None, or the encoder cannot be built, or its attention cannot
                be replaced.
        """
        if network is None:
            if pretrained is None:
                raise ValueError("name the encoder to linearize: --model.pretrained=FOLDER_OR_NAME")
            network = describe_encoder(pretrained)
        for saved in saved_hyperparameters(self):
            saved["network"] = network
            # The options of text and image encoders have the same names, so a checkpoint must name its class.
            saved.setdefault("_class_path", f"{type(self).__module__}.{type(self).__name__}")
        keep_plain(self)
        self._pretrained = pretrained
        self.library = library_of(network)
        self.network = self.library.build(network)
        if self.pooling == "head":
            self.library.head(self.network)  # raises an error if there is none
        swap_attention(self.network, as_dataclass(AttentionConfig, attention), layer_kinds=layer_kinds)
        choose_trained(self.network, train, as_dataclass(LoraOptions, lora, "lora"))
        for name, parameter in self.network.named_parameters():
            # DDP fails if the loss does not depend on a trained parameter.
            if name.startswith(self.library.unused) or name.endswith("mask_token"):
                parameter.requires_grad_(False)
        if self.training_options.checkpointing:
            self.library.recompute(self.network)
        stages = ("val", "test")
        self.pairs = nn.ModuleDict({stage: EmbeddingPairs() for stage in stages})
        self.means = nn.ModuleDict(
            {
                stage: nn.ModuleDict(
                    {name: MeanMetric(nan_strategy="disable") for name in ("loss", "cosine", "token_cosine")}
                )
                for stage in stages
            }
        )

    @override
    def layers(self) -> list[nn.Module]:
        return self.library.layers(self.network)

    @override
    def start_from(self, pretrained: str) -> None:
        self.library.load(self.network, pretrained)

    @abstractmethod
    def encode(self, network: Any, *inputs: Tensor) -> Tensor:
        """Compute the token vectors of a batch, ``[B, N, dim]`` for B samples of N tokens.

        Args:
            network: encoder.
            *inputs: tensors of the batch, as :meth:`read_inputs` returns them.
        """

    @abstractmethod
    def read_inputs(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors ``[B, ...]`` of a batch of B samples that the encoder takes as inputs."""

    @abstractmethod
    def real_tokens(self, *inputs: Tensor) -> Tensor | None:
        """Return the mask of a batch's tokens that are not padding.

        Args:
            *inputs: tensors of the batch, as :meth:`read_inputs` returns them.

        Returns:
            ``[B, N]`` bool, False for padding; None if no token is padding.
        """

    def embed(self, vectors: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the embeddings of samples, ``[B, dim]``, from their token vectors.

        Args:
            vectors: token vectors, ``[B, N, dim]``.
            mask: ``[B, N]`` bool, False for padding; None if no token is padding.
        """
        if self.pooling == "first":
            return vectors[:, 0]
        if self.pooling == "head":  # its weights are frozen, so they are those of the teacher
            return self.library.head(self.network)(vectors)
        if mask is None:
            return vectors.mean(1)
        weights = mask[..., None].to(vectors.dtype)
        return (vectors * weights).sum(1) / weights.sum(1).clamp(min=1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Compute the embeddings of a batch, ``[B, dim]``, normalized to unit length.

        Args:
            batch: tensors ``[B, ...]`` by name, from which :meth:`read_inputs` selects the inputs of the encoder.
        """
        inputs = self.read_inputs(batch)
        return F.normalize(self.embed(self.encode(self.network, *inputs), self.real_tokens(*inputs)), dim=-1)

    def on_fit_start(self) -> None:
        """Load the teacher. With a positive ``layer_steps``, check that the replaced layers can be trained on their own.

        Raises:
            ValueError: if no teacher is named, or if ``distillation.layer_steps`` is positive and the replaced layers cannot be
                trained on their own.
        """
        self._start()

    def on_validation_start(self) -> None:
        """Load the teacher, unless it has been loaded already; the validations of a fit use the one that the fit loaded.

        Raises:
            ValueError: if no teacher is named.
        """
        if self.trainer.state.fn != "fit":
            self._start()

    def on_test_start(self) -> None:
        """Load the teacher, unless it has been loaded already.

        Raises:
            ValueError: if no teacher is named.
        """
        self._start()

    def _start(self) -> None:
        if self.distillation.teacher is None:
            raise ValueError(
                "an encoder is trained and measured against the model before its attention was replaced: name it by "
                "--model.distillation.teacher"
            )
        self.linearization.start(self, load_encoder)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute, log and return the loss of a batch, a scalar.

        In the first ``distillation.layer_steps`` steps, the loss compares the output of each replaced layer with that of the
        original layer. Later, it is the weighted sum of the distances from the teacher that :class:`EncoderDistillation` lists.

        Args:
            batch: tensors ``[B, ...]`` by name, from which :meth:`read_inputs` selects the inputs of the encoder.
            batch_idx: index of the batch; not used.
        """
        inputs = self.read_inputs(batch)
        if self.linearization.matches_layers(self):
            return self.linearization.layer_loss(self, *inputs)
        mask = self.real_tokens(*inputs)
        distances = self.distances(self.encode(self.network, *inputs), self._wanted(*inputs), mask)
        for name, value in distances.items():
            self.log(f"train/{name}_distance", value.detach(), batch_size=len(inputs[0]))
        return self.log_loss(self._weighted(distances), len(inputs[0]))

    @torch.no_grad()
    def _wanted(self, *inputs: Tensor) -> Tensor:
        return self.encode(self.linearization.teacher, *inputs)

    def distances(self, vectors: Tensor, wanted: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Compute the distances of a model from its teacher.

        Args:
            vectors: token vectors of the model, ``[B, N, dim]``.
            wanted: token vectors of the teacher, ``[B, N, dim]``.
            mask: ``[B, N]`` bool, False for padding; None if no token is padding.

        Returns:
            Scalars ``tokens``, ``embedding`` and ``similarity`` by name, as :class:`EncoderDistillation` defines them.
        """
        vectors, wanted = vectors.float(), wanted.float()
        real = torch.ones(vectors.shape[:2], dtype=torch.bool, device=vectors.device) if mask is None else mask
        # [B, dim] each; the products below are the cosine similarities [B, B].
        embedding, target = (F.normalize(self.embed(x, mask), dim=-1) for x in (vectors, wanted))
        return {
            # Divided by the variance, the distance does not depend on the scale of the encoder's vectors.
            "tokens": (vectors - wanted)[real].square().mean() / wanted[real].var().clamp(min=1e-12),
            "embedding": (1 - (embedding * target).sum(-1)).mean(),
            "similarity": (embedding @ embedding.T - target @ target.T).square().mean(),
        }

    def _weighted(self, distances: dict[str, Tensor]) -> Tensor:
        weights: dict[str, float] = {name: getattr(self.distillation, f"{name}_weight") for name in distances}
        return torch.stack([weight * distances[name] for name, weight in weights.items() if weight]).sum()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Update the validation metrics with one batch."""
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Update the test metrics with one batch."""
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        """Log the share of each validation sample's nearest neighbors on which the encoder and its teacher agree.

        The two metrics, ``val/recall_at_10`` and ``val/mixed_recall_at_10``, are shares from 0 to 1. The class
        :class:`lightning_mhla.training.neighbors.EmbeddingPairs` defines them.
        """
        self._log_pairs("val")

    def on_test_epoch_end(self) -> None:
        """Log the share of each test sample's nearest neighbors on which the encoder and its teacher agree.

        The two metrics, ``test/recall_at_10`` and ``test/mixed_recall_at_10``, are shares from 0 to 1. The class
        :class:`lightning_mhla.training.neighbors.EmbeddingPairs` defines them.
        """
        self._log_pairs("test")

    def _evaluate(self, batch: dict[str, Any], stage: str) -> None:
        # All processes compute the complete batch, filler samples included, so that they stay in step.
        valid, inputs = batch["valid"], self.read_inputs(batch)
        mask = self.real_tokens(*inputs)
        vectors, wanted = self.encode(self.network, *inputs).float()[valid], self._wanted(*inputs).float()[valid]
        mask = None if mask is None else mask[valid]
        embedding, target = self.embed(vectors, mask), self.embed(wanted, mask)
        means: Any = self.means[stage]
        if len(vectors):
            cosine = F.cosine_similarity(vectors, wanted, dim=-1)
            means["loss"].update(self._weighted(self.distances(vectors, wanted, mask)), len(vectors))
            means["cosine"].update(F.cosine_similarity(embedding, target, dim=-1))
            means["token_cosine"].update(cosine if mask is None else cosine[mask])
        pairs: Any = self.pairs[stage]
        pairs.update(embedding, target)
        for name, metric in means.items():
            self.log(f"{stage}/{name}", metric, on_epoch=True, prog_bar=name == "cosine", batch_size=len(valid))

    def _log_pairs(self, stage: str) -> None:
        pairs: Any = self.pairs[stage]
        if pairs.update_count:  # every process has the same number of batches
            self.log_dict({f"{stage}/{name}": value.to(self.device) for name, value in pairs.compute().items()})
        pairs.reset()
