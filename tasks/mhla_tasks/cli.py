"""The command line of every domain: ``lightning fit|validate|test|predict --config FILE [--config OVERLAY] [--key=value]``.

What the command line says beats the YAML files, a later file beats an earlier one, and all of them beat what a
checkpoint given by ``--ckpt_path`` remembers of its model and data.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jsonargparse import Namespace
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

from lightning_mhla.callbacks.recovery import RunStopped
from lightning_mhla.checkpoints.choice import choose_checkpoint
from lightning_mhla.checkpoints.io import CHECKPOINTS, read_safely, remove_secrets
from lightning_mhla.checkpoints.runs import RunFolder, keep_tables, remove_log_folder
from lightning_mhla.system.lightning_private import saved_hyperparameters, subcommand_parsers
from lightning_mhla.system.redaction import hidden_options, redacted
from mhla_tasks.config_errors import find_repeated_option, find_unknown_key, shorten
from mhla_tasks.console import ignore_noise, prepare_streams, show_log
from mhla_tasks.errors import printable, reported
from mhla_tasks.late_imports import without_collection
from mhla_tasks.own_modules import UnknownModuleError
from mhla_tasks.settle import (
    agree,
    check_trainer,
    defaults_from,
    find_missing,
    inside,
    leave_out_monitors,
    network_of,
    of_another_command,
    settle,
    with_class_of_strategy,
    with_config_of_run,
    with_folder_of_logger,
    write_beside_checkpoint,
)
from mhla_tasks.sources import Source, read_sources, strongest
from mhla_tasks.trust import AllowError, allow_classes, allow_imports, allow_model_config, refusal

log = logging.getLogger(__name__)


class SaveConfig(SaveConfigCallback):
    """Saves the configuration of a run without the folder and the checkpoint of this start: another run may take it.

    Secrets are left out, see :mod:`lightning_mhla.system.redaction`; of the options of every model and data module also from
    what loggers and checkpoints get.

    Raises:
        ValueError: for a configuration from which secrets were left out, unless they are given again.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, *args: Any, **options: Any) -> None:
        if hidden := dict.fromkeys(name.replace(".init_args", "") for name in hidden_options(config)):
            again = " ".join(f"--{name}=..." for name in hidden)
            raise ValueError(
                f"{', '.join(hidden)}: secrets, such as passwords and queries of URLs, are not written into "
                f"files, so that these options are not complete; give them again on the command line: {again}"
            )
        kept = redacted(config.clone())
        kept.run_dir = kept.ckpt_path = None
        super().__init__(parser, kept, *args, **options)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for module in (pl_module, trainer.datamodule):  # type: ignore[attr-defined]  # set when the data is attached
            if module is not None and module.hparams:
                _, logged = saved_hyperparameters(module)
                logged.update(redacted(dict(logged)))
        super().setup(trainer, pl_module, stage)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        remove_secrets(checkpoint)


