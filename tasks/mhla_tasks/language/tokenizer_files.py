"""Tokenizers as files: loaded from a folder or the hub, saved, and kept inside checkpoints.

A file inside a checkpoint may come from anybody. Names that lead out of the folder, files without end, and rules that make a
short text grow without end are errors; no code from a file runs.
"""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tokenizers import Regex, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightning_mhla.system.untrusted import check_size, reason

PackedFiles = dict[str, str | dict[str, str]]
"""Files by their path inside the folder: text as it is, other bytes as ``{"base64": ...}``."""

MOST_FILES = 1000
MOST_CHARACTERS = 1 << 29
MOST_DEPTH = 8
"""Bounds of the files of a tokenizer in a checkpoint, far above those of any published one."""

LARGEST_FILE = 1 << 27
"""Bytes of a ``tokenizer.json``."""

MOST_GROWTH, LONGEST_REPLACEMENT, MOST_RULES = 100, 1000, 1000
"""How much longer a text may become under the replacements of a tokenizer; the longest one, in characters; their number."""

REPEATED = 3
"""Times that a replacement is tried in a row, for patterns that reach from one to the next."""

MOST_PADDING, MOST_AROUND = 1 << 17, 1000
"""Tokens to which a tokenizer may pad a text, and which it may put around one."""


