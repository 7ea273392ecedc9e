"""Shared by the domains: block layouts, attention modules, the backbone, the data pipeline, callbacks, checkpoints."""

from mhla_kernels.version import __version__

from lightning_mhla.attention import MHLA, AttentionConfig, BlockLayout
from lightning_mhla.model import Backbone, Block, GenerationCache
from lightning_mhla.swap import load_swapped, swap_attention

__all__ = [
    "MHLA",
    "AttentionConfig",
    "Backbone",
    "Block",
    "BlockLayout",
    "GenerationCache",
    "__version__",
    "load_swapped",
    "swap_attention",
]
