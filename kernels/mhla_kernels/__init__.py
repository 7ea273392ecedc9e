"""MHLA, linear-cost attention with learned mixing of block summaries, as pure functions of tensors.

Paper: arXiv 2601.07832. Needs torch only; nothing of the suite around it.
"""

from mhla_kernels.attention import attention_matrix, mhla_attention
from mhla_kernels.mixing import resize_mixing

__all__ = ["attention_matrix", "mhla_attention", "resize_mixing"]
