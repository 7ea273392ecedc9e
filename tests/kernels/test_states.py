"""Both kinds of state keep the same rules: donation, rows, kinds, pytrees and files."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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
from torch import Tensor
from torch.utils import _pytree as pytree

SIZE = 2


class Family(NamedTuple):
    """Kind of state, with the functions that create it."""

    count: int
    whole: Callable[..., Tensor]
    prefill: Callable[..., Any]
    step: Callable[..., Any]


FAMILIES = {
    "mhla": Family(3, mhla_attention, mhla_prefill, mhla_step),
    "window": Family(5, mhla_window_attention, mhla_window_prefill, mhla_window_step),
}


def mixings(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    torch.manual_seed(5)
    return {
        "dense": torch.rand(16, 16, dtype=dtype),
        "exponential": ExponentialMixing(torch.rand(2, dtype=dtype), torch.rand(2, dtype=dtype)),
    }


def tokens(family: Family, n: int, batch: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.rand(batch, n, 2, 3, dtype=dtype) for _ in range(family.count)]


def one_pass(family: Family, inputs: list[Tensor], mixing: Any) -> Tensor:
    options = {"causal": True} if family.count == 3 else {}
    return family.whole(*inputs, mixing, block_size=SIZE, **options)


def step(family: Family, inputs: list[Tensor], t: int, mixing: Any, state: Any, **options: Any) -> Any:
    return family.step(*(x[:, t] for x in inputs), mixing, state, block_size=SIZE, **options)


def begun(family: Family, inputs: list[Tensor], n: int, mixing: Any, **options: Any) -> Any:
    return family.prefill(*(x[:, :n] for x in inputs), mixing, block_size=SIZE, **options)[1]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    torch.manual_seed(0)
    return FAMILIES[request.param]


@pytest.fixture(params=["dense", "exponential"])
def mixing(request: pytest.FixtureRequest) -> Any:
    return mixings()[request.param]


@pytest.mark.parametrize("start", range(1, 9))
def test_donating_a_child_leaves_its_parent_alone(family: Family, mixing: Any, start: int) -> None:
    inputs = tokens(family, 16)
    want = one_pass(family, inputs, mixing)
    parent = begun(family, inputs, start, mixing)
    kept = {name: x.clone() for name, x in parent.tensors.items()}
    _, child = step(family, inputs, start, mixing, parent)
    for t in range(start + 1, start + 6):
        out, child = step(family, inputs, t, mixing, child, donate_state=True)
        torch.testing.assert_close(out, want[:, t], rtol=1e-9, atol=1e-9)
        assert all(torch.equal(x, kept[name]) for name, x in parent.tensors.items())
    out, _ = step(family, inputs, start, mixing, parent)
    torch.testing.assert_close(out, want[:, start], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ["parent first", "child first"])
def test_relatives_that_are_all_donated_go_their_own_ways(family: Family, mixing: Any, order: str) -> None:
    """A parent, its child and a sibling; each state is used once, across several ends of blocks."""
    base = tokens(family, 7)
    parent = begun(family, base, 7, mixing)
    ways: dict[str, tuple[list[Tensor], Any]] = {"parent": (base, parent)}
    for name in ("child", "sibling"):
        more = [torch.cat([x, y], 1) for x, y in zip(base, tokens(family, 1), strict=True)]
        ways[name] = more, step(family, more, 7, mixing, parent)[1]
    names = list(ways) if order == "parent first" else list(ways)[::-1]
    for _ in range(6):
        for name in names:
            seen, state = ways[name]
            seen = [torch.cat([x, y], 1) for x, y in zip(seen, tokens(family, 1), strict=True)]
            out, state = step(family, seen, -1, mixing, state, donate_state=True)
            torch.testing.assert_close(out, one_pass(family, seen, mixing)[:, -1], rtol=1e-9, atol=1e-9)
            ways[name] = seen, state


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "tree": lambda state: pytree.tree_map(lambda x: x, state),
    "select": lambda state: state.select([0]),
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("how", COPIES)
def test_donating_a_copy_leaves_the_original_alone(family: Family, mixing: Any, how: str) -> None:
    inputs = tokens(family, 12)
    want = one_pass(family, inputs, mixing)
    state = begun(family, inputs, 5, mixing)
    other = COPIES[how](state)
    kept = {name: x.clone() for name, x in state.tensors.items()}
    for t in range(5, 12):
        out, other = step(family, inputs, t, mixing, other, donate_state=True)
        torch.testing.assert_close(out, want[:, t], rtol=1e-9, atol=1e-9)
    assert all(torch.equal(x, kept[name]) for name, x in state.tensors.items())


def test_donating_the_original_leaves_a_copy_alone(family: Family, mixing: Any) -> None:
    inputs = tokens(family, 12)
    state = begun(family, inputs, 5, mixing)
    other = copy.copy(state)
    step(family, inputs, 5, mixing, state, donate_state=True)
    out, _ = step(family, inputs, 5, mixing, other)
    torch.testing.assert_close(out, one_pass(family, inputs, mixing)[:, 5], rtol=1e-9, atol=1e-9)


def test_a_donated_state_takes_its_memory_along(family: Family) -> None:
    inputs, mixing = tokens(family, 12), mixings()["dense"]
    state = begun(family, inputs, 5, mixing)
    with torch.no_grad():
        for t in (5, 6, 7):
            _, after = step(family, inputs, t, mixing, state, donate_state=True)
            for name in state.own_names[1:]:
                assert getattr(after, name).data_ptr() == getattr(state, name).data_ptr(), name
            state = after


def test_a_step_needs_a_state_of_its_kind(family: Family, mixing: Any) -> None:
    inputs = tokens(family, 4)
    others = [other for other in FAMILIES.values() if other is not family]
    for state in (None, (), *(begun(other, tokens(other, 4), 4, mixing) for other in others)):
        with pytest.raises(ValueError, match=f"state is {type(state).__name__}, not MHLA.*State; mhla_.*prefill makes"):
            step(family, inputs, 0, mixing, state)


@pytest.mark.parametrize("state", [5, (), "state", torch.ones(2)], ids=str)
def test_a_prefill_needs_a_state_of_its_kind(family: Family, mixing: Any, state: Any) -> None:
    inputs = tokens(family, 4)
    with pytest.raises(ValueError, match=f"state is {type(state).__name__}, not MHLA.*State; mhla_.*prefill makes"):
        family.prefill(*inputs, mixing, block_size=SIZE, state=state)
    others = [other for other in FAMILIES.values() if other is not family]
    state = begun(others[0], tokens(others[0], 4), 4, mixing)
    with pytest.raises(ValueError, match=f"state is {type(state).__name__}, not MHLA.*State; mhla_.*prefill makes"):
        family.prefill(*inputs, mixing, block_size=SIZE, state=state)


def test_a_donated_state_is_of_no_more_use(family: Family, mixing: Any) -> None:
    inputs = tokens(family, 12)
    state = begun(family, inputs, 6, mixing)
    step(family, inputs, 6, mixing, state, donate_state=True)
    message = "was donated to an earlier step"
    for use in (
        lambda: step(family, inputs, 6, mixing, state),
        lambda: step(family, inputs, 6, mixing, state, donate_state=True),
        lambda: family.prefill(*inputs, mixing, block_size=SIZE, state=state),
        lambda: state.select([0]),
        lambda: step(family, inputs, 6, mixing, copy.copy(state)),
        lambda: step(family, inputs, 6, mixing, pytree.tree_map(torch.clone, state)),
    ):
        with pytest.raises(ValueError, match=message):
            use()


@pytest.mark.parametrize("inferring", ["x......", ".x.....", "xx.....", "x.x.x.x", ".xxx...", "xxxx..."])
def test_a_state_goes_in_and_out_of_inference_mode(family: Family, mixing: Any, inferring: str) -> None:
    """Donated steps of rows at different places in their blocks; an x stands for two steps in inference mode."""
    inputs = tokens(family, 20, batch=2)
    with torch.inference_mode(inferring[0] == "x"):
        _, state = family.prefill(*(x[:, :6] for x in inputs), mixing, block_size=SIZE, lengths=[6, 3])
    outs = []
    for t in range(14):
        now = [torch.stack([x[0, 6 + t], x[1, 3 + t]]) for x in inputs]
        with torch.inference_mode(inferring[t // 2] == "x"):
            out, state = family.step(*now, mixing, state, block_size=SIZE, donate_state=True)
        outs.append(out)
    want = one_pass(family, inputs, mixing)
    got = torch.stack(outs, 1)
    torch.testing.assert_close(got[:1], want[:1, 6:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got[1:], want[1:, 3:17], rtol=1e-9, atol=1e-9)
    assert not any(x.is_inference() for x in state.tensors.values()) or "x" in inferring[-2:]


def test_a_prefill_continues_a_state_of_inference_mode(family: Family, mixing: Any) -> None:
    inputs = tokens(family, 20, batch=2)
    want = one_pass(family, inputs, mixing)
    with torch.inference_mode():
        state = begun(family, inputs, 7, mixing)
        _, state = step(family, inputs, 7, mixing, state, donate_state=True)
    for first, last in ((8, 9), (9, 14), (14, 20)):
        now = (x[:, first:last] for x in inputs)
        out, state = family.prefill(*now, mixing, block_size=SIZE, state=state)
        torch.testing.assert_close(out, want[:, first:last], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths", [[4, 3], [2, 4], [0, 1], [0, 0]], ids=str)
@pytest.mark.parametrize("previous", [0, 1, 3, 4])
def test_coefficients_need_not_cover_padding(family: Family, lengths: list[int], previous: int) -> None:
    """Padding that would make more blocks than there are coefficients, at the start and after a state."""
    mixing, inputs = torch.rand(4, 4, dtype=torch.float64), tokens(family, 8, batch=2)
    state = begun(family, inputs, previous, mixing) if previous else None
    parts = [x[:, previous : previous + max(lengths)].requires_grad_() for x in inputs]
    padded = [torch.cat([x, x.new_full((2, 40, *x.shape[2:]), torch.nan)], 1) for x in parts]
    options: dict[str, Any] = {"block_size": SIZE, "lengths": lengths, "state": state}
    want, exact = family.prefill(*parts, mixing, **options)
    out, after = family.prefill(*padded, mixing, **options)
    assert out.shape[1] == max(lengths) + 40
    assert not out[:, max(lengths) :].any()
    assert torch.equal(out[:, : max(lengths)], want)
    assert after.lengths == exact.lengths == tuple(previous + length for length in lengths)
    assert all(torch.equal(x, exact.tensors[name]) for name, x in after.tensors.items())
    for gradient in torch.autograd.grad(out.sum(), parts, allow_unused=True, materialize_grads=True):
        assert gradient.isfinite().all()


def test_padding_does_not_hide_shapes_that_do_not_fit(family: Family, mixing: Any) -> None:
    inputs = tokens(family, 8)
    for number in range(1, family.count):
        wrong = [x[:, :7] if index == number else x for index, x in enumerate(inputs)]
        with pytest.raises(ValueError, match=r"\[1, 7, 2, 3\]"):
            family.prefill(*wrong, mixing, block_size=SIZE, lengths=[4])


ROWS: dict[str, Any] = {
    "tensor of booleans": torch.tensor([True, False]),
    "list of booleans": [True, False],
    "array of booleans": np.array([True, False]),
    "floats": torch.tensor([0.0, 1.0]),
    "list of floats": [0.0],
    "past the end": [0, 2],
    "negative": torch.tensor([-1]),
    "a number": torch.tensor(1),
    "a Python number": 1,
    "nothing": None,
    "two axes": torch.tensor([[0]]),
    "text": "0",
}


@pytest.mark.parametrize("rows", ROWS)
def test_select_takes_indices_of_rows_alone(family: Family, mixing: Any, rows: str) -> None:
    state = begun(family, tokens(family, 6, batch=2), 6, mixing, lengths=[6, 3])
    with pytest.raises(ValueError, match=r"rows must be .*integer indices"):
        state.select(ROWS[rows])
    assert state.select(np.array([1, 1, 0])).lengths == (3, 3, 6)


def test_another_kind_of_call_is_rejected(family: Family) -> None:
    inputs, made = tokens(family, 6), mixings()
    state = begun(family, inputs, 5, made["dense"])
    narrow, three = [x.float() for x in inputs], tokens(family, 6, batch=3)
    four = ExponentialMixing(torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64))
    for message, call in (
        ("with dense mixing, .* with exponential mixing of 2", lambda: step(family, inputs, 5, made["exponential"], state)),
        ("of 2 terms, .* of 4 terms",
         lambda: step(family, inputs, 5, four, begun(family, inputs, 5, made["exponential"]))),
        (r"in torch\.float64, .* summed in torch\.float32",
         lambda: step(family, narrow, 5, made["dense"].float(), state)),
        ("1 rows, but q has B=3", lambda: step(family, three, 5, made["dense"], state)),
        ("block_size=2, .*block_size=4",
         lambda: family.prefill(*inputs, made["dense"], block_size=4, state=state)),
        ("a step takes one token.* go to mhla_(window_)?prefill",
         lambda: family.step(*inputs, made["dense"], state, block_size=SIZE)),
        ("one token goes to mhla_(window_)?step",
         lambda: family.prefill(*(x[:, 0] for x in inputs), made["dense"], block_size=SIZE)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_a_state_is_a_pytree_and_a_file(family: Family, mixing: Any, tmp_path: Path) -> None:
    inputs = tokens(family, 9, batch=2)
    state = begun(family, inputs, 6, mixing, lengths=[6, 3])
    want, _ = step(family, inputs, 6, mixing, state)
    leaves, spec = pytree.tree_flatten(state)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    again = pytree.treespec_loads(pytree.treespec_dumps(spec))
    torch.save(state, tmp_path / "state.pt")
    for other in (
        pytree.tree_unflatten(leaves, spec),
        pytree.tree_unflatten(leaves, again),
        torch.load(tmp_path / "state.pt", weights_only=True),
    ):
        assert type(other) is type(state)
        assert other.lengths == (6, 3)
        assert torch.equal(step(family, inputs, 6, mixing, other, donate_state=True)[0], want)


def test_a_state_keeps_no_more_than_its_own_memory(family: Family) -> None:
    """A small state of a long prompt is not a view of what the prompt needed."""
    state = begun(family, tokens(family, 500), 500, mixings()["exponential"])
    stream = io.BytesIO()
    torch.save(state, stream)  # storages are saved in full
    assert len(stream.getvalue()) < state.bytes + 10_000


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_nothing_to_attend_to_has_gradients(family: Family, mixing: Any, shape: tuple[int, int]) -> None:
    batch, n = shape
    leaves = [x.requires_grad_() for x in tokens(family, n, batch=batch)]
    learned = [mixing] if isinstance(mixing, Tensor) else list(mixing.tensors.values())
    learned = [x.requires_grad_() for x in learned]
    before = begun(family, tokens(family, 3, batch=batch), 3, mixing)
    outs = [
        one_pass(family, leaves, mixing),
        family.prefill(*leaves, mixing, block_size=SIZE)[0],
        family.prefill(*leaves, mixing, block_size=SIZE, state=before)[0],
        family.prefill(*tokens(family, 2, batch=batch), mixing, block_size=SIZE, state=before, lengths=[0] * batch)[0],
    ]
    if n:
        outs.append(step(family, leaves, 0, mixing, before)[0])
    for index, out in enumerate(outs):
        # the last is a step, whose mixture was made before
        wanted = (learned, leaves[:3])[index - 3] if index >= 3 else [*leaves, *learned]
        assert all(not x.any() for x in torch.autograd.grad(out.sum(), wanted, retain_graph=True))
