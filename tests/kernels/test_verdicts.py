"""``backend="auto"`` where a kernel is broken: wrong numbers, no compilation, no launch; here or on another process.

The kernels are interpreted; ``auto`` is told that they are native, as they would be on a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fork_server import ForkServer
from implementations import DEVICE, TRITON
from mhla_kernels import ExponentialMixing, agree_on_kernels, mhla_attention, mhla_prefill, rotary_features, verdicts
from mhla_kernels.triton_backend import (
    config,
    launch,
    ops,  # noqa: F401  registers the operator
    rotary,
)
from mhla_kernels.triton_backend.config import MANY
from mhla_kernels.triton_backend.trial import Kind, block_counts, make_problem, try_kernels
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

FAILURES: dict[str, Callable[[], Exception]] = {
    "compilation": lambda: CompilationError("def kernel(): pass", None, "no such layout"),
    "resources": lambda: OutOfResources(300000, 232448, "shared memory"),
    "launch": lambda: RuntimeError("Triton Error [CUDA]: invalid argument"),
}


@pytest.fixture(autouse=True)
def _native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the choices of a GPU, an empty cache, and no stored verdicts."""
    monkeypatch.setenv("MHLA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mhla_kernels.backend.is_native", lambda q: True)
    torch._dynamo.reset()
    verdicts.forget()
    yield
    verdicts.forget()


def tensors(tokens: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(1, tokens, 2, 8, generator=generator) for _ in range(3)]
    return [x.to(DEVICE).requires_grad_() for x in (*made, torch.rand(2, 3, 3, generator=generator))]


def attend(*given: Tensor, **options: Any) -> Tensor:
    return mhla_attention(*given, **{"block_size": 8, "form": "chunked", "backend": "auto", **options})


