"""Command line of lm-evaluation-harness, with the additional model type mhla.

    mhla-lm-eval --model_args pretrained=last.ckpt --tasks mmlu,longbench --data_dir copies --batch_size 8

All options are those of lm-eval, with three changes. --model defaults to mhla. --data_dir names a folder with local copies
of the tasks' data. --allow lists modules with attention kinds of your own. On several GPUs, each process answers a share of
the requests:

    torchrun --nproc-per-node 8 -m mhla_tasks.language.evaluation.script --model_args pretrained=last.ckpt --tasks mmlu
"""

from __future__ import annotations

import os
import sys

import torch
from lm_eval.__main__ import cli_evaluate

import mhla_tasks.language.evaluation.lm  # noqa: F401  registers the model type
from mhla_tasks.commandline.console import prepare_streams, show_log
from mhla_tasks.commandline.errors import reported
from mhla_tasks.commandline.user_modules import import_own
from mhla_tasks.language.evaluation.tasks import local_data


def main() -> None:
    """Run the command line of lm-eval, and print a short message instead of a traceback for errors that the user can fix."""
    prepare_streams()
    show_log(sys.stderr)
    with reported():
        _run()


def _run() -> None:
    arguments, folder = _without_option(sys.argv[1:], "--data_dir")
    arguments, allowed = _without_option(arguments, "--allow")
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}\n")
    runs = not arguments or arguments[0] not in ("ls", "validate", "-h", "--help")
    if runs and not any(word == "--model" or word.startswith("--model=") or word == "-M" for word in arguments):
        arguments += ["--model", "mhla"]
    sys.argv[1:] = arguments
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group()
    try:
        import_own(allowed.split(",") if allowed else [])
        with local_data(folder):
            cli_evaluate()
    finally:
        if several:
            torch.distributed.destroy_process_group()


def _without_option(arguments: list[str], option: str) -> tuple[list[str], str | None]:
    remaining: list[str] = []
    value = None
    iterator = iter(arguments)
    for word in iterator:
        if word == option:
            value = next(iterator, None)
            if value is None:
                sys.exit(f"error: {option} needs a value")
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
        else:
            remaining.append(word)
    return remaining, value


if __name__ == "__main__":
    main()
