"""Registered operators meet the requirements of torch: schemas, fake kernels, compile, export, checkpointing."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from implementations import DEVICE, TRITON
from mhla_kernels import ExponentialMixing, backend, mhla_attention, mhla_prefill, mhla_step
from mhla_kernels.blocks import TokenLayout
from mhla_kernels.triton_backend import (
    attend,
    config,
    launch,
    mix,
    ops,  # noqa: F401  registers the operator
)
from mhla_kernels.triton_backend.call import Arguments
from mhla_kernels.triton_backend.tables import kernel_tables
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

CALLS: dict[str, dict[str, Any]] = {
    "bidirectional": {"block_size": 8, "feature_map": "relu"},
    "causal": {"block_size": 8, "causal": True, "normalize": False},
    "uneven": {"block_offsets": (0, 5, 20)},
    "block-causal": {"block_size": 8, "causal": "block", "feature_map": "relu"},
    "block-causal, uneven": {"block_offsets": (0, 5, 20), "causal": "block", "normalize": False},
    "masked": {"block_size": 8, "key_mask": (torch.arange(20) < 15)[None]},
}  # fmt: skip
BACKENDS = (*TRITON, "torch chunked", "torch parallel")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


def problem(blocks: int = 3, exponential: bool = False) -> list[Tensor]:
    q, k, v = (torch.rand(1, 20, 2, 8, device=DEVICE).requires_grad_() for _ in range(3))
    mixing = [torch.rand(2, blocks, blocks)] if not exponential else [torch.rand(2, 3), torch.rand(2, 3)]
    return [q, k, v, *(x.to(DEVICE).requires_grad_() for x in mixing)]


@pytest.mark.parametrize("form", ["parallel", "chunked"])
def test_opcheck(form: str) -> None:
    q, k, v, mixing = problem()
    mask = (torch.arange(20, device=DEVICE) < 15)[None]
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    shared = mixing[:1].detach().requires_grad_()
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    tables = kernel_tables(TokenLayout(20, 8), form, 3, torch.device(DEVICE))
    calls = [
        Arguments(*half, [mixing], tables, None, None, 8, None, True, True, None, form, "dense", ""),
        Arguments(q, k, v, [shared], tables, mask, None, 8, None, False, False, 1e-6, form, "dense", ""),
        Arguments(*half, [mixing], tables, mask, None, 8, None, True, True, 1e-6, form, "dense", "", block_causal=True),
    ]
    if form == "chunked":
        sums = problem(exponential=True)[3:]
        calls.append(Arguments(*half, sums, tables, None, None, 8, None, True, False, 1e-6, form, "exponential", ""))
    for arguments in calls:
        torch.library.opcheck(torch.ops.mhla.attention, tuple(arguments), test_utils=utilities)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_compiles_as_one_graph(implementation: str, name: str) -> None:
    backend, form = implementation.split()
    options = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in CALLS[name].items()}
    leaves = problem(2 if name == "uneven" else 3)

    def layer(q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
        return mhla_attention(q * 2, k, v, mixing, form=form, backend=backend, **options).square()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    want, got = layer(*leaves), compiled(*leaves)
    torch.testing.assert_close(got, want)
    cotangent = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, leaves, cotangent), torch.autograd.grad(want, leaves, cotangent), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("causal", [True, "block"])
def test_packed_and_exponential_compile_as_one_graph(implementation: str, causal: Any) -> None:
    backend, form = implementation.split()
    q, k, v, amplitude, decay = problem(exponential=True)

    def layer(q: Tensor, bounds: Tensor, mixing: ExponentialMixing) -> Tensor:
        options: dict[str, Any] = {"block_size": 4, "causal": causal, "form": form, "backend": backend}
        return mhla_attention(q, k, v, mixing, cu_seqlens=bounds, **options)

    bounds, mixing = torch.tensor([0, 7, 20], device=DEVICE), ExponentialMixing(amplitude, decay)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, bounds, mixing), layer(q, bounds, mixing))


@pytest.mark.parametrize("exponential", [False, True], ids=["dense", "exponential"])
def test_the_choice_of_a_form_is_no_break_of_a_graph(exponential: bool) -> None:
    """Where the number of tokens is open, the costs are too."""
    mixing = [torch.rand(2), torch.rand(2)] if exponential else [torch.rand(200, 200)]

    def layer(x: Tensor, *mixing: Tensor) -> Tensor:
        coefficients = ExponentialMixing(*mixing) if exponential else mixing[0]
        return mhla_attention(x, x, x, coefficients, block_size=4, causal=True)

    compiled = torch.compile(layer, fullgraph=True, backend=(counter := torch._dynamo.testing.CompileCounter()))
    for tokens in (300, 500, 700, 600):
        x = torch.rand(1, tokens, 1, 4)
        torch.testing.assert_close(compiled(x, *mixing), layer(x, *mixing), rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("implementation", BACKENDS)
def test_other_lengths_need_no_new_graph_each(implementation: str) -> None:
    backend, form = implementation.split()
    compiled = torch.compile(
        lambda q, k, v, m: mhla_attention(q, k, v, m, block_size=4, causal=True, form=form, backend=backend),
        fullgraph=True,
        backend=(counter := torch._dynamo.testing.CompileCounter()),
        dynamic=True,
    )
    mixing = torch.rand(30, 30, device=DEVICE)
    for tokens in (20, 24, 28, 33, 47):
        q, k, v = (torch.rand(1, tokens, 2, 8, device=DEVICE) for _ in range(3))
        assert compiled(q, k, v, mixing).shape == v.shape
    limit = 1 if backend == "triton" else 3  # the PyTorch forms branch on whether the last block is short
    assert counter.frame_count <= limit, f"{counter.frame_count} graphs for five lengths"


@pytest.mark.parametrize("implementation", BACKENDS)
def test_exports(implementation: str) -> None:
    backend, form = implementation.split()

    class Layer(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
            return mhla_attention(q, k, v, mixing, block_size=8, form=form, backend=backend)

    arguments = tuple(x.detach() for x in problem())
    program = torch.export.export(Layer(), arguments)
    torch.testing.assert_close(program.module()(*arguments), Layer()(*arguments))


@pytest.mark.parametrize("implementation", BACKENDS)
def test_uneven_blocks_work_after_an_export(implementation: str) -> None:
    """Tables that tracing makes of fake tensors are not used in real calls, and tables of real calls not in tracing."""
    backend, form = implementation.split()
    options: dict[str, Any] = {"block_offsets": (0, 3, 11, 20), "form": form, "backend": backend}

    class Layer(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor) -> Tensor:
            return mhla_attention(q, k, v, mixing, **options)

    arguments = tuple(x.detach() for x in problem())
    program = torch.export.export(Layer(), arguments)
    want = mhla_attention(*arguments, **{**options, "form": "reference", "backend": "torch"})
    torch.testing.assert_close(Layer()(*arguments), want)
    torch.testing.assert_close(program.module()(*arguments), want)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert mhla_attention(*(mode.from_tensor(x) for x in arguments), **options).shape == want.shape
    torch.testing.assert_close(Layer()(*arguments), want)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_checkpointing_gives_the_same_gradients(implementation: str) -> None:
    backend, form = implementation.split()
    leaves = problem()

    def layer(*x: Tensor) -> Tensor:
        return mhla_attention(*x, block_size=8, form=form, backend=backend)

    plain = torch.autograd.grad(layer(*leaves).square().sum(), leaves)
    again = torch.autograd.grad(checkpoint(layer, *leaves, use_reentrant=False).square().sum(), leaves)
    for a, b in zip(again, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("implementation", TRITON)
def test_only_what_is_asked_for_is_computed(implementation: str) -> None:
    backend, form = implementation.split()
    q, k, v, mixing = (x.detach() for x in problem())
    q.requires_grad_()
    mhla_attention(q, k, v, mixing, block_size=8, form=form, backend=backend).sum().backward()
    assert q.grad is not None
    assert k.grad is None
    assert mixing.grad is None


@pytest.mark.parametrize("causal", [False, "block"])
def test_the_torch_forms_take_double_gradients(causal: Any) -> None:
    leaves = [x.double()[:, :6, :1, :2] if x.dim() == 4 else x.double()[:1, :2, :2] for x in problem()]
    assert torch.autograd.gradgradcheck(
        lambda *x: mhla_attention(*x, block_size=3, causal=causal, backend="torch", form="chunked"),
        [x.detach().requires_grad_() for x in leaves],
        atol=1e-4,
    )


class Operator(nn.Module):
    """The operator as a model to be exported."""

    def __init__(self, form: str, causal: Any) -> None:
        super().__init__()
        self.form, self.causal = form, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mixing: Any) -> Tensor:
        return mhla_attention(q, k, v, mixing, block_size=16, causal=self.causal, form=self.form, backend="torch")  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["auto", "chunked", "parallel"])
@pytest.mark.parametrize("kind", ["dense", "exponential"])
def test_export_leaves_the_number_of_tokens_open(form: str, kind: str, tmp_path: Path) -> None:
    """One exported graph, written and read back, for 2 to 4,096 tokens; exponential mixing is an input of the graph."""
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    mixing: Any = torch.rand(256, 256) if kind == "dense" else ExponentialMixing(torch.rand(3), torch.rand(3))
    for causal in (True, "block", False) if kind == "exponential" else (True, "block"):
        example = [torch.rand(1, 100, 2, 8) for _ in range(3)]  # one tensor for all three would be one input
        shapes = (*[{1: tokens}] * 3, None if kind == "dense" else [None, None])
        network = Operator(form, causal)
        torch.export.save(
            torch.export.export(network, (*example, mixing), dynamic_shapes=shapes), tmp_path / "program.pt2"
        )
        exported = torch.export.load(tmp_path / "program.pt2").module()
        for n in (2, 17, 64, 1000):
            q, k, v = (torch.rand(1, n, 2, 8) for _ in range(3))
            torch.testing.assert_close(exported(q, k, v, mixing), network(q, k, v, mixing), rtol=1e-4, atol=1e-5)


def test_coefficients_and_states_are_read_without_unpickling(tmp_path: Path) -> None:
    mixing = ExponentialMixing(torch.rand(3), torch.rand(3))
    _, state = mhla_prefill(*(torch.rand(1, 20, 2, 8) for _ in range(3)), mixing, block_size=8)
    torch.save({"mixing": mixing, "state": state}, tmp_path / "saved.pt")
    read = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert torch.equal(read["mixing"].matrix(4), mixing.matrix(4))
    step = [torch.rand(1, 2, 8) for _ in range(3)]
    again, before = (mhla_step(*step, mixing, each, block_size=8)[0] for each in (read["state"], state))
    assert torch.equal(again, before)


def test_wrong_bounds_are_refused_in_a_compiled_graph_too() -> None:
    q, k, v, mixing = (x.detach().cpu() for x in problem(blocks=5))  # a failed check ends a CUDA device for good
    options: dict[str, Any] = {"block_size": 4, "causal": True, "backend": "torch"}

    def layer(bounds: Tensor) -> Tensor:
        return mhla_attention(q, k, v, mixing, cu_seqlens=bounds, **options)

    compiled = torch.compile(layer, backend="aot_eager")
    assert compiled(torch.tensor([0, 7, 20])).shape == v.shape
    for wrong in ([0, 25, 20], [0, 7, 19], [1, 7, 20]):
        with pytest.raises(RuntimeError, match="cu_seqlens must rise from 0 to N"):
            compiled(torch.tensor(wrong))


@pytest.mark.parametrize("implementation", TRITON)
@pytest.mark.parametrize("causal", [False, True, "block"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)], ids=str)
def test_only_gradients_that_are_asked_for(
    implementation: str, causal: Any, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what they are among all; of v alone, without a normalizer, one kernel over token pairs runs."""
    form, modes = implementation.split()[1], []
    run = launch.attend
    monkeypatch.setattr(launch, "attend", lambda call, mode, *given: (modes.append(mode), run(call, mode, *given))[1])
    options: dict[str, Any] = {"block_size": 8, "form": form, "backend": "triton", "causal": causal}
    for normalize in (True, False):
        leaves = problem()
        out = mhla_attention(*leaves, normalize=normalize, **options)
        cotangent = torch.rand_like(out)
        every = torch.autograd.grad(out, leaves, cotangent)
        leaves = [x.detach().requires_grad_(number in wanted) for number, x in enumerate(leaves)]
        out = mhla_attention(*leaves, normalize=normalize, **options)
        modes.clear()
        found = torch.autograd.grad(out, [leaves[number] for number in wanted], cotangent)
        for one, number in zip(found, wanted, strict=True):
            assert torch.equal(one, every[number])
    if wanted == (2,):
        assert modes == [attend.DV.value]


