"""Callback that saves the configuration of a training run as ``config.yaml`` in the folder of the run.

Importing this module also makes every jsonargparse parser of the process write configurations with :func:`to_yaml`.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import yaml
from jsonargparse import Namespace, set_dumper
from lightning import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from typing_extensions import override

from lightning_mhla.checkpoints.io import remove_secrets
from lightning_mhla.system.files import written_whole
from lightning_mhla.system.lightning_private import saved_hyperparameters
from lightning_mhla.system.redaction import hidden_options, redacted

UNKNOWN = "Unable to serialize instance "
"""Prefix that jsonargparse puts before a value for which it knows no text."""

_LEFT_OUT = object()


def to_yaml(configuration: dict[str, Any]) -> str:
    """Return a configuration as YAML that can be read again.

    Values that YAML cannot represent are converted: an Enum to its value, and an instance of a subclass of a basic type, such
    as ``numpy.float64``, to the basic type. The name of a function is written as the user gave it. Objects that have no text
    form are omitted. Such objects can only be default values, so a run with the written configuration uses the same ones.

    Args:
        configuration: serialized options by name, with nested dicts and lists.
    """
    return yaml.safe_dump(_plain(configuration), default_flow_style=False, allow_unicode=True, sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, dict):
        items = {key: _plain(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _LEFT_OUT}
    if isinstance(value, list | tuple | set | frozenset):
        return [item for item in map(_plain, value) if item is not _LEFT_OUT]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, str):
        text = str(value).removeprefix(UNKNOWN)
        # `<...>` is the text of an object that cannot be read back.
        return _LEFT_OUT if text != value and text.startswith("<") else text
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value if value is None else _LEFT_OUT


set_dumper("yaml", to_yaml)


class SaveConfig(SaveConfigCallback):
    """Callback that saves the configuration of a training run without secrets, so that new runs can start from it.

    The first run in a folder writes ``config.yaml`` immediately, so that ``--run_dir`` alone can repeat the run if it is
    interrupted. A later run in the same folder replaces the file only after its first training batch, because its options may
    turn out to be wrong until then, for example if they do not fit the checkpoint or the data. The file therefore always
    matches the checkpoints in the folder.

    ``run_dir`` and ``ckpt_path`` are not saved. Secrets, such as passwords in URLs, are also removed from the hyperparameters
    in checkpoints and loggers.

    Args:
        parser: parser of the command.
        config: parsed options of the run.
        args: further positional arguments of ``SaveConfigCallback``.
        options: keyword arguments of ``SaveConfigCallback``.

    Attributes:
        already_saved: whether the configuration is final, because this process has trained a batch or has found nothing left
            to train.

    Raises:
        ValueError: if an option lacks a secret that was removed when the configuration was saved, and the command line does not
            set this option again.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, *args: Any, **options: Any) -> None:
        if hidden := dict.fromkeys(name.replace(".init_args", "") for name in hidden_options(config)):
            again = " ".join(f"--{name}=..." for name in hidden)
            raise ValueError(
                f"{', '.join(hidden)}: secrets, such as passwords and queries of URLs, are not written to "
                f"files, so these options are not complete; give them again on the command line: {again}"
            )
        saved = redacted(config.clone())
        saved.run_dir = saved.ckpt_path = None
        super().__init__(parser, saved, *args, **options)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for module in (pl_module, trainer.datamodule):  # type: ignore[attr-defined]  # set when the data is attached
            if module is not None and module.hparams:
                _, logged = saved_hyperparameters(module)
                logged.update(redacted(dict(logged)))
        if self.already_saved:
            return
        path = self._path(trainer)
        if trainer.is_global_zero and not path.exists():
            self._write(path)

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._accept(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._accept(trainer)  # also a run with no step left to train has accepted its options

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        remove_secrets(checkpoint)

    def _accept(self, trainer: Trainer) -> None:
        if self.already_saved:
            return
        self.already_saved = True
        path = self._path(trainer)
        trainer.strategy.barrier()  # another process may still reject its part of the data
        if trainer.is_global_zero:
            self._write(path)

    def _path(self, trainer: Trainer) -> Path:
        # trainer.log_dir is a collective, so every process must call this method.
        return Path(trainer.log_dir or trainer.default_root_dir) / self.config_filename

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as unfinished:
            self.parser.save(self.config, unfinished, skip_none=False, overwrite=True, multifile=False)
