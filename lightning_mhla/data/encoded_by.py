"""Comparison of the models that encoded the samples of shards with the models that a training module uses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning_mhla.data.origins import MODEL_FILES, model_digest
from lightning_mhla.system.untrusted import read_json

log = logging.getLogger(__name__)

MODEL_OPTIONS = ("vae", "model")
"""Names under which a manifest holds the folder or hub name of the model that encoded the samples, or of its pipeline."""

ENCODERS = ("vae", "text_encoder", "tokenizer")
"""Folders of a pipeline whose models encode samples and captions."""


def recorded_options(manifest: Path) -> dict[str, Any]:
    """Return the options that a manifest records; an empty dict if it has none, as beside shards of other programs."""
    try:
        return dict(read_json(manifest))
    except (OSError, TypeError, ValueError):
        return {}


def compare_model(manifest: Path, option: str, path: str) -> None:
    """Log a warning if a model is not the one that encoded the samples of shards.

    Args:
        manifest: path of the manifest beside the shards. Without a record of a model in it, nothing is compared.
        option: option that names the model, such as ``model.vae``, for the message.
        path: value of the option: folder of a model or of a pipeline that contains it, or name of either on the hub.
    """
    record = recorded_options(manifest)
    name = next((record[key] for key in MODEL_OPTIONS if isinstance(record.get(key), str)), None)
    if name is not None and not is_same_model(path, name, record.get(MODEL_FILES)):
        log.warning(
            "%s is %s, and %s names %s as the model that encoded the data: unless their weights are equal, samples come out "
            "wrong; set %s to the model that encoded the data", option, path, manifest, name, option,
        )  # fmt: skip


def is_same_model(path: str, recorded: str, digest: Any) -> bool:
    """Return whether a model is the one that a record of shards names. Its pipeline and its folder there count as the same.

    Args:
        path: folder of the model or of a pipeline that contains it, or name of either on the hub.
        recorded: value of the option in the record, in one of these forms.
        digest: digest of the model in the record; None if the record has none.
    """
    folder = Path(path)
    places = [folder, folder / "vae", *([folder.parent] if folder.name == "vae" else [])]
    if path == recorded or any(place.resolve() == Path(recorded).resolve() for place in places):
        return True
    parts = (["vae"], ENCODERS)  # of class-to-image latents, and of captioned latents
    return digest is not None and any(model_digest(str(place), names) == digest for place in places for names in parts)
