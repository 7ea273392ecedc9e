"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
READMES = ("README.md", "kernels/mhla_kernels/README.md")
SHAPES = {"README.md": [(2, 256, 6, 64), None], READMES[1]: [(2, 1024, 6, 64), (1, 4096, 4, 64), (2, 4, 64)]}


@pytest.mark.parametrize("readme", READMES)
def test_python_examples_run(readme: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), flags=re.DOTALL)
    for code, shape in zip(blocks, SHAPES[readme], strict=True):
        names: dict[str, object] = {}
        exec(code, names)
        if shape is not None:
            assert names["out"].shape == shape  # type: ignore[attr-defined]
        else:
            assert names["attention"](torch.randn(1, 197, 384)).shape == (1, 197, 384)  # type: ignore[operator]


@pytest.mark.parametrize("readme", READMES)
def test_every_file_and_make_target_that_it_names_exists(readme: str) -> None:
    text, folder = (ROOT / readme).read_text(), (ROOT / readme).parent
    for path in re.findall(r"\]\(((?!http)[^)#]+)[^)]*\)", text):
        assert (folder / path).exists(), f"{path} does not exist"
    for path in re.findall(r"configs/[\w/]+\.yaml", text):
        assert (ROOT / path).exists(), f"{path} does not exist"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make (\w+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target} does not exist"
