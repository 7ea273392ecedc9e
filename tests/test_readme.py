"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_mhla.attention import Attention, AttentionConfig, BlockLayout, build_attention

ROOT = Path(__file__).parents[1]
READMES = (
    "CONTRIBUTING.md",
    "README.md",
    "kernels/mhla_kernels/README.md",
    "tasks/mhla_tasks/language/README.md",
    "tasks/mhla_tasks/diffusion/README.md",
    "tasks/mhla_tasks/video/README.md",
)
SHAPES = {
    "README.md": [("out", (2, 256, 6, 64)), ("attention", (1, 197, 384)), ("Mean", (1, 16, 8))],
    "kernels/mhla_kernels/README.md": [
        ("out", (2, 1024, 6, 64)),
        ("out", (1, 4096, 4, 64)),
        ("out", (1, 1000, 4, 64)),
        ("out", (2, 4, 64)),
        ("out", (1, 1000, 4, 64)),
    ],
    "tasks/mhla_tasks/language/README.md": [("tokens", (2, 28))],
    "tasks/mhla_tasks/diffusion/README.md": [("predicted", (2, 8, 32, 32))],
    "tasks/mhla_tasks/video/README.md": [("layers", (3,))],
}
"""The end of each example: a tensor, or a layer or a kind of attention that takes and gives tokens of this shape."""


@pytest.mark.parametrize("readme", READMES)
def test_python_examples_run(readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples save models
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), flags=re.DOTALL)
    for code, (name, shape) in zip(blocks, SHAPES.get(readme, []), strict=True):
        names: dict[str, Any] = {}
        for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            monkeypatch.setenv(variable, value) if "torchrun" in code else None
        exec(code, names)
        if dist.is_initialized():
            dist.destroy_process_group()
        found = names[name]
        if isinstance(found, type):
            try:
                found = build_attention(AttentionConfig(kind=name.lower()), 8, 2, BlockLayout((16,), (1,)))
            finally:
                del Attention.kinds[name.lower()]
        assert (found(torch.randn(shape)) if callable(found) else found).shape == shape


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
