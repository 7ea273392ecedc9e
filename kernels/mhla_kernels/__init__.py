"""Multi-head linear attention (MHLA) as pure functions of tensors: attention at linear cost that mixes block summaries.

Tokens are divided into blocks. The summary of a block is a sum over its keys and values. Each query block reads a mixture of
all summaries, with learned coefficients (arXiv 2601.07832). The package depends on torch, and on triton for the fused kernels.
It does not import any other package of this repository.
"""

from mhla_kernels.attention import attention_matrix, mhla_attention
from mhla_kernels.forms.cost import limit_memory
from mhla_kernels.generation import mhla_prefill, mhla_step
from mhla_kernels.mixing import ExponentialMixing, extend_mixing, resize_mixing
from mhla_kernels.rotary import rotary_features
from mhla_kernels.state import MHLAState
from mhla_kernels.verdicts import agree_on_kernels
from mhla_kernels.version import __version__
from mhla_kernels.windowed import mhla_window_attention
from mhla_kernels.windowed_state import MHLAWindowState, mhla_window_prefill, mhla_window_step

__all__ = [
    "ExponentialMixing",
    "MHLAState",
    "MHLAWindowState",
    "__version__",
    "agree_on_kernels",
    "attention_matrix",
    "extend_mixing",
    "limit_memory",
    "mhla_attention",
    "mhla_prefill",
    "mhla_step",
    "mhla_window_attention",
    "mhla_window_prefill",
    "mhla_window_step",
    "resize_mixing",
    "rotary_features",
]
