"""The PyTorch form in the place of a fused kernel that failed: the same call, from the arguments of the operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mhla_kernels.features import map_features
from mhla_kernels.forms.attend import attend, attend_span
from mhla_kernels.mixing.span import Span
from mhla_kernels.triton_backend.call import Arguments
from mhla_kernels.triton_backend.mixers import MIXERS
from mhla_kernels.verdicts import in_own_thread


def outputs(given: Arguments, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[B, N, H, V]`` in the dtype of v, contiguous; differentiable. Sums are held in ``dtype``."""
    q, k, v = (x.to(dtype) for x in given[:3])
    q, k, v = map_features(q, k, v, "relu" if given.relu else "identity", given.key_mask)
    scale = None if given.normalize else 1.0
    if given.form == "spanning":
        matrix, reading, writing, decay = (x.to(dtype) for x in given.coefficients)
        span = Span(matrix, reading, writing, decay, 0 if given.causal else decay.shape[-1] // 2)
        options = {"causal": given.causal, "scale": scale, "eps": given.eps}
        out = attend_span(q, k, v, span, given.block_size, given.largest, given.cu_seqlens, **options)
        return out.to(given.v.dtype).contiguous()
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
        scale=scale,
        eps=given.eps,
    )
    return out.to(given.v.dtype).contiguous()


def gradients(gradient: Tensor, wanted: Sequence[bool], given: Arguments) -> list[Tensor | None]:
    """Gradients of q, k, v and of each coefficient tensor; ``wanted``: for q, k, v and the coefficients together."""
    count = len(given.coefficients)
    wants = [*wanted[:3], *(wanted[3],) * count]

    def run() -> list[Tensor]:
        with torch.enable_grad():
            tensors = (*given[:3], *given.coefficients)
            leaves = [x.detach().requires_grad_(want) for x, want in zip(tensors, wants, strict=True)]
            out = outputs(given._replace(q=leaves[0], k=leaves[1], v=leaves[2], coefficients=leaves[3:]))
            asked = [x for x in leaves if x.requires_grad]
            # a single chunk has no use for what lies between chunks
            return list(torch.autograd.grad(out, asked, gradient.to(out.dtype), materialize_grads=True))

    found = iter(in_own_thread(run, given.q.device))  # an operator's own thread records nothing for autograd
    return [next(found) if want else None for want in wants]