@pytest.mark.parametrize("causal", [False, True, "block"])
def test_backward_keeps_two_sets_of_summaries(causal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the largest tensors of a layer: 0.1 to 0.5 GB each at the paper's shapes."""
    made: list[weakref.ref[Tensor]] = []
    most = [0]

    def counted(run: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            out = run(*given, **named)
            made.append(weakref.ref(out[0] if isinstance(out, tuple) else out))
            most[0] = max(most[0], sum(one() is not None for one in made))
            return out

        return call

    leaves = problem()
    out = mhla_attention(*leaves, block_size=8, form="chunked", backend="triton", causal=causal)
    monkeypatch.setattr(launch, "summarize", counted(launch.summarize))
    monkeypatch.setattr(mix.DenseMixer, "mix", counted(mix.DenseMixer.mix))
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert len(made) == 4
    assert most[0] == 2


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_is_not_hidden_by_the_feature_map(implementation: str, name: str) -> None:
    backend, form = implementation.split()
    given = dict(zip("qkvm", (x.detach().clone() for x in problem()), strict=True))
    given[name][0, 3, 1, 2] = torch.nan
    out = mhla_attention(*given.values(), block_size=8, feature_map="relu", form=form, backend=backend)
    assert out[0, 3, 1].isnan().any()
    assert out[0, :, 0].isfinite().all()


def test_fake_tensors_of_a_gpu_that_is_not_there() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 20, 2, 8, device="cuda") for _ in range(3))
        mixing = torch.empty(2, 2, device="cuda")
        for options in ({"block_offsets": (0, 5, 20)}, {"block_size": 10, "cu_seqlens": [0, 20]}):
            out = mhla_attention(q, k, v, mixing, **options)
            assert out.shape == v.shape
            assert out.device.type == "cuda"


