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


VARIABLE = "MHLA_MEMORY_GB"


def _limit_at_start() -> float:
    text = os.environ.get(VARIABLE) or "inf"
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = 0.0
    if not gigabytes > 0:
        raise ValueError(f"{VARIABLE}={text!r} must be a positive number of gigabytes")
    return gigabytes * 1e9


_limit = _limit_at_start()


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
    size = -(-tokens // max(blocks, 1))
    chunk = chunk_tokens(tokens, size, backend)
    if terms is not None and size < chunk < tokens:
        # on a CPU the numbers beside the products stay in its cache
        products, moved, pair = 2, 0.0, key_width + value_width
        if fused:  # weighted tokens and sums are two bfloat16 pieces each
            products, moved, pair = 4, cost["summary"] / chunk, inside + 2 * SPAN * parts
        spanning = (products + moved) * tokens * terms * summary + tokens * chunk * pair / (1 + (causal and fused))
        costs["spanning"] = spanning + cost["token"] * tokens * (key_width + value_width)
    if _limit < float("inf"):
        sums = 0 if terms is None else terms
        held = {
            form: rows * numbers_held(form, tokens, blocks, key_width, value_width, sums, backend) for form in costs
        }
        least = min(held.values())
        costs = {form: cost for form, cost in costs.items() if 4 * held[form] <= _limit or held[form] == least}
    chosen: ChosenForm = next(iter(costs))
    for form, spent in costs.items():  # in a graph that torch traces, sizes and costs may be open
        if spent < costs[chosen]:
            chosen = form
    return chosen


def numbers_held(
    form: ChosenForm,
    tokens: int,
    blocks: int,
    key_width: int,
    value_width: int,
    terms: int,
    backend: Literal["torch", "triton"] = "torch",
) -> int:
    """Float32 numbers that a forward pass holds beside the tokens, for one batch row and head.

    The PyTorch forms hold scores, and the spanning one the tokens weighed for each term too; a CPU computes some rows at a
    time and holds less than all of them take.
    """
    summary = key_width * (value_width + 1)
    if form == "parallel":
        return 0 if backend == "triton" else 2 * tokens * tokens
    if form == "chunked":
        return 2 * blocks * summary
    chunk = chunk_tokens(tokens, -(-tokens // max(blocks, 1)), backend)
    sums = -(-tokens // chunk) * terms * summary
    return sums if backend == "triton" else 3 * sums + 2 * tokens * (terms * key_width + chunk)
