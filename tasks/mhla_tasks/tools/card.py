"""Writing of the model card (``README.md``) of an exported model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from mhla_kernels.version import __version__

from lightning_mhla.callbacks.page import duration, fenced
from lightning_mhla.checkpoints.former_names import present_options
from lightning_mhla.system.redaction import published
from lightning_mhla.training.module import TrainingModule
from mhla_tasks.commandline.console import harmless

PAPER = "https://arxiv.org/abs/2601.07832"


MARK = "<!-- lightning export "


def is_own(text: str) -> bool:
    """Return whether a model card is unchanged since :func:`write_card` wrote it, according to the checksum at its end."""
    content, mark, digest = text.rpartition(MARK)
    return bool(mark) and digest.strip() == f"{_digest(content)} -->"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_card(
    module: TrainingModule, content: Mapping[str, Any], path: Path, folder: str, loading: str, license_name: str | None
) -> None:
    """Write the model card of an exported model.

    The card states the type of the model, code that loads it, data, metrics, configuration, versions and license. Secrets and
    the directory parts of local paths are removed from the options that it lists. Text from the checkpoint is escaped, so that
    it is never interpreted as Markdown or HTML.

    Args:
        module: the exported module.
        content: entries of the model's checkpoint, without tensors.
        path: path of the card to write.
        folder: name of the exported folder.
        loading: Python code that loads the exported folder, with the placeholder ``FOLDER`` instead of its path.
        license_name: identifier of the model's license; None if it is not known.
    """
    memory = _options(present_options("model", type(module), content.get("hyper_parameters") or {}))
    data = _options(content.get("datamodule_hyper_parameters"))
    name = type(module).__name__
    network = getattr(module, "network", module)
    count = sum(parameter.numel() for parameter in network.parameters())
    header = {"library_name": "lightning-mhla", "tags": ["mhla", "linear-attention"]}
    header |= {"license": license_name} if license_name else {}
    article = "An" if name[0] in "AEIOU" else "A"
    quoted = json.dumps(folder, ensure_ascii=not folder.isprintable())  # a JSON string is also a Python string
    code = loading.replace("FOLDER", quoted[1:-1])
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {_plain(folder)}",
        f"{article} `{name}` of {count:,} parameters, trained with lightning-mhla{_attention(memory)}.",
        f"## Loading\n\n{fenced(code, 'python')}",
        f"## Training data\n\n{_data(content, data)}",
        f"## Metrics\n\n{_metrics(content)}",
        f"## Training\n\n{content.get('global_step', 0):,} optimizer steps, {content.get('epoch', 0) + 1} epochs"
        f"{_spent(content)}. Options of the model and its optimizer:\n\n{fenced(_yaml(memory), 'yaml')}",
        "## Versions\n\n"
        f"lightning-mhla {__version__}, Lightning {_plain(content.get('pytorch-lightning_version', 'unknown'))}"
        + (
            f" (training); torch {_plain(torch_version)}"
            if (torch_version := _report(content).get("versions", {}).get("torch"))
            else ""
        )
        + ".",
        f"## Licence\n\n{_plain(license_name or '') or 'Not stated. Name it with `lightning export --license IDENTIFIER`.'}",
    ]
    text = ("\n\n".join(parts) + "\n\n").encode(errors="backslashreplace").decode()
    path.write_text(f"{text}{MARK}{_digest(text)} -->\n", encoding="utf-8")


def _options(memory: Any) -> dict[str, Any]:
    """Convert the hyperparameters of a model or data module to options in the format of a configuration file.

    Args:
        memory: hyperparameters from a checkpoint; None, which gives an empty dict, if the checkpoint has none.
    """
    arguments = {key: value for key, value in (memory or {}).items() if not key.startswith("_")}
    class_path = (memory or {}).get("_class_path")
    return {"class_path": class_path, "init_args": arguments} if class_path else arguments


def _attention(memory: Mapping[str, Any]) -> str:
    options = memory.get("init_args", memory)
    kind = (options.get("attention") or {}).get("kind")
    kinds = dict.fromkeys(options.get("layer_kinds") or [kind])
    kind_list = ", ".join(_code(kind) for kind in kinds if kind)
    return f"; attention: {kind_list}{f' ([paper]({PAPER}))' if 'mhla' in kinds else ''}" if kind_list else ""


def _report(content: Mapping[str, Any]) -> dict[str, Any]:
    return dict((content.get("callbacks") or {}).get("RunReport") or {})


def _data(content: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    if not data:
        return "The checkpoint does not say which."
    return fenced(_yaml(data), "yaml")


def _metrics(content: Mapping[str, Any]) -> str:
    rows = [(name, *points[-1]) for name, points in _report(content).get("points", {}).items() if points]
    if not rows:
        return "The checkpoint holds none; `lightning validate` measures them."
    lines = [f"| {_code(name)} | {value:.4g} | {step:,} |" for name, step, value in rows]
    return "\n".join(["| metric | value | step |", "| --- | ---: | ---: |", *lines])


def _spent(content: Mapping[str, Any]) -> str:
    seconds = _report(content).get("seconds")
    return f", {duration(seconds)}" if seconds else ""


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.dump(published(values), Dumper=_Plain, sort_keys=False, allow_unicode=True).rstrip()


def _plain(text: Any) -> str:
    """Convert a text to one line, and escape the characters that Markdown or HTML would interpret."""
    line = " ".join(harmless(str(text)).split())
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", line)


def _code(text: Any) -> str:
    """Format a text as inline code in Markdown, or escape it if it contains a character that would end the code."""
    line = str(text)
    return f"`{line}`" if re.fullmatch(r"[^`|<>\n\r\\]+", line) and harmless(line) == line else _plain(line)


class _Plain(yaml.SafeDumper):
    """YAML dumper that writes ``str(value)`` for objects that YAML cannot represent."""


_Plain.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))
