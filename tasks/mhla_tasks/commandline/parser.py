"""Commands ``lightning fit|validate|test|predict --config FILE [--config OVERLAY] [--key=value]``, based on LightningCLI.

Command-line options override the YAML files, and later files override earlier ones. All of these override the options of model
and data module that are stored in the checkpoint named by ``--ckpt_path``.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

from jsonargparse import Namespace
from lightning import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_mhla.callbacks.recovery import RunStopped
from lightning_mhla.checkpoints.io import CHECKPOINTS, replace_checkpoint_io
from lightning_mhla.checkpoints.runs import LogFiles, RunFolder
from lightning_mhla.system.lightning_private import trains_in_children
from lightning_mhla.system.rendezvous import listen_on_one_interface
from mhla_tasks.commandline.agreement import agree
from mhla_tasks.commandline.arguments import UsageError, read_words
from mhla_tasks.commandline.console import ignore_noise, prepare_streams, show_log
from mhla_tasks.commandline.errors import report_usage_error, reported
from mhla_tasks.commandline.late_imports import without_collection
from mhla_tasks.commandline.memory import remembered_network
from mhla_tasks.commandline.moved_keys import notice
from mhla_tasks.commandline.options import (
    callbacks_of,
    check_callbacks,
    check_trainer,
    leave_out_monitors,
    use_run_folder,
    write_beside_checkpoint,
)
from mhla_tasks.commandline.plan import OBJECTS, Plan, check_same, make_plan, method_options
from mhla_tasks.commandline.problems import shorten
from mhla_tasks.commandline.progress_bar import EpochBar
from mhla_tasks.commandline.registry import LIGHTNING
from mhla_tasks.commandline.saved_configuration import SaveConfig
from mhla_tasks.commandline.sources import Source
from mhla_tasks.commandline.trust import allow_model_config, permit_loading, refusal, subclass_named

log = logging.getLogger(__name__)


class ShortErrorParser(LightningArgumentParser):
    """Command-line parser that reports errors in one or two lines, without printing the usage.

    Attributes:
        sources: configuration files and command-line options, for error messages. This is a class attribute, so that the
            additional parsers that jsonargparse creates for the options of classes have it too.
        program: name of the command, such as ``lightning fit``, for the hint to call it with ``--help``.
    """

    sources: ClassVar[Sequence[Source]] = ()
    program: ClassVar[str] = "lightning"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print a shortened error message and exit with status 2.

        Args:
            message: error message of jsonargparse.
            ex: ignored; part of the interface of jsonargparse.
        """
        text = shorten(message, self.sources)
        if denied := re.search(r"Importing '([^']+)' is not allowed", text):
            origins = [f"{source.origin}: " for source in self.sources if denied[1] in str(source.values)]
            text = f"{''.join(origins[-1:])}{denied[1]}: {refusal(denied[1]) or 'may not be imported'}"
        report_usage_error(text, self.program)


