"""Command line of ``lightning paper``, which trains small models, scores them, and writes the results page."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import benchmarks.paper as description
from benchmarks.paper import (
    architectures,
    contexts,
    images,
    language,
    linearize,
    mnist,
    photographs,
    recall,
    scenes,
    video,
    windows,
)
from benchmarks.paper.full_runs import write_counts
from benchmarks.paper.jobs import Job, run_jobs
from benchmarks.paper.page import write_page
from benchmarks.paper.runs import ROOT
from benchmarks.paper.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for part in (
        mnist,
        photographs,
        images,
        architectures,
        scenes,
        video,
        language,
        contexts,
        recall,
        linearize,
        windows,
    )
    for study in part.STUDIES
}

RESULTS = ROOT / "benchmarks/results/paper"


def main() -> None:
    """Train and score all variants that have no result yet, and write the results page after each."""
    parser = argparse.ArgumentParser(
        prog="lightning paper",
        description=description.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES), help="studies (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds (default: 0 1 2)")
    parser.add_argument("--variants", nargs="+", help="variants (default: all)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="number of rows to train at the same time; several have one thread each (default: 1)",
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/paper"), help="folder of the runs (default: runs/paper)"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the rows (default: benchmarks/results/paper)"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page (default: docs)")
    parser.add_argument(
        "options", nargs="*", help="additional options of lightning fit, after --; they require a separate --results"
    )
    parser.add_argument("--page", action="store_true", help="write docs/results.md from the results, and train nothing")
    parser.add_argument("--list", action="store_true", help="list studies and variants with the number of their rows")
    parser.add_argument(
        "--count",
        action="store_true",
        help="count the operations of the configurations of full size, and write the page",
    )
    args = parser.parse_args()
    studies = [STUDIES[name] for name in args.only]
    if args.list:
        for study in studies:
            print(f"{study.name}: {study.title}")
            for variant in study.variants:
                print(f"  {variant}: {sum(row['variant'] == variant for row in study.rows(args.results))} rows")
        return
    if unknown := set(args.variants or ()) - {name for study in studies for name in study.variants}:
        parser.error(f"--variants: unknown: {', '.join(sorted(unknown))}; --list shows the variants")
    if args.jobs < 1:
        parser.error(f"--jobs: {args.jobs} must be at least 1")
    if args.count:
        write_counts(dict.fromkeys(config for study in STUDIES.values() for config in study.full))
    elif not args.page:
        jobs = [
            Job(study, variant, seed)
            for seed in args.seeds
            for study in studies
            if study.seeds is None or seed in study.seeds
            for variant in study.variants
            if args.variants is None or variant in args.variants
        ]
        page = partial(write_page, STUDIES.values(), args.results, args.docs)
        run_jobs(jobs, args.jobs, args.runs, args.results, args.options, page)
    print(write_page(STUDIES.values(), args.results, args.docs))


if __name__ == "__main__":
    main()
