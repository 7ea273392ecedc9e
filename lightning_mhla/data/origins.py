"""Records of what shards were made from, used to decide whether an interrupted command can be resumed.

For shards ``PREFIX-0000.tar`` and so on, ``PREFIX-origins.jsonl.gz`` contains the options of the command, then a line for each
:class:`Origin`. ``PREFIX-manifest.json`` contains only the options and the number of samples, for people to read. A file counts
as unchanged if its size and its change time (``st_ctime``) are unchanged, or its size and its digest. A program cannot set the
change time back. With the digest, copies and files that were rewritten with the same content also count as unchanged.
"""

# Longer than other modules because the records are written, compared and explained to the user in one place.

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from lightning_mhla.data.lines import iterate_lines
from lightning_mhla.data.tables import INDEX, load_table
from lightning_mhla.system.files import write_json, written_whole
from lightning_mhla.system.listing import is_file_name, is_visible, shown
from lightning_mhla.system.redaction import redacted
from lightning_mhla.system.untrusted import BROKEN, read_json

log = logging.getLogger(__name__)

MODEL_FILES = "model_files"
"""Name of the option that holds the digest of the model which encodes the samples. Records of earlier versions lack it."""

MODEL_SUFFIXES = (".json", ".safetensors", ".bin", ".model", ".txt")
"""Suffixes of the files of a model: configurations, weights and vocabularies, but not, for example, a model card."""

PACKED = 64
"""Maximum compression ratio of a record of origins; gzip compresses digests by a factor of 2, zeros by a factor of 1,000."""


@dataclass(frozen=True)
class Origin:
    """Files and other inputs from which one or more samples of a shard are made.

    Attributes:
        name: name of the origin, such as the relative path of a file. The name is unique within a set of shards.
        files: files that the samples are read from.
        note: any other input of the samples as text, such as a label or a caption.
    """

    name: str
    files: tuple[Path, ...] = ()
    note: str = ""