def values_and_gradients(backend: str = "auto", **options: Any) -> list[Tensor]:
    leaves = tensors()
    out = attend(*leaves, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@contextmanager
def broken(part: str, change: Callable[[Any], Any], calls: range = range(1000)) -> Iterator[list[int]]:
    """Change the results of ``launch.forward`` or ``launch.backward`` in some of the calls; yield a list with their count."""
    run, count = getattr(launch, part), [0]

    def changed(*given: Any) -> Any:
        count[0] += 1
        return change(run(*given)) if count[0] - 1 in calls else run(*given)

    with mock.patch.object(launch, part, changed):
        yield count


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    """Check that exactly one RuntimeWarning occurs, with the given text."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    (text,) = (str(one.message) for one in said if one.category is RuntimeWarning)
    assert re.search(match, text), text


def fail(failure: str) -> Callable[[Any], Any]:
    def change(_: Any) -> Any:
        raise FAILURES[failure]()

    return change


def stored(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]


def test_a_sound_kernel_is_tried_once_and_used(tmp_path: Path) -> None:
    with broken("forward", lambda out: out) as calls, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = values_and_gradients()
        assert calls[0] == 2, "the trial and the call"
        assert same(found, values_and_gradients("triton"))
        values_and_gradients()
        assert calls[0] == 4
        (content,) = stored(tmp_path)
        assert re.fullmatch(r"errors \S+ \(output\), \S+ \(gradients\)", content["errors"])
        assert content["environment"]["torch"] == torch.__version__
        verdicts.forget()  # as another process
        values_and_gradients()
        assert calls[0] == 5, "known from the cache"
    with broken("forward", lambda out: out) as calls:
        attend(*(x.detach().bfloat16() for x in tensors()[:3]), tensors()[3])
        assert calls[0] == 3, "another dtype is another kind, tried with 3 and with 18 blocks"
    assert len(stored(tmp_path)) == 2


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("failure", ["numbers", "nan", *FAILURES])
def test_a_broken_kernel_is_replaced_with_one_warning(tmp_path: Path, part: str, failure: str) -> None:
    changes = {"numbers": lambda x: x * 1.01, "nan": lambda x: torch.full_like(x, torch.nan)}

    def change(found: Any) -> Any:
        if failure in FAILURES:
            raise FAILURES[failure]()
        if part == "forward":
            return changes[failure](found)
        return [*found[:3], *(changes[failure](x) for x in found[3:])]  # only the coefficients

    with broken(part, change):
        reason = "is off by" if failure in ("numbers", "nan") else type(FAILURES[failure]()).__name__
        with one_warning(f"chunked-dense-float32-8x8-equal16-normalize is not used on .*{reason}"):
            found = values_and_gradients()
            assert same(found, values_and_gradients("torch"))
            values_and_gradients()
        if failure in FAILURES:
            with pytest.raises(type(FAILURES[failure]())):
                values_and_gradients("triton")
    assert not stored(tmp_path), "the next process tries again"


@pytest.mark.parametrize(
    ("causal", "form", "compiled"),
    [(False, "chunked", True), (True, "chunked", False), (True, "spanning", False)],
)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_kernel_that_fails_after_its_trial_is_withdrawn(
    tmp_path: Path, part: str, causal: bool, form: str, compiled: bool
) -> None:
    """Only at this size, say: the call is answered by the PyTorch form, and so is every later one."""
    q, k, v, dense = tensors()
    masked = (torch.arange(20, device=DEVICE) < 15)[None]
    exponential = [torch.rand(2, 3, device=DEVICE).requires_grad_() for _ in range(2)]
    exponentials = causal or form == "spanning"
    leaves = [q, k, v, *(exponential if exponentials else [dense])]
    options: dict[str, Any] = {"causal": causal, "key_mask": masked, "block_size": 8, "form": form}

    def layer(q: Tensor, k: Tensor, v: Tensor, *mixing: Tensor, backend: str = "auto") -> Tensor:
        coefficients: Any = ExponentialMixing(*mixing) if exponentials else mixing[0]
        return mhla_attention(q, k, v, coefficients, backend=backend, **options)

    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    want = layer(*leaves, backend="torch")
    cotangent = torch.randn_like(want)
    wanted = torch.autograd.grad(want, leaves, cotangent)
    with (
        broken(part, fail("resources"), range(1, 1000)) as calls,
        one_warning("OutOfResources"),
    ):
        for _ in range(2):
            got = run(*leaves)
            torch.testing.assert_close(got, want)
            for one, two in zip(torch.autograd.grad(got, leaves, cotangent), wanted, strict=True):
                torch.testing.assert_close(one, two)
    assert calls[0] == 2, "after the trial, one failure"
    assert len(stored(tmp_path)) == 1, "the trial was sound: the next process uses the kernel again"


def test_kernels_are_not_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "environment", lru_cache(lambda _: {"device": "a GPU"}))
    capturing, trials = [True], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(verdicts, "in_own_thread", lambda trial, _: trial())
    with one_warning("it was not tried before a CUDA graph was captured"):
        assert not [
            True for _ in range(3) if verdicts.may_use("some", "cuda:0", lambda: trials.append(1) or "no errors")
        ]
    capturing[0] = False
    assert verdicts.may_use("some", "cuda:0", lambda: trials.append(1) or "no errors")
    assert len(trials) == 1


def test_the_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhla_kernels.backend.AUTOMATIC", "torch")
    with broken("forward", lambda out: out) as calls:
        assert same(values_and_gradients(), values_and_gradients("torch"))
        assert calls[0] == 0
        values_and_gradients("triton")
        assert calls[0] == 1
    monkeypatch.setattr("mhla_kernels.backend.AUTOMATIC", "triton")
    with pytest.raises(ValueError, match="MHLA_BACKEND='triton' is not 'auto' or 'torch'"):
        values_and_gradients()
    program = [sys.executable, "-c", "import mhla_kernels.backend as b; print(b.AUTOMATIC)"]
    environment = {**os.environ, "PYTHONPATH": str(Path(verdicts.__file__).parents[1])}
    for value, answer in (("torch", "torch"), ("", "auto")):
        environment["MHLA_BACKEND"] = value
        done = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
        assert done.stdout.strip() == answer


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("Triton Error [CUDA]: out of memory")])
def test_memory_that_runs_out_is_not_the_kernels_fault(tmp_path: Path, error: Exception) -> None:
    def exhausted(_: Any) -> Any:
        raise error

    with broken("forward", exhausted), pytest.raises(type(error)):
        values_and_gradients()
    with broken("forward", exhausted, range(1, 9)), pytest.raises(type(error)):
        values_and_gradients()
    assert len(stored(tmp_path)) == 1, "the second trial was sound"
    assert not verdicts.withdrawn()


@pytest.mark.parametrize("mode", ["default dtype", "products"])
def test_a_trial_is_judged_in_any_mode_of_the_process(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's bf16-true, and float32 products of few bits, which Lightning itself advises."""
    kind = Kind("chunked", "dense", "float32", 8, 8, False, True, False, False, "equal", 16, False, 0)
    if mode == "default dtype":
        torch.set_default_dtype(torch.bfloat16)
    else:
        product = Tensor.__matmul__

        def rough(a: Tensor, b: Tensor) -> Tensor:
            return product(a.bfloat16(), b.bfloat16()).float() if a.dtype is torch.float32 else product(a, b)

        monkeypatch.setattr(Tensor, "__matmul__", rough)
    try:
        assert try_kernels(kind, torch.device(DEVICE)).startswith("errors ")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chip", [80, 90, 100, 120])
def test_every_set_of_mixing_tiles_has_a_trial(chip: int, dtype: str) -> None:
    def tiles(blocks: int) -> tuple[object, object]:
        sizes = getattr(torch, dtype), blocks, chip
        return config.mix_tiles(*sizes), config.mixing_gradient_tiles(*sizes)

    for many, counts in ((False, range(1, MANY + 1)), (True, range(MANY + 1, 1000))):
        tried = [tiles(blocks) for blocks in block_counts("chunked", dtype, many, chip)]
        assert {tiles(blocks) for blocks in counts} == set(tried)
        assert len(tried) == len(set(tried)), "no set is tried twice"


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_what_is_withdrawn_in_a_checkpointed_step(part: str) -> None:
    """A second layer fails; the first one, recomputed after that, saves what it saved before."""
    leaves = tensors()

    def layers(backend: str) -> list[Tensor]:
        x = leaves[2]
        for _ in range(2):
            x = checkpoint(
                lambda q, k, v, m: attend(q, k, v, m, backend=backend), *leaves[:2], x, leaves[3], use_reentrant=False
            )
        return [x.detach(), *torch.autograd.grad(x.sum(), leaves)]

    with broken(part, fail("resources"), range(2 if part == "forward" else 1, 1000)), one_warning("OutOfResources"):
        found = layers("auto")
    for one, two in zip(found, layers("torch"), strict=True):
        torch.testing.assert_close(one, two)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MHLA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def none() -> Path:
        raise RuntimeError("Could not determine home directory")

    monkeypatch.setattr(Path, "home", none)
    assert verdicts.cache_folder().name == f"mhla-{os.getuid()}"


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (a@b-1.2)", "570.86.15"),
        ("NVRM version: 580.65", "580.65"),
        ("a different text", "a different text"),
        ("", ""),
    ],
)
def test_the_version_of_the_driver_is_read(line: str, version: str) -> None:
    assert verdicts.driver_version(f"{line}\nGCC version:  gcc version 12.3.0 (Ubuntu)\n") == version


