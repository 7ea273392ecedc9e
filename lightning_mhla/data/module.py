"""Base class of data modules whose loaders resume training with exactly the next sample, and locations of their shards."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning import LightningDataModule, Trainer
from typing_extensions import override

from lightning_mhla.data.ahead import FetchAhead
from lightning_mhla.data.cache import ShardCache
from lightning_mhla.data.encoded_by import compare_models, recorded_encoder
from lightning_mhla.data.loader import Progress, ResumableLoader
from lightning_mhla.data.options import ShardOptions
from lightning_mhla.data.shards import ShardReader, beside_shard, find_shards, holds_shards
from lightning_mhla.data.source import SampleSource
from lightning_mhla.data.tables import default_cache
from lightning_mhla.system.hyperparameters import LoggedApart
from lightning_mhla.system.listing import visible_folders
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range, check_seed
from lightning_mhla.system.redaction import check_secrets

log = logging.getLogger(__name__)


class ShardSets:
    """Locations of the training and validation data of a data module, with methods to find, download and read its shards.

    Args:
        train: location of the training data: a folder, path pattern or URL of tar shards, a list of these, or a folder with one
            subfolder per class.
        val: location of the data for validation and tests, in one of the same forms.
        options: options for reading shards and keeping downloads.
    """

    def __init__(self, train: str | list[str], val: str | list[str], options: ShardOptions = ShardOptions()) -> None:
        self.locations = {"train": _location(train), "validate": _location(val), "test": _location(val)}
        self.cache = Path(options.cache_dir) if options.cache_dir else None
        folder = (self.cache or default_cache()) / "streamed"
        self._encoders: dict[str, Path] = {}
        self.streamed = None if options.cache_bytes is None else ShardCache(folder, options.cache_bytes)

    def prepare(self, trainer: Trainer | None) -> None:
        """Find or download the shards that a trainer needs for its current stage, and read the table of files in each shard.

        Args:
            trainer: trainer that is about to start; None to do nothing.
        """
        stages = {"fit": ("train", "validate"), "validate": ("validate",), "test": ("test",)}
        for stage in stages.get(trainer.state.fn.value, ()) if trainer is not None and trainer.state.fn else ():
            if self.class_folder(stage) is None:
                self.reader(stage)

    def class_folder(self, stage: str) -> Path | None:
        """Return the folder with the data of a stage if it has one subfolder per class; None if the data is in shards.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``.
        """
        location = self.locations[stage]
        folder = Path(location) if isinstance(location, str) else None
        if folder is None or not folder.is_dir() or holds_shards(folder):
            return None
        return folder if visible_folders(folder) else None

    def find(self, stage: str) -> list[Path]:
        """Return the local paths of the shards for a stage.

        Remote shards are downloaded first or, if the option ``cache_bytes`` is set, when they are read.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``.

        Raises:
            FileNotFoundError: if there are no shards at the location.
            ValueError: if the location has a ``***`` in place of a secret, a URL scheme that is not allowed, or braces that
                cannot be expanded.
        """
        locations = self.locations[stage]
        for location in [locations] if isinstance(locations, str) else locations:
            check_secrets(location, f"data.{'train' if stage == 'train' else 'val'}")
        return find_shards(locations, self.cache, self.streamed)

    def reader(self, stage: str) -> ShardReader:
        """Create a reader of the shards for a stage.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``.
        """
        return ShardReader(self.find(stage), self.cache, self.streamed)

    def compare_encoders(self, stage: str) -> None:
        """Log a warning if different models encoded the latents of this stage and of the stages checked earlier.

        Latents from two models have different meanings. The models are compared by the digests of their files, which the
        manifests (JSON files beside the shards) contain.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``.
        """
        for manifest in self.manifests(stage):
            encoder = recorded_encoder(manifest)
            if encoder is None or encoder.digest is None or encoder.digest in self._encoders:
                continue
            self._encoders[encoder.digest] = manifest
            first = next(iter(self._encoders.values()))
            if first != manifest:
                log.warning(
                    "%s and %s name models with different files: unless their weights are equal, the latents have different "
                    "meanings; prepare all shards with one model", first, manifest,
                )  # fmt: skip

    def compare_models(self, models: Mapping[str, str]) -> None:
        """Log a warning if the training samples were encoded by models other than those of the LightningModule.

        Args:
            models: mapping from the name of an option of the LightningModule, such as ``model.vae``, to its value: the folder
                or the Hugging Face Hub name of a model, or of a pipeline that contains the model.
        """
        if self.class_folder("train") is None:
            compare_models(self.manifests("train"), models)

    def manifests(self, stage: str) -> list[Path]:
        """Return the paths of the manifests beside the shards of a stage, sorted; they need not exist."""
        return sorted({beside_shard(shard, "manifest.json") for shard in self.find(stage)})

    def ahead(self, stage: str, window: int | None) -> Callable[[np.ndarray], FetchAhead] | None:
        """Return a function that creates a context manager for downloading the shards of a stage ahead of their use.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``.
            window: number of shards that are shuffled together; None for all.

        Returns:
            Function that takes the shard number of each sample in reading order, and returns the context manager. None if no
            shard of the stage is downloaded during training.

        Raises:
            ValueError: if the cache has no room for ``window`` shards and one more that is downloaded ahead.
        """
        streamed = self.streamed
        if streamed is None or self.class_folder(stage) is not None:
            return None
        paths = self.find(stage)
        if not set(paths) & set(streamed.urls):
            return None
        self.reader(stage)  # reads the member tables, from which the cache learns the sizes
        streamed.check_window(paths, window)
        return lambda shards: FetchAhead(streamed, paths, shards)


def _location(where: Any) -> str | list[str]:
    """Convert one location, or an iterable of locations, to strings. A single location becomes one string instead of a list."""
    # Not os.fspath: objects for remote paths have no local path, or download the file to get one.
    names = [str(part) for part in ([where] if isinstance(where, str) or not isinstance(where, Iterable) else where)]
    return names[0] if len(names) == 1 else names


TRAINED = "batches_trained"
"""Key under which the state of a data module in a checkpoint holds the number of batches trained on."""


def batches_trained(trainer: Trainer) -> int:
    """Return the total number of batches that a run has trained on, including those before it was interrupted and resumed."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.total
    return progress.processed  # type: ignore[attr-defined]  # Lightning's annotation names the base class


