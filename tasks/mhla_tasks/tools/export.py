"""Export of trained models from checkpoints to folders that other libraries load, for ``lightning export``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_mhla.checkpoints.io import read_header, resolve_checkpoint
from lightning_mhla.system.files import rebuilt_folder
from lightning_mhla.system.redaction import published
from lightning_mhla.training.loading import accepts, load_module
from lightning_mhla.training.module import TrainingModule
from mhla_tasks.commandline.trust import AllowError, find_class
from mhla_tasks.tools.card import ExportedRun, is_own, write_card

DOMAINS = {
    "classification": "ImageClassifier",
    "diffusion": "ClassToImage",
    "language": "LanguageModel",
    "text_to_image": "TextToImage",
    "video": "VideoDiffusion",
}
"""Name of the training module of each domain, by the name of the domain.

The module ``export`` of a domain defines ``write``, ``OPTIONS`` (the names of its options), and ``LOADING`` (code that loads an
export) or the function ``loading`` if this code depends on the model. It may define ``REPLACED``, the names of files to delete
if an earlier export wrote them.
"""

WEIGHTS = re.compile(r"(model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Pattern of the names of weight files that exports write. Weight files with other names belong to the user and are kept."""


VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
"""Files of tokenizers that :func:`remove_private` does not change, since texts in them only look like paths."""

LABELS = ("added_tokens_decoder", "chat_template", "class_names", "label_names", "id2label", "label2id")
"""Entries of configurations that :func:`remove_private` does not change, since texts in them only look like paths."""


def write_export(
    checkpoint: Path, folder: Path, live: bool, options: Mapping[str, Any], license_name: str | None = None
) -> None:
    """Export the model of a checkpoint, with a model card, to a folder that other programs can load.

    A ``README.md`` that the user has edited is kept, and the new card is written to ``README.new.md``.

    Args:
        checkpoint: path of a checkpoint file, of a sharded checkpoint's folder, or of a run's folder, whose latest complete
            checkpoint is used.
        folder: folder to write the model to.
        live: whether to export the trained weights instead of their moving average, if the checkpoint has both.
        options: values, by name, of the options that only some tasks support: ``tokenizer`` and ``context`` for language
            models, ``adapters`` for text-to-image and video models.
        license_name: license of the model, for the card; None if it is not known.

    Raises:
        FileNotFoundError: if no checkpoint exists at the path.
        FileExistsError: if ``folder`` is a file.
        ValueError: if the checkpoint was not trained with this package, or the model's task does not support one of the
            options.
    """
    path = resolve_checkpoint(checkpoint)
    content = read_header(path)
    module = load_trained(path, live)
    domain = _domain_of(type(module))
    for name in options:
        if name not in domain.OPTIONS:
            raise ValueError(
                f"--{name} is not an option for {checkpoint}, which contains the model of {type(module).__name__}"
            )
    card = folder / "README.md"
    # Read before the folder is rebuilt, which replaces the file.
    previous_card = card.read_bytes() if card.exists() else None
    is_edited = previous_card is not None and not is_own(previous_card.decode(errors="replace"))
    network = type(getattr(module, "network", None)).__name__
    loading = domain.loading(module) if hasattr(domain, "loading") else domain.LOADING
    with rebuilt_folder(folder, partial(_is_replaced, getattr(domain, "REPLACED", ()))) as aside:
        domain.write(module, aside, **options)
        remove_private(aside)
        card = aside / "README.md"
        if previous_card is not None and is_edited:
            card.write_bytes(previous_card)
            card = aside / "README.new.md"
        origin = ExportedRun(path, _command(checkpoint, folder, live, options, license_name), live)
        loading = loading.replace("NETWORK", network)
        write_card(module, content, card, folder.resolve().name, loading, license_name, origin)


def _command(
    checkpoint: Path, folder: Path, live: bool, options: Mapping[str, Any], license_name: str | None
) -> list[str]:
    """Return the command-line arguments of ``lightning export`` that have the same effect as a call of :func:`write_export`."""
    words = ["export", str(checkpoint), str(folder), *(["--live"] if live else [])]
    values = {**options, "license": license_name}
    return [*words, *(f"--{name}={value}" for name, value in values.items() if value is not None)]


def remove_private(folder: Path) -> None:
    """Remove secrets, and the directory parts of local paths, from the JSON configurations in an exported folder.

    In files such as ``config.json``, libraries store the path from which a model or a tokenizer was loaded. Vocabularies and
    class names are not changed.

    Args:
        folder: exported folder, which the user may publish. The files in it are changed in place.
    """
    for path in folder.rglob("*.json"):
        if path.name in VOCABULARIES or path.name.endswith(".index.json"):
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        labels = {name: content[name] for name in LABELS if name in content} if isinstance(content, dict) else {}
        private = published(content)
        if labels:
            private.update(labels)
        if private != content:
            path.write_text(json.dumps(private, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_replaced(names: Collection[str], path: Path) -> bool:
    """Return whether a new export must delete an old file, because libraries would load it together with the new files.

    Args:
        names: names of files and folders that exports of the model's task write.
        path: path of the old file relative to the exported folder.
    """
    return WEIGHTS.fullmatch(str(path)) is not None or path.parts[0] in names


def load_trained(checkpoint: Path, live: bool = False) -> TrainingModule:
    """Load a trained module from a checkpoint of any task, without running code from the checkpoint.

    Args:
        checkpoint: path of a checkpoint file, of a sharded checkpoint's folder, or of a run's folder, whose latest complete
            checkpoint is used.
        live: whether to load the trained weights instead of their moving average, if the checkpoint has both.

    Returns:
        The Lightning module with its weights.

    Raises:
        FileNotFoundError: if no checkpoint exists at the path.
        ValueError: if the checkpoint was not trained with this package, or if importing the class of its model is not allowed.
    """
    path = resolve_checkpoint(checkpoint)
    memory = read_header(path).get("hyper_parameters") or {}
    class_path = str(memory.get("_class_path", ""))
    if class_path:
        try:
            kind = find_class(class_path, (TrainingModule,))
        except AllowError as error:
            raise ValueError(f"{checkpoint} was trained with the class {class_path[:80]}: {error}") from error
        return load_module(kind, path, live)
    for domain, name in DOMAINS.items():  # a checkpoint of training from Python does not name its class
        kind = getattr(import_module(f"mhla_tasks.{domain}"), name)
        if accepts(kind, memory):
            return load_module(kind, path, live)
    raise ValueError(f"{checkpoint} does not contain a module of {', '.join(DOMAINS)}")


def _domain_of(kind: type) -> ModuleType:
    for base in kind.__mro__:
        package = base.__module__.rpartition(".")[0]
        if package.startswith("mhla_tasks."):
            return import_module(f"{package}.export")
    raise ValueError(f"{kind.__module__}.{kind.__name__} does not belong to one of the domains {', '.join(DOMAINS)}")
