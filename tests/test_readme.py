"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.split()[1])
def test_python_examples_run(code: str) -> None:
    names: dict[str, object] = {}
    exec(code, names)
    if "out" in names:
        assert names["out"].shape == (2, 256, 6, 64)  # type: ignore[attr-defined]
    else:
        assert names["attention"](torch.randn(1, 197, 384)).shape == (1, 197, 384)  # type: ignore[operator]


def test_every_file_and_make_target_that_it_names_exists() -> None:
    for path in re.findall(r"\]\(((?!http)[^)]+)\)", TEXT) + re.findall(r"configs/[\w/]+\.yaml", TEXT):
        assert (ROOT / path).exists(), f"{path} does not exist"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make (\w+)", TEXT, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target} does not exist"