def test_one_stage_where_the_compiler_overlaps_chained_products(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {}
    for version in ("3.8.1", "3.9.0", "3.10.0"):
        monkeypatch.setattr(config.triton, "__version__", version)
        stages[version] = [2 - config.overlaps_chained_products(chip) for chip in (80, 90, 100, 103, 120)]
    assert stages == {"3.8.1": [2, 2, 1, 1, 2], "3.9.0": [2] * 5, "3.10.0": [2] * 5}


@pytest.mark.parametrize(
    ("capability", "found", "trusted"),
    [((9, 0), "3.8.0", False), ((9, 0), "3.9.0", True), ((10, 3), "3.8.0", False), ((8, 6), "3.8.0", True)],
)
def test_auto_leaves_a_compiler_alone_that_is_known_to_be_wrong(
    capability: tuple[int, int], found: str, trusted: bool
) -> None:
    backend._distrust.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert (backend._distrust(capability[0], found) is None) == trusted
    assert len(said) == (not trusted)


@pytest.mark.parametrize("implementation", TRITON)
@pytest.mark.parametrize("keys", [20, 13], ids=["self", "cross"])
def test_a_call_frees_its_tensors_at_once(implementation: str, keys: int) -> None:
    backend, form = implementation.split()
    q, k, v = (torch.rand(1, tokens, 2, 8, device=DEVICE) for tokens in (20, keys, keys))
    mixing = torch.rand(3, -(-keys // 8), device=DEVICE)
    alive = [weakref.ref(x) for x in (q, k, v)]
    gc.disable()
    try:
        mhla_attention(q, k, v, mixing, block_size=8, form=form, backend=backend)  # type: ignore[arg-type]
        del q, k, v
        assert not any(x() is not None for x in alive)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("form", "causal", "pairs", "summaries"),
    [
        ("parallel", False, 20 * 20, 0),
        ("parallel", True, 20 * 20 / 2, 0),
        ("chunked", False, 0, 2 * 20 + 3 * 3),  # keys into summaries, summaries into outputs, and the mixing
        ("chunked", True, 20 * 8 / 2, 2 * 20 + 3 * 3),
        ("chunked", "block", 0, 2 * 20 + 3 * 3),
    ],
)
def test_operations_of_kernels_are_counted(form: str, causal: Any, pairs: float, summaries: int) -> None:
    """Three blocks of up to 8 among 20 tokens, two heads, and widths of 8: products of a pair or of a summary, times two."""
    leaves = problem()
    with FlopCounterMode(display=False) as counter:
        out = mhla_attention(*leaves, block_size=8, form=form, backend="triton", causal=causal)
        forward = counter.get_total_flops()
        torch.autograd.grad(out.sum(), leaves)
    assert forward == 2 * 2 * (pairs * (8 + 8) + summaries * 8 * 8)
    assert counter.get_total_flops() == 3 * forward
