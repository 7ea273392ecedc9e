"""Tools that measure: models, samples, runs, and the operator."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from runpy import run_module

from mhla_tasks.commandline.registry import Run, passes_on

CHECKOUT = Path(__file__).resolve().parents[3]
"""Root of the repository where the package is installed in place; a folder without benchmarks otherwise."""


@passes_on
def evaluate(words: Sequence[str]) -> int | None:
    """Score a language model with lm-evaluation-harness.

        lightning evaluate --model_args pretrained=runs/stdlib --tasks mmlu,arc_easy

    Takes the options of ``lm_eval``, and is ``mhla-lm-eval``.
    """
    from mhla_tasks.language.evaluation.script import main

    sys.argv = ["lightning evaluate", *words]
    main()
    return None


def score(parser: ArgumentParser) -> Run:
    """FID, sFID, Inception Score, KID, precision and recall of samples that are already there.

        lightning score runs/dit/version_0/samples.npz VIRTUAL_imagenet256_labeled.npz
        lightning score samples/ photos/ --weights weights-inception-2015-12-05-6726825d.pth

    Samples and reference are a folder of images each, or an .npz: of images (arr_0) as predict writes it, of reference
    statistics (mu, sigma, mu_s, sigma_s), or of both, as for ADM's evaluator.
    """
    parser.add_argument("samples", help="folder of images, or .npz")
    parser.add_argument("reference", help="folder of images, or .npz")
    parser.add_argument(
        "--features",
        choices=("inception", "digits", "mnist", "random"),
        default="inception",
        help="network whose features are compared; random needs no download (default: inception)",
    )
    parser.add_argument("--weights", help="file of torch-fidelity's Inception-v3; downloaded if not given")
    parser.add_argument("--batch_size", type=int, default=64, help="images at once (default: 64)")
    parser.add_argument("--device", help="cpu or cuda; a GPU if there is one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(args: Namespace) -> None:
        from mhla_tasks.diffusion.score import compare_sets, print_scores

        found = compare_sets(args.samples, args.reference, args.features, args.weights, args.batch_size, args.device)
        print_scores(found, f"{args.samples} against {args.reference}", args.json)

    return run


def arrange(parser: ArgumentParser) -> Run:
    """Copy drawn images into the folders that GenEval, DPG-Bench or MJHQ-30K's FID read.

        lightning arrange runs/sana/predict/images geneval --layout geneval --prompts evaluation_metadata.jsonl

    The images are those that ``predict`` drew for the same list of prompts, four for each prompt (per_prompt=4) for GenEval
    and DPG-Bench, one for MJHQ-30K. The list is evaluation_metadata.jsonl of GenEval, the folder of prompts of DPG-Bench, or
    meta_data.json of MJHQ-30K.
    """
    parser.add_argument("images", type=Path, help="folder of images that predict wrote")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--layout", choices=("geneval", "dpg", "mjhq"), required=True, help="whose layout")
    parser.add_argument("--prompts", type=Path, required=True, help="list of prompts that the images were drawn for")

    def run(args: Namespace) -> None:
        from mhla_tasks.text_to_image import layouts

        count = layouts.arrange(args.images, args.prompts, args.layout, args.target)
        sys.stdout.write(f"images of {count} prompts in {args.target}\n")

    return run


def compare(parser: ArgumentParser) -> Run:
    """Lay runs side by side: options that differ, metrics, time, parameters, and curves in one picture.

        lightning compare runs/mnist runs/digits/version_3 --picture compared.png

    Takes all runs in the folders that it is given: those with a ``run.json``, which ``RunReport`` writes. Metrics are those
    of the last validation; the best one is that by which checkpoints were chosen.
    """
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several")
    parser.add_argument("--picture", type=Path, help="file for the curves (default: no picture)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(args: Namespace) -> None:
        from mhla_tasks.tools.compare import as_json, draw, print_table, read_runs

        runs = read_runs(args.runs)
        if args.json:
            sys.stdout.write(json.dumps(as_json(runs), indent=1) + "\n")
        else:
            print_table(runs)
        if args.picture:
            draw(runs, args.picture)
            sys.stderr.write(f"curves: {args.picture}\n")

    return run


def layers(parser: ArgumentParser) -> Run:
    """Measure what each replaced layer of a linearised model costs, and propose a hybrid.

        lightning layers runs/linearize-stdlib/version_0 --keep 0.25

    Scores held-out samples of the run's data with one new layer after the other, all others being the original ones, and
    proposes ``layer_kinds`` with the given share of layers kept. Best after the layer steps of distillation.
    """
    parser.add_argument("checkpoint", type=Path, help="checkpoint or run of a LinearizedModel or a TimmClassifier")
    parser.add_argument("--keep", type=float, default=0.25, help="share of the layers to keep (default: 0.25)")
    parser.add_argument("--batches", type=int, default=16, help="batches of validation data (default: 16)")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, .. (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(args: Namespace) -> None:
        from mhla_tasks.tools import layer_costs

        found = layer_costs.measure(args.checkpoint, args.keep, args.batches, args.accelerator)
        sys.stdout.write(json.dumps(found, indent=1) + "\n" if args.json else layer_costs.table(found))

    return run


@passes_on
def bench(words: Sequence[str]) -> int | None:
    """Run a benchmark of the repository: attention, generation, models, recurrences and more.

        lightning bench attention --device cpu

    ``lightning bench`` lists them; ``lightning bench NAME --help`` has the options of one. They need a checkout.
    """
    return _run_of_checkout("benchmarks", words)


@passes_on
def paper(words: Sequence[str]) -> int | None:
    """Train and score the comparisons of docs/results.md, row by row; resumes.

        lightning paper --only mnist --seeds 0

    ``lightning paper --list`` lists studies and rows. It needs a checkout.
    """
    return _run_of_checkout("benchmarks.paper", words)


def _run_of_checkout(program: str, words: Sequence[str]) -> int | None:
    """Run a program of the repository as ``python -m`` does; status 2, with a message, where this is not a checkout.

    Benchmarks use this package, which imports none of them.
    """
    if not (CHECKOUT / "benchmarks/__main__.py").is_file():
        sys.stderr.write(
            "error: the benchmarks are part of the repository, not of the package: clone it, then pip install -e .\n"
        )
        return 2
    sys.path.insert(0, str(CHECKOUT))  # first, so that no package of this name in the working folder runs instead
    sys.argv[1:] = words
    run_module(program, run_name="__main__", alter_sys=True)
    return None