def test_trials_leave_no_trace(tmp_path: Path) -> None:
    """Under no_grad, inference mode, autocast, fake tensors and tracing; the random state stays."""
    state = torch.get_rng_state()
    for number, mode in enumerate((torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16))):
        verdicts.forget()
        with mode, mock.patch.dict(os.environ, MHLA_CACHE=str(tmp_path / str(number))):
            attend(*tensors())
            assert len(stored(tmp_path / str(number))) == 1
    verdicts.forget()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert attend(*(fake.from_tensor(x.detach()) for x in tensors())).shape == (1, 20, 2, 8)
    assert verdicts.withdrawn() == {}
    verdicts.forget()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors()), attend(*tensors(), backend="torch"))
    assert verdicts.withdrawn() == {}
    assert len(tensors()) == 4
    assert torch.equal(torch.get_rng_state(), state)


def test_generation_goes_on_without_the_kernel() -> None:
    q, k, v, mixing = (x.detach() for x in tensors())
    options: dict[str, Any] = {"block_size": 8, "normalize": False}
    want, _ = mhla_prefill(q, k, v, mixing, form="chunked", backend="torch", **options)
    with broken("forward", fail("launch")), pytest.warns(RuntimeWarning, match="invalid argument"):
        got, _ = mhla_prefill(q, k, v, mixing, form="chunked", **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("calls", [range(1000), range(2, 1000)], ids=["in the trial", "after it"])
def test_rotary_is_guarded_too(calls: range) -> None:
    x, angle = tensors()[0], torch.rand(20, 4, device=DEVICE)
    want = rotary_features(x, angle.cos(), angle.sin(), backend="torch")
    run, count = rotary.launch_rotary, [0]

    def changed(*given: Any, **named: Any) -> Tensor:
        count[0] += 1
        if count[0] - 1 in calls:
            raise FAILURES["launch"]()
        return run(*given, **named)

    with (
        mock.patch.object(rotary, "launch_rotary", changed),
        one_warning("rotary-float32-8"),
    ):
        got = rotary_features(x, angle.cos(), angle.sin())
        (gradient,) = torch.autograd.grad(got, x, torch.ones_like(got))
    assert torch.equal(got, want)
    assert torch.equal(gradient, torch.autograd.grad(want, x, torch.ones_like(want))[0])


@pytest.mark.parametrize("implementation", TRITON)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "normalize": False, "relu": True},
        {"layout": "uneven", "masked": True},
        {"layout": "packed", "causal": True, "dtype": "bfloat16"},
        {"layout": "packed", "normalize": False},
        {"many": True, "key_width": 24, "value_width": 40},
        {"mixer": "exponential", "terms": 3, "causal": True, "block_size": 32},
        {"causal": True, "block_causal": True, "layout": "uneven"},
        {"mixer": "exponential", "terms": 3, "causal": True, "block_causal": True},
    ],
    ids=str,
)
def test_every_kind_has_a_trial_that_a_sound_kernel_passes(implementation: str, options: dict[str, Any]) -> None:
    form = implementation.split()[1]
    if form == "parallel" and ("many" in options or "mixer" in options):
        pytest.skip("mixing of summaries is the chunked form's")
    sound = Kind(form, "dense", "float32", 16, 16, False, True, False, False, "equal", 16, False, 0)
    kind = sound._replace(**options)
    given = make_problem(kind, torch.device(DEVICE))
    assert given.causal == kind.causal
    assert (given.key_mask is not None) == kind.masked
    assert verdicts.judge(str(kind), DEVICE, lambda: try_kernels(kind, torch.device(DEVICE))).agrees


