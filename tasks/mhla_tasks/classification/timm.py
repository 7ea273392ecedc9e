"""Image classifiers with timm's vision transformers, trained unchanged or with their attention replaced.

If the attention is replaced, training recovers the accuracy in two phases, as in LoLCATs (arXiv 2410.10254, section 3). In the
first ``distillation.layer_steps`` steps, each new layer learns to match the output of the layer that it replaced (attention
transfer). Afterwards, the model or low-rank adapters in it are trained on the labels.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla import AttentionConfig, swap_attention
from lightning_mhla.checkpoints.pretrained import read_trained
from lightning_mhla.swap import is_swapped, load_swapped
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart, choose_trained
from lightning_mhla.swap.loading import give_weights
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.untrusted import BROKEN, reason
from lightning_mhla.training.classes import known_classes
from lightning_mhla.training.linearize import DistilledLinearization, ScoringHost, TransferOptions
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.classification.base import Classifier, MixupConfig

log = logging.getLogger(__name__)

PUBLISHED = "timm"
"""Value of ``pretrained`` that selects the weights that timm publishes."""


class TimmClassifier(Classifier):
    """Image classifier with one of timm's vision transformers, optionally with replaced attention.

    Args:
        model: name of the architecture, such as vit_small_patch16_224.
        num_classes: number of classes; null on the command line to use the number of classes in the data.
        image_size: side of the square image, in pixels.
        channels: number of channels of the image.
        model_args: further options of timm.create_model, such as {patch_size: 2, embed_dim: 64, depth: 4, num_heads: 4}; null
            for none.
        attention: options of the attention that replaces the original attention; null to keep the original attention.
        layer_kinds: pattern of attention kinds that repeats over all layers; the number of layers must be a multiple of its
            length. "keep" leaves the attention of a layer unchanged, and "replace" uses attention.kind. null replaces the
            attention of all layers.
        train: parameters to train after the first distillation.layer_steps steps: "all"; "attention" for the new attention
            layers with their projections; "new" for only the parameters that the replacement added; or "lora" for these
            parameters and low-rank adapters of the projections.
        lora: rank, alpha and dropout of the low-rank adapters.
        distillation: options for training the new attention to match the original attention.
        label_smoothing: fraction of each label's probability that is spread evenly over all classes; 0 for none.
        mixup: options of mixup and cutmix, which mix images and labels; both are off by default.
        class_names: class names to show in predictions, in the order of the labels. null uses the names in the data or, if
            there are none, the label numbers.
        pretrained: initial weights. The value "timm" selects the weights that timm publishes. Otherwise, it is the path of a
            checkpoint or run folder (its latest checkpoint) of this class, or of a folder that timm or lightning export wrote.
            The option is ignored if --ckpt_path supplies the weights.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        ValueError: if timm cannot build the model, its attention cannot be replaced, or options that require ``attention`` are
            set without it.
    """

    output_names: tuple[str, ...] = ("head", "fc_norm", "norm", "attn_pool")

    def __init__(
        self,
        model: str,
        num_classes: int | None = None,
        image_size: int = 224,
        channels: int = 3,
        model_args: dict[str, Any] | None = None,
        attention: AttentionConfig | None = None,
        layer_kinds: list[str] | None = None,
        train: TrainedPart = "all",
        lora: LoraOptions = LoraOptions(),
        distillation: TransferOptions = TransferOptions(),
        label_smoothing: float = 0.0,
        mixup: MixupConfig = MixupConfig(),
        class_names: list[str] | None = None,
        pretrained: str | None = None,
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        num_classes = known_classes(num_classes)
        super().__init__(num_classes, class_names, label_smoothing, mixup, training)
        self.save_hyperparameters(ignore=["pretrained"])
        keep_plain(self)
        lora = as_dataclass(LoraOptions, lora, "lora")
        self.distillation = as_dataclass(TransferOptions, distillation)
        self.linearization = DistilledLinearization(
            self.distillation, ScoringHost("train/label_loss", _run_layers, _scores)
        )
        self._pretrained = pretrained
        self.network = self.build()
        if self.training_options.checkpointing:
            self.network.set_grad_checkpointing(True)
        if attention is not None:
            swap_attention(self.network, as_dataclass(AttentionConfig, attention), layer_kinds=layer_kinds)
            choose_trained(self.network, train, lora)
        elif (
            layer_kinds is not None or train != "all" or self.distillation != TransferOptions() or lora != LoraOptions()
        ):
            raise ValueError(
                "layer_kinds, train, lora and distillation are for a model whose attention is replaced: give attention"
            )

    def build(self, published: bool = False) -> Any:
        """Build the model that the option ``model`` names, with its original attention.

        Args:
            published: whether to load the pretrained weights that timm publishes; false for random weights.

        Returns:
            The timm model.

        Raises:
            ValueError: if timm does not have a model of this name, or the model does not accept the configured options.
        """
        import timm  # imports all of its models

        hparams = self.hparams
        options = {"img_size": hparams["image_size"], "in_chans": hparams["channels"], **(hparams["model_args"] or {})}
        try:
            return timm.create_model(hparams["model"], published, num_classes=hparams["num_classes"], **options)
        except BROKEN as error:
            raise ValueError(f"timm builds no model {hparams['model']!r} with {options}: {reason(error)}") from error

    @override
    def layers(self) -> list[nn.Module]:
        blocks = getattr(self.network, "blocks", None)
        if blocks is None:
            raise ValueError(
                f"model={self.hparams['model']} has no list of blocks, which compile, layer_decay and sharding need; choose a "
                "vision transformer such as vit_small_patch16_224"
            )
        return list(blocks)

    @override
    def start_from(self, pretrained: str) -> None:
        give_weights(self.network, self._weights(pretrained), pretrained)

    def read_teacher(self, path: str) -> Any:
        """Build the model that the option ``model`` names, with its original attention, and load weights into it.

        Args:
            path: path of a run folder (its latest checkpoint), a checkpoint or an exported folder; or ``timm`` for the weights
                that timm publishes.

        Returns:
            The timm model.

        Raises:
            FileNotFoundError: if there are no weights at the path.
            ValueError: if the weights do not match the model.
        """
        teacher = self.build()
        give_weights(teacher, self._weights(path), path)
        return teacher

    def _weights(self, path: str) -> dict[str, Tensor]:
        """Read weights by name from a run folder, a checkpoint or an exported folder, or from timm if the path is ``timm``.

        Raises:
            FileNotFoundError: if there are no weights at the path.
        """
        if path == PUBLISHED:
            return self.build(published=True).state_dict()
        if (trained := read_trained(path)) is not None:
            return trained.weights
        if is_swapped(path):
            return dict(load_swapped(path).state_dict())
        file = Path(path) / "model.safetensors"
        if not file.is_file():
            raise FileNotFoundError(
                f"pretrained {path} is no checkpoint, no run and no folder with safetensors; or write timm"
            )
        return load_file(file)

    def on_fit_start(self) -> None:
        """Load the teacher model, if one is configured, and check the options of training layer by layer.

        A warning is logged if the patches leave out pixels at the edge of the images.

        Raises:
            ValueError: if ``distillation.layer_steps`` is positive, and the replaced layers cannot be trained on their own; or
                if the weights of the teacher do not match the model.
            FileNotFoundError: if there are no weights at the path of the teacher.
        """
        if self.trainer.is_global_zero:
            _check_patches(self.network, self.hparams["image_size"])
        self.linearization.start(self, self.read_teacher)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute and log the loss of one batch.

        In the first ``distillation.layer_steps`` steps, the loss is the mean distance between the outputs of the new and the
        original attention layers. Afterwards, it is the cross-entropy of the labels, combined with the divergence from the
        teacher's predictions if a teacher is configured.

        Args:
            batch: batch with ``image`` ``[B, channels, image_size, image_size]`` and ``label`` ``[B]`` int64.
            batch_idx: index of the batch; not used.

        Returns:
            Scalar loss.
        """
        images, labels = batch["image"], batch["label"]
        if self.linearization.matches_layers(self):
            return self.linearization.layer_loss(self, images)
        images, labels = self.mixed(images, labels)
        scores = self(images)
        return self.linearization.distilled_loss(self, self.label_loss(scores, labels), scores, images)


def _check_patches(network: Any, side: int) -> None:
    """Log a warning if the patches of a timm model leave out pixels at the edge of square images.

    This is not an error, because published models such as SigLIP were trained in this way.

    Args:
        network: timm model.
        side: side of the images, in pixels.
    """
    from timm.layers import PatchEmbed  # imports a large part of timm

    embedding = getattr(network, "patch_embed", None)
    if not isinstance(embedding, PatchEmbed) or embedding.dynamic_img_pad:
        return
    height, width = embedding.patch_size
    if side % height or side % width:
        log.warning(
            "images of %d x %d pixels are not divided into patches of %d x %d: the model does not read the last %d rows and %d "
            "columns; choose a multiple of the patch size as image_size, or another patch_size in model_args",
            side, side, height, width, side % height, side % width,
        )  # fmt: skip


def _run_layers(network: Any, images: Tensor) -> None:
    network.forward_features(images)


def _scores(network: Any, images: Tensor) -> Tensor:
    scores: Tensor = network(images)
    return scores
