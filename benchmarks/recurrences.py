"""Recurrences of the baselines, compared with flash-linear-attention's references in PyTorch: error and time on a CPU.

    lightning bench recurrences --out benchmarks/results

q, k and v are ``[1, N, 4, 64]``, float32. Errors are relative to the largest value of the token-by-token recurrence in float64.
The peer is the chunked reference if there is one, else the recurrence (GLA) or the full attention matrix (retention).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.machine import describe, milliseconds
from lightning_mhla.attention import gated_delta_rule, gated_linear_attention, retention, state_space_dual
from lightning_mhla.system.files import write_json

Call = Callable[..., Any]


def cases(tokens: int, heads: int = 4, width: int = 64) -> dict[str, tuple[Call, Call, list[Tensor]]]:
    """Return the recurrences to compare, by name.

    Args:
        tokens: number of tokens.
        heads: number of heads.
        width: width of queries, keys and values.

    Returns:
        For each recurrence, our function, the function of flash-linear-attention, and random inputs.
    """
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.retention.naive import naive_retention
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, width) for _ in range(3))
    gate = F.logsigmoid(torch.randn(1, tokens, heads)) / 16
    gates = F.logsigmoid(torch.randn(1, tokens, heads, width)) / 16
    beta, unit = torch.rand(1, tokens, heads), F.normalize(k, dim=-1)
    rates = -torch.log(1 - 2.0 ** (-5 - torch.arange(heads)))

    def theirs_retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    def theirs_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor) -> Tensor:
        return naive_chunk_gated_delta_rule(q, k, v, gate, beta)[0]

    return {
        "retention": (lambda q, k, v: retention(q, k, v, rates.to(q))[0], theirs_retention, [q, k, v]),
        "state_space_dual": (
            lambda *x: state_space_dual(*x)[0], lambda *x: naive_chunk_simple_gla(*x)[0], [q, k, v, gate]
        ),
        "gated_linear_attention": (
            lambda *x: gated_linear_attention(*x)[0], lambda *x: naive_recurrent_gla(*x)[0], [q, k, v, gates]
        ),
        "gated_delta_rule": (lambda *x: gated_delta_rule(*x)[0], theirs_delta, [q, unit, v, beta, gate]),
    }  # fmt: skip


def definition(name: str, *inputs: Tensor) -> Tensor:
    """Compute a recurrence token by token in float64, as the reference for errors.

    Args:
        name: name of the recurrence, a key of the result of :func:`cases`.
        inputs: q, k and v ``[1, N, H, D]``, and the gates of the recurrence.

    Returns:
        Outputs ``[1, N, H, D]`` float64.
    """
    q, k, v, *gates = (x.double() for x in inputs)
    heads, width = q.shape[2:]
    state = q.new_zeros(1, heads, width, v.shape[3])
    rates = torch.log(1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64)))
    outs = []
    for t in range(q.shape[1]):
        # The last gate is the decay. The gated delta rule has the strength of writing (beta) before it.
        log_decay = gates[-1][:, t] if gates else rates[None]
        state = state * log_decay.exp().view(1, heads, -1, 1)
        value = v[:, t]
        if name == "gated_delta_rule":
            value = gates[0][:, t, :, None] * (value - (state * k[:, t, :, :, None]).sum(-2))
        state = state + k[:, t, :, :, None] * value[:, :, None]
        outs.append(width**-0.5 * (q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outs, 1)


def error(actual: Tensor, want: Tensor) -> float:
    """Compute the largest difference between two tensors, relative to the largest absolute value of the correct one.

    Args:
        actual: tensor to check.
        want: correct tensor, in float64.
    """
    return float((actual.double() - want).detach().abs().max() / want.detach().abs().max())


def measure(name: str, ours: Call, theirs: Call, inputs: list[Tensor], seconds: float) -> dict[str, Any]:
    """Measure a recurrence: the errors of outputs and gradients on 512 tokens, and the times on all tokens.

    Args:
        name: name of the recurrence.
        ours: our function.
        theirs: function of flash-linear-attention.
        inputs: arguments of both functions.
        seconds: approximate duration of each measurement in seconds.

    Returns:
        A row with the errors of our function, its difference from the function of flash-linear-attention, and the milliseconds
        of both functions.
    """
    short = [x[:, :512].clone().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in short]
    expected, out = definition(name, *exact), ours(*short)
    weight = torch.randn_like(out)
    slopes = torch.autograd.grad((expected * weight).sum(), exact)
    gradients = torch.autograd.grad((out * weight).sum(), short)
    leaves = [x.requires_grad_() for x in inputs]
    row: dict[str, Any] = {
        "operator": name,
        "error": error(out, expected),
        "gradient_error": max(error(a, b) for a, b in zip(gradients, slopes, strict=True)),
        "difference_from_theirs": error(ours(*inputs).detach(), theirs(*inputs).detach().double()),
    }
    for who, call in (("ours", ours), ("theirs", theirs)):

        def both(call: Call = call) -> None:
            torch.autograd.grad(call(*leaves).sum(), leaves)

        with torch.no_grad():
            row[f"{who}_forward_ms"] = milliseconds(lambda call=call: call(*inputs), torch.device("cpu"), seconds)  # type: ignore[misc]
        row[f"{who}_both_ms"] = milliseconds(both, torch.device("cpu"), seconds)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results of all recurrences as a Markdown table."""
    lines = [
        "| operator | error | of gradients | forward, ms | theirs | forward and backward, ms | theirs | times faster |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        times = [row[f"{who}_{what}_ms"] for what in ("forward", "both") for who in ("ours", "theirs")]
        cells = [f"`{row['operator']}`", f"{row['error']:.1e}", f"{row['gradient_error']:.1e}"]
        lines.append(f"| {' | '.join([*cells, *(f'{t:.1f}' for t in times), f'{times[3] / times[2]:.1f}'])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure every recurrence, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="N (default: 4096)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each measurement (default: 2)")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    args = parser.parse_args()
    rows = [measure(name, *case, args.seconds) for name, case in cases(args.tokens).items()]
    print(table(rows))
    if args.out:
        result = {"machine": describe(torch.device("cpu")), "tokens": args.tokens, "rows": rows}
        write_json(args.out / "recurrences-cpu.json", result, indent=2)


if __name__ == "__main__":
    main()
