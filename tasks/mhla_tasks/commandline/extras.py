"""Extras of the package that install what an optional feature needs."""

from __future__ import annotations

import re

EXTRAS = {
    "accelerate": "language", "av": "video", "datasets": "language", "diffusers": "diffusion", "lm_eval": "language",
    "mlxtend": "classification", "peft": "video", "pyarrow": "language", "pytorch_optimizer": "text-to-image",
    "sklearn": "classification", "tokenizers": "language", "torch_fidelity": "diffusion", "transformers": "language",
}  # fmt: skip
"""Extras that install packages, by the packages' import names."""


def name_the_extra(message: str) -> str:
    """A message with the command that installs the package that Python says is missing."""
    found = re.search(r"No module named '(\w+)", message)
    if found is None or found[1] not in EXTRAS:
        return message
    return f"{message}: pip install 'lightning-mhla[{EXTRAS[found[1]]}]'"
