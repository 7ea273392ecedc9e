"""Extras of the package, such as ``[video]``, which install the requirements of optional features."""

from __future__ import annotations

import re

EXTRAS = {
    "accelerate": "language", "av": "video", "datasets": "language", "diffusers": "diffusion", "lm_eval": "language",
    "mlxtend": "classification", "peft": "video", "pyarrow": "language", "pytorch_optimizer": "text-to-image",
    "sklearn": "classification", "tokenizers": "language", "torch_fidelity": "diffusion", "transformers": "language",
}  # fmt: skip
"""Extra that installs a package, by the package's import name."""


def name_the_extra(message: str) -> str:
    """Append a pip command that installs the missing package to the message of a ``ModuleNotFoundError``.

    Args:
        message: any error message. It is returned unchanged unless it says that an optional package is missing.
    """
    match = re.search(r"No module named '(\w+)", message)
    if match is None or match[1] not in EXTRAS:
        return message
    return f"{message}: pip install 'lightning-mhla[{EXTRAS[match[1]]}]'"
