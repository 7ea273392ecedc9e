"""Entry point of the program ``lightning``, which runs Lightning's commands and this project's tools.

Commands such as ``fit`` are called with ``lightning COMMAND --config FILE [--config OVERLAY] [--key=value]``. Each command or
tool imports only the modules that it uses.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from importlib.metadata import version

from mhla_tasks.commandline import completion, registry, shipped
from mhla_tasks.commandline.console import harmless, prepare_streams
from mhla_tasks.commandline.errors import report_usage_error, reported
from mhla_tasks.commandline.late_imports import put_off_imports, without_collection

HELP = """\
usage: lightning COMMAND [--config FILE]... [--key=value]...
       lightning TOOL [options]

Train, evaluate and sample models with MHLA attention.

{listing}

`lightning COMMAND --help` lists the options of a command or a tool, `lightning fit --model.help CLASS` those of a class.
`--config mhla://classification/mnist.yaml` names a configuration that the package brings, `--config mhla://` lists them.
`lightning`, `mhla` and `lightning-mhla` are the same program; other packages may install a `lightning` too.
"""


def main() -> None:
    """Run the command or tool that the command-line arguments name, and print its errors."""
    prepare_streams()
    with reported():
        _run()


def _run() -> None:
    if sys.argv[1:2] == [completion.REQUEST]:
        sys.stdout.write("\n".join(completion.answer(*sys.argv[2:4])))
        sys.exit(0)
    try:
        sys.argv[1:] = arguments = shipped.resolve(sys.argv[1:])
    except FileNotFoundError as error:
        sys.stderr.write(f"error: {harmless(str(error))}\n")
        sys.exit(2)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(HELP.format(listing=registry.listing()))
        sys.exit(0)
    if arguments[0] == "--version":
        sys.stdout.write(f"lightning-mhla {version('lightning-mhla')}\n")
        sys.exit(0)
    os.environ["MPLBACKEND"] = "agg"  # pictures are written to files; a notebook's backend may be inherited
    put_off_imports()
    if tool := registry.tool_named(arguments):
        sys.exit(registry.run(tool, arguments[len(tool.split()) :]))
    if arguments[0] in registry.families():
        asks_for_help = len(arguments) == 1 or arguments[1] in ("-h", "--help")
        message = "" if asks_for_help else f"error: {harmless(' '.join(arguments[:2]))} is not a tool\n"
        (sys.stdout if asks_for_help else sys.stderr).write(f"{message}{registry.listing(arguments[0])}\n")
        sys.exit(0 if asks_for_help else 2)
    if arguments[0] not in registry.LIGHTNING and not arguments[0].startswith("-"):
        report_usage_error(f"{arguments[0]} is not a command{registry.nearest(arguments[0])}", "lightning")
    if any(word.partition("=")[0] == "--sweep" for word in arguments):
        sys.exit(import_module("mhla_tasks.tools.sweep").run(arguments))
    with without_collection():
        main_of_commands = import_module("mhla_tasks.commandline.parser").main
        # Imported objects live until the process exits. They are frozen before the collector is enabled, which would otherwise
        # scan all of them at the next allocation (0.2 s), and before a model is built, whose memory must be freed.
        gc.freeze()
    main_of_commands()
