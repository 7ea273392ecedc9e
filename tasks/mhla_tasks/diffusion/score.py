"""FID, sFID, Inception Score, KID, precision and recall of samples that are already there.

    python -m mhla_tasks.diffusion.score runs/dit/version_0/samples.npz VIRTUAL_imagenet256_labeled.npz
    python -m mhla_tasks.diffusion.score samples/ photos/ --weights weights-inception-2015-12-05-6726825d.pth

Samples and reference are a folder of images each, or an .npz: of images (arr_0) as predict writes it, of reference
statistics (mu, sigma, mu_s, sigma_s), or of both, as for ADM's evaluator.
"""

from __future__ import annotations

import json
import sys

import torch
from rich.console import Console
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
from lightning_mhla.system.commands import command_parser, short_errors


def main() -> None:
    """Command line."""
    parser = command_parser("mhla_tasks.diffusion.score", __doc__)
    parser.add_argument("samples", help="folder of images, or .npz")
    parser.add_argument("reference", help="folder of images, or .npz")
    parser.add_argument(
        "--features",
        choices=("inception", "digits", "mnist", "random"),
        default="inception",
        help="network whose features are compared; random needs no download (default: inception)",
    )
    parser.add_argument("--weights", help="file of torch-fidelity's Inception-v3; downloaded if not given")
    parser.add_argument("--batch-size", type=int, default=64, help="images at once (default: 64)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    networks = {"digits": DigitFeatures, "mnist": MnistFeatures, "random": RandomFeatures}
    chosen = networks.get(args.features)
    features: FeatureNetwork = InceptionFeatures(args.weights) if chosen is None else chosen()
    device = torch.device(args.device)
    with short_errors():
        one, two = (read_set(path, features, device, args.batch_size) for path in (args.samples, args.reference))
        scores = score(one, two)
    depends = {
        "samples": one.count,
        "samples_sha256": one.digest,
        "reference_images": two.count,
        "reference_sha256": two.digest,
        "features_sha256": fingerprint(features.network()),
    }
    if args.json:
        sys.stdout.write(json.dumps({**scores.values, "marks": scores.marks, **depends}) + "\n")
        return
    table = Table("metric", "value", title=f"{args.samples} against {args.reference}", caption="\n".join(scores.marks))
    for name, value in {**scores.values, **depends}.items():
        table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
