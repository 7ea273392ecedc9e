"""Sequence parallelism: attention over a sequence whose tokens are distributed over several processes.

:mod:`mhla_kernels.sequence_parallel.operator` describes the algorithm.
"""

from mhla_kernels.sequence_parallel.collectives import gather_shares
from mhla_kernels.sequence_parallel.operator import mhla_sequence_parallel
from mhla_kernels.sequence_parallel.plan import SequencePlan, Traffic, share_blocks, share_tokens, traffic

__all__ = [
    "SequencePlan",
    "Traffic",
    "gather_shares",
    "mhla_sequence_parallel",
    "share_blocks",
    "share_tokens",
    "traffic",
]
