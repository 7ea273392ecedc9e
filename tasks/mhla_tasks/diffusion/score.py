"""Scores such as FID for existing sets of images, for the command ``lightning score``."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_mhla.generative.fidelity.features import (
    DigitFeatures,
    FeatureNetwork,
    InceptionFeatures,
    MnistFeatures,
    RandomFeatures,
)
from lightning_mhla.generative.fidelity.scores import read_set, score
from lightning_mhla.system.files import to_json
from lightning_mhla.system.numbers import rounded
from lightning_mhla.system.processes import process_device
from lightning_mhla.system.sharding import fingerprint
from mhla_tasks.commandline.console import harmless

NETWORKS: dict[str, type[FeatureNetwork]] = {"digits": DigitFeatures, "mnist": MnistFeatures, "random": RandomFeatures}


def compare_sets(
    samples: str, reference: str, features: str, weights: str | None, batch_size: int, device: str | None
) -> dict[str, Any]:
    """Compare generated images with real images by FID, sFID, Inception Score, KID, precision and recall.

    Args:
        samples: path of a folder of generated images, or of an ``.npz`` file with images or with statistics of their features.
        reference: path of a folder of real images, or of an ``.npz`` file with images or with statistics of their features.
        features: network whose features are compared: inception (Inception-v3), digits or mnist (small classifiers of digits,
            trained on first use), or random (a convolutional network with random weights).
        weights: path of the weights of torch-fidelity's Inception-v3; None to download them, or for a different network.
        batch_size: number of images processed at once.
        device: ``cpu`` or ``cuda``; None for a GPU if the machine has one, otherwise the CPU.

    Returns:
        A dict with the scores by name, such as ``fid``. The entry ``marks`` is a list of remarks on the scores. ``samples`` and
        ``reference_images`` are the numbers of generated and real images. ``samples_sha256``, ``reference_sha256`` and
        ``features_sha256`` are checksums of the two sets and of the network.

    Raises:
        FileNotFoundError: if a path does not exist, or a folder contains no images.
        ValueError: if a file contains neither images nor statistics, the images of a set have different sizes, or ``weights``
            is combined with a network other than inception.
    """
    if weights is not None and features != "inception":
        raise ValueError(
            f"--weights {weights} is for the features of inception, and --features {features} reads no weights; leave "
            "out --weights, or choose --features inception"
        )
    network = InceptionFeatures(weights) if features == "inception" else NETWORKS[features]()
    torch_device = process_device(device)
    sample_set, reference_set = (read_set(path, network, torch_device, batch_size) for path in (samples, reference))
    scores = score(sample_set, reference_set)
    return {
        **scores.values,
        "marks": scores.marks,
        "samples": sample_set.count,
        "samples_sha256": sample_set.digest,
        "reference_images": reference_set.count,
        "reference_sha256": reference_set.digest,
        "features_sha256": fingerprint(network.network()),
    }


def print_scores(scores: dict[str, Any], title: str, as_json: bool) -> None:
    """Print the result of :func:`compare_sets` as a table with a title, or as JSON.

    Args:
        scores: scores and remarks by name, as :func:`compare_sets` returns them.
        title: title of the table.
        as_json: whether to print JSON instead of a table.
    """
    if as_json:
        sys.stdout.write(to_json(scores) + "\n")
        return
    table = Table("metric", "value", title=escape(harmless(title)), caption="\n".join(scores["marks"]))
    for name, value in scores.items():
        if name != "marks":
            table.add_row(name, value if isinstance(value, str) else rounded(value))
    Console().print(table)
