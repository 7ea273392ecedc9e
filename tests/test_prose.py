"""The word list finds opaque summaries and private shorthand, and nothing in plain English."""

from __future__ import annotations

import pytest
from prose import findings

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