def work(rank: int, world: int) -> None:
    """Break a kernel on process 1, and check that no process uses it afterwards."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mock.patch("mhla_kernels.backend.is_native", return_value=True).start()
    with broken("forward", fail("launch") if rank == 1 else lambda out: out) as calls, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values_and_gradients()
        assert bool(verdicts.withdrawn()) == (rank == 1)
        agreed = agree_on_kernels()
        assert list(agreed) == ["chunked-dense-float32-8x8-equal16-normalize"], agreed
        assert ("process 1: " in next(iter(agreed.values()))) == (rank == 0)
        before = calls[0]
        assert same(values_and_gradients(), values_and_gradients("torch"))
        assert calls[0] == before
    dist.destroy_process_group()


def test_all_processes_of_a_run_choose_alike(server: ForkServer, tmp_path: Path) -> None:
    program = f"import os; os.environ['MHLA_CACHE'] = '{tmp_path}/' + os.environ['RANK']\n"
    program += "from test_verdicts import work; work(int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))"
    status, said = server.program(program, processes=2, PATH_OF_TESTS=str(Path(__file__).parent))
    assert status == 0, said[-4000:]


def store(kind: str = "some") -> Path:
    """Store that a kernel agrees with PyTorch, and return the path of the file."""
    assert verdicts.judge(kind, "cpu", lambda: "no errors").agrees
    verdicts.forget()  # as another process
    return verdicts.folder_of("cpu") / f"{kind}.json"


def wrong() -> str:
    raise ArithmeticError("off by one")


def test_a_kernel_that_disagrees_later_is_no_longer_stored() -> None:
    path = store()
    assert verdicts.may_use("some", "cpu", wrong), "stored, so not tried"
    assert verdicts.judge("some", "cpu", wrong) == (False, "ArithmeticError: off by one")
    assert not verdicts.may_use("some", "cpu", lambda: "no errors"), "judged in this process"
    assert not path.exists()
    assert store() == path
    assert path.exists()


PLANTED = ("folder", "link", "hard link", "pipe", "of another user", "linked folder")


@pytest.mark.parametrize("agrees", [True, False])
@pytest.mark.parametrize("what", PLANTED)
def test_what_somebody_planted_is_neither_believed_nor_changed(what: str, agrees: bool, tmp_path: Path) -> None:
    path, victim, trials = store(), tmp_path / "victim", []
    victim.write_text("of somebody")
    path.unlink()
    if what == "of another user":
        if os.geteuid():
            pytest.skip("only root can give files to another user")
        path.write_text("of somebody")
        os.chown(path, 12345, 12345)
    elif what == "linked folder":
        path.parent.rmdir()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / path.name).write_text("of somebody")
        path.parent.symlink_to(tmp_path / "folder")
    else:
        {
            "folder": path.mkdir, "link": lambda: path.symlink_to(victim), "pipe": lambda: os.mkfifo(path),
            "hard link": lambda: path.hardlink_to(victim),
        }[what]()  # fmt: skip

    def trial() -> str:
        trials.append(1)
        return "no errors" if agrees else wrong()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if what == "hard link":  # to a file of this user: it counts, and is not written to
            assert verdicts.may_use("some", "cpu", trial)
            assert verdicts.judge("some", "cpu", trial).agrees == agrees
        else:
            assert verdicts.may_use("some", "cpu", trial) == agrees
            assert len(trials) == 1
    assert victim.read_text() == "of somebody"
    if what == "linked folder":
        assert (tmp_path / "folder" / path.name).read_text() == "of somebody"
    if what == "of another user" and not agrees:
        assert path.read_text() == "of somebody"
    assert not list(path.parent.glob("*.part"))


def test_without_a_writable_cache_every_process_runs_its_own_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MHLA_CACHE", str(tmp_path / "file"))
    store()
    with pytest.warns(RuntimeWarning, match="some is not used on interpreter .*off by one"):
        assert not verdicts.may_use("some", "cpu", wrong)
