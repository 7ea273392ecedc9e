"""Whichever form is asked for, in PyTorch, on mapped tensors of one dtype."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mhla_kernels.backend import Form
from mhla_kernels.blocks import is_dynamic, make_partition, most_blocks, token_blocks
from mhla_kernels.forms import reference
from mhla_kernels.forms.chunked import chunked, make_mixer
from mhla_kernels.forms.parallel import parallel
from mhla_kernels.mixing import Mixing


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Mixing,
    form: Form,
    *,
    block_size: int | None,
    block_offsets: tuple[int, ...] | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    eps: float,
) -> Tensor:
    """Outputs ``[B, N, H, V]``; ``scale`` None asks for the normaliser. Arguments are those of the public function, checked."""
    options: dict[str, Any] = {"causal": causal, "scale": scale, "eps": eps}
    tokens, device = q.shape[1], q.device
    if form == "reference" or (form == "parallel" and is_dynamic(tokens)):
        where = token_blocks(tokens, device, block_size, block_offsets, cu_seqlens)
        matrix = mixing.matrix(most_blocks(tokens, block_size, block_offsets))
        return reference.attend(reference.weights(q, k, matrix, where, **options), v)
    blocks = make_partition(tokens, device, block_size, block_offsets, cu_seqlens)
    q, k, v = blocks.split(q), blocks.split(k), blocks.split(v)
    if form == "parallel":
        matrix = mixing.matrix(most_blocks(tokens, block_size, block_offsets))
        return blocks.merge(parallel(q, k, v, blocks.expand_mixing(matrix), **options))
    return blocks.merge(chunked(q, k, v, make_mixer(mixing, blocks), **options))
