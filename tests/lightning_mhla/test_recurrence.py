"""Recurrences in chunks against the recurrence token by token in float64, and against flash-linear-attention's references."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_mhla.attention import gated_delta_rule, gated_linear_attention, retention, state_space_dual
from lightning_mhla.recurrence import kernels

OPERATORS = {
    "retention": retention,
    "ssd": state_space_dual,
    "gla": gated_linear_attention,
    "gated_delta": gated_delta_rule,
}
DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda x: F.logsigmoid(x) / 4,
    "none": lambda x: 0 * x,
    "weak": lambda x: -1e-6 * x.abs(),
    "strong": lambda x: -60 * x.abs(),
    "outliers": lambda x: torch.where(x > 1.3, -200.0, -1e-3 * x.abs()),
    "forgetting": lambda x: torch.where(x > 1.5, -torch.inf, -0.05 * x.abs()),
}


def operands(
    name: str, tokens: int, decay: str = "usual", batch: int = 2, heads: int = 3, widths: tuple[int, int] = (6, 5)
) -> list[Tensor]:
    """Draw float64 inputs of an operator: q, k, v and its gates."""
    shape = (batch, tokens, heads)
    q, k = (torch.randn(*shape, widths[0], dtype=torch.float64) for _ in range(2))
    v = torch.randn(*shape, widths[1], dtype=torch.float64)
    if name == "retention":
        return [q, k, v, -DECAYS[decay](torch.randn(heads, dtype=torch.float64))]
    if name == "ssd":
        return [q, k, v, DECAYS[decay](torch.randn(shape, dtype=torch.float64))]
    if name == "gla":
        return [q, k, v, DECAYS[decay](torch.randn(*shape, widths[0], dtype=torch.float64))]
    beta = torch.rand(shape, dtype=torch.float64)
    return [q, F.normalize(k, dim=-1), v, beta, DECAYS[decay](torch.randn(shape, dtype=torch.float64))]


def recurrence(
    name: str, *inputs: Tensor, scale: float | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the definition token by token."""
    q, k, v, *gates = inputs
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype)
    state = state if initial_state is None else initial_state
    outs = []
    for t in range(q.shape[1]):
        key, value = k[:, t], v[:, t]
        if name == "retention":
            state = torch.exp(-gates[0])[None, :, None, None] * state
        elif name == "gla":
            state = gates[0][:, t].exp()[..., None] * state
        else:
            state = gates[-1][:, t].exp()[..., None, None] * state
        if name == "gated_delta":
            old = (state * key[..., None]).sum(-2)
            value = gates[0][:, t, :, None] * (value - old)
        state = state + key[..., None] * value[..., None, :]
        outs.append(scale * (q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outs, 1) if outs else torch.zeros_like(v), state


def error(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    if want.numel() == 0:
        return 0.0
    return float((got.double() - want).detach().abs().max() / want.abs().max().clamp(min=1e-3))


def compare(name: str, inputs: list[Tensor], got: Callable[..., Any], want: Callable[..., Any]) -> None:
    """Compare outputs, final state and all gradients."""
    exact = [x.clone().requires_grad_() for x in inputs]
    single = [x.float().requires_grad_() for x in inputs]
    results, truths = got(*single), want(*exact)
    for what, one, two in zip(("output", "state"), results, truths, strict=True):
        assert one.shape == two.shape
        assert error(one, two) < 1e-5, what
    weights = [torch.randn(x.shape, dtype=torch.float64) for x in truths]
    slopes = torch.autograd.grad(list(truths), exact, weights)
    found = torch.autograd.grad(list(results), single, [x.float() for x in weights])
    for index, (one, two) in enumerate(zip(found, slopes, strict=True)):
        assert torch.isfinite(one).all(), f"gradient {index}"
        assert error(one, two) < 1e-4, f"gradient {index}"


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("tokens", "widths"), [(1, (6, 5)), (5, (6, 5)), (64, (6, 5)), (70, (6, 5)), (150, (40, 5))])
@pytest.mark.parametrize("name", OPERATORS)
def test_chunks_are_the_recurrence(name: str, tokens: int, widths: tuple[int, int], decay: str) -> None:
    if name == "retention" and decay == "forgetting":
        pytest.skip("a rate of inf has no slope in the definition either")
    state = torch.randn(2, 3, *widths, dtype=torch.float64)
    compare(
        name,
        [*operands(name, tokens, decay, widths=widths), state],
        lambda *x: OPERATORS[name](*x[:-1], initial_state=x[-1]),
        lambda *x: recurrence(name, *x[:-1], initial_state=x[-1]),
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_packed_sequences_are_sequences_alone(name: str) -> None:
    bounds = [0, 3, 3, 70, 71, 200]
    inputs = operands(name, 200, batch=1)
    states = torch.randn(5, 3, 6, 5, dtype=torch.float64)

    def alone(*x: Tensor) -> tuple[Tensor, Tensor]:
        *tensors, initial = x
        parts = []
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            part = [t if t.dim() == 1 else t[:, start:end] for t in tensors]
            parts.append(recurrence(name, *part, initial_state=initial[number : number + 1]))
        return torch.cat([out for out, _ in parts], 1), torch.cat([state for _, state in parts])

    for cu_seqlens in (bounds, torch.tensor(bounds)):
        compare(
            name,
            [*inputs, states],
            lambda *x, cu=cu_seqlens: OPERATORS[name](*x[:-1], initial_state=x[-1], cu_seqlens=cu),
            alone,
        )


@pytest.mark.parametrize("name", OPERATORS)
def test_a_sequence_in_pieces_is_the_sequence(name: str) -> None:
    inputs = operands(name, 90)
    whole, final = OPERATORS[name](*inputs, scale=0.7)
    state, outs = None, []
    for start, end in ((0, 40), (40, 41), (41, 90)):
        part = [t if t.dim() == 1 else t[:, start:end] for t in inputs]
        out, state = OPERATORS[name](*part, scale=0.7, initial_state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    torch.testing.assert_close(state, final)
    assert final.dtype == torch.float64


@pytest.mark.parametrize("name", OPERATORS)
def test_later_tokens_change_nothing_by_a_bit(name: str) -> None:
    inputs = [x.float() for x in operands(name, 130)]
    changed = [x.clone() for x in inputs]
    for tensor in changed:
        if tensor.dim() > 1:
            tensor[:, 77:] = torch.where(tensor[:, 77:] > 0, 1e30, -3.0) if tensor.dim() == 4 else -5.0
    if name == "gated_delta":
        changed[1] = F.normalize(changed[1].sign(), dim=-1)  # keys have length 1, or the state grows without bound
        changed[1][:, :77] = inputs[1][:, :77]
    assert torch.equal(OPERATORS[name](*inputs)[0][:, :77], OPERATORS[name](*changed)[0][:, :77])


@pytest.mark.parametrize("name", OPERATORS)
def test_half_precision_and_empty_batches(name: str) -> None:
    inputs = [x.bfloat16() for x in operands(name, 70)]
    out, state = OPERATORS[name](*inputs)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    want, _ = recurrence(name, *(x.double() for x in inputs))
    assert error(out, want) < 1e-2
    with torch.autocast("cpu", torch.bfloat16):
        single, _ = OPERATORS[name](*(x.float() for x in inputs))
    assert error(single, want) < 1e-5, "autocast reaches into the operator"
    for batch, tokens in ((0, 10), (2, 0), (0, 1)):
        out, state = OPERATORS[name](*operands(name, tokens, batch=batch))
        assert out.shape == (batch, tokens, 3, 5)
        assert state.shape == (batch, 3, 6, 5)


@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives_are_those_of_the_recurrence(name: str) -> None:
    inputs = [x.requires_grad_() for x in operands(name, 37, heads=1)]
    directions = [torch.randn_like(x) for x in inputs]

    def along(out: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        """Compute products of the Hessian with a vector."""
        loss = out.pow(3).sum() + state.square().sum()
        slopes = torch.autograd.grad(loss, inputs, create_graph=True)
        total = torch.stack([(x * y).sum() for x, y in zip(slopes, directions, strict=True)]).sum()
        return torch.autograd.grad(total, inputs)

    for got, want in zip(along(*OPERATORS[name](*inputs)), along(*recurrence(name, *inputs)), strict=True):
        assert error(got, want) < 1e-9


@pytest.mark.parametrize("name", OPERATORS)
def test_mapped_gradients_are_those_of_a_loop(name: str) -> None:
    batches = [operands(name, 70, batch=1) for _ in range(3)]

    def loss(*inputs: Tensor) -> Tensor:
        out, state = OPERATORS[name](*inputs)
        return out.square().sum() + state.sum()

    every = tuple(range(len(batches[0])))
    mapped = torch.func.vmap(torch.func.grad(loss, every))(*map(torch.stack, zip(*batches, strict=True)))
    for index, inputs in enumerate(batches):
        leaves = [x.requires_grad_() for x in inputs]
        for got, want in zip(mapped, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(got[index], want)


@pytest.mark.parametrize("name", OPERATORS)
def test_wrong_inputs_are_named(name: str) -> None:
    inputs = operands(name, 10)
    run = OPERATORS[name]
    with pytest.raises(ValueError, match="q and k must be"):
        run(inputs[0][..., :3], *inputs[1:])
    with pytest.raises(ValueError, match=r"must be \["):
        run(*inputs[:-1], inputs[-1][..., :1] if name != "retention" else inputs[-1][:1])
    with pytest.raises(ValueError, match="initial_state must be"):
        run(*inputs, initial_state=torch.zeros(1, 3, 6, 5))
    with pytest.raises(ValueError, match="one row"):
        run(*inputs, cu_seqlens=[0, 10])
    one = [x if x.dim() == 1 else x[:1] for x in inputs]
    with pytest.raises(ValueError, match="must rise from 0"):
        run(*one, cu_seqlens=[0, 4, 9])
    with pytest.raises(ValueError, match="flash-linear-attention"):
        run(*inputs, backend="triton")
    with pytest.raises(ValueError, match="backend='cuda' is not one of"):
        run(*inputs, backend="cuda")


def test_against_the_references_of_flash_linear_attention() -> None:
    from fla.ops.gated_delta_rule import naive as delta
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.retention.naive import naive_retention
    from fla.ops.simple_gla import naive as simple

    theirs: dict[str, list[Callable[..., Any]]] = {
        "ssd": [simple.naive_chunk_simple_gla, simple.naive_recurrent_simple_gla],
        "gla": [naive_recurrent_gla],
        "gated_delta": [
            lambda q, k, v, beta, g, **o: delta.naive_chunk_gated_delta_rule(q, k, v, g, beta, **o),
            delta.naive_recurrent_gated_delta_rule,
        ],
    }
    for name, functions in theirs.items():
        for function in functions:
            inputs = [x.float().requires_grad_() for x in operands(name, 100)]
            want = function(*inputs, output_final_state=True)
            got = OPERATORS[name](*inputs)
            for one, two in zip(got, want, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
            slopes = (torch.autograd.grad(out.square().sum(), inputs) for out in (got[0], want[0]))
            for one, two in zip(*slopes, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    q, k, v, _ = (x.float() for x in operands("retention", 100))
    rates = -torch.log(1 - 2.0 ** (-5 - torch.arange(3)))
    want = naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(retention(q, k, v, rates)[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("backend", "uses"), [("auto", True), ("triton", True), ("torch", False)])
def test_on_a_gpu_the_kernels_are_used_unless_pytorch_is_asked_for(
    backend: str, uses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "installed", lambda: True)
    with FakeTensorMode():  # tensors that say that they are on a GPU, without memory
        q = torch.empty(1, 8, 2, 16, device="cuda")
    assert kernels.chosen(backend, q) is uses
    assert not kernels.chosen("auto", q.double())
    assert not kernels.chosen("auto", q, widest=8)
    with pytest.raises(ValueError, match="keys of at most 8 features"):
        kernels.chosen("triton", q, widest=8)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("tokens", [1, 10, 70])
def test_without_key_features_outputs_are_zeros(name: str, tokens: int) -> None:
    inputs = [x.requires_grad_() for x in operands(name, tokens, widths=(0, 5), batch=1)]
    for options in ({}, {"initial_state": torch.zeros(1, 3, 0, 5)}, {"cu_seqlens": [0, 1, tokens]}):
        out, final = OPERATORS[name](*inputs, **options)
        assert out.shape == inputs[2].shape
        assert not out.any()
        assert final.shape == (2 if "cu_seqlens" in options else 1, 3, 0, 5)
        assert not torch.autograd.grad(out.sum(), inputs[2])[0].any()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_only_floating_point_numbers_are_taken(name: str, which: str, dtype: torch.dtype) -> None:
    inputs = operands(name, 10)
    inputs["qkv".index(which)] = inputs["qkv".index(which)].to(dtype)
    with pytest.raises(TypeError, match=f"{which} is {dtype}; it must be a floating-point tensor"):
        OPERATORS[name](*inputs)
