"""Which form is cheaper, from the shape alone: never by timing at run time.

The constants lie in ``cost.json``, each set with the command, the machine and the date that it came from.
"""

from __future__ import annotations

import json
import os
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


_limit = float(os.environ.get("MHLA_MEMORY_GB", "inf")) * 1e9


def limit_memory(bytes_of_a_call: float | None) -> None:
    """Bound what ``form="auto"`` may hold beside the tokens in one forward pass, in bytes; None for no bound.

    Forms that would hold more are left out where another does not; where all would, the one that holds least is taken. At the
    start the bound is that of ``MHLA_MEMORY_GB``, in gigabytes, where this variable is set.

    Raises:
        ValueError: for a bound that is not positive.
    """
    global _limit
    if bytes_of_a_call is not None and not bytes_of_a_call > 0:
        raise ValueError(f"the bound must be a positive number of bytes, not {bytes_of_a_call}")
    _limit = float("inf") if bytes_of_a_call is None else float(bytes_of_a_call)


def cheapest_form(
    tokens: int,
    blocks: int,
    key_width: int,
    value_width: int,
    causal: bool,
    *,
    work: int | None = None,
    terms: int | None = None,
    rows: int = 1,
    backend: Literal["torch", "triton"] = "torch",
) -> ChosenForm:
    """The cheapest form for N ``tokens`` in M ``blocks``, counted in multiply-adds for one batch row and head.

    See :func:`limit_memory` for forms that are left out.

    ``work``: summaries added up for each block, see :meth:`mhla_kernels.mixing.Mixing.work`; None for all M.
    ``terms``: running sums between chunks of several blocks, see :meth:`mhla_kernels.mixing.Mixing.span_terms`.
    ``rows``: batch rows times heads.
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
    held = {"parallel": 0 if fused else 2 * tokens**2, "chunked": 2 * blocks * (summary + key_width)}
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
        held["spanning"] = -(-tokens // chunk) * terms * (summary + key_width)
    least = min(held.values())
    allowed = [form for form in costs if 4 * rows * held[form] <= _limit or held[form] == least]
    return min(allowed, key=lambda form: costs[form])
