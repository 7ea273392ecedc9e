"""Wrong arguments are clear errors that name the value and the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mhla_kernels import (
    ExponentialMixing,
    attention_matrix,
    blocks,
    extend_mixing,
    limit_memory,
    mhla_attention,
    mhla_prefill,
    mhla_step,
    mhla_window_attention,
    resize_mixing,
)
from mhla_kernels.forms import cost
from mhla_kernels.forms.cost import cheapest_form

Q = torch.rand(1, 10, 2, 4)
M = torch.rand(3, 3)

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "fp16": ({"q": Q.half()}, TypeError, "float16 is not supported"),
    "shapes": ({"k": Q[..., :3]}, ValueError, "Hkv a divisor of H"),
    "lengths": ({"k": Q[:, :9]}, ValueError, "must share B, Nk and heads with k"),
    "key heads": ({"q": Q.repeat(1, 1, 2, 1)[:, :, :3], "mixing": torch.rand(3, 3)}, ValueError, "Hkv a divisor of H"),
    "value heads": ({"v": Q[:, :, :1]}, ValueError, "must share B, N and heads with k"),
    "sdpa's order": ({**dict.fromkeys("qkv", torch.rand(1, 2, 10, 4))}, ValueError, r"order, \[B, H, N, D\], need transpose\(1, 2\)"),
    "sdpa's order, per head": ({**dict.fromkeys("qkv", torch.rand(1, 2, 10, 4)), "mixing": torch.rand(2, 3, 3)}, ValueError, r"need transpose"),
    "boolean block size": ({"block_size": True}, ValueError, "positive integer"),
    "negative decay": ({"mixing": ExponentialMixing(torch.ones(2), torch.tensor([0.1, -0.1]))}, ValueError, r"finite and not negative, got \[0.1"),
    "infinite decay": ({"mixing": ExponentialMixing(torch.ones(1), torch.tensor([torch.inf]))}, ValueError, "finite and not negative"),
    "decay not a number": ({"mixing": ExponentialMixing(torch.ones(1), torch.tensor([torch.nan]))}, ValueError, "finite and not negative"),
    "spanning, dense": ({"form": "spanning"}, ValueError, "takes an ExponentialMixing without a grid, not"),
    "spanning, grid": ({"form": "spanning", "mixing": ExponentialMixing(torch.ones(1), torch.ones(1, 1), (3,))}, ValueError, "without a grid"),
    "spanning, uneven": ({"form": "spanning", "mixing": ExponentialMixing(torch.ones(1), torch.ones(1)), "block_size": None, "block_offsets": (0, 3, 10)}, ValueError, "blocks of equal size, not block_offsets"),
    "mixing heads": ({"mixing": torch.rand(3, 3, 3)}, ValueError, r"\[H, M, M\] with H = 2"),
    "mixing not square": ({"mixing": torch.rand(3, 4)}, ValueError, r"\[M, M\]"),
    "integer mixing": ({"mixing": torch.ones(3, 3, dtype=torch.long)}, TypeError, "floating point"),
    "too many blocks": ({"block_size": 2}, ValueError, "N=10 tokens with block_size=2 make 5 blocks.*resize_mixing"),
    "too few blocks": ({"block_size": 10}, ValueError, "needs exactly 1"),
    "causal too long": ({"block_size": 3, "causal": True}, ValueError, "at most N=9 tokens, block_size=4 or more"),
    "no blocks": ({"block_size": None}, ValueError, "exactly one of block_size"),
    "both blocks": ({"block_offsets": [0, 4, 8, 10]}, ValueError, "exactly one of block_size"),
    "zero block size": ({"block_size": 0}, ValueError, "positive integer"),
    "float block size": ({"block_size": 4.0}, ValueError, "positive integer"),
    "offsets end": ({"block_size": None, "block_offsets": [0, 4, 8, 9]}, ValueError, "end at N=10"),
    "empty block": ({"block_size": None, "block_offsets": [0, 4, 4, 10]}, ValueError, "increase"),
    "causal offsets": ({"block_size": None, "block_offsets": [0, 4, 8, 10], "causal": True}, ValueError, "bidirectional"),
    "eps": ({"eps": 0.0}, ValueError, "eps=0.0 must be positive"),
    "empty mixing": ({"mixing": torch.rand(0, 0), "causal": True}, ValueError, r"\[M, M\]"),
    "scale": ({"scale": 0.5}, ValueError, "scale=0.5 has no effect with normalize=True"),
    "learned scale": ({"scale": torch.ones((), requires_grad=True), "normalize": False}, TypeError, "scale is a constant and gets no gradient"),
    "learned eps": ({"eps": torch.ones((), requires_grad=True)}, TypeError, "eps is a constant and gets no gradient"),
    "feature map": ({"feature_map": "gelu"}, ValueError, "'gelu' is not one of 'identity', 'relu'"),
    "form": ({"form": "fast"}, ValueError, "'fast' is not one of"),
    "backend": ({"backend": "cuda"}, ValueError, "'cuda' is not one of 'auto', 'torch', 'triton'"),
    "triton, float64": ({"q": Q.double(), "backend": "triton"}, ValueError, "not float64; use backend='torch'"),
    "triton, reference": ({"backend": "triton", "form": "reference"}, ValueError, "only in PyTorch"),
    "triton, wide": ({"v": torch.rand(1, 10, 2, 300), "backend": "triton"}, ValueError, "at most 256 features, not 300"),
    "amplitude heads": ({"mixing": ExponentialMixing(torch.ones(3, 4), torch.ones(3, 4))}, ValueError, "for 3 heads; q has H = 2"),
    "causal grid": ({"mixing": ExponentialMixing(torch.ones(4), torch.ones(4, 2), (2, 2)), "causal": True}, ValueError, "without grid"),
    "other grid": ({"mixing": ExponentialMixing(torch.ones(4), torch.ones(4, 2), (2, 2))}, ValueError, "needs exactly 3"),
    "mask dtype": ({"key_mask": torch.ones(1, 10)}, ValueError, "must be bool"),
    "mask shape": ({"key_mask": torch.ones(1, 9, dtype=torch.bool)}, ValueError, r"\[1, 10\]"),
    "packed batch": ({**dict.fromkeys("qkv", Q.repeat(2, 1, 1, 1)), "cu_seqlens": [0, 10]}, ValueError, "B=2"),
    "packed end": ({"cu_seqlens": [0, 4, 9], "causal": True}, ValueError, "end at N=10"),
    "packed falls": ({"cu_seqlens": [0, 8, 4, 10], "causal": True}, ValueError, "not decrease"),
    "packed grids": ({"cu_seqlens": [0, 4, 10]}, ValueError, "N=4 tokens with block_size=4 make 1 blocks"),
    "packed floats": ({"cu_seqlens": torch.tensor([0.0, 10.0])}, ValueError, "integers"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(name: str) -> None:
    changed, error, message = WRONG[name]
    call: dict[str, Any] = {"q": Q, "k": Q, "v": Q, "mixing": M, "block_size": 4, **changed}
    with pytest.raises(error, match=message):
        mhla_attention(**call)


def test_only_shapes_are_met_with_the_hint_at_another_order() -> None:
    """``[B, H, N, D]`` looks like few tokens of many heads; a wrong decay has nothing to do with it."""
    few = torch.rand(1, 2, 4, 8)
    with pytest.raises(ValueError, match="transpose"):
        mhla_attention(few, few, few, torch.ones(3, 2, 2), block_size=1)
    wrong = ExponentialMixing(torch.ones(2), torch.tensor([0.1, -0.1]))
    with pytest.raises(ValueError, match="not negative") as error:
        mhla_attention(few, few, few, wrong, block_size=1)
    assert "transpose" not in str(error.value)


def test_numpys_integers_will_do() -> None:
    want = mhla_attention(Q, Q, Q, M, block_size=4)
    assert torch.equal(mhla_attention(Q, Q, Q, M, block_size=np.int64(4)), want)
    offsets = np.array([0, 4, 8, 10])
    assert torch.equal(mhla_attention(Q, Q, Q, M, block_offsets=offsets), want)
    whole = mhla_attention(Q, Q, Q, M, block_size=np.int32(4), causal=True, cu_seqlens=np.array([0, 10]))
    causal = mhla_attention(Q, Q, Q, M, block_size=4, causal=True)
    torch.testing.assert_close(whole, causal)
    assert torch.equal(mhla_attention(Q, Q, Q, M, block_size=4, causal=np.True_), causal)


@pytest.mark.parametrize("exponential", [False, True], ids=["dense", "exponential"])
@pytest.mark.parametrize("shape", [(0, 10, 2, 4), (1, 0, 2, 4), (1, 10, 2, 0)], ids=["batch", "tokens", "key width"])
def test_where_there_is_nothing_outputs_are_zeros_and_everything_gets_a_gradient(
    shape: tuple[int, ...], exponential: bool
) -> None:
    """Else the next step of DDP waits for gradients that never come."""
    q, k = (torch.rand(shape).requires_grad_() for _ in range(2))
    v = torch.rand(*shape[:3], 5).requires_grad_()
    learned = (
        [torch.rand(2).requires_grad_(), torch.rand(2).requires_grad_()]
        if exponential
        else [M.clone().requires_grad_()]
    )
    mixing = ExponentialMixing(*learned) if exponential else learned[0]
    out = mhla_attention(q, k, v, mixing, block_size=4, causal=True)
    assert out.shape == (*shape[:3], 5)
    assert (out == 0).all()
    for x, gradient in zip((q, k, v, *learned), torch.autograd.grad(out.sum(), (q, k, v, *learned)), strict=True):
        assert gradient.shape == x.shape
        assert (gradient == 0).all()


NOT_TENSORS: dict[str, tuple[str, Any]] = {
    "list": ("list", [[1.0]]),
    "array": ("ndarray", np.ones((1, 10, 2, 4), np.float32)),
    "none": ("NoneType", None),
}


@pytest.mark.parametrize("kind", NOT_TENSORS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_queries_keys_and_values_are_tensors(name: str, kind: str) -> None:
    found, value = NOT_TENSORS[kind]
    tensors: dict[str, Any] = {"q": Q, "k": Q, "v": Q, name: value}
    message = f"{name} is {found}; it must be a tensor"
    for options in ({}, {"key_block_size": 5}, {"causal": True}):
        with pytest.raises(TypeError, match=message):
            mhla_attention(**tensors, mixing=M, block_size=4, **options)
    with pytest.raises(TypeError, match=message):
        mhla_prefill(**tensors, mixing=M, block_size=4)
    _, state = mhla_prefill(Q, Q, Q, M, block_size=4)
    one_token = {key: x[:, 0] if isinstance(x, torch.Tensor) else x for key, x in tensors.items()}
    with pytest.raises(TypeError, match=message):
        mhla_step(**one_token, mixing=M, state=state, block_size=4)
    _, state = mhla_prefill(Q[:, :4], Q[:, :4], Q[:, :4], M, block_size=4, causal="block")
    one_block = {key: x[:, :4] if isinstance(x, torch.Tensor) else x for key, x in tensors.items()}
    with pytest.raises(TypeError, match=message):
        mhla_step(**one_block, mixing=M, state=state, block_size=4, causal="block")
    if name != "v":
        with pytest.raises(TypeError, match=message):
            attention_matrix(tensors["q"], tensors["k"], M, block_size=4)


@pytest.mark.parametrize("mask", [[[True] * 10], np.ones((1, 10), bool), "all"], ids=["list", "array", "text"])
def test_masks_are_tensors(mask: Any) -> None:
    with pytest.raises(TypeError, match=r"key_mask is \w+; it must be a tensor"):
        mhla_attention(Q, Q, Q, M, block_size=4, key_mask=mask)
    for name in ("key_mask", "query_mask"):
        with pytest.raises(TypeError, match=rf"{name} is \w+; it must be a tensor"):
            mhla_attention(Q, Q, Q, M, block_size=4, key_block_size=4, **{name: mask})


@pytest.mark.parametrize("causal", [0, np.False_, False], ids=repr)
def test_whatever_equals_false_is_false(causal: Any) -> None:
    for options in ({}, {"key_block_size": 4}):
        want = mhla_attention(Q, Q, Q, M, block_size=4, **options)
        assert torch.equal(mhla_attention(Q, Q, Q, M, block_size=4, causal=causal, **options), want)


@pytest.mark.parametrize("causal", [1, True, np.True_, "block", None, "no"], ids=repr)
def test_cross_attention_is_not_causal(causal: Any) -> None:
    with pytest.raises(ValueError, match=r"causal=.* is for self-attention"):
        mhla_attention(Q, Q, Q, M, block_size=4, key_block_size=4, causal=causal)


@pytest.mark.parametrize("value", [6, 1.5, torch.tensor(6), "ab", [0, 10.0], [0, None], [0, True]], ids=str)
def test_bounds_and_lengths_are_several_integers(value: Any) -> None:
    options: dict[str, Any] = {"block_size": 4}
    for arguments in (
        {"cu_seqlens": value, "causal": True},
        {"cu_seqlens": value, "key_cu_seqlens": [0, 10]},
        {"cu_seqlens": [0, 10], "key_cu_seqlens": value},
        {"block_size": None, "block_offsets": value},
    ):
        with pytest.raises(ValueError, match=r"(cu_seqlens|block_offsets) must be .*integers, got"):
            mhla_attention(Q, Q, Q, M, **options | arguments)
    with pytest.raises(ValueError, match="lengths must be 1 integers from 0 to N=10, one for each row, got"):
        mhla_prefill(Q, Q, Q, M, block_size=4, lengths=value)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize("causal", [False, True, "block"])
@pytest.mark.parametrize("options", [{}, {"cu_seqlens": [0, 4, 10]}, {"key_mask": torch.ones(1, 10).bool()}], ids=str)
def test_without_features_outputs_are_zeros(options: dict[str, Any], causal: Any, normalize: bool) -> None:
    q, v = torch.rand(1, 10, 2, 0), torch.rand(1, 10, 2, 5)
    mixing = ExponentialMixing(torch.rand(2), torch.rand(2))
    for form in ("auto", "chunked", "parallel", "reference", "spanning"):
        out = mhla_attention(q, q, v, mixing, block_size=4, causal=causal, normalize=normalize, form=form, **options)
        assert out.shape == v.shape
        assert not out.any()


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize("mixing", [M, ExponentialMixing(torch.rand(2), torch.rand(2))], ids=["dense", "exponential"])
def test_without_features_there_are_matrices_states_and_cross_attention(mixing: Any, normalize: bool) -> None:
    q, v = torch.rand(1, 10, 2, 0), torch.rand(1, 10, 2, 5)
    options: dict[str, Any] = {"block_size": 4, "normalize": normalize}
    assert not attention_matrix(q, q, mixing, **options).any()
    assert not mhla_attention(q, q[:, :9], v[:, :9], mixing, key_block_size=3, **options).any()
    out, state = mhla_prefill(q[:, :3], q[:, :3], v[:, :3], mixing, **options)
    outs = [out]
    for t in (3, 4):
        out, state = mhla_step(q[:, t], q[:, t], v[:, t], mixing, state, **options)
        outs.append(out[:, None])
    out, state = mhla_prefill(q[:, 5:], q[:, 5:], v[:, 5:], mixing, state=state, **options)
    out = torch.cat([*outs, out], 1)
    assert out.shape == v.shape
    assert not out.any()


def test_resize_mixing_keeps_the_same_grid_and_row_sums() -> None:
    mixing = torch.rand(2, 12, 12)
    mixing = mixing / mixing.sum(-1, keepdim=True)
    torch.testing.assert_close(resize_mixing(mixing, (3, 4), (3, 4)), mixing)
    for grid in ((6, 8), (2, 2), (5, 3)):
        resized = resize_mixing(mixing, (3, 4), grid)
        assert resized.shape == (2, grid[0] * grid[1], grid[0] * grid[1])
        assert (resized >= 0).all()
        torch.testing.assert_close(resized.sum(-1), torch.ones(2, grid[0] * grid[1]))


def test_resize_mixing_keeps_rows_that_sum_to_zero() -> None:
    mixing = torch.tensor([[1.0, -1.0], [0.5, 0.5]])
    torch.testing.assert_close(resize_mixing(mixing, (2,), (2,)), mixing)
    finer = resize_mixing(mixing, (2,), (4,))
    assert (finer[0, :2] > 0).all()
    assert (finer[0, 2:] < 0).all()


def test_resize_mixing_keeps_what_depends_on_distance() -> None:
    near = torch.exp(-(torch.arange(16.0)[:, None] - torch.arange(16.0)).abs())
    near = near / near.sum(-1, keepdim=True)
    finer = resize_mixing(near, (16,), (32,))
    assert (finer.argmax(-1) // 2 == torch.arange(32) // 2).all(), "the nearest block must stay the heaviest"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [((3,), (2, 2), "the same number of axes"), ((2, 2), (4, 4), "has 4 blocks"), ((9,), (0,), "each >= 1")],
)
def test_resize_mixing_refuses(old: tuple[int, ...], new: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resize_mixing(torch.rand(9, 9), old, new)


def test_triton_says_why_it_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhla_kernels.backend.INTERPRETED", False)
    with pytest.raises(ValueError, match=r"the tensors are on 'cpu'.*TRITON_INTERPRET=1"):
        mhla_attention(Q, Q, Q, M, block_size=4, backend="triton")
    monkeypatch.setattr("mhla_kernels.backend.INSTALLED", False)
    with pytest.raises(ValueError, match="triton is not installed"):
        mhla_attention(Q, Q, Q, M, block_size=4, backend="triton")


@pytest.mark.parametrize(
    ("amplitude", "decay", "grid", "message"),
    [
        (torch.ones(2, 2, 2), torch.ones(2, 2, 2), None, r"\[R\] or \[H, R\]"),
        (torch.ones(3), torch.ones(4), None, r"must be \[3\]"),
        (torch.ones(3), torch.ones(3), (2, 2), r"must be \[3, 2\]"),
        (torch.ones(3), torch.ones(3, 2), (2, 0), "each >= 1"),
    ],
)
def test_exponential_mixing_refuses(amplitude: torch.Tensor, decay: torch.Tensor, grid: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExponentialMixing(amplitude, decay, grid)


def test_exponential_mixing_over_a_single_row_or_column_of_blocks_is_that_over_a_sequence() -> None:
    amplitude, decay = torch.tensor([0.7, 0.2]), torch.tensor([0.3, 1.0])
    want = ExponentialMixing(amplitude, decay).dense(5)
    for grid, decays in (((5, 1), [decay, torch.ones(2)]), ((1, 5), [torch.ones(2), decay])):
        torch.testing.assert_close(ExponentialMixing(amplitude, torch.stack(decays, -1), grid).dense(), want)


def test_fit_of_equal_coefficients_explains_them() -> None:
    fitted, explained = ExponentialMixing.fit(torch.full((8, 8), 1 / 8), steps=200)
    assert explained > 0.99
    torch.testing.assert_close(fitted.dense(8), torch.full((8, 8), 1 / 8), rtol=0.05, atol=0)


def test_fit_finds_the_exponentials_of_each_head_and_of_a_grid() -> None:
    amplitude, decay = torch.tensor([[0.3, 0.1], [0.0, 0.5]]), torch.tensor([[1.0, 0.1], [1.0, 0.3]])
    dense = ExponentialMixing(amplitude, decay).dense(24)
    fitted, explained = ExponentialMixing.fit(dense, terms=3, causal=True)
    assert (explained > 0.999).all()
    torch.testing.assert_close(fitted.dense(24).tril(), dense.tril(), atol=5e-3, rtol=0)
    rows = dense[0].tril() / dense[0].tril().sum(-1, keepdim=True)
    assert ExponentialMixing.fit(rows, terms=3, causal=True)[1] < 0.9, "normalised rows are no function of distance"
    assert ExponentialMixing.fit(rows, terms=3, causal=True, any_row_scale=True)[1] > 0.999
    grid = ExponentialMixing(torch.tensor([0.7]), torch.tensor([[0.2, 1.0]]), (3, 5))
    fitted, explained = ExponentialMixing.fit(grid.dense(), terms=2, grid=(3, 5))
    assert explained > 0.999
    torch.testing.assert_close(fitted.dense(), grid.dense(), atol=5e-3, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixing": torch.full((3, 3), float("nan"))}, "not finite"),
        ({"terms": 0}, "positive"),
        ({"grid": (2, 2)}, "has 4 blocks, but mixing is for 3"),
        ({"grid": (3,), "causal": True}, "leave grid out"),
    ],
)
def test_fit_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExponentialMixing.fit(**{"mixing": torch.ones(3, 3), **change})


def test_the_cheaper_form() -> None:
    """Floors of an H200: 256 image tokens want pairs, long sequences summaries; packed ones count by their own length."""
    from mhla_kernels.attention import _choose_form
    from mhla_kernels.checks import check_problem

    def pick(
        tokens: int, block: int, causal: bool, sequences: int = 1, width: int = 128, value: int | None = None
    ) -> str:
        q, bounds = torch.empty(1, tokens, 1, width), None
        mixing = torch.ones(tokens // sequences // block, tokens // sequences // block)
        if sequences > 1:
            bounds = list(range(0, tokens + 1, tokens // sequences))
        v = q[..., :1].expand(-1, -1, -1, value or width)
        return _choose_form(
            check_problem(q, q, v, mixing, block_size=block, causal=causal, cu_seqlens=bounds), fused=True
        )

    assert pick(256, 16, False, width=64) == "parallel"
    assert pick(31500, 210, False) == "chunked"
    assert pick(32768, 64, True) == "chunked"
    assert pick(2560, 64, True, width=128, value=256) == "chunked", "340M: each half of the values scores all pairs"
    assert pick(512, 64, True) == pick(64 * 512, 64, True, sequences=64) == "parallel"


def test_only_blocks_of_equal_size_are_spanned() -> None:
    from mhla_kernels.attention import _choose_form
    from mhla_kernels.checks import check_problem

    q = torch.empty(1, 65536, 1, 16)
    mixing = ExponentialMixing(torch.ones(2), torch.tensor([0.1, 0.2]))
    equal = check_problem(q, q, q, mixing, block_size=4)
    uneven = check_problem(q, q, q, mixing, block_size=None, block_offsets=[*range(0, 65536, 4), 65535, 65536])
    assert _choose_form(equal, fused=False) == "spanning"
    assert _choose_form(uneven, fused=False) != "spanning"


def test_memory_bounds_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that would hold more than the bound is left out, the cheaper one too, unless none holds less."""
    shape = 4096, 256, 64, 64, True
    options: dict[str, Any] = {"work": 40, "terms": 4}
    spanning = 4 * 16 * 4 * (64 * 64 + 64)  # chunks of 256 in Triton
    try:
        short = 1024, 512, 32, 32, False
        assert cheapest_form(*short) == "parallel"
        for bound in (8 * 512 * (32 * 32 + 32), 1):
            for rows in (1, 3):
                limit_memory(bound * rows)
                assert cheapest_form(*short, rows=rows) == "chunked"
        for bound, form in ((None, "spanning"), (spanning, "spanning"), (spanning - 1, "parallel")):
            limit_memory(bound)
            assert cheapest_form(*shape, **options, backend="triton") == form, bound
        for wrong in (0, -1, float("nan")):
            with pytest.raises(ValueError, match="positive"):
                limit_memory(wrong)
    finally:
        limit_memory(None)
    for text, bytes_of_a_call in (("", float("inf")), ("8", 8e9)):
        monkeypatch.setenv(cost.VARIABLE, text)
        assert cost._limit_at_start() == bytes_of_a_call
    for text in ("8GB", "0", "nan"):
        monkeypatch.setenv(cost.VARIABLE, text)
        with pytest.raises(ValueError, match="MHLA_MEMORY_GB"):
            cost._limit_at_start()


