"""PyTorch replacements that compute a call of the cross-attention operator if its Triton kernels have failed."""

from __future__ import annotations

import torch
from torch import Tensor

from mhla_kernels.cross.forms import attend_cross, chunked_by, mix_by_matrix
from mhla_kernels.cross.problem import CrossProblem, prepare_cross
from mhla_kernels.features import hide
from mhla_kernels.mixing import DenseMixing
from mhla_kernels.problem import Weighting
from mhla_kernels.triton_backend.cross.call import CrossArguments


def outputs(arguments: CrossArguments, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the outputs of the cross-attention operator in PyTorch, with support for autograd.

    Args:
        arguments: arguments of the operator ``torch.ops.mhla.cross_attention``.
        dtype: dtype of the operands and sums.

    Returns:
        Outputs, ``[B, Nq, H, V]`` in the dtype of v, contiguous.
    """
    q, k, v, matrix = (x.to(dtype) for x in (*arguments[:3], *arguments.coefficients))
    matrix = matrix if len(matrix) > 1 else matrix[0]
    problem = CrossProblem(
        q,
        k,
        v,
        DenseMixing(matrix),
        arguments.layout,
        Weighting(False, None if arguments.eps is not None else 1.0, arguments.eps or 0.0),
        "relu" if arguments.relu else "identity",
        arguments.query_mask,
        arguments.key_mask,
    )
    problem = prepare_cross(problem)
    bounds, (_, sequences, *_) = arguments.cu_seqlens, arguments.query_tables
    if bounds is not None and sequences.shape[1] != len(bounds) - 1:  # the matrix covers the blocks of all sequences
        blocks = problem.layout.partition(q.device)
        out = hide(chunked_by(problem, blocks, mix_by_matrix(matrix, blocks.together)), arguments.query_mask)
    else:
        out = attend_cross(problem, "chunked")
    return out.to(arguments.v.dtype).contiguous()
