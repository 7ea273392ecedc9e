"""Tokenizers that anybody may have written: rules by which a short text grows without end are an error before they are used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, normalizers

from lightning_mhla.system.untrusted import check_size, reason

LARGEST_FILE = 1 << 27
"""Bytes of a ``tokenizer.json``."""

MOST_GROWTH, LONGEST_REPLACEMENT, MOST_RULES = 100, 1000, 1000
"""How much longer a text may become under the replacements of a tokenizer; the longest one, in characters; their number."""

REPEATED = 3
"""Times that a replacement is tried in a row, for patterns that reach from one to the next."""

MOST_PADDING, MOST_AROUND = 1 << 17, 1000
"""Tokens to which a tokenizer may pad a text, and which it may put around one."""

MOST_DEPTH = 8
"""Steps inside steps."""


def check_tokenizer(tokenizer: Any, where: str) -> None:
    """Check the rules of a tokenizer of transformers that is loaded.

    Args:
        tokenizer: the tokenizer; one that is written in Python has no rules.
        where: its folder or name, for messages.

    Raises:
        ValueError: see :func:`check_rules`; and for a template that puts many tokens around a text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        check_rules(json.loads(backend.to_str()), where)
        around = backend.num_special_tokens_to_add(True)
        if around > MOST_AROUND:
            raise ValueError(
                f"the tokenizer in {where} is not safe to use: it puts {around} tokens around a text, more than {MOST_AROUND}"
            )


def check_folder(folder: Path) -> None:
    """Check a folder's rules before the library applies them, which it does to the tokens it adds.

    Raises:
        ValueError: see :func:`check_rules`; and for a file that is too large.
    """
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
