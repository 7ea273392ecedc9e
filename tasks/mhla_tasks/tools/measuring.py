"""Command-line tools that measure and compare models, samples, runs and the MHLA operator."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from runpy import run_module

from mhla_tasks.commandline.registry import Run, passes_on

CHECKOUT = Path(__file__).resolve().parents[3]
"""Root of the repository, if the package is installed from a checkout. Otherwise a folder without benchmarks."""

FORMS = {
    "markdown": "a Markdown table",
    "csv": "CSV with unrounded numbers, seeds and folders",
    "latex": "a LaTeX table for the package booktabs",
    "json": "the records of all runs as JSON",
}
"""Formats of ``lightning compare`` other than a table for the terminal."""


@passes_on
def evaluate(arguments: Sequence[str]) -> int | None:
    """Score a language model with lm-evaluation-harness.

        lightning evaluate --model_args pretrained=runs/stdlib --tasks mmlu,arc_easy

    The command accepts the options of ``lm_eval``. ``mhla-lm-eval`` is another name of this command.

    Args:
        arguments: command-line arguments after ``lightning evaluate``.

    Returns:
        Always None, which stands for success.
    """
    from mhla_tasks.language.evaluation.script import main

    sys.argv = ["lightning evaluate", *arguments]
    main()
    return None


def score(parser: ArgumentParser) -> Run:
    """Compute FID, sFID, Inception Score, KID, precision and recall of existing samples.

        lightning score runs/dit/version_0/samples.npz VIRTUAL_imagenet256_labeled.npz
        lightning score samples/ photos/ --weights weights-inception-2015-12-05-6726825d.pth

    The first argument names the generated images, and the second names the real images (reference). Each is a folder of images
    or an .npz file in the format of ADM's evaluator. Such a file contains images (arr_0), statistics of features (mu, sigma,
    mu_s, sigma_s), or both. The predict command writes images in this format.
    """
    parser.add_argument("samples", help="folder of images, or .npz")
    parser.add_argument("reference", help="folder of images, or .npz")
    parser.add_argument(
        "--features",
        choices=("inception", "digits", "mnist", "random"),
        default="inception",
        help="network whose features are compared; random requires no download (default: inception)",
    )
    parser.add_argument("--weights", help="weights file of torch-fidelity's Inception-v3; downloaded by default")
    parser.add_argument("--batch_size", type=int, default=64, help="images per batch (default: 64)")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(args: Namespace) -> None:
        from lightning_mhla.system.ranges import check_range
        from mhla_tasks.diffusion.score import compare_sets, print_scores

        check_range(least=1, batch_size=args.batch_size)
        scores = compare_sets(args.samples, args.reference, args.features, args.weights, args.batch_size, args.device)
        print_scores(scores, f"{args.samples} against {args.reference}", args.json)

    return run


def arrange(parser: ArgumentParser) -> Run:
    """Copy generated images to the folder layout of GenEval, DPG-Bench or the FID of MJHQ-30K.

        lightning arrange runs/sana/predict/images geneval --layout geneval --prompts evaluation_metadata.jsonl

    The ``predict`` command must have generated the images for the same list of prompts. GenEval and DPG-Bench expect four
    images per prompt (per_prompt=4), and MJHQ-30K expects one. The list of prompts is evaluation_metadata.jsonl for GenEval,
    the folder of prompts for DPG-Bench, and meta_data.json for MJHQ-30K.
    """
    parser.add_argument("images", type=Path, help="folder of images that predict wrote")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument(
        "--layout", choices=("geneval", "dpg", "mjhq"), required=True, help="layout of the target folder"
    )
    parser.add_argument("--prompts", type=Path, required=True, help="list of prompts of the images")

    def run(args: Namespace) -> None:
        from mhla_tasks.text_to_image import layouts

        count = layouts.arrange(args.images, args.prompts, args.layout, args.target)
        sys.stdout.write(f"images of {count} prompts in {args.target}\n")

    return run


def compare(parser: ArgumentParser) -> Run:
    """Compare runs: means over seeds, options that differ, time, parameters, curves and pictures.

        lightning compare runs/kinds --html compared.html
        lightning compare runs/mhla runs/softmax --latex --metrics val/accuracy

    The command compares all runs in the given folders that have a ``run.json``, which the callback ``RunReport`` writes.
    Completed runs that differ only in their seed and have the same number of training steps form one row, which shows the mean
    and the standard deviation. The table shows the metrics of the last validation. It also shows the best value of the metric
    that was used to choose checkpoints. The best value of a column is bold. Runs of a sweep keep the order of the sweep.
    """
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several")
    forms = parser.add_mutually_exclusive_group()
    for form, text in FORMS.items():
        forms.add_argument(f"--{form}", dest="form", action="store_const", const=form, help=f"print {text}")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a web page with table, curves and pictures")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="write the curves to a picture, such as x.png or x.pdf"
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help="metrics to show, in this order; also 'best NAME', steps, time, parameters (default: all)",
    )

    def run(args: Namespace) -> None:
        from mhla_tasks.tools.compare import compare as compare_runs

        compare_runs(args.runs, args.form or "table", args.html, args.picture, args.metrics)

    return run


def layers(parser: ArgumentParser) -> Run:
    """Measure how much each replaced layer of a linearized model adds to the loss, and propose a hybrid.

        lightning layers runs/linearize-stdlib/version_0 --keep 0.25

    For each layer, the command measures the loss on validation data with the new attention in this layer only and softmax
    attention in all others. It then proposes ``layer_kinds`` for a hybrid model, which keeps softmax attention in the layers
    that add most to the loss. ``--keep`` sets their share. Run the command after the layer-wise steps of distillation.
    """
    parser.add_argument(
        "checkpoint", type=Path, help="checkpoint or run folder of a model whose attention was replaced"
    )
    parser.add_argument("--keep", type=float, default=0.25, help="share of layers to keep (default: 0.25)")
    parser.add_argument("--batches", type=int, default=16, help="batches of validation data (default: 16)")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(args: Namespace) -> None:
        from lightning_mhla.system.files import to_json
        from mhla_tasks.tools import layer_costs

        costs = layer_costs.measure(args.checkpoint, args.keep, args.batches, args.accelerator)
        sys.stdout.write(to_json(costs, indent=1) + "\n" if args.json else layer_costs.table(costs))

    return run


@passes_on
def bench(arguments: Sequence[str]) -> int | None:
    """Run a benchmark of the repository: attention, generation, models, recurrences and more.

        lightning bench attention --device cpu

    ``lightning bench`` lists the benchmarks, and ``lightning bench NAME --help`` lists the options of a benchmark. The command
    requires a checkout of the repository.

    Args:
        arguments: command-line arguments after ``lightning bench``.

    Returns:
        None for success; exit status 2 if the package is not installed from a checkout.
    """
    return _run_of_checkout("benchmarks", arguments)


@passes_on
def paper(arguments: Sequence[str]) -> int | None:
    """Train and score the models of docs/results.md, one table row at a time; the command can be resumed.

        lightning paper --only mnist --seeds 0

    ``lightning paper --list`` lists the tables and their rows. The command requires a checkout of the repository.

    Args:
        arguments: command-line arguments after ``lightning paper``.

    Returns:
        None for success; exit status 2 if the package is not installed from a checkout.
    """
    return _run_of_checkout("benchmarks.paper", arguments)


def _run_of_checkout(program: str, arguments: Sequence[str]) -> int | None:
    """Run a module from a checkout of the repository as ``python -m`` does.

    Such modules are not part of the installed package. They import this package, so this package must not import them.

    Args:
        program: dotted name of the module, such as ``benchmarks``.
        arguments: command-line arguments of the module.

    Returns:
        None for success; exit status 2, after an error message, if this package is not installed from a checkout.
    """
    if not (CHECKOUT / "benchmarks/__main__.py").is_file():
        sys.stderr.write(
            "error: the benchmarks are part of the repository, not of the package: clone it, then pip install -e .\n"
        )
        return 2
    sys.path.insert(0, str(CHECKOUT))  # first, so that a package of the same name in the working folder is not run
    sys.argv[1:] = arguments
    run_module(program, run_name="__main__", alter_sys=True)
    return None
