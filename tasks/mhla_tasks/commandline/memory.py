"""Reading of model and data module options from a checkpoint. Configuration files and the command line override them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mhla.checkpoints.io import find_checkpoints, read_header, resolve_checkpoint
from lightning_mhla.checkpoints.sharded import is_sharded
from mhla_tasks.commandline.sources import Source, class_path_of
from mhla_tasks.commandline.trust import refusal

MEMORY = (("model", "hyper_parameters"), ("data", "datamodule_hyper_parameters"))
"""Names of the command's options that a checkpoint stores, each with the checkpoint entry that holds the value."""


def remembered_options(checkpoint: str, sources: Sequence[Source]) -> dict[str, Any]:
    """Read the options of the model and the data module that a checkpoint stores.

    The stored options of the model are ignored if a configuration file or the command line chooses a different model class. The
    same holds for the data module.

    Args:
        checkpoint: path of a checkpoint file, of the folder of a sharded checkpoint, or of a run folder, whose latest
            checkpoint is read; or a Lightning keyword such as ``last``.
        sources: configuration files and command-line options, from lowest to highest priority.

    Returns:
        Options under the keys ``model`` and ``data``, each a dict with ``class_path`` and ``init_args``. A key is absent if its
        options are not stored or are ignored. The dict is empty if ``checkpoint`` is a keyword of Lightning, a URL or a folder
        without checkpoints.

    Raises:
        FileNotFoundError: if ``checkpoint`` does not exist.
        ValueError: if ``checkpoint`` cannot be read, or if it names a class for the model or the data module that
            configurations must not name.
    """
    path = Path(checkpoint)
    if not path.exists():
        if "://" in checkpoint or ("/" not in checkpoint and not path.suffix):
            return {}
        raise FileNotFoundError(f"ckpt_path {checkpoint} does not exist")
    if path.is_dir() and not is_sharded(path):
        below = find_checkpoints(path)
        if not below:
            return {}
        path = below[0]
    try:
        content = read_header(path)
        memories = [(root, content.get(key, {})) for root, key in MEMORY]
    except Exception as error:
        raise ValueError(f"ckpt_path {checkpoint} is not a checkpoint that can be read safely ({error})") from error
    options = {}
    for root, memory in memories:
        named = [class_path for s in sources if (class_path := class_path_of(s.values.get(root))) is not None]
        if not isinstance(memory, dict) or not all(isinstance(name, str) for name in memory):
            raise ValueError(f"ckpt_path {checkpoint}: its options of the {root} must be a mapping with text keys")
        class_path = memory.get("_class_path")
        if class_path and (refused := refusal(str(class_path))):
            raise ValueError(f"ckpt_path {checkpoint} was trained with the class {str(class_path)[:80]}: {refused}")
        if class_path and (not named or named[-1] in (class_path, str(class_path).rpartition(".")[2])):
            arguments = {name: value for name, value in memory.items() if not name.startswith("_")}
            options[root] = {"class_path": class_path, "init_args": arguments}
    return options


def remembered_network(checkpoint: str) -> dict[str, Any] | None:
    """Return the configuration of the transformers network that a checkpoint stores in the options of its model.

    Args:
        checkpoint: path of a checkpoint file, of the folder of a sharded checkpoint, or of a run folder, whose latest complete
            checkpoint is read.

    Returns:
        Value of the option ``network``; None if the checkpoint does not exist or does not store this option.
    """
    path = Path(checkpoint)
    memory = (read_header(resolve_checkpoint(path)).get("hyper_parameters") or {}) if path.exists() else {}
    return memory.get("network")
