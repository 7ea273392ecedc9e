"""A sequence spread over processes gives what one process gives, values and gradients, and moves the bytes that it says."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fork_server import ForkServer
from mhla_kernels import ExponentialMixing, mhla_attention
from mhla_kernels.sequence_parallel import mhla_sequence_parallel, share_blocks, share_tokens, traffic
from toeplitz import Toeplitz
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SIZES = [(64, 8), (61, 8), (9, 8), (300, 150)]  # even; a short last block; fewer blocks than processes; long blocks
KINDS = ("dense", "dense per head", "exponential", "exponential per head", "uneven blocks", "grid", "toeplitz")
Choice = tuple[tuple[int, int], str, Any, bool, str, bool]
"""Numbers of tokens in the sequence and in a block, kind of mixing, ``causal``, ``normalize``, ``exchange``, with a mask."""
CHOICES: list[Choice] = list(
    product(SIZES, KINDS, (False, True, "block"), (False, True), ("summaries", "tokens"), (False, True))
)
FEW: list[Choice] = list(product([(61, 8)], KINDS, (False, True), (False,), ("summaries",), (False,)))


def make(kind: str, blocks: int, heads: int, dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
    """Return a mixing, and the tensors that it learns."""
    if kind.startswith("exponential") or kind == "grid":
        shape = (heads, 3) if kind.endswith("head") else (3,)
        amplitude = torch.rand(shape, dtype=dtype).requires_grad_()
        decay = torch.rand(*shape, *((2,) if kind == "grid" else ()), dtype=dtype).requires_grad_()
        return ExponentialMixing(amplitude, decay, (1, blocks) if kind == "grid" else None), [amplitude, decay]
    if kind == "toeplitz":
        weights = torch.rand(heads, blocks, dtype=dtype).requires_grad_()
        return Toeplitz(weights), [weights]
    mixing = torch.rand(*((heads,) if kind.endswith("head") else ()), blocks, blocks, dtype=dtype).requires_grad_()
    return mixing, [mixing]


def relative_error(found: Tensor, expected: Tensor) -> float:
    scale = float(expected.norm())
    return float((found - expected).norm()) / scale if scale > 1e-12 else float(found.norm())


def compare(rank: int, world: int, dtype: torch.dtype, choices: Iterable[Choice] = CHOICES) -> float:
    """Return the largest error over some kinds of blocks, mixing and exchange."""
    worst = 0.0
    for (tokens, size), kind, causal, normalize, exchange, masked in choices:
        if (
            (causal and kind == "grid")
            or (causal is True and kind == "uneven blocks")
            or (exchange == "tokens" and kind.startswith("exp"))
        ):
            continue
        if kind == "toeplitz" and tokens != 61:  # by the matrix, as dense coefficients
            continue
        torch.manual_seed(tokens)
        blocks, offsets = -(-tokens // size), None
        if kind == "uneven blocks":
            offsets = tuple(sorted({0, tokens, *(i * i * tokens // blocks**2 for i in range(blocks))}))
            blocks = len(offsets) - 1
        mixing, learned = make(kind, blocks, 3, dtype)
        q, k, v = (torch.rand(2, tokens, 3, width, dtype=dtype).requires_grad_() for width in (5, 5, 4))
        mask = torch.rand(2, tokens) > 0.3 if masked else None
        cotangent = torch.randn(2, tokens, 3, 4, dtype=dtype)
        where: dict[str, Any] = {"block_size": None if offsets else size, "block_offsets": offsets}
        options: dict[str, Any] = {**where, "causal": causal, "normalize": normalize, "feature_map": "relu"}
        whole = mhla_attention(q, k, v, mixing, key_mask=mask, **options)
        expected = torch.autograd.grad(whole, [q, k, v, *learned], cotangent)
        bounds = share_tokens(tokens, world, **where)
        own = slice(bounds[rank], bounds[rank + 1])
        out = mhla_sequence_parallel(
            q[:, own], k[:, own], v[:, own], mixing, group=dist.group.WORLD, tokens=tokens, exchange=exchange,
            key_mask=None if mask is None else mask[:, own], **options,
        )  # fmt: skip
        found = torch.autograd.grad(out, [q, k, v, *learned], cotangent[:, own], materialize_grads=True)
        for gradient in found:
            dist.all_reduce(gradient)
        pairs = [(out.detach(), whole[:, own].detach()), *zip(found, expected, strict=True)]
        worst = max(worst, *(relative_error(a, b) for a, b in pairs))
    return worst


def later_tokens_change(rank: int, world: int) -> list[str]:
    """Name the outputs and gradients before a token that change if all later tokens are 1e15 times as large; none may."""
    changed = []
    for kind, normalize, exchange, causal in product(
        ("dense", "exponential", "toeplitz"), (False, True), ("summaries", "tokens"), (True, "block")
    ):
        if exchange == "tokens" and kind == "exponential":
            continue
        torch.manual_seed(3)
        tokens, size, last = 61, 8, 25 if causal is True else 23
        mixing, learned = make(kind, 8, 2, torch.float32)
        inputs = [torch.rand(1, tokens, 2, width) for width in (5, 5, 4)]
        cotangent = torch.randn(1, tokens, 2, 4)
        cotangent[:, last + 1 :] = 0
        bounds = share_tokens(tokens, world, block_size=size)
        own, results = slice(bounds[rank], bounds[rank + 1]), []
        before = max(0, min(last + 1, bounds[rank + 1]) - bounds[rank])
        for factor in (1.0, 1e15):
            leaves = [torch.cat([x[:, : last + 1], x[:, last + 1 :] * factor], 1)[:, own] for x in inputs]
            leaves = [x.requires_grad_() for x in leaves]
            out = mhla_sequence_parallel(
                *leaves, mixing, group=dist.group.WORLD, tokens=tokens, block_size=size, causal=causal,
                normalize=normalize, exchange=exchange,
            )  # fmt: skip
            found = torch.autograd.grad(out, [*leaves, *learned], cotangent[:, own], materialize_grads=True)
            results.append([out.detach()[:, :before], *(x[:, :before] for x in found[:3]), *found[3:]])
        pairs = zip(("output", "q", "k", "v", "mixing", "decay"), *results, strict=False)
        changed += [f"{kind}, {exchange}, {normalize=}: {name}" for name, a, b in pairs if not torch.equal(a, b)]
    return changed


def count_bytes(world: int) -> list[tuple[int, int]]:
    """Return the bytes that a process receives in the forward pass, and the bytes that :func:`traffic` computes."""
    received = 0
    gather = dist.all_gather_into_tensor

    def counted(every: Tensor, share: Tensor, group: Any) -> None:
        nonlocal received
        received += (every.numel() - share.numel()) * every.element_size()
        gather(every, share, group=group)

    dist.all_gather_into_tensor = counted  # type: ignore[assignment]
    rows = []
    kinds = product(("dense", "exponential"), (False, True), ("summaries", "tokens", "auto"), (4, 2, 1), (4, 16))
    for kind, causal, exchange, kv_heads, blocks in kinds:
        if kind == "exponential" and exchange == "tokens":
            continue
        mixing, learned = make(kind, blocks, 4, torch.float32)
        q, k, v = (
            torch.rand(1, 64 // world, heads, width, dtype=torch.bfloat16)
            for heads, width in ((4, 16), (kv_heads, 16), (kv_heads, 8))
        )
        received, block_size = 0, 64 // blocks
        mhla_sequence_parallel(
            q, k, v, mixing, group=dist.group.WORLD, tokens=64, block_size=block_size, causal=causal, exchange=exchange
        )
        terms = None if kind == "dense" else learned[0].numel()
        said = traffic(1, 64, 4, 16, 8, blocks, world, key_value_heads=kv_heads, terms=terms, causal=causal)
        rows.append((received, getattr(said, said.least if exchange == "auto" else exchange)))
    dist.all_gather_into_tensor = gather
    return rows


def under_a_mesh(rank: int, world: int) -> float:
    """Return the error of two data-parallel groups of two processes each, as in combination with FSDP2."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "sequence"))
    torch.manual_seed(0)
    mixing = torch.rand(8, 8)
    q, k, v = (torch.rand(2, 64, 2, 8) for _ in range(3))
    row, place = mesh["data"].get_local_rank(), mesh["sequence"].get_local_rank()
    whole = mhla_attention(q[row : row + 1], k[row : row + 1], v[row : row + 1], mixing, block_size=8)
    bounds = share_tokens(64, world // 2, block_size=8)
    own = slice(bounds[place], bounds[place + 1])
    parts = (x[row : row + 1, own] for x in (q, k, v))
    out = mhla_sequence_parallel(*parts, mixing, group=mesh["sequence"], tokens=64, block_size=8)
    return relative_error(out, whole[:, own])


def beside_fsdp(world: int) -> float:
    """Return the error of a layer with weights sharded over all processes, and each sequence spread over two of them."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "sequence"))
    torch.manual_seed(0)
    layer, tokens = nn.Linear(6, 48), 61
    x, mixing = torch.rand(2, tokens, 6), torch.rand(8, 8)
    mean = relu_attention(layer, x, lambda *qkv: mhla_attention(*qkv, mixing, block_size=8)).square().mean()
    (expected,) = torch.autograd.grad(mean, [layer.weight])

    fully_shard(layer, mesh=mesh._flatten("all"))
    row, place = mesh["data"].get_local_rank(), mesh["sequence"].get_local_rank()
    bounds = share_tokens(tokens, world // 2, block_size=8)
    share = x[row : row + 1, bounds[place] : bounds[place + 1]]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mhla_sequence_parallel(q, k, v, mixing, group=mesh["sequence"], tokens=tokens, block_size=8)

    out = relu_attention(layer, share, attend)
    (out.square().sum() * world / (2 * tokens * 16)).backward()  # FSDP2 takes the mean over the processes
    gradient: Any = layer.weight.grad
    return relative_error(gradient.full_tensor(), expected)


def relu_attention(layer: nn.Module, x: Tensor, attend: Any) -> Tensor:
    q, k, v = layer(x).relu().unflatten(-1, (3, 2, 8)).unbind(2)
    return attend(q, k, v).flatten(2)


def work(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"double": compare(rank, world, torch.float64), "bytes": count_bytes(world)}
    found["changed"] = later_tokens_change(rank, world)
    if world == 4:
        found["mesh"] = max(under_a_mesh(rank, world), beside_fsdp(world))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def work_briefly(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo")
    error = compare(rank, world, torch.float64, FEW)
    assert error <= 1e-10, f"values or gradients are off by {error:.1e} on process {rank}"
    dist.barrier()
    dist.destroy_process_group()


def test_three_processes_agree_with_one_on_each_kind_of_mixing(server: ForkServer) -> None:
    program = "import os; from test_sequence_parallel import work_briefly; n = os.environ\n"
    program += "work_briefly(int(n['RANK']), int(n['WORLD_SIZE']), int(n['MASTER_PORT']))"
    status, said = server.program(program, processes=3, PATH_OF_TESTS=str(Path(__file__).parent))
    assert status == 0, said[-4000:]


@pytest.mark.parametrize("world", [2, 4])
def test_processes_together_give_what_one_gives(server: ForkServer, tmp_path: Path, world: int) -> None:
    program = "import os, sys; from test_sequence_parallel import work; n = os.environ\n"
    program += "work(int(n['RANK']), int(n['WORLD_SIZE']), int(n['MASTER_PORT']), sys.argv[1])"
    status, said = server.program(program, tmp_path, processes=world, PATH_OF_TESTS=str(Path(__file__).parent))
    assert status == 0, said[-4000:]
    for rank in range(world):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found["double"] <= 1e-10, "values or gradients"
        assert found.get("mesh", 0.0) <= 1e-5
        assert found["changed"] == []
        for received, said in found["bytes"]:
            assert received == said


def test_shares_are_whole_blocks() -> None:
    assert share_blocks(10, 4) == (0, 2, 5, 7, 10)
    assert share_tokens(61, 2, block_size=8) == (0, 32, 61)
    assert share_tokens(10, 4, block_offsets=(0, 3, 10)) == (0, 0, 3, 3, 10)
    assert share_blocks(1, 3) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="exactly one of block_size"):
        share_tokens(8, 2)


@pytest.mark.parametrize(
    "options",
    [{"block_size": -2}, {"block_size": 0}, *({"block_offsets": x} for x in ((0, 4, 8), (0, 8, 4, 10), (1, 10)))],
)
def test_shares_of_wrong_blocks_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        share_tokens(10, 2, **options)


def test_fewer_bytes_are_chosen() -> None:
    video = traffic(1, 31500, 12, 128, 128, 150, 4)
    assert video.least == "summaries"
    small_blocks = traffic(1, 4096, 8, 64, 64, 256, 4)
    assert small_blocks.least == "tokens"
    forward = traffic(1, 32768, 4, 128, 256, 512, 4, terms=8, causal=True, normalize=False)
    both_ways = traffic(1, 32768, 4, 128, 256, 512, 4, terms=8, causal=False, normalize=False)
    assert forward.tokens is both_ways.tokens is None
    assert forward.summaries == 4 * 3 * 8 * 128 * 256 * 4, (
        "a running sum of each term in float32 from each other process"
    )
    assert both_ways.summaries == 2 * forward.summaries


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_wrong_calls_are_refused(alone: Any) -> None:
    q = torch.rand(1, 32, 2, 4)
    mixing = torch.rand(4, 4)
    with pytest.raises(ValueError, match="process 0 of 1 has 32 tokens; of N=64 its share is 64, from 0 on"):
        mhla_sequence_parallel(q, q, q, torch.rand(8, 8), group=alone, tokens=64, block_size=8)
    with pytest.raises(ValueError, match="needs exactly 4"):
        mhla_sequence_parallel(q, q, q, torch.rand(8, 8), group=alone, tokens=32, block_size=8)
    with pytest.raises(ValueError, match="exchange='all' is not one of"):
        mhla_sequence_parallel(q, q, q, mixing, group=alone, tokens=32, block_size=8, exchange="all")  # type: ignore[arg-type]
    decaying = ExponentialMixing(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="exchange='tokens' is for dense mixing"):
        mhla_sequence_parallel(q, q, q, decaying, group=alone, tokens=32, block_size=8, exchange="tokens")
    with pytest.raises(ValueError, match="key_mask is"):
        mhla_sequence_parallel(q, q, q, mixing, group=alone, tokens=32, block_size=8, key_mask=torch.ones(1, 3) > 0)
    for name in ("q", "k", "v", "key_mask"):
        with pytest.raises(TypeError, match=rf"^{name} is list; it must be a tensor"):
            mhla_sequence_parallel(
                **{"q": q, "k": q, "v": q, name: [1.0]}, mixing=mixing, group=alone, tokens=32, block_size=8
            )
    with pytest.raises(ValueError, match="k holds negative features"):
        mhla_sequence_parallel(q, q - 0.5, q, mixing, group=alone, tokens=32, block_size=8)
    with pytest.raises(ValueError, match="mixing is on 'meta'"):
        mhla_sequence_parallel(q, q, q, mixing.to("meta"), group=alone, tokens=32, block_size=8)
