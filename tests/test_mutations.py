"""The mutations of ``make mutate`` fit the code: each text occurs once, and the tests that must notice it exist."""

from __future__ import annotations

from pathlib import Path

from mutate import read_mutations

ROOT = Path(__file__).parents[1]


def test_mutations_fit_the_code() -> None:
    mutations = read_mutations()
    assert len({mutation["id"] for mutation in mutations}) == len(mutations) >= 120
    for mutation in mutations:
        for wanted in (word for word in mutation["tests"] if word.startswith("tests/")):
            path, _, name = wanted.partition("::")
            function = name.rpartition("::")[2].partition("[")[0]
            assert (ROOT / path).exists(), wanted
            assert not function or f"def {function}(" in (ROOT / path).read_text(), wanted
