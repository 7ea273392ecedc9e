"""Safety checks for tokenizers from untrusted sources, which reject rules that make a short text grow without bound."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, normalizers

from lightning_mhla.system.untrusted import check_size, reason

LARGEST_FILE = 1 << 27
"""Maximum size of a ``tokenizer.json`` in bytes."""

MOST_GROWTH, LONGEST_REPLACEMENT, MOST_RULES = 100, 1000, 1000
"""Limits for a tokenizer: growth factor of a text, characters in one replacement, and number of replacements."""

REPEATED = 3
"""Number of copies of a replacement in the tested text, for patterns that match across two copies."""

MOST_PADDING, MOST_AROUND = 1 << 17, 1000
"""Maximum length in tokens to which a tokenizer may pad a text, and maximum number of tokens that it may add around a text."""

MOST_DEPTH = 8
"""Maximum nesting depth of a tokenizer's steps."""


def check_tokenizer(tokenizer: Any, where: str) -> None:
    """Check that a loaded transformers tokenizer cannot make a short text grow without bound.

    Args:
        tokenizer: tokenizer from the transformers library. A tokenizer written in Python has no configurable replacements, and
            always passes.
        where: folder or name of the tokenizer, for messages.

    Raises:
        ValueError: if :func:`check_rules` rejects the tokenizer, or more than 1,000 special tokens are added to each text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        check_rules(json.loads(backend.to_str()), where)
        around = backend.num_special_tokens_to_add(True)
        if around > MOST_AROUND:
            raise ValueError(
                f"the tokenizer in {where} is not safe to use: it adds {around} tokens around each text (at most {MOST_AROUND})"
            )


def check_folder(folder: Path) -> None:
    """Check the text replacements and padding in a tokenizer's folder before transformers loads the tokenizer.

    A check after loading would be too late, because loading applies the replacements to the added tokens. A folder passes if
    it has no ``tokenizer.json``, or if this file is not valid JSON, an error that transformers reports.

    Args:
        folder: folder of the tokenizer.

    Raises:
        ValueError: if :func:`check_rules` rejects the tokenizer, or ``tokenizer.json`` is larger than 128 MiB.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    check_size(path, LARGEST_FILE)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return  # the library reports the error in the file
    check_rules(state, str(folder))


def check_rules(state: Any, where: str) -> None:
    """Check that the text replacements and padding of a tokenizer cannot make a short text grow without bound.

    Args:
        state: parsed content of the tokenizer's ``tokenizer.json``.
        where: folder of the tokenizer, for messages.

    Raises:
        ValueError: if text replacements can make a text more than 100 times longer, or texts are padded to more than 131,072
            tokens. Also if the replacements cannot be checked because there are too many, one is too long, or a pattern is
            invalid.
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
    """Check that successive replacements of a tokenizer do not make a text more than 100 times longer.

    The check takes the output of each replacement and applies all later replacements to it, so that the result does not depend
    on a choice of test texts.

    Args:
        rules: replacements in the order in which they are applied.
        kind: ``normalizer`` or ``decoder``, for messages.
        where: folder of the tokenizer, for messages.

    Raises:
        ValueError: if the text may become more than 100 times longer, or if a replacement has more than 1,000 characters or an
            invalid pattern. Also if more than 1,000 replacements would have to be tried.
    """
    long = any(len(rule.content) > LONGEST_REPLACEMENT for rule in rules)
    # The product bounds the growth from above without running a rule, which is enough for almost all tokenizers.
    if not long and math.prod(max(1.0, rule.growth) for rule in rules) <= MOST_GROWTH:
        return
    if not long and len(rules) <= MOST_RULES:
        try:
            normalizer_steps = [rule.make() for rule in rules]
            for number, rule in enumerate(rules):
                text = rule.content * REPEATED
                longest = MOST_GROWTH * REPEATED * rule.shortest
                for later in normalizer_steps[number + 1 :]:
                    text = later.normalize_str(text)
                    # Stop inside the loop: the text may grow exponentially with the number of rules.
                    if len(text) > longest:
                        break
                if len(text) > longest:
                    break
            else:
                return
        except Exception as error:  # the tokenizers library raises Exception itself
            raise ValueError(f"the tokenizer in {where} has a broken {kind}: {reason(error)}") from error
    raise ValueError(
        f"the tokenizer in {where} is not safe to use: the replacements of its {kind} make a text more than {MOST_GROWTH} "
        f"times longer, one of them has more than {LONGEST_REPLACEMENT} characters, or there are more than {MOST_RULES}"
    )


class _Rule(NamedTuple):
    """Replacement step of a tokenizer, which replaces a pattern in a text or inserts a prefix.

    Attributes:
        pattern: the text that is replaced; None if ``content`` is inserted at the start of the text.
        is_regex: whether ``pattern`` is a regular expression.
        content: text that replaces the pattern or is inserted.
    """

    pattern: str | None
    is_regex: bool
    content: str

    @property
    def shortest(self) -> int:
        """Minimum number of characters that this step replaces in a text; 1 for a regular expression or an inserted prefix."""
        return 1 if self.is_regex or not self.pattern else len(self.pattern)

    @property
    def growth(self) -> float:
        """Upper bound on the factor by which this replacement step lengthens a text."""
        return (len(self.content) + (self.is_regex or not self.pattern)) / self.shortest

    def make(self) -> normalizers.Normalizer:
        """Create the object of the tokenizers library that performs this replacement."""
        if self.pattern is None:
            return normalizers.Prepend(self.content)
        return normalizers.Replace(Regex(self.pattern) if self.is_regex else self.pattern, self.content)


def _rules(step: Any, depth: int) -> Iterator[_Rule]:
    """Yield the replacement steps of a normalizer or decoder, in order.

    Args:
        step: entry of ``tokenizer.json`` that describes the normalizer or decoder.
        depth: number of steps that enclose ``step``. From a depth of 8, steps inside ``step`` are replaced by a rule that is
            always rejected.
    """
    if not isinstance(step, dict):
        return
    inside: list[Any] = next(
        (step[name] for name in ("normalizers", "decoders") if isinstance(step.get(name), list)), []
    )
    if inside and depth >= MOST_DEPTH:
        yield _Rule("", False, "x" * (LONGEST_REPLACEMENT + 1))  # stands for the nested steps, and is always rejected
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
