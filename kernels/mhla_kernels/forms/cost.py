"""Which form is cheaper, from the shape alone: never by timing at run time.

The constants lie in ``cost.json``, each set with the command, the machine and the date that it came from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from mhla_kernels.backend import ChosenForm
from mhla_kernels.forms.chunked import TILE
from mhla_kernels.forms.spanning import chunk_tokens

CONSTANTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "cost.json").read_text())
"""By backend, in multiply-adds: ``pair`` and ``summary``, what a token pair and a number of a summary cost beside their
products (scaling, masking, row sum; writing and reading), and ``token``, what reading a number of k or v again costs."""

OUTPUTS, SPAN = 128, 16
"""Of the fused kernels in bfloat16: widest part of an output that a program holds, and blocks that a tile of tokens touches."""


def cheapest_form(
    tokens: int,
    blocks: int,
    key_width: int,
    value_width: int,
    causal: bool,
    *,
    work: int | None = None,
    terms: int | None = None,
    backend: Literal["torch", "triton"] = "torch",
) -> ChosenForm:
    """The cheapest form for N ``tokens`` in M ``blocks``, counted in multiply-adds for one batch row and head.

    ``work``: summaries added up for each block, see :meth:`mhla_kernels.mixing.Mixing.work`; None for all M.
    ``terms``: running sums between chunks of several blocks, see :meth:`mhla_kernels.mixing.Mixing.span_terms`.
    """
    cost, fused, parts = CONSTANTS[backend], backend == "triton", -(-value_width // OUTPUTS)  # each scores the pairs
    inside = key_width + value_width + cost["pair"]
    pair, products, mixing = inside, 2, 1
    if fused:
        inside = parts * (key_width + cost["pair"]) + 2 * value_width  # a float32 score is two bfloat16 pieces
        pair = inside + 2 * SPAN * parts  # and so is a coefficient
        products, mixing = 3, 3
    parallel = tokens * tokens * pair
    if causal and fused:
        parallel /= 2  # the PyTorch form computes the masked half too
    mixed = blocks if work is None else work
    summary = key_width * value_width
    chunked = (products * tokens + mixing * blocks * mixed + cost["summary"] * blocks) * summary
    if causal:
        chunked += cost["token"] * tokens * (key_width + value_width)
        chunked += tokens * min(-(-tokens // max(blocks, 1)), TILE) * inside
    costs: dict[ChosenForm, float] = {"parallel": parallel, "chunked": chunked}
    size = -(-tokens // max(blocks, 1))
    chunk = chunk_tokens(tokens, size, backend)
    if terms is not None and size < chunk < tokens:
        products, moved, pair = (
            2,
            0.0,
            key_width + value_width,
        )  # on a CPU what lies beside the products stays in its cache
        if fused:  # weighted tokens and sums are two bfloat16 pieces each
            products, moved, pair = 4, cost["summary"] / chunk, inside + 2 * SPAN * parts
        spanning = (products + moved) * tokens * terms * summary + tokens * chunk * pair / (1 + (causal and fused))
        costs["spanning"] = spanning + cost["token"] * tokens * (key_width + value_width)
    return min(costs, key=lambda form: costs[form])
