"""Shapes of the operator's benchmarks, their minimal cost, and random inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of the tensors in a call of the operator.

    Attributes:
        name: name of the row in tables.
        batch: number of sequences.
        heads: number of heads.
        tokens: number of tokens N.
        block: number of tokens in a block.
        key_width: width Dk of a key.
        value_width: width Dv of a value.
        causal: whether attention is causal.
        normalize: whether weights are divided by their sum; None to do so if attention is bidirectional.
    """

    name: str
    batch: int
    heads: int
    tokens: int
    block: int
    key_width: int
    value_width: int
    causal: bool
    normalize: bool | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks M."""
        return -(-self.tokens // self.block)

    @property
    def normalized(self) -> bool:
        """Whether weights are divided by their sum; resolves the default of ``normalize``."""
        return not self.causal if self.normalize is None else self.normalize


MODELS = [
    Shape("DeiT-S 224", 128, 6, 256, 16, 64, 64, False),
    Shape("DiT-S/2 256 px", 256, 6, 256, 16, 64, 64, False),
    Shape("DiT-XL/2 256 px", 64, 16, 256, 16, 72, 72, False),
    Shape("DiT-XL/2 512 px", 32, 16, 1024, 64, 72, 72, False),
    Shape("SANA-0.6B 1024 px", 16, 36, 1024, 64, 32, 32, False),
    Shape("Wan2.1-1.3B 480x800, 150 blocks", 1, 12, 31500, 210, 128, 128, False, False),
    Shape("Wan2.1-1.3B 480x800, 105 blocks", 1, 12, 31500, 300, 128, 128, False, False),
    Shape("LM 340M, 2k", 16, 4, 2048, 64, 128, 256, True),
    Shape("LM 340M, 8k", 4, 4, 8192, 64, 128, 256, True),
    Shape("LM 340M, 32k, C=64", 1, 4, 32768, 64, 128, 256, True),
    Shape("LM 340M, 32k, C=256", 1, 4, 32768, 256, 128, 256, True),
]
"""Shapes of published models, at batch sizes for training (MHLA paper, sections 4 and 5)."""

LENGTHS = [Shape(f"LM 340M, N={n}", 32768 // n, 4, n, 64, 128, 256, True) for n in (256, 512, 1024, 4096, 16384)]
"""Shapes of different lengths with 32,768 tokens in total. Together with ``MODELS`` they show how time grows with length."""

SMALL = [
    *(Shape(f"LM 340M, N={n}", 1, 4, n, 64, 128, 256, True) for n in (512, 1024, 2048, 4096, 8192, 16384)),
    Shape("digits 8x8", 64, 4, 64, 4, 16, 16, False),
    Shape("DeiT-S 256 tokens", 4, 6, 256, 16, 64, 64, False),
    Shape("DiT-XL/2 512 px", 1, 16, 1024, 64, 72, 72, False),
    Shape("DiT-XL/2 1024 px", 1, 16, 4096, 256, 72, 72, False),
]
"""Shapes small enough to measure on a CPU."""


@dataclass(frozen=True)
class Rates:
    """Peak rates of a device: bytes and operations per second. The defaults were measured on an H200."""

    bandwidth: float = 4.3e12
    operations: float = 790e12


@dataclass(frozen=True)
class Cost:
    """Number of bytes moved and of operations computed in a forward or backward pass."""

    bytes: float
    operations: float

    def milliseconds(self, rates: Rates) -> float:
        """Return the minimal time in milliseconds: that of moving the bytes or of the operations, whichever is longer."""
        return 1e3 * max(self.bytes / rates.bandwidth, self.operations / rates.operations)


def least_cost(shape: Shape, rates: Rates, backward: bool, terms: int | None = None) -> Cost:
    """Compute the minimal cost of the operator in bfloat16: that of the cheaper form if each tensor is moved once.

    N is the number of tokens, M of blocks, and K and V are the widths of keys and values. The chunked form has
    4 N K V + 2 M^2 K V operations and four passes over the summaries, and reads k and v once more if attention is causal. Its
    backward pass has twice as many operations and ten passes over the summaries, and reads k and v twice more if attention is
    causal. Exponential mixing replaces one M by the number of terms. The parallel form has 2 N^2 (K + V) operations, and
    2 N^2 (3 K + 2 V) in its backward pass, both halved if attention is causal. The backward pass reads q, k, v and the gradient
    of the outputs, and writes the gradients of q, k and v.

    Args:
        shape: sizes of the call.
        rates: rates by which the cheaper form is chosen.
        backward: whether to include the backward pass.
        terms: number of terms of exponential mixing; None for dense coefficients.
    """
    n, m, k, v = shape.tokens, shape.blocks, shape.key_width, shape.value_width
    rows = shape.batch * shape.heads
    tokens, summary = n * (2 * k + 2 * v), m * k * v
    pairs = 2 * n * n * (k + v) / (2 if shape.causal else 1)
    mixed = m * (m if terms is None else terms)
    chunk = 4 * n * k * v + 2 * mixed * k * v
    again = n * (k + v) if shape.causal else 0
    passes = 4
    if backward:
        tokens += n * (4 * k + 3 * v)
        pairs += 2 * n * n * (3 * k + 2 * v) / (2 if shape.causal else 1)
        chunk += 8 * n * k * v + 4 * mixed * k * v
        again *= 3
        passes += 10
    parallel = Cost(2 * rows * tokens, rows * pairs)
    chunked = Cost(2 * rows * (tokens + again + passes * summary), rows * chunk)
    return min(parallel, chunked, key=lambda cost: cost.milliseconds(rates))


def inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw random tensors for a call of the operator. All require gradients.

    Args:
        shape: sizes of the tensors.
        device: device of the tensors.
        dtype: dtype of q, k and v.

    Returns:
        q and k ``[B, N, H, Dk]``, v ``[B, N, H, Dv]``, and mixing coefficients ``[M, M]`` float32.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, device=device, dtype=dtype).requires_grad_()

    token = (shape.batch, shape.tokens, shape.heads)
    q, k = random(*token, shape.key_width), random(*token, shape.key_width)
    mixing = torch.rand(shape.blocks, shape.blocks, generator=generator, device=device).requires_grad_()
    return q, k, random(*token, shape.value_width), mixing
