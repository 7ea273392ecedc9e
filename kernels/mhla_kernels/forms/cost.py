"""Choice of the attention algorithm with the lowest estimated cost, from sizes alone and without timing at run time.

The constants of the estimate are in ``cost.json``. Each is stored with the command, the machine and the date of its
measurement.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mhla_kernels.backend import ChosenForm
from mhla_kernels.forms.chunked import TILE
from mhla_kernels.forms.spanning import chunk_tokens
from mhla_kernels.problem import Causal

CONSTANTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "cost.json").read_text())
"""Costs by backend, in multiply-adds, in addition to the cost of matrix products.

``pair`` is the cost of a token pair (scaling, masking, row sum). ``summary`` is the cost of writing and reading one entry of a
block summary. ``token`` is the cost of reading one element of k or v again."""

OUTPUTS, SPAN = 128, 16
"""Largest number of output features that a Triton program holds, and number of blocks that a tile of tokens overlaps.

Both numbers are for bfloat16.
"""


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
    """Limit the memory that attention with ``form="auto"`` may use in one forward pass, in addition to inputs and outputs.

    ``"auto"`` ignores algorithms that need more memory than the limit. If all of them do, it takes the one that needs the
    least. The environment variable ``MHLA_MEMORY_GB`` sets the initial limit in gigabytes. If it is not set, there is no limit.

    Args:
        bytes_of_a_call: limit in bytes; None for no limit.

    Raises:
        ValueError: if the limit is not positive.
    """
    global _limit
    if bytes_of_a_call is not None and not bytes_of_a_call > 0:
        raise ValueError(f"the memory limit must be a positive number of bytes, not {bytes_of_a_call}")
    _limit = float("inf") if bytes_of_a_call is None else float(bytes_of_a_call)


def cheapest_form(
    tokens: int,
    blocks: int,
    key_width: int,
    value_width: int,
    causal: Causal,
    *,
    work: int | None = None,
    terms: int | None = None,
    rows: int = 1,
    backend: Literal["torch", "triton"] = "torch",
) -> ChosenForm:
    """Estimate the multiply-adds of each attention algorithm, and return the name of the cheapest one.

    The algorithms are called forms. ``"parallel"`` computes a weight for each pair of tokens, ``"chunked"`` a summary of each
    block, and ``"spanning"`` running sums across chunks, which are groups of several consecutive blocks. Forms that need more
    memory than :func:`limit_memory` allows are ignored. If all of them do, only the one that needs the least is considered.

    Args:
        tokens: number of tokens N.
        blocks: number of blocks M.
        key_width: width of a key, Dk.
        value_width: width of a value, Dv.
        causal: whether attention is causal; ``"block"`` for block-causal attention.
        work: number of block summaries that are added up to mix one block; None for all M.
        terms: number of running sums that the spanning form carries between chunks; None excludes this form.
        rows: batch size times number of heads.
        backend: ``"torch"`` or ``"triton"``.

    Returns:
        Name of the form: ``"parallel"``, ``"chunked"`` or ``"spanning"``.
    """
    units, mixed = _unit_costs(key_width, value_width, backend), blocks if work is None else work
    costs = _costs_of_sides((tokens, tokens), (blocks, blocks), blocks * mixed, key_width * value_width, units)
    cost, fused = CONSTANTS[backend], backend == "triton"
    size = -(-tokens // max(blocks, 1))
    if causal and fused:
        costs["parallel"] /= 2  # the PyTorch form also computes the masked half
    if causal is True:  # pairs inside a block are scored
        costs["chunked"] += cost["token"] * tokens * (key_width + value_width)
        costs["chunked"] += tokens * min(size, TILE) * units.pair_inside
    chunk = chunk_tokens(tokens, size, backend)
    if terms is not None and size < chunk < tokens:
        # on a CPU the sums stay in the cache, so that moving them costs nothing
        products, moved, pair = 2, 0.0, float(key_width + value_width)
        if fused:  # weighted tokens and sums are two bfloat16 pieces each
            products, moved, pair = 4, cost["summary"] / chunk, units.pair
        spanning = (products + moved) * tokens * terms * key_width * value_width + tokens * chunk * pair / (
            1 + (causal is True and fused)
        )
        costs["spanning"] = spanning + cost["token"] * tokens * (key_width + value_width)
    if _limit < float("inf"):
        sums = 0 if terms is None else terms
        costs = _within_limit(
            costs,
            {form: rows * numbers_held(form, tokens, blocks, key_width, value_width, sums, backend) for form in costs},
        )
    return _cheapest(costs)


def cheapest_cross_form(
    tokens: tuple[int, int],
    blocks: tuple[int, int],
    key_width: int,
    value_width: int,
    *,
    rows: int = 1,
    backend: Literal["torch", "triton"] = "torch",
) -> Literal["parallel", "chunked"]:
    """Estimate the multiply-adds of each cross-attention algorithm, and return the name of the cheaper one.

    The constants and the memory limit are those of :func:`cheapest_form`. The cost of writing and reading a block summary in
    self-attention is divided equally between a block of queries and a block of keys.

    Args:
        tokens: number of queries and number of keys.
        blocks: number of query blocks and number of key blocks.
        key_width: width of a key, Dk.
        value_width: width of a value, Dv.
        rows: batch size times number of heads.
        backend: ``"torch"`` or ``"triton"``.
    """
    units = _unit_costs(key_width, value_width, backend)
    costs = _costs_of_sides(tokens, blocks, blocks[0] * blocks[1], key_width * value_width, units)
    if _limit < float("inf"):
        summary = key_width * (value_width + 1)
        costs = _within_limit(
            costs, {form: rows * _held_by_sides(form, tokens, blocks, summary, backend) for form in costs}
        )
    return "parallel" if _cheapest(costs) == "parallel" else "chunked"


class UnitCosts(NamedTuple):
    """Costs of the steps of attention, in multiply-adds, for one batch row and head.

    Attributes:
        pair_inside: cost of a token pair without a mixing coefficient, or with a coefficient that all pairs of a block share.
        pair: cost of a token pair with its own mixing coefficient.
        query: cost of applying a mixture of block summaries to a query, per entry of a summary.
        mixing: cost of adding a block summary to a mixture, per entry of a summary.
        summary: cost of the memory accesses for one block of queries or one block of keys, per entry of a summary.
    """

    pair_inside: float
    pair: float
    query: int
    mixing: int
    summary: float


def _unit_costs(key_width: int, value_width: int, backend: Literal["torch", "triton"]) -> UnitCosts:
    cost = CONSTANTS[backend]
    if backend == "torch":
        pair = key_width + value_width + cost["pair"]
        return UnitCosts(pair, pair, 1, 1, cost["summary"] / 2)
    parts = -(-value_width // OUTPUTS)  # a wide output is computed in parts, each of which scores all pairs again
    inside = parts * (key_width + cost["pair"]) + 2 * value_width  # a float32 score is two bfloat16 pieces
    # a coefficient is two bfloat16 pieces too, and a mixture three
    return UnitCosts(inside, inside + 2 * SPAN * parts, 2, 3, cost["summary"] / 2)


def _costs_of_sides(
    tokens: tuple[int, int], blocks: tuple[int, int], mixed: int, numbers: int, units: UnitCosts
) -> dict[ChosenForm, float]:
    """Estimate the cost of bidirectional attention in the parallel and in the chunked form, in multiply-adds.

    Queries and keys may belong to different sequences. The result maps each form to its cost for one batch row and head.

    Args:
        tokens: number of queries and number of keys.
        blocks: number of query blocks and number of key blocks.
        mixed: number of block summaries that are added to mixtures, in total for all query blocks.
        numbers: number of entries of a block summary.
        units: costs of the steps of attention.
    """
    products = tokens[1] + units.query * tokens[0] + units.mixing * mixed + units.summary * (blocks[0] + blocks[1])
    return {"parallel": tokens[0] * tokens[1] * units.pair, "chunked": products * numbers}


def _held_by_sides(
    form: ChosenForm, tokens: tuple[int, int], blocks: tuple[int, int], numbers: int, backend: str
) -> int:
    """Estimate how many float32 values the parallel or the chunked form holds for one batch row and head.

    Args:
        form: ``"parallel"`` or ``"chunked"``; any other name counts as ``"chunked"``.
        tokens: number of queries and number of keys.
        blocks: number of query blocks and number of key blocks.
        numbers: number of entries of a block summary.
        backend: ``"torch"`` or ``"triton"``.
    """
    if form == "parallel":
        return 0 if backend == "triton" else 3 * tokens[0] * tokens[1]  # with the coefficients of a head
    return (blocks[0] + blocks[1]) * numbers


def _within_limit(costs: dict[ChosenForm, float], numbers: dict[ChosenForm, int]) -> dict[ChosenForm, float]:
    """Return the costs of the attention algorithms (forms) that fit into the memory limit.

    If none of them fits, the result contains only the forms that need the least memory.

    Args:
        costs: cost of each form.
        numbers: number of float32 values that each form holds in memory.
    """
    least = min(numbers.values())
    return {form: cost for form, cost in costs.items() if 4 * numbers[form] <= _limit or numbers[form] == least}


def _cheapest(costs: dict[ChosenForm, float]) -> ChosenForm:
    chosen: ChosenForm = next(iter(costs))
    for form, form_cost in costs.items():  # not min(): sizes and costs may be open while torch traces
        if form_cost < costs[chosen]:
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
    """Estimate how many float32 values a forward pass holds for one batch row and head, in addition to inputs and outputs.

    On a CPU, only some rows and heads are computed at a time. A forward pass then holds fewer values than this number times
    the batch size and the number of heads.

    Args:
        form: algorithm of attention: ``"parallel"`` (weights of token pairs), ``"chunked"`` (a summary of each block) or
            ``"spanning"`` (running sums across chunks, which are groups of several consecutive blocks).
        tokens: number of tokens N.
        blocks: number of blocks M.
        key_width: width of a key, Dk.
        value_width: width of a value, Dv.
        terms: number of running sums that the spanning form carries between chunks; 0 for coefficients without running sums.
        backend: ``"torch"`` or ``"triton"``.
    """
    summary = key_width * (value_width + 1)
    if form != "spanning":
        return _held_by_sides(form, (tokens, tokens), (blocks, blocks), summary, backend)
    chunk = chunk_tokens(tokens, -(-tokens // max(blocks, 1)), backend)
    sums = -(-tokens // chunk) * terms * summary
    return sums if backend == "triton" else 3 * sums + 2 * tokens * (terms * key_width + chunk)
