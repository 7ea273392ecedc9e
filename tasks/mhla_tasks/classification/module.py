"""Image classifiers with this package's own networks: plain and hierarchical vision transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.checkpoints.pretrained import adopt, read_pretrained
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from lightning_mhla.training.classes import known_classes
from lightning_mhla.training.options import TrainingOptions
from lightning_mhla.vision import VLT, StageConfig, VisionTransformer
from lightning_mhla.vision.ravlt import read_ravlt
from lightning_mhla.vision.vit import Size
from mhla_tasks.classification.base import Classifier, MixupConfig


@dataclass(frozen=True)
class VisionShape:
    """Shape of a vision transformer: depth, widths, patches and padding.

    Args:
        dim: width of the tokens. dim, depth and heads are required if the model's option size is null, otherwise null.
        depth: number of blocks.
        heads: number of attention heads.
        patch_size: side of a square patch, in pixels.
        stem: layers that convert patches to tokens: patch (one convolution as large as a patch) or conv (two small
            convolutions).
        pad_to: side in pixels of the square to which the image is padded with zeros; null for no padding.
        mlp_ratio: inner width of the MLP divided by the width of the tokens.

    Raises:
        ValueError: if a value is out of range.
    """

    dim: int | None = None
    depth: int | None = None
    heads: int | None = None
    patch_size: int = 16
    stem: Literal["patch", "conv"] = "patch"
    pad_to: int | None = None
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        sizes = {"dim": self.dim, "depth": self.depth, "heads": self.heads}
        check_range("shape.", least=1, patch_size=self.patch_size, **sizes)
        check_range("shape.", least=0, pad_to=self.pad_to)
        check_range("shape.", above=0, mlp_ratio=self.mlp_ratio)


class ImageClassifier(Classifier):
    """Image classifier with a plain vision transformer, or with the hierarchical vision transformer VLT.

    Args:
        attention: options of the attention layers.
        num_classes: number of classes; null on the command line to use the number of classes in the data.
        image_size: side of the square image, in pixels.
        channels: number of channels of the image.
        size: size of the vision transformer: tiny, small or base, as in DeiT; null to use dim, depth and heads of shape.
        shape: shape of the vision transformer.
        vlt: options of the stages of VLT, in place of size and shape; null for a plain vision transformer.
        drop_path: stochastic depth rate of the last block; the rate grows linearly from 0 in the first block.
        label_smoothing: fraction of each label's probability that is spread evenly over all classes; 0 for none.
        mixup: options of mixup and cutmix, which mix images and labels; both are off by default.
        class_names: class names to show in predictions, in the order of the labels. null uses the names in the data or, if
            there are none, the label numbers.
        pretrained: path of the initial weights: a run folder (its latest checkpoint), a checkpoint or an exported folder. The
            resolution and the classes may differ from those of this model. A VLT also accepts the weights file (.pth) that the
            authors of RAVLT published. The option is ignored if --ckpt_path supplies the weights.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        ValueError: if options contradict each other, such as ``size`` and ``vlt``, or sizes do not match.
    """

    def __init__(
        self,
        attention: AttentionConfig,
        num_classes: int | None = None,
        image_size: int = 224,
        channels: int = 3,
        size: Size | None = None,
        shape: VisionShape = VisionShape(),
        vlt: StageConfig | None = None,
        drop_path: float = 0.0,
        label_smoothing: float = 0.0,
        mixup: MixupConfig = MixupConfig(),
        class_names: list[str] | None = None,
        pretrained: str | None = None,
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        num_classes = known_classes(num_classes)
        super().__init__(num_classes, class_names, label_smoothing, mixup, training)
        attention, shape = as_dataclass(AttentionConfig, attention), as_dataclass(VisionShape, shape, "shape")
        self.save_hyperparameters(ignore=["pretrained"])
        keep_plain(self)
        self._pretrained = pretrained
        common: dict[str, Any] = {
            "channels": channels,
            "drop_path": drop_path,
            "checkpointing": self.training_options.checkpointing,
        }
        if vlt is None:
            self.network = VisionTransformer(image_size, num_classes, attention, size=size, **asdict(shape), **common)
        elif size is not None or shape != VisionShape():
            raise ValueError("vlt gives the sizes of all stages; leave out size and shape")
        else:
            self.network = VLT(image_size, num_classes, attention, as_dataclass(StageConfig, vlt), **common)

    @override
    def layers(self) -> list[nn.Module]:
        return self.network.layers

    @override
    def start_from(self, pretrained: str) -> None:
        source = read_ravlt(pretrained) if isinstance(self.network, VLT) else None
        source = source or read_pretrained(pretrained)
        adopt(self.network, source, pretrained, heads=("head.",), positions=("position",))
