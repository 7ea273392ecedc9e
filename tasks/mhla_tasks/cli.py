"""The command line of every domain: ``lightning fit|validate|test|predict --config FILE [--config OVERLAY] [--key=value]``.

What the command line says beats the YAML files, a later file beats an earlier one, and all of them beat what a
checkpoint given by ``--ckpt_path`` remembers of its model and data.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning import Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_mhla.callbacks.recovery import RunStopped
from lightning_mhla.data import BrokenSampleError, ShardUnavailableError
from lightning_mhla.system.lightning_private import subcommand_parsers
from mhla_tasks.config_errors import find_repeated_option, find_unknown_key, shorten
from mhla_tasks.late_imports import without_collection
from mhla_tasks.own_modules import UnknownModuleError, log_handler
from mhla_tasks.settle import (
    agree,
    defaults_from,
    find_missing,
    inside,
    leave_out_monitors,
    network_of,
    settle,
    with_config_of_run,
    with_folder_of_logger,
    write_beside_checkpoint,
)
from mhla_tasks.sources import read_sources
from mhla_tasks.trust import AllowError, allow_imports, allow_shapes, check_config, refusal

log = logging.getLogger(__name__)

OWN = ("mhla_kernels", "lightning_mhla", "mhla_tasks")
EXPECTED = (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError)
READING = (BrokenSampleError, ShardUnavailableError)


class ShortErrorParser(LightningArgumentParser):
    """A parser whose errors are a line or two, not a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and leave with status 2."""
        text = _printable(shorten(message, read_sources(sys.argv[1:])))
        if denied := re.search(r"Importing '([^']+)' is not allowed", text):
            text = f"{denied[1]}: {refusal(denied[1]) or 'may not be imported'}"
        program = re.sub(r"^\w+\.py ", "lightning ", re.sub(r" \[[^]]*\]", "", self.prog))
        sys.stderr.write(f"error: {text}\nhelp: {program} --help\n")
        sys.exit(2)


class SuiteCLI(LightningCLI):
    """LightningCLI with short errors, run folders, and checkpoints that never override what the user asks for."""

    @override
    def __init__(self, *, args: ArgsType = None, **options: Any) -> None:
        """Parse and run; options of commands that nobody asked for are not looked up."""
        words = list(args) if isinstance(args, Sequence) else sys.argv[1:]
        every = LightningCLI.subcommands()
        chosen = {name: every[name] for name in words[:1] if name in every} or every
        self.subcommands = lambda: chosen  # type: ignore[method-assign]
        super().__init__(args=args, **options)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options of every command beside Lightning's."""
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Folder of the run: logs and checkpoints go there, and fit resumes from the furthest whole checkpoint in it. "
            "Without --config it takes the configuration that it was started with. With --sweep KEY=VALUE,VALUE (fit only, one "
            "or more) it holds several runs, one for each combination of values, which are trained and compared.",
        )
        parser.add_argument(
            "--allow",
            type=list[str] | str | None,
            default=None,
            help="Modules and packages beyond those of this suite and Lightning whose classes and attention kinds "
            "configurations may name (comma between them). They are imported, which runs them. Only on the command line.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Check the keys, take over what a checkpoint remembers as defaults, then parse."""
        words = sys.argv[1:] if args is None else []
        if isinstance(args, Sequence):
            words = list(args)
        words = with_folder_of_logger(with_config_of_run(words))
        if args is None:
            sys.argv[1:] = words  # other processes of the run are started with it
        else:
            args = words
        parsers = subcommand_parsers(self)
        for command in parsers.values():
            command.set_defaults({"weights_only": True})
        if "predict" in parsers:
            parsers["predict"].set_defaults({"return_predictions": False})  # callbacks write them
        subcommand = next((word for word in words if word in parsers), None)
        if subcommand is not None:
            chosen = parsers[subcommand]
            if missing := find_missing(words, subcommand):
                chosen.error(missing)
            sources = [inside(source, subcommand) for source in read_sources(words)]
            problems = [check_config(Path(source.origin)) for source in sources if not source.origin.startswith("-")]
            try:
                allow_imports(sources)
            except (AllowError, UnknownModuleError) as error:
                problems.append(str(error))
            if any(problems):
                chosen.error(next(problem for problem in problems if problem))
            options = [action.dest for action in chosen._actions]
            problem = find_unknown_key(sources, [*options, "print_config"]) or find_repeated_option(words)
            if problem:
                chosen.error(problem)
            self._sources = sources
            for source in sources:
                if isinstance(checkpoint := source.values.get("ckpt_path"), str):
                    try:
                        remembered = defaults_from(checkpoint, sources)
                        allow_shapes(remembered)
                        chosen.set_defaults(remembered)
                    except ValueError as error:
                        chosen.error(str(error))
        with without_collection():  # the classes that are named are imported
            super().parse_arguments(parser, args)

    def before_instantiate_classes(self) -> None:
        """Settle in the run's folder; leave weights to start from alone where a checkpoint brings others."""
        options, subcommand = self.config[self.subcommand], str(self.subcommand)
        agree(options, self._sources)
        if options.run_dir is not None:
            self._run = settle(options, subcommand)
        if subcommand != "fit":
            self.save_config_callback = None  # the folder keeps the configuration that the run was started with
            own = [source for source in self._sources if options.run_dir is None or source.origin.startswith("-")]
            write_beside_checkpoint(options, subcommand, own)
        start = options.get("model", {}).get("init_args", {})
        if options.get("ckpt_path") and "pretrained" in start:
            start["pretrained"] = None
            if "network" in start and start["network"] is None:  # it was read where the weights were
                start["network"] = network_of(str(options["ckpt_path"]))
                allow_shapes(start["network"])
        if subcommand == "predict" and not options.get("ckpt_path") and not start.get("pretrained"):
            raise ValueError(
                "predict has no weights and would draw noise: name them with --ckpt_path=FILE, --run_dir=FOLDER or "
                "--model.init_args.pretrained"
            )
        if options.trainer.logger is False:
            leave_out_monitors(options.trainer, subcommand)

    @override
    def instantiate_trainer(self, **options: Any) -> Trainer:
        """Build the trainer with a progress bar that knows runs without a number of epochs."""
        given = self._get(self.config_init, "trainer")
        callbacks = given.callbacks if isinstance(given.callbacks, list) else [given.callbacks]
        bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
        if not bars and given.enable_progress_bar in (None, True) and not given.barebones:
            self.trainer_defaults = {**self.trainer_defaults, "callbacks": [EpochBar()]}
        return super().instantiate_trainer(**options)

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except Exception:
            if subcommand == "fit" and self.config[subcommand].run_dir is None:
                remove_unused(self.trainer)
            raise

    def _parse_ckpt_path(self) -> None:
        """Nothing here: :meth:`parse_arguments` has made the checkpoint's memory the weakest source."""


def _printable(text: str) -> str:
    """Without signs that a terminal would obey, and not longer than can be read."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)[:2000]


def remove_unused(trainer: Trainer) -> None:
    """Remove the numbered log folder of a fit that ended before its first step, so that failures use up no number."""
    folder = Path(trainer.log_dir or "")
    fresh = trainer.is_global_zero and not trainer.global_step and re.fullmatch(r"version_\d+", folder.name)
    if fresh and folder.is_dir() and not any(folder.rglob("*.ckpt")):
        shutil.rmtree(folder)


class EpochBar(RichProgressBar):
    """A progress bar that leaves out the number of epochs where only the number of steps is known."""

    def _get_train_description(self, current_epoch: int) -> str:
        limit = self.trainer.max_epochs
        return f"Epoch {current_epoch}" if limit in (None, -1) else super()._get_train_description(current_epoch)


def _is_deliberate(error: BaseException) -> bool:
    """Whether an error was raised by a check of ours, so that its message alone is enough."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if isinstance(error, READING):  # raised again by the loader when a worker process read the sample
        return True
    scope = frames[-1][0].f_globals if frames else {}
    raised_in = str(scope.get("__package__") or scope.get("__name__", ""))  # run as a module, its name is __main__
    return isinstance(error, EXPECTED) and raised_in.split(".")[0] in OWN


def main(args: ArgsType = None) -> None:
    """Run the command line; errors that a check of ours raised are printed without a traceback.

    Set ``LIGHTNING_MHLA_TRACEBACK=1`` to see the traceback.
    """
    logging.basicConfig(level=logging.WARNING, handlers=[log_handler()])
    for name in OWN:
        logging.getLogger(name).setLevel(logging.INFO)
    for noise in (
        ".*LeafSpec.*is deprecated.*",
        ".*`srun` command is available.*",
        ".*callbacks used to create the.*",
        ".*Grad strides do not match.*",
        ".*Previous log files in this directory will be deleted.*",  # RunFolder keeps them
        ".*The dirpath has changed from.*",  # predict and validate write elsewhere than training
        ".*Checkpoint directory .* exists and is not empty.*",  # it is the run's own
        ".*is smaller than the logging interval.*",
    ):
        warnings.filterwarnings("ignore", message=noise)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in str(record.msg) and not str(record.msg).startswith("TPU available")
    )
    saving = logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector")
    saving.addFilter(lambda record: "`weights_only` was not set" not in str(record.msg))  # what is read is plain data
    try:
        SuiteCLI(
            parser_class=ShortErrorParser,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            trainer_defaults={"default_root_dir": "runs", "enable_model_summary": False},  # Forecast says what it needs
            args=args,
        )
    except RunStopped:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # srun sends them to who is still on the way out
        raise
    except Exception as error:
        union = "Does not validate against any of the Union subtypes" in str(error)
        if os.environ.get("LIGHTNING_MHLA_TRACEBACK") or not (union or _is_deliberate(error)):
            raise
        text = shorten(str(error), read_sources(sys.argv[1:])) if union else str(error)
        sys.stderr.write(f"error: {text}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
