"""Command line of the benchmarks: ``python -m benchmarks NAME [options]``, which ``lightning bench`` calls."""

from __future__ import annotations

import sys
from importlib import import_module

from mhla_tasks.commandline.console import harmless

from benchmarks import BENCHMARKS


def main() -> int | None:
    """List all benchmarks, or run the one that the first argument names, and return its exit status."""
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, BENCHMARKS))
        print("usage: lightning bench NAME [options]\n")
        for benchmark, summary in BENCHMARKS.items():
            print(f"  {benchmark:<{width}}  {summary}")
        return 0
    if name not in BENCHMARKS:
        sys.stderr.write(
            f"error: {harmless(name)} is not a benchmark; the benchmarks are {', '.join(BENCHMARKS)}\nhelp: lightning bench\n"
        )
        return 2
    sys.argv = [f"lightning bench {name}", *options]  # the benchmark's parser takes its name from there
    import_module(f"benchmarks.{name}").main()
    return None


if __name__ == "__main__":
    sys.exit(main())
