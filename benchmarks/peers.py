"""Peers of the operator in benchmarks: softmax and linear attention, and loops over blocks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def loop_over_blocks(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, block: int) -> Tensor:
    """Compute causal MHLA without a normalizer by a Python loop over blocks, as a baseline for benchmarks.

    Args:
        q: queries, ``[B, N, H, D]``.
        k: keys, ``[B, N, H, D]``.
        v: values, ``[B, N, H, V]``.
        mixing: coefficients between M blocks, ``[M, M]``.
        block: number of tokens in a block, ``N / M``.

    Returns:
        Outputs ``[B, N, H, V]``.
    """
    q, k, v = (x.transpose(1, 2).unflatten(2, (-1, block)) for x in (q, k, v))
    blocks = q.shape[2]
    visible = torch.ones(block, block, dtype=q.dtype, device=q.device).tril()
    summaries = torch.stack([k[:, :, i].transpose(-1, -2) @ v[:, :, i] for i in range(blocks)])
    out = torch.zeros_like(v)
    for i in range(blocks):
        earlier = (mixing[i, :i, None, None, None, None] * summaries[:i]).sum(0).to(q.dtype)
        scores = (q[:, :, i] @ k[:, :, i].transpose(-1, -2)) * visible
        out[:, :, i] = q[:, :, i] @ earlier + mixing[i, i].to(q.dtype) * (scores @ v[:, :, i])
    return out.flatten(2, 3).transpose(1, 2) * q.shape[-1] ** -0.5


def softmax_backend(device: torch.device) -> SDPBackend | None:
    """Return the backend that softmax attention has to use: flash attention on a GPU; None on a CPU, where torch chooses."""
    return SDPBackend.FLASH_ATTENTION if device.type == "cuda" else None


def softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: SDPBackend | None) -> Tensor:
    """Compute softmax attention with torch's scaled_dot_product_attention.

    Args:
        q: queries, ``[B, H, N, D]``.
        k: keys, with the same shape.
        v: values, with the same shape.
        causal: whether attention is causal.
        backend: backend of torch to use; None to let torch choose.

    Returns:
        Outputs ``[B, H, N, D]``.
    """
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def flash_linear_attention() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the function for causal linear attention of flash-linear-attention, on tensors ``[B, N, H, D]``.

    Returns:
        The function; None if the package is not installed or there is no GPU.
    """
    if importlib.util.find_spec("fla") is None or not torch.cuda.is_available():
        return None
    from fla.ops.linear_attn import chunk_linear_attn

    return lambda q, k, v: chunk_linear_attn(q, k, v, normalize=False)[0]


def authors(checkout: Path) -> Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]:
    """Load the chunked causal form from a checkout of the paper's public code (github.com/DAGroup-PKU/MHLA).

    Returns:
        A function of q, k, v, mixing and the number of tokens in a block.

    Raises:
        FileNotFoundError: if the checkout does not contain the chunked form.
    """
    path = checkout / "mhla_nlp/fla/ops/mhla/naive.py"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; --authors requires a checkout of github.com/DAGroup-PKU/MHLA")
    spec = importlib.util.spec_from_file_location("authors_naive", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, block: int) -> Tensor:
        out = module.naive_chunk_simple_mhla_fixed(q, k, v, mixing[..., None, None, None, None], chunk_size=block)
        return out[0] if isinstance(out, tuple) else out

    return run