class ShortErrorParser(LightningArgumentParser):
    """A parser whose errors are a line or two, not a page of usage.

    Attributes:
        sources: where options come from, read before a parser changes the working folder to that of a file. They are those
            of the command line, for the parsers too that jsonargparse makes of the options of a class.
    """

    sources: ClassVar[Sequence[Source]] = ()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and leave with status 2."""
        text = printable(shorten(message, self.sources))
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
        self._start: str | None = None
        self._run: RunFolder | None = None
        super().__init__(args=args, **options)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options of every command beside Lightning's."""
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Folder of the run: logs and checkpoints go there, and fit resumes from the latest complete checkpoint in it. "
            "--ckpt_path=best is then the run's best checkpoint; fit with an earlier one of the run rolls back to it. "
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
        words = with_class_of_strategy(with_folder_of_logger(with_config_of_run(words)))
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
            ShortErrorParser.sources = sources
            problems = [source.problem for source in sources]
            problems += [
                f"{source.origin}: checkpoints are read as plain data, so that they run no code; leave weights_only out"
                for source in sources
                if source.values.get("weights_only") is False
            ]
            problems.append(of_another_command(sources, subcommand, LightningCLI.subcommands()))
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
            remembered: Source | None = None
            run = strongest(sources, "run_dir")
            of_run = str(
                Path(run or "") / "config.yaml"
            )  # written by an earlier version, it names an earlier checkpoint
            asked = strongest([source for source in sources if source.origin != of_run], "ckpt_path")
            try:
                self._start = choose_checkpoint(Path(run) if run else None, asked, training=subcommand == "fit")
                if asked is not None and self._start is not None:
                    remembered = Source(self._start, defaults_from(self._start, sources))
                allow_classes(sources, remembered)
                if remembered is not None:
                    chosen.set_defaults(remembered.values)
            except (ValueError, FileNotFoundError) as error:
                chosen.error(str(error))
        with without_collection():  # the classes that are named are imported
            super().parse_arguments(parser, args)

    def before_instantiate_classes(self) -> None:
        """Settle in the run's folder; leave weights to start from alone where a checkpoint brings others."""
        options, subcommand = self.config[self.subcommand], str(self.subcommand)
        check_trainer(options.trainer)
        if isinstance(options.trainer.strategy, str) and "." in options.trainer.strategy:  # the class of one, in a file
            options.trainer.strategy = Namespace(class_path=options.trainer.strategy, init_args=Namespace())
        agree(options, self._sources)
        options.ckpt_path = self._start
        if options.run_dir is not None:
            self._run = settle(options, subcommand)
        if subcommand != "fit":
            self.save_config_callback = None  # the folder keeps the configuration that the run was started with
            own = [source for source in self._sources if options.run_dir is None or source.typed]
            write_beside_checkpoint(options, subcommand, own)
        start = options.get("model", {}).get("init_args", {})
        if options.get("ckpt_path") and "pretrained" in start:
            start["pretrained"] = None
            if "network" in start and start["network"] is None:  # it was read where the weights were
                start["network"] = network_of(str(options["ckpt_path"]))
                allow_model_config(start["network"])
        if subcommand == "predict" and not options.get("ckpt_path") and not start.get("pretrained"):
            raise ValueError(
                "predict has no weights and would draw noise: name them with --ckpt_path=FILE, --run_dir=FOLDER or "
                "--model.pretrained"
            )
        if options.trainer.logger is False:
            leave_out_monitors(options.trainer, subcommand)

    @override
    def instantiate_classes(self) -> None:
        """Build model, data and trainer; a value that no kind of an option takes is named with its source."""
        try:
            super().instantiate_classes()
        except Exception as error:
            if "Does not validate against any of the Union subtypes" not in str(error):
                raise
            raise ValueError(shorten(str(error), self._sources)) from error

    @override
    def instantiate_trainer(self, **options: Any) -> Trainer:
        """Build the trainer with a progress bar that knows runs without a number of epochs."""
        given = self._get(self.config_init, "trainer")
        callbacks = given.callbacks if isinstance(given.callbacks, list) else [given.callbacks]
        bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
        if not bars and given.enable_progress_bar in (None, True) and not given.barebones:
            self.trainer_defaults = {**self.trainer_defaults, "callbacks": [EpochBar()]}
        trainer = super().instantiate_trainer(**options)
        read_safely(trainer.strategy)  # for modules of others too
        keep_tables(trainer)
        if self._run is not None:
            for callback in trainer.checkpoint_callbacks:
                if (
                    isinstance(callback, ModelCheckpoint) and callback.dirpath is None
                ):  # a logger would choose the folder
                    callback.dirpath = str(self._run.path / CHECKPOINTS)
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except Exception:
            if subcommand == "fit" and self.config[subcommand].run_dir is None:
                remove_unused(self.trainer)
            raise

    def _parse_ckpt_path(self) -> None:
        """Nothing here: :meth:`parse_arguments` has made the checkpoint's memory the weakest source."""


def remove_unused(trainer: Trainer) -> None:
    """Remove the numbered log folder of a fit that ended before its first step, so that failures use up no number."""
    folder = Path(trainer.log_dir or "")
    fresh = trainer.is_global_zero and not trainer.global_step and re.fullmatch(r"version_\d+", folder.name)
    if fresh:
        remove_log_folder(folder)


class EpochBar(RichProgressBar):
    """A progress bar that leaves out the number of epochs where only the number of steps is known."""

    def _get_train_description(self, current_epoch: int) -> str:
        limit = self.trainer.max_epochs
        return f"Epoch {current_epoch}" if limit in (None, -1) else super()._get_train_description(current_epoch)


def main(args: ArgsType = None) -> None:
    """Run one of Lightning's commands; errors are those of :func:`mhla_tasks.errors.reported`."""
    prepare_streams()
    show_log(sys.stdout)
    ignore_noise()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in str(record.msg) and not str(record.msg).startswith("TPU available")
    )
    saving = logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector")
    saving.addFilter(lambda record: "`weights_only` was not set" not in str(record.msg))  # what is read is plain data
    with reported():
        try:
            SuiteCLI(
                parser_class=ShortErrorParser,
                save_config_callback=SaveConfig,
                save_config_kwargs={"overwrite": True},
                auto_configure_optimizers=False,
                trainer_defaults={
                    "default_root_dir": "runs",
                    "enable_model_summary": False,  # Forecast says what it needs
                },
                args=args,
            )
        except RunStopped:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # srun sends them to who is still on the way out
            raise


if __name__ == "__main__":
    main()
