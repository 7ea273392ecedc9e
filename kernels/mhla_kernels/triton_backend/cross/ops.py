"""Registration of ``torch.ops.mhla.cross_attention`` with a fake kernel, an autograd formula and a FLOP count."""

from __future__ import annotations

from typing import Any

from mhla_kernels.triton_backend.cross.call import CrossArguments, sides
from mhla_kernels.triton_backend.cross.fallback import outputs
from mhla_kernels.triton_backend.ops import register_attention


def _operations(shapes: Any) -> int:
    """Count the additions and multiplications in the matrix products of a forward pass of cross-attention.

    Args:
        shapes: a :class:`CrossArguments` object with shapes in place of tensors.
    """
    (batch, queries, heads, key_width), keys, width = shapes.q, shapes.k[1], shapes.v[-1]
    if shapes.form == "parallel":
        return int(2 * batch * heads * queries * keys * (key_width + width))
    mixed = shapes.query_tables[0][1] * shapes.key_tables[0][1]
    return int(2 * batch * heads * (queries + keys + mixed) * key_width * width)


register_attention("cross_attention", CrossArguments, sides, outputs, _operations)
