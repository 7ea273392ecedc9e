"""Vision transformers of timm: trained as they are, or with their attention replaced, to win its quality back.

The first ``distillation.layer_steps`` steps teach each new layer the output of the one it replaced (attention transfer);
then the model is trained on the labels, all of it or by low-rank adapters, after LoLCATs (arXiv 2410.10254, section 3).
"""

from __future__ import annotations

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
from lightning_mhla.training.classes import known_classes
from lightning_mhla.training.compilation import CompileOptions
from lightning_mhla.training.linearize import Linearization, ScoringHost, TransferOptions
from lightning_mhla.training.optim import OptimizerConfig
from mhla_tasks.classification.base import Classifier, MixupConfig

PUBLISHED = "timm"
"""Word for the weights that timm downloads."""


class TimmClassifier(Classifier):
    """A vision transformer of timm, trained on images and labels; with ``attention``, a swapped one.

    Args:
        model: name of the architecture, such as vit_small_patch16_224.
        num_classes: number of classes; on the command line it follows from the data where that names its classes.
        image_size: side of the square image, in pixels.
        channels: channels of the image.
        model_args: further options of timm.create_model, such as {patch_size: 2, embed_dim: 64, depth: 4, num_heads: 4}.
        attention: what takes the place of its attention; null leaves it as it is.
        layer_kinds: kinds of the layers, repeated to the depth: keep for those that stay as they are, replace for
            attention.kind; null replaces all.
        train: what is trained after the layer steps: all; attention, the replaced layers with their projections; new, only
            what replacing added; lora, that and adapters of the projections.
        lora: rank and alpha of the adapters.
        distillation: see TransferOptions.
        checkpointing: recompute blocks in the backward pass, to save memory.
        compile: compile the network, block by block (:func:`torch.compile`).
        compile_options: options of torch.compile; see :class:`lightning_mhla.training.compilation.CompileOptions`.
        label_smoothing: share of the label that is spread over all classes.
        mixup: mixing of images and labels.
        optimizer: AdamW or CAME, and its schedule.
        ema_decay: decay of the moving average of the weights that validation and predictions use; null for none.
        ema_batch: see ImageClassifier.
        class_names: names of the classes for predictions; null for those of the data, or numbers.
        pretrained: weights to start from: timm for those that timm publishes, a checkpoint or a run of this class, or a folder
            that timm or an export wrote; not read where --ckpt_path brings weights.

    Raises:
        ValueError: for sizes that do not fit together, and attention that cannot be replaced.
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
        checkpointing: bool = False,
        compile: bool = False,
        compile_options: CompileOptions | None = None,
        label_smoothing: float = 0.0,
        mixup: MixupConfig = MixupConfig(),
        optimizer: OptimizerConfig = OptimizerConfig(),
        ema_decay: float | None = None,
        ema_batch: int | None = None,
        class_names: list[str] | None = None,
        pretrained: str | None = None,
    ) -> None:
        num_classes = known_classes(num_classes)
        optimizer = as_dataclass(OptimizerConfig, optimizer)
        compile_options = as_dataclass(CompileOptions, compile_options or {}) if compile else None
        super().__init__(
            num_classes,
            class_names,
            label_smoothing,
            as_dataclass(MixupConfig, mixup),
            ema_batch,
            optimizer,
            ema_decay,
            compile_options,
        )
        self.save_hyperparameters(ignore=["pretrained"])
        keep_plain(self)
        self.distillation = as_dataclass(TransferOptions, distillation)
        self.linearization = Linearization(self.distillation, ScoringHost("train/label_loss", _run_layers, _scores))
        self._pretrained = pretrained
        self.network = self.build()
        if checkpointing:
            self.network.set_grad_checkpointing(True)
        if attention is not None:
            swap_attention(self.network, as_dataclass(AttentionConfig, attention), layer_kinds=layer_kinds)
            choose_trained(self.network, train, as_dataclass(LoraOptions, lora))
        elif layer_kinds is not None or train != "all" or self.distillation != TransferOptions():
            raise ValueError(
                "layer_kinds, train and distillation are for a model whose attention is replaced: give attention"
            )

    def build(self, published: bool = False) -> Any:
        """The model of timm with its own attention; with the weights that timm publishes, if asked for.

        Raises:
            ValueError: for a name that timm does not have, or options that the model does not.
        """
        import timm  # brings all of its models

        given = self.hparams
        options = {"img_size": given["image_size"], "in_chans": given["channels"], **(given["model_args"] or {})}
        try:
            return timm.create_model(given["model"], published, num_classes=given["num_classes"], **options)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ValueError(f"timm builds no model {given['model']!r} with {options}: {error}") from error

    @override
    def layers(self) -> list[nn.Module]:
        return list(self.network.blocks)

    @override
    def configure_model(self) -> None:
        if self._pretrained is not None:
            give_weights(self.network, self._weights(self._pretrained), self._pretrained)
            self._pretrained = None
        super().configure_model()

    def read_teacher(self, path: str) -> Any:
        """Return the model before the swap, with the weights at a path."""
        teacher = self.build()
        give_weights(teacher, self._weights(path), path)
        return teacher

    def _weights(self, path: str) -> dict[str, Tensor]:
        """Weights of a model at a path.

        Raises:
            FileNotFoundError: when there are none.
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
        """Check that layers can be matched, and load the teacher; see :meth:`Linearization.start`."""
        self.linearization.start(self, self.read_teacher)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Match the layers, then learn the labels, and the teacher's predictions if there is one."""
        images, labels = batch["image"], batch["label"]
        if self.linearization.matches_layers(self):
            return self.linearization.layer_loss(self, images)
        images, labels = self.mixed(images, labels)
        scores = self(images)
        return self.linearization.distilled_loss(self, self.label_loss(scores, labels), scores, images)


def _run_layers(network: Any, images: Tensor) -> None:
    network.forward_features(images)


def _scores(network: Any, images: Tensor) -> Tensor:
    scores: Tensor = network(images)
    return scores
