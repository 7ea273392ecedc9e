"""Data modules of text-to-image models: rendered scenes of digits, captioned images, and latents with caption embeddings."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from lightning_mhla.data import SampleSource, ShardSets
from lightning_mhla.data.captioned import CaptionedFiles, FolderFiles, ShardFiles
from lightning_mhla.data.images import EXTENSIONS
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.data.shards import holds_shards
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.ranges import check_range
from mhla_tasks.captioned.data import CaptionedData, EncodedShards
from mhla_tasks.captioned.encoded import EncodedSamples, read_manifest
from mhla_tasks.captioned.requests import PromptRequest
from mhla_tasks.text_to_image.buckets import Size, check_groups, parse_buckets
from mhla_tasks.text_to_image.scenes import SceneSamples, every_caption
from mhla_tasks.text_to_image.sources import CaptionedImages

PREPARE = "lightning prepare caption-latents"

IMAGE = "png"
"""Extension of the image files that the predict command writes, without a dot."""

SANA_LENGTH = 300
"""Number of tokens of a caption in SANA."""


class CaptionedImageData(CaptionedData):
    """Base class of data modules with captioned images.

    A subclass implements :meth:`samples`, which returns the data set of a stage.

    Args:
        prompts: options of the predict command: the prompts, the number of samples for each prompt, and the seed.
        options: keyword arguments of :class:`ResumableDataModule`, such as ``batch_size`` and ``seed``.
    """

    extension = IMAGE

    def real_images(self, part: str) -> SampleSource:
        """Return the real images with which metrics such as FID compare generated images.

        Args:
            part: split of the data, ``"train"`` or ``"validate"``.

        Returns:
            Map-style data set whose samples are dicts with the entry ``image``, ``[3, H, W]`` float32 in -1 .. 1.
        """
        return self.samples(part)


class DigitScenes(CaptionedImageData):
    """Data module of images of colored MNIST digits, with captions such as "a red three left of a green seven".

    There are 20,000 scenes of 32 x 32 pixels for training and 400 held-out scenes, which show different handwritten digits.

    Args:
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process; 0 is fastest for images this small.
        prompts: options of the predict command: the prompts, the number of samples for each prompt, and the seed.
        seed: random seed for the order of the samples; null for the seed of seed_everything.
    """

    def __init__(
        self,
        batch_size: int = 32,
        num_workers: int = 0,
        prompts: PromptRequest = PromptRequest(),
        seed: int | None = None,
    ) -> None:
        super().__init__(prompts, batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.save_hyperparameters(ignore=["prompts"])
        self.known_prompts = every_caption()

    @override
    def samples(self, stage: str) -> SampleSource:
        return SceneSamples(stage == "train")


class CaptionedImageShards(CaptionedImageData):
    """Data module of images with captions in WebDataset tar shards, or in folders.

    The caption of an image such as 17.jpg is in 17.txt or 17.json, in the same shard or folder. Alternatively, a folder can
    contain a file metadata.jsonl with a file_name and a caption on each line. In training, images that cannot be decoded or
    lack a caption are skipped with a warning.

    Args:
        train: training shards: a folder, a brace pattern such as DIR/train-{0000..1023}.tar, a glob, a URL, or a list of these.
            A folder of images also works.
        val: validation data, specified in the same ways as train.
        height: height in pixels to which images are scaled and center-cropped.
        width: width in pixels to which images are scaled and center-cropped.
        buckets: several image sizes in place of height and width, as HEIGHTxWIDTH, such as [512x512, 384x640]. Each image gets
            the size with the nearest aspect ratio, and all images of a batch have the same size. Heights and widths must be
            multiples of the model's patch size, multiplied by the downsampling factor of the autoencoder if there is one.
            null for a single size, height x width.
        caption_key: key of the caption in JSON files and in the lines of metadata.jsonl.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process.
        prompts: options of the predict command: the prompts, the number of samples for each prompt, and the seed.
        seed: random seed for the order of the samples, and for choosing one of several captions of an image; null for the seed
            of seed_everything.
        shards: options for reading shards and for caching downloaded ones.

    Raises:
        ValueError: if a size is invalid or occurs twice, or several buckets are combined with ``shards.cache_bytes``.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str],
        height: int = 512,
        width: int = 512,
        buckets: list[str] | None = None,
        caption_key: str = "caption",
        batch_size: int = 32,
        num_workers: int = 8,
        prompts: PromptRequest = PromptRequest(),
        seed: int | None = None,
        shards: ShardOptions = ShardOptions(),
    ) -> None:
        super().__init__(prompts, batch_size=batch_size, num_workers=num_workers, seed=seed, shards=shards)
        check_range(least=1, height=height, width=width)
        self.save_hyperparameters(ignore=["prompts"])
        keep_plain(self)
        self.sizes = [(height, width)] if buckets is None else parse_buckets(buckets)
        if len(self.sizes) > 1 and self.shard_options.cache_bytes is not None:
            raise ValueError(
                "buckets with cache_bytes would fetch every image for its size; encode the images first (lightning prepare "
                "caption-latents --buckets ...) and train on ImageLatentShards"
            )
        self.caption_key = caption_key
        self.shards: ShardSets = _ShardsOrFolders(train, val, self.shard_options)

    @override
    def samples(self, stage: str) -> SampleSource:
        return self._images(stage, self.sizes)

    @override
    def real_images(self, part: str) -> SampleSource:
        return self._images(part, self.sizes[:1])  # what is drawn has one size too

    def _images(self, stage: str, sizes: list[Size]) -> SampleSource:
        folder = self.shards.class_folder(stage)
        files: CaptionedFiles
        if folder is None:
            files = ShardFiles(self.shards.reader(stage), self.caption_key)
        else:
            files = FolderFiles(folder, EXTENSIONS, self.caption_key)
        return CaptionedImages(files, sizes, self.batch_size if stage == "train" else 0)


