"""Linear attention (MHLA) and models built with it, for use in PyTorch and in Lightning training.

The attention layers need no packages except torch, so they can be imported in an environment that has only torch. Names are
imported at their first use, so that commands that compute nothing start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhla_kernels.version import __version__

    from lightning_mhla.attention import MHLA, AttentionConfig, BlockLayout, CrossAttentionConfig, MHLACrossAttention
    from lightning_mhla.model import Backbone, Block, GenerationCache
    from lightning_mhla.swap import load_swapped, swap_attention

LATER = {
    **dict.fromkeys(
        ("MHLA", "AttentionConfig", "BlockLayout", "CrossAttentionConfig", "MHLACrossAttention"), "attention"
    ),
    "Backbone": "model",
    "Block": "model",
    "GenerationCache": "model",
    "load_swapped": "swap",
    "swap_attention": "swap",
}
"""Names that are imported at their first use, and the package of each."""

__all__ = [
    "MHLA",
    "AttentionConfig",
    "Backbone",
    "Block",
    "BlockLayout",
    "CrossAttentionConfig",
    "GenerationCache",
    "MHLACrossAttention",
    "__version__",
    "load_swapped",
    "swap_attention",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("mhla_kernels.version").__version__
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