def load_tokenizer(where: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or of a model on the hub.

    Raises:
        FileNotFoundError: when there is none, naming the way out.
        ValueError: when its files are a trap: see :func:`check_rules`, and a template that puts many tokens around a text.
    """
    _check_folder(Path(where))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(where), trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises Exception itself
        kind = "folder" if Path(where).exists() else "folder, and no model that the hub or its local cache gives"
        raise FileNotFoundError(
            f"{where} is no {kind} with a tokenizer (tokenizer.json); give the folder that holds it, or a model name with "
            f"the network at hand ({reason(error)})"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        check_rules(json.loads(backend.to_str()), str(where))
        around = backend.num_special_tokens_to_add(True)
        if around > MOST_AROUND:
            raise ValueError(
                f"the tokenizer in {where} is not safe to use: it puts {around} tokens around a text, more than {MOST_AROUND}"
            )
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files of a tokenizer, chat templates of several names included.

    Raises:
        ValueError: for a chat template whose name is not that of a file.
    """
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    for name in templates:
        if not isinstance(name, str) or not name or PurePosixPath(name).name != name or set(name) & set("\\:\0"):
            raise ValueError(f"the chat template {str(name)[:60]!r} of the tokenizer has no name for a file; rename it")
    tokenizer.save_pretrained(folder)


def pack_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PackedFiles:
    """The tokenizer's files, those in folders of its folder included."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(tokenizer, folder)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): _packed(path.read_bytes()) for path in paths}


def unpack_tokenizer(files: PackedFiles) -> PreTrainedTokenizerBase:
    """The reverse of :func:`pack_tokenizer`.

    Raises:
        ValueError: when these are not the files of a tokenizer.
    """
    if not isinstance(files, dict) or not files:
        raise ValueError("the checkpoint's tokenizer is not a set of files by name")
    contents = dict(_checked(files))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, data in contents.items():
            target = folder.joinpath(*path.parts)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as stream:  # new, so that nothing is written through a link or twice
                    stream.write(data)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"the checkpoint's tokenizer has a file {str(path)[:80]!r}: {reason(error)}"
                ) from error
        try:
            return load_tokenizer(folder)
        except FileNotFoundError as error:
            raise ValueError(
                f"the checkpoint's tokenizer cannot be read ({reason(error.__cause__ or error)})"
            ) from error


def _packed(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _checked(files: Mapping[Any, Any]) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Relative paths and contents of packed files."""
    if len(files) > MOST_FILES:
        raise ValueError(f"the checkpoint's tokenizer has {len(files)} files, more than {MOST_FILES}")
    total = 0
    for name, content in files.items():
        path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
        wrong = {"", ".", ".."}.intersection(str(name).split("/")) or set(str(name)) & set("\\:\0")
        if wrong or path.is_absolute() or not 1 <= len(path.parts) <= MOST_DEPTH:
            raise ValueError(
                f"the checkpoint's tokenizer has a file {str(name)[:80]!r}, which is not a path inside a folder"
            )
        text = content.get("base64") if isinstance(content, dict) else content
        if not isinstance(text, str):
            raise ValueError(f"the checkpoint's tokenizer has a file {name[:80]!r} that is neither text nor bytes")
        total += len(text)
        if total > MOST_CHARACTERS:
            raise ValueError(f"the checkpoint's tokenizer has more than {MOST_CHARACTERS} characters")
        try:
            yield path, base64.b64decode(text, validate=True) if isinstance(content, dict) else text.encode()
        except ValueError as error:
            raise ValueError(f"the checkpoint's tokenizer has a broken file {name[:80]!r} ({reason(error)})") from error


def _check_folder(folder: Path) -> None:
    """Check a folder's rules before the library applies them, which it does to the tokens it adds."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    check_size(path, LARGEST_FILE)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return  # the library says what is wrong with it
    check_rules(state, str(folder))


def check_rules(state: Any, where: str) -> None:
    """Reject a tokenizer that makes a short text grow without end.

    Args:
        state: what its ``tokenizer.json`` holds.
        where: its folder, for messages.

    Raises:
        ValueError: naming the folder, for replacements that feed each other, and padding to a great length.
    """
    if not isinstance(state, dict):
        return
    for kind in ("normalizer", "decoder"):
        _check_growth(list(_rules(state.get(kind), 0)), kind, where)
    padding = state.get("padding")
    padding = padding if isinstance(padding, dict) else {}
    strategy = padding.get("strategy")
    lengths = (padding.get("pad_to_multiple_of"), strategy.get("Fixed") if isinstance(strategy, dict) else None)
    for length in lengths:
        if isinstance(length, int) and length > MOST_PADDING:
            raise ValueError(
                f"the tokenizer in {where} is not safe to use: it pads each text to {length} tokens, more than {MOST_PADDING}"
            )


def _check_growth(rules: Sequence[_Rule], kind: str, where: str) -> None:
    """Raise ValueError if the replacements of a tokenizer make a text many times longer, each feeding the next.

    A text grows at the replacement that matches it first. What that leaves is followed through all later ones, so that nothing
    depends on which text is tried.
    """
    long = any(len(rule.content) > LONGEST_REPLACEMENT for rule in rules)
    if not long and math.prod(max(1.0, rule.growth) for rule in rules) <= MOST_GROWTH:
        return
    if not long and len(rules) <= MOST_RULES:
        try:
            made = [rule.make() for rule in rules]
            for number, rule in enumerate(rules):
                text = rule.content * REPEATED
                for later in made[number + 1 :]:
                    text = later.normalize_str(text)
                    if len(text) > MOST_GROWTH * REPEATED * rule.shortest:
                        break
                if len(text) > MOST_GROWTH * REPEATED * rule.shortest:
                    break
            else:
                return
        except Exception as error:  # the tokenizers library raises Exception itself
            raise ValueError(f"the tokenizer in {where} has a broken {kind}: {reason(error)}") from error
    raise ValueError(
        f"the tokenizer in {where} is not safe to use: the replacements of its {kind} make a text more than {MOST_GROWTH} "
        f"times longer, have more than {LONGEST_REPLACEMENT} characters, or are more than {MOST_RULES}"
    )


class _Rule(NamedTuple):
    """A step that replaces text: what it looks for (None for the start of a text), whether that is a regular expression, and
    what it puts there."""

    pattern: str | None
    is_regex: bool
    content: str

    @property
    def shortest(self) -> int:
        """Characters that it replaces, at least; an expression may match one."""
        return 1 if self.is_regex or not self.pattern else len(self.pattern)

    @property
    def growth(self) -> float:
        """How much longer it makes what it replaces; an expression that matches nothing adds to each character."""
        return (len(self.content) + (self.is_regex or not self.pattern)) / self.shortest

    def make(self) -> normalizers.Normalizer:
        """The library's own step."""
        if self.pattern is None:
            return normalizers.Prepend(self.content)
        return normalizers.Replace(Regex(self.pattern) if self.is_regex else self.pattern, self.content)


def _rules(step: Any, depth: int) -> Iterator[_Rule]:
    """The steps of a part of a tokenizer that can make a text longer, in order."""
    if not isinstance(step, dict):
        return
    inside: list[Any] = next(
        (step[name] for name in ("normalizers", "decoders") if isinstance(step.get(name), list)), []
    )
    if inside and depth >= MOST_DEPTH:
        yield _Rule("", False, "x" * (LONGEST_REPLACEMENT + 1))  # steps inside steps without end are not safe either
        return
    for inner in inside:
        yield from _rules(inner, depth + 1)
    pattern, content = step.get("pattern"), step.get("content")
    if step.get("type") == "Prepend" and isinstance(step.get("prepend"), str):
        yield _Rule(None, False, step["prepend"])
    if step.get("type") == "Replace" and isinstance(pattern, dict) and isinstance(content, str):
        for name, is_regex in (("String", False), ("Regex", True)):
            if isinstance(pattern.get(name), str):
                yield _Rule(pattern[name], is_regex, content)
