"""The PyTorch form in the place of a fused kernel that failed: the same call, from the arguments of the operator."""

from __future__ import annotations

import torch
from torch import Tensor

from mhla_kernels.features import map_features
from mhla_kernels.forms.attend import attend
from mhla_kernels.triton_backend.call import Arguments
from mhla_kernels.triton_backend.mixers import MIXERS
from mhla_kernels.verdicts import in_own_thread


def outputs(given: Arguments) -> Tensor:
    """``[B, N, H, V]`` in the dtype of v, contiguous; differentiable."""
    q, k, v = (x.float() for x in given[:3])
    q, k, v = map_features(q, k, v, "relu" if given.relu else "identity", given.key_mask)
    even = given.block_offsets is None
    out = attend(
        q,
        k,
        v,
        MIXERS[given.mixer].mixing(given.coefficients),
        "chunked",
        block_size=given.largest if even else None,
        block_offsets=None if given.block_offsets is None else tuple(given.block_offsets),
        cu_seqlens=given.cu_seqlens,
        causal=given.causal,
        scale=None if given.normalize else 1.0,
        eps=given.eps,
    )
    return out.to(given.v.dtype).contiguous()


def gradients(gradient: Tensor, with_mixing: bool, given: Arguments) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k, v and of the coefficients (none if not asked for)."""

    def run() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (*given[:3], *(given.coefficients if with_mixing else ()))]
            coefficients = leaves[3:] if with_mixing else given.coefficients
            out = outputs(given._replace(q=leaves[0], k=leaves[1], v=leaves[2], coefficients=coefficients))
            return torch.autograd.grad(out, leaves, gradient.to(out.dtype))

    dq, dk, dv, *others = in_own_thread(run, given.q.device)  # an operator's own thread records nothing for autograd
    return dq, dk, dv, others
