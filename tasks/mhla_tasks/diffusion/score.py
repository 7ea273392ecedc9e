"""Scores of samples that are already there: what ``lightning score`` prints."""

from __future__ import annotations

import json
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
    fingerprint,
)
from lightning_mhla.generative.fidelity.scores import read_set, score
from lightning_mhla.system.processes import process_device
from mhla_tasks.commandline.console import harmless

NETWORKS: dict[str, type[FeatureNetwork]] = {"digits": DigitFeatures, "mnist": MnistFeatures, "random": RandomFeatures}


def compare_sets(
    samples: str, reference: str, features: str, weights: str | None, batch_size: int, device: str | None
) -> dict[str, Any]:
    """Scores of one set of images against another, and what they depend on.

    Args:
        samples: folder of images, or ``.npz``.
        reference: folder of images, or ``.npz``.
        features: network whose features are compared: inception, digits, mnist or random.
        weights: file of torch-fidelity's Inception-v3; None to download it.
        batch_size: images at once.
        device: cpu or cuda; None for a GPU if there is one.
    """
    network = InceptionFeatures(weights) if features == "inception" else NETWORKS[features]()
    where = process_device(device)
    one, two = (read_set(path, network, where, batch_size) for path in (samples, reference))
    scores = score(one, two)
    return {
        **scores.values,
        "marks": scores.marks,
        "samples": one.count,
        "samples_sha256": one.digest,
        "reference_images": two.count,
        "reference_sha256": two.digest,
        "features_sha256": fingerprint(network.network()),
    }


def print_scores(found: dict[str, Any], title: str, as_json: bool) -> None:
    """Print a table, or JSON."""
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    table = Table("metric", "value", title=escape(harmless(title)), caption="\n".join(found["marks"]))
    for name, value in found.items():
        if name != "marks":
            table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console().print(table)