def model_digest(path: str, parts: Sequence[str]) -> str | None:
    """Return a digest of the model that encodes samples, which changes if the model in a folder is replaced.

    Args:
        path: folder of an autoencoder or a pipeline, or a name on the Hugging Face Hub.
        parts: subfolders of the pipeline whose models encode samples, such as ``vae``. If none of them exists, the files in
            the folder itself are used.

    Returns:
        Digest of the names and contents of the model's files; None if the path is not a folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        return None
    digest = hashlib.blake2b(digest_size=16)
    for part in [part for part in parts if (folder / part).is_dir()] or ["."]:
        entries = sorted((folder / part).glob("*"))
        for file in (
            path for path in entries if path.is_file() and path.suffix in MODEL_SUFFIXES and is_visible(path.name)
        ):
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{part}/{file.name} {content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def shard_origins(shards: Sequence[Path]) -> list[Origin]:
    """Return one :class:`Origin` for each existing shard, to record that new shards are made from the samples in it.

    The name of an origin is the file name of its shard, so that the shards may be moved. If two shards have the same file name,
    the complete paths are used instead.
    """
    unique = len({path.name for path in shards}) == len(shards)
    return [Origin(path.name if unique else str(path), (path,)) for path in shards]


@dataclass(frozen=True)
class ShardSet:
    """Paths of the shards ``PREFIX-0000.tar`` and so on in a folder, and of the files that describe them.

    Args:
        folder: folder of the shards.
        prefix: prefix of the shard names, such as ``"train"``.

    Raises:
        ValueError: if the prefix is empty, begins with a dot, or contains a slash.
    """

    folder: Path
    prefix: str

    def __post_init__(self) -> None:
        if not is_file_name(f"{self.prefix}-0000.tar") or not self.prefix:
            raise ValueError(
                f"prefix={self.prefix!r} must be the beginning of a file name, without a slash or a leading dot"
            )

    @property
    def manifest(self) -> Path:
        """Path of ``PREFIX-manifest.json``, which contains the options that the shards were made with."""
        return self.folder / f"{self.prefix}-manifest.json"

    @property
    def origins(self) -> Path:
        """Path of ``PREFIX-origins.jsonl.gz``, which records the options and source files that the shards were made from."""
        return self.folder / f"{self.prefix}-origins.jsonl.gz"

    def finished(self) -> list[Path]:
        """List the paths of all complete shards, sorted by name."""
        return sorted(path for path in self.folder.glob("*.tar") if self._is_name(path.name))

    def check_not_among(self, origins: Sequence[Origin]) -> None:
        """Check that no source file of the new shards has the path of a shard of this set.

        The command-line option ``--force`` would delete such a file before it is read.

        Args:
            origins: source files and other inputs of the new shards.

        Raises:
            ValueError: if a file of an origin is in the folder of this set and has the name of one of its shards.
        """
        for path in (path for origin in origins for path in origin.files if self._is_name(path.name)):
            if path.parent.resolve() == self.folder.resolve():
                raise ValueError(
                    f"{shown(path)} is a shard to read, and has the name of a shard to write; choose another folder or "
                    "--prefix for the new shards, or name the shards to read without a pattern that includes the new ones"
                )

    def _is_name(self, name: str) -> bool:
        """Return whether a file name is that of a shard of this set."""
        return re.fullmatch(re.escape(self.prefix) + r"-\d+\.tar", name) is not None

    def delete(self) -> None:
        """Delete all shards of this set, the saved lists of the files in them, and the records of what they were made from.

        Raises:
            ValueError: if shards exist without any such record, because the user may have made them with a different program.
        """
        if self.finished() and not (_read(self) or _is_manifest(self.manifest)):
            raise ValueError(
                f"{self.folder / self.prefix}-*.tar exist, but neither {self.origins.name} nor {self.manifest.name} says "
                "that they were prepared here, so they are not deleted; move them away, or choose another folder or --prefix"
            )
        self.origins.unlink(missing_ok=True)  # deleted first, because shards without it are an error and never resumed
        for shard in self.finished():
            shard.unlink()
            shard.with_name(shard.name + INDEX).unlink(missing_ok=True)
        self.manifest.unlink(missing_ok=True)


def resume_order(
    shards: ShardSet, options: Mapping[str, Any], origins: Sequence[Origin], per_shard: int | None
) -> list[int | None]:
    """Record what new shards are made from or, if some shards exist already, check that the missing ones may be written.

    Complete shards are not written again, so the origins of their samples (the files and other inputs that they are made from)
    must not have changed. The origins of all other samples may have been repaired or removed.

    Args:
        shards: shards to write or complete.
        options: JSON values that the samples depend on.
        origins: files and other inputs of the samples, in the order in which the samples are written.
        per_shard: number of samples in a shard if each sample has one origin; None if samples cannot be assigned to single
            origins. With None, no origin may change once a shard is complete.

    Returns:
        List with one entry per origin, in the order in which the origins were first recorded: the current index of the origin
        in ``origins``, or None if the origin no longer exists.

    Raises:
        ValueError: if there are complete shards that cannot be kept, because they have no record, the options have changed, an
            origin was added, or an origin of a complete shard was changed or removed; or if two origins have the same name.
    """
    # As a record holds them: tuples become lists, keys become strings.
    options = redacted(json.loads(json.dumps(options)))
    written = _read(shards)
    if not shards.finished() and not _is_begun(written, options, origins):
        _write(shards, options, _record_all(origins))
        return list(range(len(origins)))
    if written is None:
        remedy = "--force makes them again, or " if _is_manifest(shards.manifest) else "move them away, or "
        raise ValueError(
            f"{shards.folder / shards.prefix}-*.tar exist, but no {shards.origins.name} says what they were made from; "
            f"{remedy}choose another folder or --prefix"
        )
    begun_with, lines = written
    model_changed = begun_with.get(MODEL_FILES, options.get(MODEL_FILES)) != options.get(MODEL_FILES)
    compared = {name: value for name, value in options.items() if name != MODEL_FILES}
    samples = _compare(lines, origins, _places(shards, len(lines), per_shard))
    used = [sample for sample in samples if sample.place == USED]
    changes = {
        "changed": ["files of the model"] * model_changed + [sample.name for sample in used if sample.changed],
        "added": sorted({origin.name for origin in origins} - {sample.name for sample in samples}),
        "removed": [sample.name for sample in used if sample.origin is None],
    }
    if message := _describe(begun_with, compared, changes):
        raise ValueError(
            f"{shards.folder / shards.prefix}-*.tar were made from different files or options ({message}); --force makes them "
            "again, or choose another folder or --prefix"
        )
    if repaired := [sample for sample in samples if sample.place == SKIPPED and sample.changed]:
        log.warning("%d skipped files have changed since; --force makes all shards again with them", len(repaired))
    # Shards that are still to be written use the repaired files, so the record must describe these.
    if any(sample.place == OPEN and sample.changed for sample in samples):
        current_lines = _record_all(origins)
        pairs = zip(samples, lines, strict=True)
        _write(
            shards, options, [line if sample.origin is None else current_lines[sample.origin] for sample, line in pairs]
        )
    return [sample.origin for sample in samples]


def check_still_the_same(shards: ShardSet, origins: Sequence[Origin], per_shard: int | None) -> None:
    """Check that no source file of a set of complete shards changed while the shards were being written.

    Args:
        shards: set of complete shards.
        origins: files and other inputs of the samples, in the order in which the samples are written.
        per_shard: number of samples in a shard if each sample has one origin; otherwise None.

    Raises:
        ValueError: if a source file has changed since :func:`resume_order` recorded it.
    """
    written = _read(shards)
    if written is None:
        return
    lines = written[1]
    samples = _compare(lines, origins, _places(shards, len(lines), per_shard))
    changed = [sample.name for sample in samples if sample.changed and sample.place == USED]
    if changes := _describe({}, {}, {"changed": changed}):
        raise ValueError(
            f"{shards.folder / shards.prefix}-*.tar may mix old and new content: files changed while they were read "
            f"({changes}); --force makes them again"
        )


OPEN, USED, SKIPPED = "open", "used", "skipped"
"""States of a sample: its shard is not written yet, contains it, or was written without it."""


class _Sample(NamedTuple):
    """Sample in the record of a set of shards, and the state of its origin (the files from which the sample is made).

    Attributes:
        name: name of the sample's origin.
        place: :data:`OPEN`, :data:`USED` or :data:`SKIPPED`.
        origin: index of the sample's origin among the current origins; None if the origin no longer exists.
        changed: whether the origin has changed since it was recorded.
    """

    name: str
    place: str
    origin: int | None
    changed: bool


def _compare(lines: Sequence[Mapping[str, Any]], origins: Sequence[Origin], places: Sequence[str]) -> list[_Sample]:
    numbers = {origin.name: number for number, origin in enumerate(origins)}
    samples = []
    for line, state in zip(lines, places, strict=True):
        number = numbers.get(line["name"])
        changed = number is not None and not _is_unchanged(origins[number], line)
        samples.append(_Sample(line["name"], state, number, changed))
    return samples


def _places(shards: ShardSet, count: int, per_shard: int | None) -> list[str]:
    finished = shards.finished()
    if per_shard is None:
        return [USED if finished else OPEN] * count
    places = [OPEN] * count
    for shard in finished:
        start = int(shard.stem.removeprefix(f"{shards.prefix}-")) * per_shard
        keys = {str(key) for key in load_table(shard).keys}
        for sample in range(start, min(start + per_shard, count)):
            places[sample] = USED if sample_key(sample) in keys else SKIPPED
    return places


def sample_key(number: int) -> str:
    """Return the key of a sample in its shard: the sample number, padded with zeros to eight digits."""
    return f"{number:08d}"


def _describe(begun_with: Mapping[str, Any], options: Mapping[str, Any], changes: Mapping[str, Sequence[str]]) -> str:
    """Describe how the inputs of shards differ from the recorded inputs. The text is empty if they are equal.

    Args:
        begun_with: options of the command that writes the shards, as recorded when it first ran.
        options: current options of this command.
        changes: names of origins, such as file paths, under the keys ``"changed"``, ``"added"`` and ``"removed"``.
    """
    parts = [
        f"{name} was {begun_with.get(name)!r} and is {value!r}"
        for name, value in options.items()
        if begun_with.get(name) != value
    ]
    for what, names in changes.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{what}: {', '.join(shown(name) for name in names[:3])}{more}")
    return "; ".join(parts)


def _record_all(origins: Sequence[Origin]) -> list[dict[str, Any]]:
    repeated = [name for name, count in Counter(origin.name for origin in origins).items() if count > 1]
    if repeated:
        raise ValueError(f"{shown(repeated[0])} is named more than once; name each source of the samples once")
    with ThreadPoolExecutor(8) as pool:
        records = pool.map(_record, origins)
        is_quick = sum(len(origin.files) for origin in origins) < 1000
        return list(track(records, "reading what shards are made from", total=len(origins), disable=is_quick))


def _record(origin: Origin) -> dict[str, Any]:
    files = []
    for path in origin.files:
        status = path.stat()
        files.append([status.st_size, status.st_ctime_ns, _digest(path)])
    return {"name": origin.name, "note": origin.note, "files": files}


def _is_unchanged(origin: Origin, line: Mapping[str, Any]) -> bool:
    if origin.note != line["note"] or len(origin.files) != len(line["files"]):
        return False
    for path, (size, changed, digest) in zip(origin.files, line["files"], strict=True):
        status = path.stat()
        if status.st_size != size or (status.st_ctime_ns != changed and _digest(path) != digest):
            return False
    return True


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]


def _write(shards: ShardSet, options: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the record that is read on resume, and a manifest, which is a readable JSON file of the options.

    Args:
        shards: paths of the shards and of both files.
        options: options of the command that writes the shards.
        lines: one JSON object for each origin, with ``name``, ``note`` and ``files``.
    """
    shards.folder.mkdir(parents=True, exist_ok=True)
    write_json(shards.manifest, {**options, "samples": len(lines)})
    with written_whole(shards.origins) as aside, gzip.open(aside, "wt", encoding="ascii") as stream:
        for line in (options, *lines):
            stream.write(json.dumps(line) + "\n")


