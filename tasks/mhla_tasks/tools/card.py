"""Writer of the model card (``README.md``) of an exported model."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from mhla_kernels.version import __version__

from lightning_mhla.callbacks.sample_texts import fenced
from lightning_mhla.checkpoints.former_names import present_options
from lightning_mhla.checkpoints.runs import CONFIG, is_run
from lightning_mhla.swap import KEEP, REPLACE
from lightning_mhla.system.numbers import duration, metric_text, plural
from lightning_mhla.system.redaction import published
from lightning_mhla.system.untrusted import read_yaml
from lightning_mhla.training.module import TrainingModule
from mhla_tasks.tools.markdown import escaped, inline_code

PAPER = "https://arxiv.org/abs/2601.07832"

TRAINING = "training.yaml"
"""File name under which the card asks the reader to save the configuration of the run."""

LISTED_CLASSES = 100
"""Maximum number of class names that the card lists."""


MARK = "<!-- lightning export "


@dataclass(frozen=True)
class ExportedRun:
    """Checkpoint that a model was exported from, and the command that exported it.

    Attributes:
        checkpoint: path of the checkpoint file or of a sharded checkpoint's folder.
        command: arguments of the export, without the name of the program.
        live: whether the trained weights were exported although the checkpoint also has their moving average.
    """

    checkpoint: Path
    command: Sequence[str]
    live: bool

    def configuration(self) -> Any:
        """Return the configuration of the run that wrote the checkpoint, without secrets and local folders.

        The configuration consists of nested dicts. The result is None if the configuration cannot be read.
        """
        for folder in self.checkpoint.absolute().parents[:3]:  # RUN/checkpoints/recovery/NAME.ckpt at most
            if (folder / CONFIG).is_file() and is_run(folder):
                try:
                    return published(read_yaml(folder / CONFIG))
                except ValueError:  # the weights can be exported without it
                    return None
        return None


def is_own(text: str) -> bool:
    """Return whether a model card is unchanged since :func:`write_card` wrote it, according to the checksum at its end.

    A conversion to Windows line endings, as Git may make, does not count as a change.
    """
    content, mark, digest = text.replace("\r\n", "\n").rpartition(MARK)
    return bool(mark) and digest.strip() == f"{_digest(content)} -->"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_card(
    module: TrainingModule,
    content: Mapping[str, Any],
    path: Path,
    folder: str,
    loading: str,
    license_name: str | None,
    origin: ExportedRun,
) -> None:
    """Write the model card of an exported model.

    The card states the type of the model, code that loads it, its classes, its training data, the metrics of the exported
    checkpoint, the commands that produced it, its configuration, software versions and its license. Secrets and the directory
    parts of local paths are removed from options and commands. Text from the checkpoint is escaped, so that it is never
    interpreted as Markdown or HTML.

    Args:
        module: the exported module.
        content: entries of the model's checkpoint, without tensors.
        path: path of the card to write.
        folder: name of the exported folder.
        loading: Python code that loads the exported folder, with the placeholder ``FOLDER`` instead of its path.
        license_name: identifier of the model's license; None if it is not known.
        origin: checkpoint and command of the export.
    """
    memory = _options(present_options("model", type(module), content.get("hyper_parameters") or {}))
    data = _options(content.get("datamodule_hyper_parameters"))
    name = type(module).__name__
    network = getattr(module, "network", module)
    count = sum(parameter.numel() for parameter in network.parameters())
    header = {"library_name": "lightning-mhla", "tags": ["mhla", "linear-attention"]}
    header |= {"license": license_name} if license_name else {}
    article = "An" if name[0] in "AEIOU" else "A"
    # The template has the quotation marks already, so the first and last character of `quoted` are cut off below.
    quoted = json.dumps(folder, ensure_ascii=not folder.isprintable())  # a JSON string is also a Python string
    code = loading.replace("FOLDER", quoted[1:-1])
    # The entry `epoch` of a checkpoint is the number of complete epochs, with or without the one that was running.
    progress = ((content.get("loops") or {}).get("fit_loop") or {}).get("epoch_progress") or {}
    epochs = (progress.get("current") or {}).get("started", content.get("epoch", 0) + 1)
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {escaped(folder)}",
        f"{article} `{name}` of {count:,} parameters, trained with lightning-mhla{_attention(memory, module)}.",
        f"## Loading\n\n{fenced(code, 'python')}",
        *_classes(module),
        f"## Training data\n\n{_data(data)}",
        f"## Metrics\n\n{_metrics(content, origin)}",
        f"## Commands\n\n{_commands(origin)}",
        f"## Training\n\n{content.get('global_step', 0):,} optimizer steps, {epochs} epoch{'s' * (epochs != 1)}"
        f"{_spent(content)}. Options of the model and its optimizer:\n\n{fenced(_yaml(memory), 'yaml')}",
        "## Versions\n\n"
        f"lightning-mhla {__version__}, Lightning {escaped(content.get('pytorch-lightning_version', 'unknown'))}"
        + (
            f" (training); torch {escaped(torch_version)}"
            if (torch_version := _report(content).get("versions", {}).get("torch"))
            else ""
        )
        + ".",
        f"## License\n\n{escaped(license_name or '') or 'Not stated. Name it with `lightning export --license IDENTIFIER`.'}",
    ]
    text = ("\n\n".join(parts) + "\n\n").encode(errors="backslashreplace").decode()
    path.write_text(f"{text}{MARK}{_digest(text)} -->\n", encoding="utf-8")


def _options(memory: Any) -> dict[str, Any]:
    """Convert the hyperparameters of a model or data module to options in the format of a configuration file.

    Args:
        memory: dict of the hyperparameters in a checkpoint; None if the checkpoint has none, so that the result is empty.
    """
    arguments = {key: value for key, value in (memory or {}).items() if not key.startswith("_")}
    class_path = (memory or {}).get("_class_path")
    return {"class_path": class_path, "init_args": arguments} if class_path else arguments


def _attention(memory: Mapping[str, Any], module: TrainingModule) -> str:
    options = memory.get("init_args", memory)
    kind = (options.get("attention") or {}).get("kind")
    pattern = options.get("layer_kinds") or [REPLACE]
    kinds = dict.fromkeys(kind if entry == REPLACE else entry for entry in pattern if entry != KEEP)
    kind_list = ", ".join(inline_code(kind) for kind in kinds if kind)
    cross = (options.get("cross_attention") or {}).get("kind")
    paper = f" ([paper]({PAPER}))" if "mhla" in (*kinds, cross) else ""
    described = [f"attention: {kind_list}"] * bool(kind_list)
    if KEEP in pattern:
        depth = len(module.layers())
        count = pattern.count(KEEP) * depth // len(pattern)  # the pattern repeats over all layers
        described.append(f"original attention in {count:,} of {plural(depth, 'layer')}")
    described += [f"cross-attention: {inline_code(str(cross))}"] * bool(cross)
    return f"; {', '.join(described)}{paper}" if described else ""


def _report(content: Mapping[str, Any]) -> dict[str, Any]:
    return dict((content.get("callbacks") or {}).get("RunReport") or {})


def _data(data: Mapping[str, Any]) -> str:
    if not data:
        return "The checkpoint does not say which."
    return fenced(_yaml(data), "yaml")


def _metrics(content: Mapping[str, Any], origin: ExportedRun) -> str:
    """Return Markdown with the last metrics in a checkpoint, and sentences about the weights with which they were measured.

    Args:
        content: entries of the model's checkpoint, without tensors.
        origin: checkpoint and command of the export.
    """
    rows = [(name, *points[-1]) for name, points in _report(content).get("points", {}).items() if points]
    command = shlex.join(["lightning", "validate", "--ckpt_path", published(str(origin.checkpoint))])
    if not rows:
        return f"The checkpoint has none. This command measures them, with its file:\n\n{fenced(command, 'sh')}"
    exported_step = content.get("global_step", 0)
    lines = [f"| {inline_code(name)} | {metric_text(name, value)} | {step:,} |" for name, step, value in rows]
    table = "\n".join(["| metric | value | step |", "| --- | ---: | ---: |", *lines])
    sentences = [f"The exported checkpoint is the state after step {exported_step:,}."]
    steps = {step for _, step, _ in rows}
    if steps == {exported_step} and not origin.live:
        sentences.append("All metrics were measured on validation data with exactly these weights.")
    elif steps != {exported_step}:
        sentences.append("Metrics of other steps in the table were measured with the weights of those steps.")
    if origin.live:
        sentences.append(
            "If the run averaged its weights, the metrics are those of the average, and the export is not."
        )
    sentences.append("This command measures them again, with the file of the checkpoint:")
    return f"{table}\n\n{' '.join(sentences)}\n\n{fenced(command, 'sh')}"


def _classes(module: TrainingModule) -> list[str]:
    """Return a list with one Markdown section that names a model's classes; an empty list if the model has no classes."""
    names = getattr(module, "class_names", None) or getattr(module, "label_names", None)
    if not names:
        return []
    listed = ", ".join(inline_code(name) for name in names[:LISTED_CLASSES])
    more = f", and {len(names) - LISTED_CLASSES:,} more" if len(names) > LISTED_CLASSES else ""
    return [f"## Classes\n\n{len(names):,} classes, in the order of the model's outputs: {listed}{more}."]


def _commands(origin: ExportedRun) -> str:
    """Return Markdown with the commands that trained and exported the model, and the run's configuration if it is known."""
    export = shlex.join(["lightning", *map(published, origin.command)])
    configuration = origin.configuration()
    if configuration is None:
        sentence = "This command exported the model. The checkpoint does not say which command trained it."
        return f"{sentence}\n\n{fenced(export, 'sh')}"
    commands = fenced(f"lightning fit --config {TRAINING}\n{export}", "sh")
    details = f"<details><summary>{TRAINING}</summary>\n\n{fenced(_yaml(configuration), 'yaml')}\n\n</details>"
    sentence = f"`{TRAINING}` is the configuration of the run. Local paths in it are cut to their last parts."
    return f"{commands}\n\n{sentence}\n\n{details}"


def _spent(content: Mapping[str, Any]) -> str:
    seconds = _report(content).get("seconds")
    return f", {duration(seconds)}" if seconds else ""


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.dump(published(values), Dumper=_Plain, sort_keys=False, allow_unicode=True).rstrip()


class _Plain(yaml.SafeDumper):
    """YAML dumper that writes ``str(value)`` for objects that YAML cannot represent."""


_Plain.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))
