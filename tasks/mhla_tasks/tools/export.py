"""Trained models of checkpoints, written for use anywhere."""

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
from mhla_tasks.tools.card import is_own, write_card

DOMAINS = {
    "classification": "ImageClassifier",
    "diffusion": "ClassToImage",
    "language": "LanguageModel",
    "text_to_image": "TextToImage",
    "video": "VideoDiffusion",
}
"""Module classes of the domains. A domain's ``export`` has ``write``, the names of its ``OPTIONS``, ``LOADING``, or
``loading`` where that depends on the module, and maybe ``REPLACED``, names that are not kept of an earlier export."""

WEIGHTS = re.compile(r"(model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Files of weights that the domains write; any other one in the folder of an export is the user's."""


VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
"""Files of tokenizers whose texts are not paths, whatever they look like."""

LABELS = ("added_tokens_decoder", "chat_template", "class_names", "label_names", "id2label", "label2id")
"""Entries of configurations of which the same is true."""


def write_export(
    checkpoint: Path, folder: Path, live: bool, options: Mapping[str, Any], license_name: str | None = None
) -> None:
    """Write the model of a checkpoint as the library of its domain loads it, and a model card.

    Args:
        checkpoint: file, or folder of a run or of a sharded checkpoint.
        folder: folder to write the model to.
        live: the weights as trained, where the checkpoint also has their moving average.
        options: options of the domain, by name.
        license_name: licence of the model, for the card.

    Raises:
        FileNotFoundError: when there is no checkpoint.
        ValueError: when it holds no module of a domain, or for options of another domain.
    """
    path = resolve_checkpoint(checkpoint)
    content = read_header(path)
    module = load_trained(checkpoint, live)
    domain = _domain_of(type(module))
    for name in options:
        if name not in domain.OPTIONS:
            raise ValueError(
                f"--{name} is no option for {checkpoint}, which holds the model of {type(module).__name__}"
            )
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8") if card.exists() else None
    network = type(getattr(module, "network", None)).__name__
    loading = domain.loading(module) if hasattr(domain, "loading") else domain.LOADING
    with rebuilt_folder(folder, partial(_is_replaced, getattr(domain, "REPLACED", ()))) as aside:
        domain.write(module, aside, **options)
        remove_private(aside)
        card = aside / "README.md"
        if before is not None and not is_own(before):  # written, or edited, by hand
            card.write_text(before, encoding="utf-8")
            card = aside / "README.new.md"
        write_card(module, content, card, folder.resolve().name, loading.replace("NETWORK", network), license_name)


def remove_private(folder: Path) -> None:
    """Remove secrets and the folders of local paths from the configurations in a folder, such as ``config.json``.

    Libraries write there where a model or a tokenizer was loaded from. Vocabularies stay as they are.

    Args:
        folder: a folder to be published.
    """
    for path in folder.rglob("*.json"):
        if path.name in VOCABULARIES or path.name.endswith(".index.json"):
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        kept = {name: content[name] for name in LABELS if name in content} if isinstance(content, dict) else {}
        private = published(content)
        if kept:
            private.update(kept)
        if private != content:
            path.write_text(json.dumps(private, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_replaced(names: Collection[str], path: Path) -> bool:
    """Whether a file of an earlier export would be read beside those of a new one: weights, and files of the domain."""
    return WEIGHTS.fullmatch(str(path)) is not None or path.parts[0] in names


def load_trained(checkpoint: Path, live: bool = False) -> TrainingModule:
    """The module of a checkpoint, of whatever domain, without running any code from it.

    Args:
        checkpoint: file, or folder of a run or of a sharded checkpoint.
        live: the weights as trained, where the checkpoint also has their moving average.

    Raises:
        FileNotFoundError: when there is no checkpoint.
        ValueError: when it holds no module of a domain.
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
    for domain, name in DOMAINS.items():  # trained from Python: the checkpoint does not name its class
        kind = getattr(import_module(f"mhla_tasks.{domain}"), name)
        if accepts(kind, memory):
            return load_module(kind, path, live)
    raise ValueError(f"{checkpoint} holds no module of {', '.join(DOMAINS)}")


def _domain_of(kind: type) -> ModuleType:
    for base in kind.__mro__:
        package = base.__module__.rpartition(".")[0]
        if package.startswith("mhla_tasks."):
            return import_module(f"{package}.export")
    raise ValueError(f"{kind.__module__}.{kind.__name__} is of none of the domains {', '.join(DOMAINS)}")
