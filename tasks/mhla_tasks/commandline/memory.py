"""Options that a checkpoint remembers of its model and data: the weakest source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mhla.checkpoints.io import find_checkpoints, read_header, resolve_checkpoint
from lightning_mhla.checkpoints.sharded import is_sharded
from mhla_tasks.commandline.sources import Source, mapping
from mhla_tasks.commandline.trust import refusal

MEMORY = (("model", "hyper_parameters"), ("data", "datamodule_hyper_parameters"))
"""Options of a command, and the key under which a checkpoint keeps them."""


def remembered_options(checkpoint: str, sources: Sequence[Source]) -> dict[str, Any]:
    """Model and data options that a checkpoint remembers, except where a source names a different class.

    Args:
        checkpoint: a file, the folder of a sharded checkpoint or of a run, or one of Lightning's words such as ``last``.
        sources: all other options.

    Raises:
        ValueError: when it looks like a path, but is not a checkpoint that can be read.
    """
    path = Path(checkpoint)
    if not path.exists():
        if "://" in checkpoint or ("/" not in checkpoint and not path.suffix):
            return {}
        raise ValueError(f"ckpt_path {checkpoint} does not exist")
    if path.is_dir() and not is_sharded(path):
        below = find_checkpoints(path)
        if not below:
            return {}
        path = below[0]
    try:
        content = read_header(path)
        memories = [(root, content.get(key, {})) for root, key in MEMORY]
    except Exception as error:
        raise ValueError(f"ckpt_path {checkpoint} is no checkpoint that can be read safely ({error})") from error
    options = {}
    for root, memory in memories:
        named = [s.values[root]["class_path"] for s in sources if "class_path" in mapping(s.values.get(root))]
        if not isinstance(memory, dict) or not all(isinstance(name, str) for name in memory):
            raise ValueError(f"ckpt_path {checkpoint}: its options of the {root} are no named values")
        class_path = memory.get("_class_path")
        if class_path and (refused := refusal(str(class_path))):
            raise ValueError(f"ckpt_path {checkpoint} was trained with the class {str(class_path)[:80]}: {refused}")
        if class_path and (not named or named[-1] == class_path):
            arguments = {name: value for name, value in memory.items() if not name.startswith("_")}
            options[root] = {"class_path": class_path, "init_args": arguments}
    return options


def remembered_network(checkpoint: str) -> dict[str, Any] | None:
    """The configuration of transformers that the model of a checkpoint was built from; None where it has none."""
    path = Path(checkpoint)
    memory = (read_header(resolve_checkpoint(path)).get("hyper_parameters") or {}) if path.exists() else {}
    return memory.get("network")