def test_tables_that_a_graph_reads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph takes what its warm-up made on another stream; other sizes push it out for everybody else."""
    capturing, stream, made = [False], [1], []
    monkeypatch.setattr(blocks, "is_real", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream[0]))

    def make(device: torch.device, size: int) -> object:
        made.append(size)
        return object()

    def ask(size: int, captured: bool = False) -> object:
        capturing[0] = captured
        return blocks.keep(make, torch.device("cuda"), size)

    first = ask(1)
    assert ask(1) is first
    stream[0] = 2
    assert ask(1) is not first, "of another stream"
    assert ask(1, captured=True) is first
    assert ask(2, captured=True) is not ask(2, captured=True), "made in the graph, and not kept"
    for size in range(3, 3 + blocks.MOST):
        ask(size)
    assert ask(1, captured=True) is first
    assert made.count(1) == 2
    ask(1)
    assert made.count(1) == 3


def test_extend_mixing_continues_what_depends_on_distance() -> None:
    """Rows that are normalized exponentials go on as normalized exponentials."""
    long = ExponentialMixing(torch.tensor([1.0]), torch.tensor([0.2])).dense(96).tril()
    long = long / long.sum(-1, keepdim=True)
    for tail in ("exponential", "last", "zero"):
        got = extend_mixing(long[:32, :32], 96, tail=tail)
        assert torch.equal(got[:32, :32], long[:32, :32])
        assert (got.triu(1) == 0).all()
        torch.testing.assert_close(got.sum(-1), torch.ones(96))
        if tail == "exponential":
            torch.testing.assert_close(got, long, rtol=0.05, atol=1e-4)
        else:
            beyond = got[-1, : 96 - 32]
            torch.testing.assert_close(
                beyond, torch.full_like(beyond, got[-1, 96 - 32].item() if tail == "last" else 0.0)
            )
    torch.testing.assert_close(extend_mixing(long[:32, :32], 8), long[:8, :8])
    per_head = extend_mixing(torch.stack([long[:32, :32], torch.eye(32)]), 48)
    torch.testing.assert_close(per_head[1], torch.eye(48))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tail": "none"}, "'none' is not one of"),
        ({"blocks": 0}, "positive"),
        ({"mixing": torch.ones(2, 3)}, r"\[M, M\]"),
    ],
)
def test_extend_mixing_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extend_mixing(**{"mixing": torch.ones(2, 2), "blocks": 4, **change})


@pytest.mark.parametrize("which", ["q", "k"])
def test_negative_features_under_a_normaliser_are_rejected_everywhere(which: str) -> None:
    """They give sums near zero, and outputs of a million, without a word."""
    inputs = {name: torch.rand(1, 12, 2, 4) for name in "qkv"}
    mixing = torch.rand(3, 3)
    inputs[which] = torch.randn(1, 12, 2, 4)
    call: dict[str, Any] = {**inputs, "mixing": mixing, "block_size": 4}
    token = {name: x[:, 0] for name, x in inputs.items()}
    state = mhla_prefill(*(torch.rand(1, 1, 2, 4) for _ in "qkv"), mixing, block_size=4)[1]
    message = rf"{which} holds negative features, -\d.* for example: .*feature_map='relu'.*normalize=False"
    for attend in (
        lambda: mhla_attention(**call),
        lambda: mhla_attention(**call, causal=True, form="reference"),
        lambda: attention_matrix(call["q"], call["k"], mixing, block_size=4),
        lambda: mhla_prefill(**call),
        lambda: mhla_step(**token, mixing=mixing, state=state, block_size=4),
    ):
        with pytest.raises(ValueError, match=message):
            attend()
    far = {"q_features": inputs["q"], "k_features": inputs["k"]}
    with pytest.raises(ValueError, match=rf"{which}_features holds negative features"):
        mhla_window_attention(**inputs, **far, mixing=mixing, block_size=4)


def test_features_that_need_not_be_nonnegative_are_left_alone() -> None:
    """Mapped by the operator, without a normalizer, hidden by a mask, rounding errors, and where no number can be read."""
    q, k, v = torch.randn(3, 1, 12, 2, 4).unbind()
    mixing = torch.rand(3, 3)
    assert mhla_attention(q, k, v, mixing, block_size=4, feature_map="relu").isfinite().all()
    assert mhla_attention(q, k, v, mixing, block_size=4, normalize=False).isfinite().all()
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 8:] = False
    a, b = q.abs(), k.abs()
    a[:, 8:], b[:, 8:] = -5, torch.nan
    assert mhla_attention(a, b, v, mixing, block_size=4, key_mask=mask).isfinite().all()
    assert mhla_prefill(a, b, v, mixing, block_size=4, lengths=[8])[0][:, :8].isfinite().all()
    rounded = q.abs()
    rounded[0, 0, 0, 0] = -1e-8
    mhla_attention(rounded, k.abs(), v, mixing, block_size=4)
    attend = lambda q, k, v: mhla_attention(q[None], k[None], v[None], mixing, block_size=4)[0]  # noqa: E731
    torch.testing.assert_close(
        torch.vmap(attend)(*(x.abs().repeat(2, 1, 1, 1) for x in (q, k, v)))[0],
        attend(*(x.abs()[0] for x in (q, k, v))),
    )