class ImageLatentShards(EncodedShards):
    """Data module of image latents and embedded captions, in shards that ``lightning prepare caption-latents`` wrote.

    Args:
        train: training shards: a folder, a brace pattern such as DIR/train-{00000..01023}.tar, a glob, a URL, or a list of
            these.
        val: validation data, specified in the same ways as train.
        text_length: number of tokens in a caption; shorter captions are padded with zeros, longer ones are cut. null for the
            length that lightning prepare recorded in the manifest.json of the shards.
        batch_size: number of samples per batch, summed over all processes.
        num_workers: number of data loading workers for each training process.
        prompts: options of the predict command: the prompts, the number of samples for each prompt, and the seed.
        seed: random seed for the order of the samples, and for choosing one of several captions of a sample; null for the seed
            of seed_everything.
        shards: options for reading shards and for caching downloaded ones.
    """

    extension = IMAGE
    command = PREPARE
    axes = 3
    default_length = SANA_LENGTH

    @property
    def instruction(self) -> str | None:
        """Instruction that was inserted before each caption when the shards were written; None if there was none.

        The value ``sana`` stands for the instruction of diffusers' SanaPipeline. This value is assumed for shards that do not
        record an instruction.
        """
        return read_manifest(self.shards).get("instruction", "sana") or None

    def real_images(self, part: str) -> SampleSource:
        """Raise an error, because metrics such as FID cannot compare generated images with latents.

        Raises:
            ValueError: always; the message asks for a folder of images or an ``.npz`` file.
        """
        raise ValueError(f"reference={part!r} names latents, which are no images; name a folder of images, or an .npz")

    @override
    def samples(self, stage: str) -> EncodedSamples:
        source = super().samples(stage)
        if stage == "train" and source.groups is not None:
            check_groups(source.groups, [name.partition(".")[0] for name in source.names], self.batch_size, "latents")
        return source


class _ShardsOrFolders(ShardSets):
    """Locations of training and validation data, each of which is a set of shards or a folder of captioned images."""

    @override
    def class_folder(self, stage: str) -> Path | None:
        location = self.locations[stage]
        folder = Path(location) if isinstance(location, str) else None
        return folder if folder is not None and folder.is_dir() and not holds_shards(folder) else None
