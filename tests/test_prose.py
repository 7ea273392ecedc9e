"""The word list finds opaque summaries and private shorthand, and nothing in plain English; names say what a thing is."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest
from prose import PRODUCT, ROOT, findings, vague_names

BAD = [
    ('"""Of what trains."""', "Of"),
    ('def run():\n    """Likewise for clips."""', "Likewise"),
    ('WARPS = (4, 8)\n"""That kernels are tried with."""', "That"),
    ('"""What a command prints."""', "What"),
    ("# the samples are drawn anew", "anew"),
    ("# a file is there whole or not at all", "there whole or not at all"),
    ('"""Mask of the tokens: which\n    are no padding."""', "are no padding"),
    ('"""Reject a folder that is no whole checkpoint."""', "is no whole"),
    ("# other models are refused", "refused"),
    ("# wait for the furthest process", "furthest"),
    ('"""Steps of the optimiser."""', "optimiser"),
    ('"""Continue, with the same bits as one never stopped."""', "never stopped"),
]
GOOD = [
    '"""Versions of Python, torch and Lightning."""',
    'def run():\n    """Return whether there is no padding, and the mask is no longer needed."""',
    '"""Ask for ``anew``, and quote "refused" and `furthest`."""',
    'message = "connection refused; what it takes: likewise"',
    "# connection refused by the server",
    "# the loss is no larger than before; tokens of one row are so close that the sum overflows",
    '"""Normalizer and optimizer, as in the paper."""',
]


@pytest.mark.parametrize(("source", "phrase"), BAD)
def test_shorthand_is_found(source: str, phrase: str) -> None:
    assert phrase in [finding.phrase for finding in findings(source, ".py")]


@pytest.mark.parametrize("source", GOOD)
def test_plain_english_passes(source: str) -> None:
    assert findings(source, ".py") == []


def test_findings_have_the_lines_of_a_page() -> None:
    page = "# Title\n\n```python\nanew = likewise\n```\n\nUse `anew`.\n\nStart anew, and\nlikewise.\n"
    assert [(finding.line, finding.phrase) for finding in findings(page, ".md")] == [(9, "anew"), (10, "likewise")]


NAMED = """
found = 1

class Mixer:
    own: int

    def mix(self, known, *given, previous=None, **each):
        kept = [before for before in self.own if before(found, own=1)]
        self.kept = lambda found: found
        with open(kept) as own:
            known += 1
"""


def test_variables_and_parameters_without_a_meaning_are_found() -> None:
    names = [(name.line, name.phrase) for name in vague_names(NAMED)]
    parameters = [(7, "each"), (7, "given"), (7, "known")]
    assert names == [*parameters, (8, "before"), (8, "kept"), (9, "found"), (10, "own"), (11, "known")]


def test_attributes_keywords_and_uses_of_a_name_pass() -> None:
    assert vague_names("class Mixer:\n    def mix(self):\n        self.own = mix(found, kept=self.known)\n") == []


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_long_modules_say_why() -> None:
    long = [
        path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") if len(path.read_text().split("\n")) > 351
    ]
    assert not [path for path in long if "\n# Longer than other modules because " not in path.read_text()]