class SuiteCLI(LightningCLI):
    """LightningCLI that builds model, data module and Trainer from options that have already been merged.

    Args:
        plan: the command, its configuration, and the files and options that the configuration comes from.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run_folder: RunFolder | None = None
        ShortErrorParser.sources, ShortErrorParser.program = plan.sources, f"lightning {plan.command}"
        super().__init__(
            args=plan.configuration,
            run=False,
            parser_class=ShortErrorParser,
            parser_kwargs={"prog": f"lightning {plan.command}", "description": LIGHTNING[plan.command]},
            save_config_callback=SaveConfig
            if plan.command == "fit"
            else None,  # other commands keep the file of the fit
            auto_configure_optimizers=False,
            trainer_defaults={
                "default_root_dir": "runs",
                "enable_model_summary": False,  # the callback Forecast prints the sizes
            },
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--run_dir``, ``--allow`` and the arguments of the command's Trainer method, such as ``ckpt_path``."""
        command = self.plan.command
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Folder of the run for logs and checkpoints; fit resumes from the latest complete checkpoint in it. "
            "--ckpt_path=best then means the run's best checkpoint; fit with an earlier one of the run rolls back to it. "
            "Without --config, the configuration that the run was started with is used. With --sweep KEY=VALUE,VALUE "
            "(fit only, one or more), the folder holds several runs, one for each combination of values, which are "
            "trained and compared.",
        )
        parser.add_argument(
            "--allow",
            type=list[str] | str | None,
            default=None,
            help="Modules and packages, separated by commas, whose classes and attention kinds configurations may name in "
            "addition to those of this suite and Lightning. They are imported, which runs their code. Only on the command "
            "line.",
        )
        parser.add_method_arguments(Trainer, command, skip=OBJECTS)
        parser.set_defaults({"weights_only": True})
        if command == "predict":
            parser.set_defaults({"return_predictions": False})  # callbacks write the predictions

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Check the types of all option values, including overridden ones, and print help or configuration if requested.

        Args:
            parser: parser with all options of the command.
            args: merged configuration of the command.
        """
        request = self.plan.request
        if request is not None and not request.startswith("--print_config"):
            parser.parse_args([request])
        # Serialized now, because the parser modifies its arguments in place.
        printed = [] if request is None else [f"--config={json.dumps(args)}", request]
        # Only the check of the types matters; the parsed options are not used.
        for replaced in self.plan.replaced:
            parser.parse_object(replaced)
        super().parse_arguments(parser, args)
        if printed:
            parser.parse_args(printed)

    @override
    def before_instantiate_classes(self) -> None:
        """Adjust the parsed options before the model, the data module and the Trainer are built.

        The model and the data module get the same values for the options that they share. The output folder is set. The option
        ``pretrained`` is ignored if a checkpoint provides the weights.

        Raises:
            ValueError: if ``predict`` has neither a checkpoint nor pretrained weights, or if options contradict each other.
        """
        options, command = self.config, self.plan.command
        if self.plan.moves:
            log.warning("%s", notice(self.plan.moves))
        check_trainer(options.trainer)
        if command == "fit":
            check_callbacks(options)
        agree(options, self.plan.sources)
        options.ckpt_path = self.plan.checkpoint
        if command != "fit":
            sources = [source for source in self.plan.sources if options.run_dir is None or source.typed]
            write_beside_checkpoint(options, command, sources)
        elif options.run_dir is not None and not options.trainer.fast_dev_run:  # which writes nothing
            self.run_folder = use_run_folder(options)
        start = options.get("model", {}).get("init_args", {})
        if options.ckpt_path and "pretrained" in start:
            start["pretrained"] = None
            # The network's configuration was read from `pretrained` at the start of the run; take it from the checkpoint.
            if "network" in start and start["network"] is None:
                start["network"] = remembered_network(str(options.ckpt_path))
                allow_model_config(start["network"])
        if command == "predict" and not options.ckpt_path and not start.get("pretrained"):
            raise ValueError(
                "predict has no weights and would draw noise: name them with --ckpt_path=FILE, --run_dir=FOLDER or "
                "--model.pretrained"
            )
        if options.trainer.logger is False:
            leave_out_monitors(options.trainer, command)
        if not _has_progress_bar(options.trainer):
            self.trainer_defaults["callbacks"] = [EpochBar()]

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer, with the callback that saves the configuration, if there is one, before all other callbacks.

        Callbacks such as ``RunReport`` read the saved configuration.

        Args:
            kwargs: options of the Trainer that override those of the command.
        """
        trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # the trainer's own list
        callbacks.sort(key=lambda callback: not isinstance(callback, SaveConfig))
        return trainer

    def run(self) -> None:
        """Execute the command by calling the Trainer's method of the same name.

        If ``fit`` fails or is interrupted before it completes its first training batch, the log files that it has written are
        removed. After an error, a log folder that ``fit`` created is also removed.
        """
        replace_checkpoint_io(self.trainer.strategy)  # also for modules of other packages
        listen_on_one_interface(self.trainer.strategy)
        logs = LogFiles(self.trainer)
        if self.run_folder is not None:
            for callback in self.trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                    # Without a path, the callback would use the folder of the first logger.
                    callback.dirpath = str(self.run_folder.path / CHECKPOINTS)
        options = {name: self.config_init[name] for name in method_options(self.plan.command)}
        if self.datamodule is not None:
            options["datamodule"] = self.datamodule
        try:
            getattr(self.trainer, self.plan.command)(self.model, **options)
        except BaseException as error:
            saving = saved_configuration(self.trainer)
            if saving is not None and not saving.already_saved and not trains_in_children(self.trainer):
                logs.remove(configuration=isinstance(error, Exception))
            raise


def _has_progress_bar(trainer: Namespace) -> bool:
    """Return whether the Trainer's options choose a progress bar or disable it, so that none needs to be added."""
    return (
        any(subclass_named(callback.class_path, (ProgressBar,)) is not None for callback in callbacks_of(trainer))
        or trainer.enable_progress_bar is False
        or bool(trainer.barebones)
    )


def saved_configuration(trainer: Trainer) -> SaveConfig | None:
    """Return the callback that saves the configuration; None if the command saves none."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # the trainer's own list
    return next((callback for callback in callbacks if isinstance(callback, SaveConfig)), None)


def main(args: Sequence[str] | None = None) -> None:
    """Run ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        args: command-line arguments without the name of the program; None to use ``sys.argv``.

    Raises:
        SystemExit: after an error that the user can fix, with a short message in place of a traceback; or if a signal stopped
            the run.
    """
    prepare_streams()
    show_log(sys.stdout)
    ignore_noise()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in str(record.msg) and not str(record.msg).startswith("TPU available")
    )
    saving = logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector")
    # The message is not true here, since all checkpoints are read as plain data.
    saving.addFilter(lambda record: "`weights_only` was not set" not in str(record.msg))
    with reported():
        try:
            _run(sys.argv[1:] if args is None else args)
        except RunStopped:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # srun repeats its signal while a process exits
            raise
        finally:
            permit_loading()


def _run(arguments: Sequence[str]) -> None:
    program = "lightning"
    try:
        line = read_words(arguments, LIGHTNING)
        program = f"lightning {line.command}"
        with without_collection():  # make_plan imports the classes that the configuration names
            plan = make_plan(line)
        check_same(plan)
    except UsageError as error:
        report_usage_error(str(error), program)
    build(plan).run()


def build(plan: Plan) -> SuiteCLI:
    """Build the model, the data module and the Trainer for a command.

    Args:
        plan: the command and its merged configuration.

    Returns:
        LightningCLI with the built objects, whose method ``run`` executes the command.

    Raises:
        CommandFailed: if the parser rejects a value; it has printed a message with the file or option that sets the value.
        ValueError: if options contradict each other, or if a value fits none of the types that its option accepts.
    """
    with short_type_errors(plan.sources):
        return SuiteCLI(plan)


@contextmanager
def short_type_errors(sources: Sequence[Source]) -> Iterator[None]:
    """Context manager that shortens jsonargparse's error message for a value that fits none of several types.

    Args:
        sources: configuration files and command-line options, from lowest to highest priority.

    Raises:
        ValueError: if a value fits none of the types that its option accepts. The message names the file or command-line option
            that sets the value.
    """
    try:
        yield
    except Exception as error:
        if "Does not validate against any of the Union subtypes" not in str(error):
            raise
        raise ValueError(shorten(str(error), sources)) from error


if __name__ == "__main__":
    main()
