"""Comparison of the models that encoded the samples of shards with the models that a training module uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from lightning_mhla.data.origins import MODEL_FILES, model_digest
from lightning_mhla.system.listing import shown
from lightning_mhla.system.untrusted import read_json, reason

log = logging.getLogger(__name__)

LONGEST_NAME = 200
"""Largest number of characters of a recorded name in a message."""

ENCODERS = ("vae", "text_encoder", "tokenizer")
"""Folders of a pipeline whose models encode samples and captions."""

PARTS: dict[str, tuple[str, ...]] = {"vae": ("vae",), "model": ENCODERS}
"""Folders of a pipeline that encoded the samples, by the option under which a manifest holds the path or name of the model."""


class Encoder(NamedTuple):
    """Record of the model that encoded samples.

    Attributes:
        path: folder of the model or of a pipeline that contains it, or name of either on the Hugging Face Hub.
        parts: names of the pipeline's subfolders that contain the models for encoding samples, such as ``vae``.
        digest: digest of the model's files, see :func:`model_digest`; None if none is recorded, as for a model on the hub.
    """

    path: str
    parts: tuple[str, ...]
    digest: str | None


def recorded_encoder(manifest: Path) -> Encoder | None:
    """Return the model that encoded the samples of shards, as recorded in the manifest, the JSON file beside the shards.

    The result is None if there is no readable manifest, or if the manifest records no model.
    """
    try:
        record = read_json(manifest)
    except (OSError, ValueError):
        return None
    digest = record.get(MODEL_FILES)
    for option, parts in PARTS.items():
        if isinstance(path := record.get(option), str):
            return Encoder(path, parts, digest if isinstance(digest, str) else None)
    return None


def compare_models(manifests: Iterable[Path], models: Mapping[str, str]) -> None:
    """Log a warning for each model that is not the one that encoded the samples of shards.

    Args:
        manifests: paths of the manifests beside the shards. A manifest without a record of a model is ignored.
        models: models to compare with. The keys are options, such as ``model.vae``. The values are folders or names on the
            Hugging Face Hub, of the model itself or of a pipeline that contains it.
    """
    encoders: dict[Encoder, Path] = {}
    for manifest in manifests:
        if (encoder := recorded_encoder(manifest)) is not None:
            encoders.setdefault(encoder, manifest)
    digest_of = cache(model_digest)  # options and records often name the same files
    for (encoder, manifest), (option, path) in product(encoders.items(), models.items()):
        name = shown(encoder.path[:LONGEST_NAME])
        try:
            same = is_same_model(path, encoder, digest_of)
        except (OSError, RuntimeError, ValueError) as error:  # unreadable files, links in a circle, names with zeros
            log.warning("%s=%s is not compared with %s, which encoded the data: %s", option, path, name, reason(error))
            continue
        if not same:
            log.warning(
                "%s is %s, and %s names %s as the model that encoded the data: unless their weights are equal, samples come "
                "out wrong; set %s to the model that encoded the data", option, path, manifest, name, option,
            )  # fmt: skip


def is_same_model(path: str, encoder: Encoder, digest_of: Callable[[str, tuple[str, ...]], str | None]) -> bool:
    """Return whether a model is the one that encoded samples.

    The path of a pipeline and the path of the model's folder in this pipeline count as the same model. If ``path`` is a folder
    and the record has a digest, the digests of the files are compared; otherwise, the paths or names are.

    Args:
        path: folder of the model or of a pipeline that contains it, or name of either on the Hugging Face Hub.
        encoder: record of the model that encoded the samples.
        digest_of: :func:`model_digest`, or a function that caches its results.
    """
    folder = Path(path)
    parents = [folder.parent] if folder.name in encoder.parts else []
    places = [*parents, folder, folder / encoder.parts[0]]
    if encoder.digest is not None and folder.is_dir():
        log.info("the files in %s are compared with those of the model that encoded the data", folder)
        return any(digest_of(str(place.resolve()), encoder.parts) == encoder.digest for place in places)
    return path == encoder.path or any(place.resolve() == Path(encoder.path).resolve() for place in places)
