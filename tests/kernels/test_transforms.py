"""torch.func on every form of the operator against loops and reverse-mode autograd; graphs with lengths that change."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from mhla_kernels import (
    ExponentialMixing,
    mhla_attention,
    mhla_prefill,
    mhla_step,
    mhla_window_attention,
    mhla_window_prefill,
    mhla_window_step,
)
from mhla_kernels.blocks import is_dynamic
from torch import Tensor, func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.functional import hessian, jacobian
from torch.fx.experimental.proxy_tensor import make_fx

Function = Callable[..., Tensor]
TOKENS, SIZE = 7, 2


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) + 0.1


torch.manual_seed(0)
K, V, F, G, FAR = (
    rand(1, TOKENS, 2, 3),
    rand(1, TOKENS, 2, 2),
    rand(1, TOKENS, 2, 3),
    rand(1, TOKENS, 2, 3),
    rand(1, TOKENS, 2),
)
MIXINGS = {
    "dense": (rand(4, 4),),
    "dense per head": (rand(2, 4, 4),),
    "exponential": (rand(3), rand(3)),
    "exponential per head": (rand(2, 3), rand(2, 3)),
}


def mixing_of(tensors: tuple[Tensor, ...]) -> Any:
    return tensors[0] if len(tensors) == 1 else ExponentialMixing(*tensors)


def attention(**options: Any) -> Function:
    return lambda x, *m: mhla_attention(x, K, V * x[..., :1], mixing_of(m), block_size=SIZE, **options)


def pieces(steps: int, donate: bool = False, **options: Any) -> Function:
    """Read three tokens, then the rest at once or token by token."""

    def call(x: Tensor, *m: Tensor) -> Tensor:
        inputs, mixing = (x, K, V * x[..., :1]), mixing_of(m)
        out, state = mhla_prefill(*(t[:, :3] for t in inputs), mixing, block_size=SIZE, **options)
        outs = [out]
        if not steps:
            out, state = mhla_prefill(*(t[:, 3:] for t in inputs), mixing, block_size=SIZE, state=state, **options)
            return torch.cat([outs[0], out], 1) + state.open.sum() + state.finished.sum()
        for t in range(3, TOKENS):
            one = [x[:, t] for x in inputs]
            out, state = mhla_step(*one, mixing, state, block_size=SIZE, donate_state=donate, **options)
            outs.append(out[:, None])
        return torch.cat(outs, 1)

    return call


def block_steps(donate: bool, **options: Any) -> Function:
    """Read one block, two more, and then a short one."""

    def call(x: Tensor, *m: Tensor) -> Tensor:
        inputs, mixing = (x, K, V * x[..., :1]), mixing_of(m)
        options_of_all: dict[str, Any] = {"block_size": SIZE, "causal": "block", **options}
        out, state = mhla_prefill(*(t[:, :SIZE] for t in inputs), mixing, **options_of_all)
        outs = [out]
        out, state = mhla_prefill(*(t[:, SIZE : 3 * SIZE] for t in inputs), mixing, state=state, **options_of_all)
        outs.append(out)
        last = [t[:, 3 * SIZE :] for t in inputs]
        outs.append(mhla_step(*last, mixing, state, donate_state=donate, **options_of_all)[0])
        return torch.cat(outs, 1)

    return call


def window(x: Tensor, *m: Tensor) -> Tensor:
    return mhla_window_attention(x, K, V * x[..., :1], F * x, G, mixing_of(m), block_size=SIZE, far=FAR)


def window_pieces(steps: bool, donate: bool = False) -> Function:
    def call(x: Tensor, *m: Tensor) -> Tensor:
        inputs, mixing = (x, K, V * x[..., :1], F * x, G), mixing_of(m)
        first = [t[:, :3] for t in inputs]
        out, state = mhla_window_prefill(*first, mixing, block_size=SIZE, far=FAR[:, :3])
        outs = [out]
        if not steps:
            rest = [t[:, 3:] for t in inputs]
            outs.append(mhla_window_prefill(*rest, mixing, block_size=SIZE, far=FAR[:, 3:], state=state)[0])
            return torch.cat(outs, 1)
        for t in range(3, TOKENS):
            one = [x[:, t] for x in inputs]
            out, state = mhla_window_step(*one, mixing, state, block_size=SIZE, far=FAR[:, t], donate_state=donate)
            outs.append(out[:, None])
        return torch.cat(outs, 1)

    return call


FUNCTIONS: dict[str, Function] = {
    "causal": attention(causal=True),
    "causal, scaled": attention(causal=True, normalize=False),
    "bidirectional": attention(),
    "bidirectional, chunked": attention(form="chunked"),
    "chunked": attention(causal=True, form="chunked"),
    "spanning": attention(causal=True, form="spanning"),
    "packed": attention(causal=True, cu_seqlens=torch.tensor([0, 3, 3, 7])),
    "masked": attention(causal=True, key_mask=torch.tensor([[True] * 5 + [False] * 2])),
    "block-causal": attention(causal="block"),
    "block-causal, chunked": attention(causal="block", form="chunked"),
    "block-causal, spanning": attention(causal="block", form="spanning"),
    "block-causal, packed": attention(causal="block", cu_seqlens=torch.tensor([0, 3, 3, 7]), normalize=False),
    "blocks": block_steps(False),
    "blocks, donated and scaled": block_steps(True, normalize=False),
    "prefill": pieces(0),
    "steps": pieces(4),
    "steps, donated and scaled": pieces(4, donate=True, normalize=False),
    "window": window,
    "window prefill": window_pieces(False),
    "window steps": window_pieces(True),
    "window steps, donated": window_pieces(True, donate=True),
}


def close(got: Any, want: Any) -> None:
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(1 + b.abs().max()))


def directional(jacobians: tuple[Tensor, ...], along: tuple[Tensor, ...]) -> Tensor:
    """Return the derivative along a direction, from the Jacobians of reverse mode."""
    return sum(  # type: ignore[return-value]
        (j.flatten(-t.dim()) @ t.flatten() for j, t in zip(jacobians, along, strict=True)), start=torch.zeros(())
    )


def batch_of(arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.stack([x, 1.1 * x + 0.01]) for x in arguments)


SHARED = ("causal", "bidirectional", "block-causal", "steps", "window")
"""Functions that are tested with coefficients that all heads share, too: one for each part of the operator."""


@pytest.mark.parametrize(
    ("name", "mixing"),
    [
        (name, mixing)
        for name, mixing in product(FUNCTIONS, MIXINGS)
        if (mixing.endswith("per head") or name in SHARED)
        and not (name.endswith("spanning") and mixing.startswith("dense"))
    ],
)
def test_transformations(name: str, mixing: str) -> None:
    torch.manual_seed(1)
    function, arguments = FUNCTIONS[name], (rand(1, TOKENS, 2, 3), *MIXINGS[mixing])
    every = tuple(range(len(arguments)))
    batch, along = batch_of(arguments), tuple(torch.randn_like(x) for x in arguments)
    rows = [tuple(x[i] for x in batch) for i in range(2)]

    close(func.vmap(function)(*batch), torch.stack([function(*row) for row in rows]))
    tokens_alone = func.vmap(function, in_dims=(0, *(None for _ in arguments[1:])))(batch[0], *arguments[1:])
    close(tokens_alone, torch.stack([function(x, *arguments[1:]) for x in batch[0]]))
    mixing_alone = func.vmap(function, in_dims=(None, *(0 for _ in arguments[1:])))(arguments[0], *batch[1:])
    close(mixing_alone, torch.stack([function(arguments[0], *row[1:]) for row in rows]))

    jacobians = jacobian(function, arguments)
    want = directional(jacobians, along)
    close(func.jvp(function, arguments, along)[1], want)
    out, linear = func.linearize(function, *arguments)
    close((out, linear(*along)), (function(*arguments), want))
    several = func.vmap(lambda *t: func.jvp(function, arguments, t)[1])(*(torch.stack([t, 2 * t]) for t in along))
    close(several, torch.stack([want, 2 * want]))
    of_rows = func.jvp(func.vmap(function), batch, tuple(t.expand(2, *t.shape) for t in along))[1]
    close(of_rows, torch.stack([want, directional(jacobian(function, rows[1]), along)]))

    close(func.jacrev(function, argnums=every)(*arguments), jacobians)
    close(func.jacfwd(function, argnums=every)(*arguments), jacobians)


@pytest.mark.parametrize("mixing", ["dense", "exponential"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name: str, mixing: str) -> None:
    if name.endswith("spanning") and mixing == "dense":
        pytest.skip("the spanning form is for exponential mixing")
    torch.manual_seed(1)
    arguments = (rand(1, TOKENS, 2, 3), *MIXINGS[mixing])
    every = tuple(range(len(arguments)))

    def loss(*x: Tensor) -> Tensor:
        return FUNCTIONS[name](*x).square().sum()

    want = tuple(part for row in hessian(loss, arguments) for part in row)
    close(tuple(part for row in func.hessian(loss, argnums=every)(*arguments) for part in row), want)
    batch = batch_of(arguments)
    rows = [jacobian(loss, tuple(x[i] for x in batch)) for i in range(2)]
    close(func.vmap(func.grad(loss, argnums=every))(*batch), tuple(map(torch.stack, zip(*rows, strict=True))))


@pytest.mark.parametrize("kind", ["dense", "exponential"])
def test_a_state_is_an_argument_and_a_result(kind: str) -> None:
    mixing = mixing_of(MIXINGS[kind])
    q = rand(3, 1, TOKENS, 2, 3)
    for prefill, step, count in ((mhla_prefill, mhla_step, 3), (mhla_window_prefill, mhla_window_step, 5)):

        def begin(x: Tensor, prefill: Any = prefill, count: int = count) -> Any:
            return prefill(*[x] * count, mixing, block_size=SIZE)

        def go_on(x: Tensor, state: Any, step: Any = step, count: int = count) -> Tensor:
            out: Tensor = step(*[x[:, 0]] * count, mixing, state, block_size=SIZE, donate_state=True)[0]
            return out

        out, states = func.vmap(begin)(q)
        assert states.lengths == (TOKENS,)
        close(out, torch.stack([begin(x)[0] for x in q]))
        close(func.vmap(go_on)(q, states), torch.stack([go_on(x, begin(x)[1]) for x in q]))
        state = begin(q[0])[1]
        change = func.jvp(lambda s: go_on(q[0], s), (state,), (state,))[1]
        assert change.isfinite().all()


NUMBERS: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "lengths": (
        lambda x, n: mhla_prefill(x, x, x, torch.ones(4, 4), block_size=SIZE, lengths=n)[0],
        torch.tensor([[1], [2], [3]]),
    ),
    "cu_seqlens": (
        lambda x, n: mhla_attention(x, x, x, torch.ones(4, 4), block_size=SIZE, causal=True, cu_seqlens=n),
        torch.tensor([[0, 3, 7], [0, 4, 7], [0, 7, 7]]),
    ),
    "block_offsets": (
        lambda x, n: mhla_attention(x, x, x, torch.ones(2, 2), block_offsets=n),
        torch.tensor([[0, 3, 7], [0, 4, 7], [0, 6, 7]]),
    ),
    "rows": (
        lambda x, n: mhla_prefill(x, x, x, torch.ones(4, 4), block_size=SIZE)[1].select(n).open,
        torch.tensor([[0], [0], [0]]),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_counts_cannot_be_mapped_but_may_stand_beside_derivatives(name: str) -> None:
    call, numbers = NUMBERS[name]
    x = torch.rand(3, 1, TOKENS, 2, 2)
    with pytest.raises(ValueError, match=f"{name} is mapped by torch.vmap"):
        func.vmap(call)(x, numbers)
    close(
        func.vmap(func.grad(lambda y, n: call(y, n).sum()), in_dims=(0, None))(x, numbers[0]),
        torch.stack([jacobian(lambda y: call(y, numbers[0]).sum(), row) for row in x]),
    )


@pytest.mark.parametrize("transformation", ["vmap", "jvp", "grad", "linearize", "jacfwd"])
def test_wrong_decays_are_found_under_transformations(transformation: str) -> None:
    x, decays = torch.rand(1, TOKENS, 2, 2), torch.tensor([[0.1, 0.2], [0.3, -1.0]])

    def call(decay: Tensor) -> Tensor:
        mixing = ExponentialMixing(torch.ones(2), decay)
        return mhla_attention(x, x, x, mixing, block_size=SIZE, causal=True).sum()

    run: dict[str, Callable[[], Any]] = {
        "vmap": lambda: func.vmap(call)(decays),
        "jvp": lambda: func.jvp(call, (decays[1],), (decays[0],)),
        "grad": lambda: func.grad(call)(decays[1]),
        "linearize": lambda: func.linearize(call, decays[1]),
        "jacfwd": lambda: func.jacfwd(call)(decays[1]),
    }
    with pytest.raises(ValueError, match=r"finite and not negative, got .*-1\.0"):
        run[transformation]()


# Graphs


def inputs(tokens: int, batch: int = 2) -> list[Tensor]:
    torch.manual_seed(tokens)
    return [torch.rand(batch, tokens, 2, 3), torch.rand(batch, tokens, 2, 3), torch.randn(batch, tokens, 2, 3)]


def last_two(donate: bool, prefill: Any, step: Any, copies: int) -> Function:
    def call(q: Tensor, k: Tensor, v: Tensor, *m: Tensor) -> Tensor:
        every = (q, k, v, q, k)[:copies]
        out, state = prefill(*(x[:, :-2] for x in every), mixing_of(m), block_size=4)
        outs = [out]
        for t in (-2, -1):  # of 13 tokens in blocks of 4, the last one opens a block
            out, state = step(*(x[:, t] for x in every), mixing_of(m), state, block_size=4, donate_state=donate)
            outs.append(out[:, None])
        return torch.cat(outs, 1)

    return call


def two_pieces(prefill: Any, copies: int) -> Function:
    def call(q: Tensor, k: Tensor, v: Tensor, *m: Tensor) -> Tensor:
        every = (q, k, v, q, k)[:copies]
        out, state = prefill(*(x[:, :5] for x in every), mixing_of(m), block_size=4)
        rest, state = prefill(*(x[:, 5:] for x in every), mixing_of(m), block_size=4, state=state)
        return torch.cat([out, rest], 1)

    return call


def then_a_block(q: Tensor, k: Tensor, v: Tensor, *m: Tensor) -> Tensor:
    options: dict[str, Any] = {"block_size": 4, "causal": "block"}
    out, state = mhla_prefill(q[:, :4], k[:, :4], v[:, :4], mixing_of(m), **options)
    rest = (x[:, 4:8] for x in (q, k, v))
    return torch.cat([out, mhla_step(*rest, mixing_of(m), state, **options)[0]], 1)


GRAPHS: dict[str, Function] = {
    "attention": lambda q, k, v, *m: mhla_attention(q, k, v, mixing_of(m), block_size=4, causal=True),
    "bidirectional": lambda q, k, v, *m: mhla_attention(q, k, v, ExponentialMixing(*m), block_size=4),
    "prefill": two_pieces(mhla_prefill, 3),
    "steps": last_two(True, mhla_prefill, mhla_step, 3),
    "block-causal": lambda q, k, v, *m: mhla_attention(q, k, v, mixing_of(m), block_size=4, causal="block"),
    "block step": then_a_block,
    "window": lambda q, k, v, *m: mhla_window_attention(q, k, v, q, k, mixing_of(m), block_size=4),
    "window prefill": two_pieces(mhla_window_prefill, 5),
    "window steps": last_two(False, mhla_window_prefill, mhla_window_step, 5),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_exponential_mixing_trains_in_one_graph_at_new_lengths(name: str) -> None:
    """A cold compiler, a new number of tokens at each call, few and many blocks."""
    torch._dynamo.reset()
    learned = [torch.rand(3).requires_grad_(), torch.rand(3).requires_grad_()]
    graph = torch.compile(GRAPHS[name], fullgraph=True, backend="aot_eager")
    for tokens in (8, 13, 147) if name == "attention" else (8, 13):
        leaves = [x.requires_grad_() for x in inputs(tokens)]
        got, want = graph(*leaves, *learned), GRAPHS[name](*leaves, *learned)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        gradients = (torch.autograd.grad(x.square().sum(), [*leaves, *learned]) for x in (got, want))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["exponential", "matrix", "window"])
def test_packed_bounds_in_a_tensor_are_no_break_of_a_graph(kind: str) -> None:
    """Sequences that begin inside a block, empty ones, and a number of tokens that the second call leaves open."""
    torch._dynamo.reset()
    learned, matrix = (torch.rand(3), torch.rand(3)), torch.rand(2, 12, 12).tril()

    def call(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        mixing = matrix if kind == "matrix" else ExponentialMixing(*learned)
        if kind == "window":
            return mhla_window_attention(q, k, v, q, k, mixing, block_size=4, cu_seqlens=bounds)
        return mhla_attention(q, k, v, mixing, block_size=4, causal=True, cu_seqlens=bounds)

    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    for tokens, bounds in (
        (8, [0, 3, 8]),
        (13, [0, 4, 4, 13]),
        (30, [0, 1, 2, 30]),
        (44, [0, 44]),
        (44, [0, 5, 18, 44]),
    ):
        x = inputs(tokens, 1)
        torch.testing.assert_close(
            graph(*x, torch.tensor(bounds)), call(*x, torch.tensor(bounds)), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_is_read_while_a_graph_is_recorded_or_tensors_are_fake(name: str) -> None:
    arguments = (*inputs(13), torch.rand(3), torch.rand(3))
    recorded = make_fx(GRAPHS[name])(*arguments)
    other = (*inputs(13), torch.rand(3), torch.rand(3))
    want = GRAPHS[name](*other)
    torch.testing.assert_close(recorded(*other), want)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert GRAPHS[name](*(mode.from_tensor(x) for x in arguments)).shape == want.shape


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64], ids=str)
def test_packed_bounds_that_cannot_be_read_are_integers(dtype: torch.dtype) -> None:
    x, mixing = torch.rand(1, 8, 1, 4), torch.eye(2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        bounds = mode.from_tensor(torch.tensor([0, 1], dtype=dtype))
        with pytest.raises(ValueError, match=rf"cu_seqlens must be a one-dimensional tensor of integers, got {dtype}"):
            mhla_attention(mode.from_tensor(x), x, x, mixing, block_size=4, cu_seqlens=bounds)


def test_transformations_inside_a_graph() -> None:
    torch._dynamo.reset()

    def call(x: Tensor, amplitude: Tensor, decay: Tensor) -> Tensor:
        mixing = ExponentialMixing(amplitude, decay)
        return mhla_attention(x, x, x, mixing, block_size=4, causal=True)

    arguments = torch.rand(3, 1, 13, 2, 3), torch.rand(3, 2), torch.rand(3, 2)
    graph = torch.compile(lambda *x: func.vmap(call)(*x), fullgraph=True, backend="eager")
    torch.testing.assert_close(graph(*arguments), torch.stack([call(*row) for row in zip(*arguments, strict=True)]))


@pytest.mark.parametrize("factor", [1, 7, 11, 143, 1001])
def test_open_sizes_are_told_from_numbers_in_compiled_graphs(factor: int) -> None:
    def f(x: Tensor) -> Tensor:
        return x + (1 if is_dynamic(x.shape[0] * factor) else 0) + (10 if is_dynamic(4 * factor) else 0)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    for length in (5, 9):
        x = torch.zeros(length)
        torch._dynamo.mark_dynamic(x, 0)  # dynamic=True would leave the factor open too
        assert torch.equal(compiled(x), torch.ones(length))
    assert torch.equal(f(torch.zeros(5)), torch.zeros(5))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_outside_of_a_batched_call_with_features(causal: bool) -> None:
    """Inside vmap no tensor seems to need a gradient, so nothing that the backward pass reads may be changed in place."""
    torch.manual_seed(2)
    x = rand(3, TOKENS, 2, 4).requires_grad_()
    mixing = torch.rand(-(-TOKENS // SIZE), -(-TOKENS // SIZE), dtype=x.dtype)

    def call(row: Tensor) -> Tensor:
        return mhla_attention(
            row[None], row[None], row[None], mixing, block_size=SIZE, causal=causal, feature_map="relu"
        )[0]

    (expected,) = torch.autograd.grad(torch.stack([call(row) for row in x]).square().sum(), x)
    (gradient,) = torch.autograd.grad(torch.vmap(call)(x).square().sum(), x)
    torch.testing.assert_close(gradient, expected)
    by_function = torch.func.grad(lambda t: torch.vmap(call)(t).square().sum())(x.detach())
    torch.testing.assert_close(by_function, expected)