def data_batch_size(state: dict[str, Any]) -> int | None:
    """Return the batch size that a data module has saved in a checkpoint; None if the checkpoint has no valid batch size.

    Args:
        state: state of the data module in the checkpoint.
    """
    size = state.get("batch_size", len(state.get("rows") or ()))
    return size if isinstance(size, int) and size > 0 else None


def process_share(trainer: Trainer | None) -> tuple[int, int]:
    """Return the rank of this process among the processes that divide the samples, and the number of these processes.

    Processes that share sequences read the same samples, and count as one. Without a trainer, the result is ``(0, 1)``.
    """
    share = (trainer.distributed_sampler_kwargs if trainer is not None else None) or {}
    return share.get("rank", 0), share.get("num_replicas", 1)


class ResumableDataModule(LoggedApart, LightningDataModule):
    """Base class of data modules whose training loader, after an interruption, continues with exactly the next sample.

    Subclasses implement :meth:`source`, which returns the data set of a stage.

    Args:
        batch_size: number of samples in a batch, summed over all processes. It must be a multiple of the number of processes.
        num_workers: number of worker processes that read samples, for each training process.
        seed: seed of the sample order and of the random numbers for each sample; null to use the seed of ``seed_everything``.
        shards: options for reading shards and keeping downloads.

    Raises:
        ValueError: if ``batch_size`` is below 1, or ``num_workers`` or ``seed`` is negative.
    """

    logged_as = "data"
    shards: ShardSets | None = None
    """Shards that the data module reads, which are found, downloaded and scanned before training; None if it reads none."""
    repeats: int = 1
    """Number of times that a training sample occurs in an epoch; see :func:`lightning_mhla.data.sampling.repeated`."""

    def __init__(
        self,
        batch_size: int,
        num_workers: int = 0,
        seed: int | None = None,
        shards: ShardOptions = ShardOptions(shuffle_window=None),
    ) -> None:
        super().__init__()
        check_range(least=1, batch_size=batch_size)
        check_range(least=0, num_workers=num_workers)
        check_seed(seed=seed)
        self.batch_size, self.num_workers = batch_size, num_workers
        self.shard_options = as_dataclass(ShardOptions, shards, "shards")
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed

        self._trained_with: dict[str, Any] | None = None
        self._order: dict[str, Any] = {}
        self._train_loader: ResumableLoader | None = None

    @override
    def prepare_data(self) -> None:
        if isinstance(self.shards, ShardSets):
            self.shards.prepare(self.trainer)

    @override
    def setup(self, stage: str) -> None:
        """Discard the training loader and the restored checkpoint state of an earlier ``fit``.

        Lightning calls :meth:`load_state_dict` after this method if training resumes from a checkpoint.

        Args:
            stage: stage of the trainer. Only ``"fit"`` has an effect.
        """
        if stage == "fit":
            self._trained_with = self._train_loader = None

    def source(self, stage: str) -> SampleSource:
        """Create the data set for a stage.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """
        raise NotImplementedError

    def train_dataloader(self) -> ResumableLoader:
        """Create the loader of shuffled training batches, which continues after the batches already trained on.

        Raises:
            ValueError: if the checkpoint to resume from was saved with a different sample order.
        """
        loader = self._loader("train", train=True)
        if self._trained_with is not None:
            loader.check_order(self._trained_with)
        self._order, self._train_loader = loader.state_dict(), loader
        if self.trainer is not None:
            # A function and not a value, because the position changes from epoch to epoch.
            loader.progress = self._progress
        return loader

    def val_dataloader(self) -> ResumableLoader:
        """Create the loader of validation batches, which contain every sample once, apart from repeats that fill up a batch."""
        return self._loader("validate")

    def test_dataloader(self) -> ResumableLoader:
        """Create the loader of test batches, which contain every sample once, apart from repeats that fill up a batch."""
        return self._loader("test")

    def predict_dataloader(self) -> ResumableLoader:
        """Create the loader of prediction batches, which contain every sample once, apart from repeats that fill up a batch."""
        return self._loader("predict")

    def _progress(self) -> Progress:
        """Return the current position of the run in its training data.

        With the trainer option ``overfit_batches``, the epoch is always 0, so that every epoch has the same order.

        Raises:
            ValueError: if the checkpoint to resume from was saved with a different number of batches in an epoch.
        """
        assert self.trainer is not None
        steps = int(self.trainer.num_training_batches)
        saved_steps = (self._trained_with or {}).get("steps", steps)
        if saved_steps != steps:
            raise ValueError(
                f"the checkpoint's epochs had {saved_steps} batches, this run's have {steps}: it cannot resume with the "
                "very next sample. Set limit_train_batches back, or start a new run from the weights alone"
            )
        self._order["steps"] = steps
        epoch, done = divmod(batches_trained(self.trainer), steps)
        overfit: float = self.trainer.overfit_batches  # type: ignore[attr-defined]  # set when the trainer is made
        return Progress(0 if overfit else epoch, done, steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the options that determine the order of training samples, and the number of batches trained on, by name."""
        return {**self._order, TRAINED: batches_trained(self.trainer)} if self.trainer is not None else self._order

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a checkpoint was saved with the same order of training samples.

        The check is made at once if the training loader exists, and otherwise when it is created. A checkpoint saved before the
        first batch is not checked, because Lightning's BatchSizeFinder restores such a checkpoint with a different batch size.

        Args:
            state_dict: state of the data module in the checkpoint, as returned by :meth:`state_dict`.

        Raises:
            ValueError: if an option that determines the order, such as the batch size or the seed, differs.
        """
        if state_dict.get(TRAINED) == 0:
            return
        self._trained_with = {name: value for name, value in state_dict.items() if name != TRAINED}
        if self._train_loader is not None:
            self._train_loader.check_order(state_dict)

    def _loader(self, stage: str, train: bool = False) -> ResumableLoader:
        rank, world = process_share(self.trainer)
        shards = self.shards if isinstance(self.shards, ShardSets) and stage != "predict" else None
        options = self.shard_options
        # Evaluation does not shuffle.
        ahead = None if shards is None else shards.ahead(stage, options.shuffle_window if train else 1)
        source = self.source(stage)
        return ResumableLoader(
            source,
            self.batch_size,
            train=train,
            seed=self.seed,
            window=options.shuffle_window,
            max_skipped=options.max_skipped,
            num_workers=self.num_workers,
            rank=rank,
            world=world,
            ahead=ahead,
            repeats=self.repeats,
        )
