"""Optional requirements of this package, which ``pip install 'lightning-mhla[video]'`` and similar commands install."""

from __future__ import annotations

import re

EXTRAS = {
    "accelerate": "language", "av": "video", "datasets": "language", "diffusers": "diffusion", "lm_eval": "language",
    "mlxtend": "classification", "peft": "video", "pyarrow": "language", "pytorch_optimizer": "text-to-image",
    "sklearn": "classification", "tokenizers": "language", "torch_fidelity": "diffusion", "transformers": "language",
}  # fmt: skip
"""Mapping from the import name of a package to the extra that installs it."""


def name_the_extra(message: str) -> str:
    """Append the pip command that installs a missing optional package to the error message that reports it.

    Args:
        message: error message, such as ``No module named 'diffusers'``.

    Returns:
        The longer message; ``message`` unchanged if it does not report a missing optional package.
    """
    match = re.search(r"No module named '(\w+)", message)
    if match is None or match[1] not in EXTRAS:
        return message
    return f"{message}: pip install 'lightning-mhla[{EXTRAS[match[1]]}]'"
