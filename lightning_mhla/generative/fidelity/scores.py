"""FID, sFID, Inception Score, KID, precision and recall of generated images, computed with torch-fidelity."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from torch import Tensor, nn
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, KEY_METRIC_ISC_STD, isc_features_to_metric
from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, KEY_METRIC_KID_STD, kid_features_to_metric
from torch_fidelity.metric_prc import KEY_METRIC_PRECISION, KEY_METRIC_RECALL, prc_features_to_metric

from lightning_mhla.data.images import decode_file, image_files
from lightning_mhla.generative.fidelity.features import FeatureNetwork, Features
from lightning_mhla.system.listing import shown
from lightning_mhla.system.untrusted import read_arrays

PUBLISHED_COUNT = 50_000
"""Number of samples with which FID is usually published."""

KID_SUBSET = 1000
"""Maximum number of samples in each random subset from which KID is computed, the default of torch-fidelity."""

SPLITS = 10
"""Number of parts into which the images are divided for the Inception Score, the mean over the parts.

torch-fidelity uses ten parts, as does ADM's evaluator for 50,000 images.
"""


STATISTICS, LARGEST_STATISTICS = ("mu", "sigma", "mu_s", "sigma_s"), 1 << 28
"""Names of arrays with reference statistics, and maximum size of an array in bytes, enough for 5,792 features."""


class Moments(NamedTuple):
    """Mean ``[D]`` and covariance ``[D, D]`` of D image features, both float64."""

    mean: np.ndarray
    covariance: np.ndarray


def moments(features: Tensor) -> Moments:
    """Compute the mean and covariance of image features ``[n, D]`` in float64, for n images with D features each."""
    statistics = fid_features_to_statistics(features.double().cpu())
    return Moments(statistics["mu"], np.atleast_2d(statistics["sigma"]))


def frechet_distance(one: Moments, two: Moments) -> float:
    """Compute the Fréchet distance (FID, equation 6 of arXiv 1706.08500) between two normal distributions.

    Args:
        one: mean and covariance of the first distribution.
        two: mean and covariance of the second distribution.
    """
    pair = [{"mu": moments.mean, "sigma": moments.covariance} for moments in (one, two)]
    return fid_statistics_to_metric(*pair, verbose=False)[KEY_METRIC_FID]


@dataclass
class ImageSet:
    """Features and statistics of a set of n images, from which metrics are computed.

    Attributes:
        origin: description of the set for messages, such as its path.
        digest: hash of the images or the statistics; empty for generated images.
        count: number of images from which the statistics are computed; None if the statistics were read from a file, which does
            not state the number.
        pooled: features ``[n, D]`` for FID, KID, precision and recall; None if only statistics are known.
        logits: class scores ``[n, K]``; None if the feature network does not compute them or only statistics are known.
        spatial: features ``[n, S]`` for sFID; None if the feature network does not compute them or only statistics are known.
        statistics: mean and covariance of the features, under the keys ``"pooled"`` and ``"spatial"``. They are read from a
            file, or computed when they are first needed.
    """

    origin: str
    digest: str
    count: int | None
    pooled: Tensor | None = None
    logits: Tensor | None = None
    spatial: Tensor | None = None
    statistics: dict[str, Moments] = field(default_factory=dict)

    def moments(self, name: str) -> Moments | None:
        """Return the mean and covariance of the ``"pooled"`` or ``"spatial"`` features.

        Args:
            name: ``"pooled"`` for FID, or ``"spatial"`` for sFID.

        Returns:
            The mean and covariance; None if the set has neither these statistics nor such features of at least two images.
        """
        features: Tensor | None = getattr(self, name)
        if name not in self.statistics and features is not None and len(features) > 1:
            self.statistics[name] = moments(features)
        return self.statistics.get(name)


def image_set(origin: str, batches: Iterable[Tensor], features: FeatureNetwork, device: torch.device) -> ImageSet:
    """Compute the features of all images of a set.

    Args:
        origin: description of the set for messages, such as its path.
        batches: images in batches of b images, ``[b, C, S, S]`` uint8 on the CPU.
        features: feature network.
        device: device on which the features are computed.

    Raises:
        ValueError: if there are no images.
    """
    network = features.network().to(device)
    digest, parts = hashlib.sha256(), []
    for images in batches:
        digest.update(images.contiguous().numpy().data)
        parts.append(extract(features, network, images.to(device)))
    return assemble(origin, digest.hexdigest()[:16], parts)


@torch.no_grad()
def extract(features: FeatureNetwork, network: nn.Module, images: Tensor) -> Features:
    """Compute the features of one batch of images in float32, even under autocast.

    Args:
        features: feature network, which defines how images are preprocessed.
        network: network returned by ``features.network()``.
        images: images ``[b, C, S, S]`` uint8 on the device of ``network``.
    """
    with torch.autocast(images.device.type, enabled=False):
        return features.extract(network, images)


def assemble(origin: str, digest: str, parts: Sequence[Features]) -> ImageSet:
    """Combine the features of several batches, in order, into the features of one set of images.

    Args:
        origin: description of the set for messages, such as its path.
        digest: hash of the images; empty for generated images.
        parts: features of each batch.

    Raises:
        ValueError: if there are no batches.
    """
    if not parts:
        raise ValueError(f"{origin} holds no images")
    columns = [None if values[0] is None else torch.cat(values).cpu() for values in zip(*parts, strict=True)]
    pooled, spatial, logits = columns
    assert pooled is not None
    return ImageSet(origin, digest, len(pooled), pooled, logits, spatial)


def read_set(path: str, features: FeatureNetwork, device: torch.device, batch_size: int = 64) -> ImageSet:
    """Compute the features of images in a folder or an ``.npz`` file, or read the statistics of features from the file.

    Args:
        path: path of a folder of images, or of an ``.npz`` file in the format of ADM's evaluator. The file contains one
            or both of the following. With both, FID and sFID are computed from the statistics.

            - Images: ``arr_0``, ``[N, S, S, 3]``, or ``[N, S, S, 1]`` for gray images, uint8.
            - Statistics: ``mu`` and ``sigma``, and for sFID ``mu_s`` and ``sigma_s``. They must have been computed with the
              same feature network.
        features: feature network.
        device: device on which the features are computed.
        batch_size: number of images to process at once.

    Raises:
        FileNotFoundError: if the path does not exist, or the folder contains no images.
        ValueError: if the file contains neither images nor statistics, if its arrays have different shapes or dtypes than
            described, if statistics are not finite, or if the images in a folder have different sizes.
    """
    local = Path(path)
    if local.is_dir():
        files = image_files(local)
        batches = _read_batches(files, batch_size)
        return image_set(path, _shown(batches, local, -(-len(files) // batch_size)), features, device)
    if not local.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a folder of images, or an .npz of images or statistics")
    # Images have no limit of their own; `read_arrays` bounds them by the size of the file.
    arrays = read_arrays(local, {"arr_0": 1 << 48, **dict.fromkeys(STATISTICS, LARGEST_STATISTICS)})
    return _from_arrays(path, arrays, features, device, batch_size)


def _from_arrays(
    path: str, arrays: Mapping[str, np.ndarray], features: FeatureNetwork, device: torch.device, batch_size: int
) -> ImageSet:
    statistics: dict[str, Moments] = {}
    for name, keys in {"pooled": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}.items():
        if keys[0] in arrays and keys[1] in arrays:
            if any(arrays[key].dtype.kind != "f" or not np.isfinite(arrays[key]).all() for key in keys):
                raise ValueError(f"{path}: {keys[0]} and {keys[1]} are not finite floating-point numbers")
            mean, covariance = (np.float64(arrays[key]) for key in keys)
            if mean.ndim != 1 or covariance.shape != (len(mean),) * 2:
                raise ValueError(f"{path}: {keys[0]} {mean.shape} and {keys[1]} {covariance.shape} are no moments")
            statistics[name] = Moments(mean, covariance)
    images = arrays.get("arr_0")
    if images is None and "pooled" not in statistics:
        raise ValueError(
            f"{path} holds neither images (arr_0) nor reference statistics (mu, sigma), only {sorted(arrays)}"
        )
    digest = hashlib.sha256()
    for _, array in sorted(arrays.items()):
        digest.update(np.ascontiguousarray(array).data)
    if images is None:
        return ImageSet(path, digest.hexdigest()[:16], None, statistics=statistics)
    if images.ndim != 4 or images.dtype != np.uint8 or images.shape[-1] not in (1, 3):
        raise ValueError(f"{path}: arr_0 is {images.dtype} {images.shape}, not uint8 [N, S, S, 3]")
    chunks = range(0, len(images), batch_size)
    batches = (torch.from_numpy(images[start : start + batch_size]).permute(0, 3, 1, 2) for start in chunks)
    image_features = image_set(path, _shown(batches, Path(path), len(chunks)), features, device)
    image_features.digest, image_features.statistics = digest.hexdigest()[:16], statistics
    if "pooled" in statistics:
        image_features.count = None  # the statistics may be those of more images than the file holds
    return image_features


def _shown(batches: Iterable[Tensor], path: Path, count: int) -> Iterable[Tensor]:
    """Iterate over batches of images with a progress bar on standard error, so that standard output contains only results.

    Args:
        batches: batches of images.
        path: path of the images, whose last component is shown beside the bar.
        count: number of batches.
    """
    return track(batches, f"features of {escape(shown(path.name))}", total=count, console=Console(stderr=True))


def _read_batches(files: Sequence[Path], batch_size: int) -> Iterator[Tensor]:
    """Read image files in batches.

    Args:
        files: paths of the images.
        batch_size: number of images in a batch. The last batch may have fewer.

    Yields:
        Batch of b images ``[b, 3, H, W]`` uint8.

    Raises:
        ValueError: if the images have different sizes.
    """
    first: tuple[Path, Sequence[int]] | None = None
    for start in range(0, len(files), batch_size):
        batch = []
        for path in files[start : start + batch_size]:
            image = torch.from_numpy(np.array(decode_file(path))).permute(2, 0, 1)
            first = first or (path, image.shape)
            if image.shape != first[1]:
                pairs = (first, (path, image.shape))
                sizes = " and ".join(f"{shown(file.name)} of {size[2]} x {size[1]}" for file, size in pairs)
                raise ValueError(
                    f"{path.parent} holds images of different sizes, {sizes}; bring them to one size first"
                )
            batch.append(image)
        yield torch.stack(batch)


@dataclass
class Scores:
    """Metrics of generated images compared with real images, and remarks about the metrics.

    Attributes:
        values: values by metric name: ``fid``, ``sfid``, ``inception_score``, ``kid``, ``precision`` and ``recall``, and the
            standard deviations ``inception_score_std`` and ``kid_std``. Metrics that could not be computed are left out.
        marks: remarks, for example that there are too few samples for a reliable value.
    """

    values: dict[str, float]
    marks: list[str]


def score(generated: ImageSet, reference: ImageSet, seed: int = 2020) -> Scores:
    """Compute FID and related metrics of generated images. Metrics that need missing features or more images are left out.

    Args:
        generated: features or statistics of the generated images.
        reference: features or statistics of the real images.
        seed: seed of the random order and subsets for Inception Score and KID. The default is torch-fidelity's.

    Raises:
        ValueError: if the two sets have different numbers of features.
    """
    values: dict[str, float] = {}
    marks = list(_marks(generated, reference))
    for metric, name in (("fid", "pooled"), ("sfid", "spatial")):
        generated_moments, reference_moments = generated.moments(name), reference.moments(name)
        if generated_moments is None or reference_moments is None:
            continue
        if len(generated_moments.mean) != len(reference_moments.mean):
            raise ValueError(
                f"{reference.origin} has {len(reference_moments.mean)} features and {generated.origin} "
                f"{len(generated_moments.mean)}: they are of different feature networks"
            )
        values[metric] = frechet_distance(generated_moments, reference_moments)
    if generated.logits is not None and len(generated.logits) >= SPLITS:
        metrics = isc_features_to_metric(generated.logits, splits=SPLITS, shuffle=True, rng_seed=seed)
        values |= {"inception_score": metrics[KEY_METRIC_ISC_MEAN], "inception_score_std": metrics[KEY_METRIC_ISC_STD]}
    if generated.pooled is None or reference.pooled is None:
        without_images = reference if reference.pooled is None else generated
        marks.append(f"no kid, precision, recall: {without_images.origin} has statistics only, no images")
        return Scores(values, marks)
    subset = min(KID_SUBSET, len(generated.pooled), len(reference.pooled))
    if subset > 1:
        metrics = kid_features_to_metric(
            generated.pooled.double(), reference.pooled.double(), kid_subset_size=subset, rng_seed=seed, verbose=False
        )
        values |= {"kid": metrics[KEY_METRIC_KID_MEAN], "kid_std": metrics[KEY_METRIC_KID_STD]}
    # Precision and recall need three neighbors of each image.
    if min(len(generated.pooled), len(reference.pooled)) > 4:
        metrics = prc_features_to_metric(generated.pooled, reference.pooled, save_cpu_ram=True, verbose=False)
        values |= {"precision": metrics[KEY_METRIC_PRECISION], "recall": metrics[KEY_METRIC_RECALL]}
    return Scores(values, marks)


def _marks(generated: ImageSet, reference: ImageSet) -> Iterator[str]:
    for one_set in (generated, reference):
        set_moments = one_set.moments("pooled")
        if set_moments is None:
            yield f"no fid: {one_set.count} image of {one_set.origin} has no covariance"
        elif one_set.count is not None and one_set.count <= len(set_moments.mean):
            yield (
                f"fid is not reliable: {one_set.count:,} images of {one_set.origin} are fewer than FID needs for "
                f"{len(set_moments.mean):,} features (their covariance is singular)"
            )
    if generated.count is not None and generated.count < PUBLISHED_COUNT:
        yield f"fid of {generated.count:,} samples: higher than with the {PUBLISHED_COUNT:,} that are usual"
