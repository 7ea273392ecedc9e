"""The command line: ``lightning COMMAND --config FILE [--config OVERLAY] [--key=value]``, and the tools beside the commands.

What a command does not use is not imported for it.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

from mhla_tasks.late_imports import import_without_compiler, put_off_imports, without_collection

TOOLS = {"doctor": "mhla_tasks.doctor", "tune": "mhla_tasks.tune"}
"""Modules of the tools, each with a function ``main`` that takes the words after its name."""

HELP = """\
usage: lightning COMMAND [--config FILE]... [--key=value]...
       lightning TOOL [options]

Train, evaluate and sample models with MHLA attention.

commands:
  fit        train, and validate on the way; --run_dir=FOLDER keeps everything in it and resumes
  validate   evaluate weights on the validation data
  test       evaluate weights on the test data
  predict    write what a model makes: samples, classes, clips, text

tools:
  doctor     check this machine: versions, devices, the operator, a short fit; --json for programs
  tune       measure which form of the operator is fastest at your shapes, and keep it

`lightning COMMAND --help` lists the options of a command, `lightning fit --model.help CLASS` those of a class.
`lightning` and `lightning-mhla` are the same program.
"""


def main() -> None:
    """Run the command or the tool that the command line names."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(HELP)
        sys.exit(0 if words else 2)
    os.environ["MPLBACKEND"] = "agg"  # pictures are written to files; a notebook hands down its own
    put_off_imports()
    if words[0] in TOOLS:
        sys.exit(import_module(TOOLS[words[0]]).main(words[1:]))
    with without_collection():
        import_without_compiler()
        main_of_commands = import_module("mhla_tasks.cli").main
    gc.freeze()  # what was imported stays, and need not be searched; before any model is made, and before Triton is imported
    main_of_commands()


if __name__ == "__main__":
    main()