def _read(shards: ShardSet) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Read the file that records what shards were made from.

    Returns:
        Options of the command by name, and a list of dicts with ``name``, ``note`` and ``files``, one for each :class:`Origin`.
        None if the file is missing or not valid.
    """
    try:
        _check_unpacked(shards.origins)
        rows = (json.loads(line) for line in iterate_lines(shards.origins))
        options = next(rows, None)
        if not isinstance(options, dict):
            return None
        return options, [_parse(row) for row in rows]
    except (OSError, zlib.error, *BROKEN):
        return None


def _parse(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a line of the record to a dict as :func:`_record` returns it.

    Raises:
        ValueError, TypeError, KeyError or OverflowError: if the line is not valid.
    """
    files = [[int(size), int(changed), str(digest)] for size, changed, digest in row["files"]]
    return {"name": str(row["name"]), "note": str(row["note"]), "files": files}


def _check_unpacked(path: Path) -> None:
    """Check that the compressed record of what shards were made from does not expand to an excessive size.

    Raises:
        ValueError: if it expands to more than 1 MiB, and to more than 64 times its compressed size.
    """
    most = max(PACKED * path.stat().st_size, 1 << 20)
    with gzip.open(path) as stream:
        left = most
        while data := stream.read(1 << 20):
            left -= len(data)
            if left < 0:
                raise ValueError(f"{path} becomes larger than {most} bytes, which is not a record of files")


def _is_manifest(file: Path) -> bool:
    """Return whether a file is a manifest: a JSON file written by this package with the options that shards were made with."""
    try:
        return isinstance(read_json(file).get("samples"), int)
    except (OSError, ValueError):
        return False


def _is_begun(
    written: tuple[dict[str, Any], list[dict[str, Any]]] | None, options: Mapping[str, Any], origins: Sequence[Origin]
) -> bool:
    """Return whether the record of a set of shards agrees with the current options and names of origins.

    Args:
        written: recorded options and origins; None if there is no record.
        options: current options of the command that writes the shards.
        origins: files and other inputs that the shards are now made from.
    """
    if written is None:
        return False
    return written[0] == options and {line["name"] for line in written[1]} == {origin.name for origin in origins}
