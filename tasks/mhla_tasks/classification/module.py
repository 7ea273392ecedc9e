"""Image classifiers with our networks: vision transformers, flat and hierarchical."""

from __future__ import annotations

from inspect import signature
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.checkpoints.pretrained import adopt, read_pretrained
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.training.classes import known_classes
from lightning_mhla.training.compilation import CompileOptions
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.vision import VLT, StageConfig, VisionTransformer
from lightning_mhla.vision.ravlt import read_ravlt
from lightning_mhla.vision.vit import Size
from mhla_tasks.classification.base import Classifier, MixupConfig


class ImageClassifier(Classifier):
    """A vision transformer, or a hierarchical one (VLT), trained on images and labels.

    Args:
        attention: the attention layer.
        num_classes: number of classes; on the command line it follows from the data where that names its classes.
        image_size: side of the square image, in pixels.
        vlt: stages of a hierarchical VLT; null for a vision transformer of the sizes that follow. A VLT takes none of size,
            dim, depth, heads, patch_size, stem, pad_to and mlp_ratio.
        size: DeiT's tiny, small or base; null to give dim, depth and heads.
        dim: width of the tokens.
        depth: number of blocks.
        heads: attention heads.
        patch_size: side of a patch, in pixels.
        channels: channels of the image.
        stem: patch (one convolution of the patch's size) or conv (two small ones).
        pad_to: side that zero pixels pad the image to; null for none.
        mlp_ratio: inner width of the MLP over the tokens'.
        drop_path: stochastic depth of the last block.
        checkpointing: recompute blocks in the backward pass, to save memory.
        compile: compile the network, block by block (:func:`torch.compile`).
        compile_options: options of torch.compile; see :class:`lightning_mhla.training.compilation.CompileOptions`.
        label_smoothing: share of the label that is spread over all classes.
        mixup: mixing of images and labels.
        optimizer: AdamW or CAME, and its schedule.
        ema_decay: decay of the moving average of the weights that validation and predictions use; null for none.
        ema_batch: images of a step that ema_decay is for: ema_decay to the power of their number over ema_batch applies at
            each step; null for any number.
        class_names: names of the classes for predictions; null for those of the data, or numbers.
        pretrained: weights to start from, of a run, a checkpoint or an exported folder, at any resolution and for any
            classes, or RAVLT's own file (.pth) for a VLT; not read where --ckpt_path brings weights.

    Raises:
        ValueError: for sizes that do not fit together.
    """

    def __init__(
        self,
        attention: AttentionConfig,
        num_classes: int | None = None,
        image_size: int = 224,
        vlt: StageConfig | None = None,
        size: Size | None = None,
        dim: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        patch_size: int = 16,
        channels: int = 3,
        stem: Literal["patch", "conv"] = "patch",
        pad_to: int | None = None,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
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
        attention = as_dataclass(AttentionConfig, attention)
        mixup = as_dataclass(MixupConfig, mixup)
        optimizer = as_dataclass(OptimizerConfig, optimizer)
        compile_options = as_dataclass(CompileOptions, compile_options or {}) if compile else None
        super().__init__(
            num_classes, class_names, label_smoothing, mixup, ema_batch, optimizer, ema_decay, compile_options
        )
        self.save_hyperparameters(ignore=["pretrained"])
        keep_plain(self)
        self._pretrained = pretrained
        common: dict[str, Any] = {"channels": channels, "drop_path": drop_path, "checkpointing": checkpointing}
        plain: dict[str, Any] = {
            "size": size,
            "dim": dim,
            "depth": depth,
            "heads": heads,
            "patch_size": patch_size,
            "stem": stem,
            "pad_to": pad_to,
            "mlp_ratio": mlp_ratio,
        }
        if vlt is None:
            self.network = VisionTransformer(image_size, num_classes, attention, **plain, **common)
        else:
            defaults = {name: each.default for name, each in signature(ImageClassifier.__init__).parameters.items()}
            if given := [name for name, value in plain.items() if value != defaults[name]]:
                raise ValueError(f"vlt gives the sizes of all stages; leave out {', '.join(given)}")
            self.network = VLT(image_size, num_classes, attention, as_dataclass(StageConfig, vlt), **common)

    @override
    def layers(self) -> list[nn.Module]:
        return self.network.layers

    def configure_model(self) -> None:
        """Take over weights to start from; then see :meth:`TrainingModule.configure_model`."""
        if self._pretrained is not None:
            source = read_ravlt(self._pretrained) if isinstance(self.network, VLT) else None
            source = source or read_pretrained(self._pretrained)
            adopt(self.network, source, self._pretrained, heads=("head.",), positions=("position",))
            self._pretrained = None
        super().configure_model()
