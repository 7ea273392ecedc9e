"""`lightning tune`: what it measures, keeps and prints, and that form="auto" takes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mhla_kernels import mhla_attention, tuned, verdicts
from mhla_kernels.tuned import Launch, Setting
from mhla_tasks import tune
from processes import fork_server
from torch import Tensor

ROOT = Path(__file__).parents[2]
SETTING = Setting("torch", "float32", 4, 40, 5, 8, 16, False, True, "DenseMixing")
"""Two rows of two heads, 40 tokens in blocks of 8."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MHLA_CACHE", str(tmp_path / "cache"))
    for kept in (tuned._forms, tuned._launches):
        kept.cache_clear()
    yield
    for kept in (tuned._forms, tuned._launches):
        kept.cache_clear()


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(*shape, generator=generator) for shape in ((2, 40, 2, 8), (2, 40, 2, 8), (2, 40, 2, 16), (5, 5))]


def attend(form: Any, *given: Tensor) -> Tensor:
    return mhla_attention(*(given or tensors()), block_size=8, form=form)


@pytest.mark.parametrize("form", tune.forms_of(SETTING))
@pytest.mark.parametrize("compiled", [False, True])
def test_auto_takes_what_was_measured(form: Any, compiled: bool) -> None:
    """This setting and no other; in a process that has asked before. Graphs, whose sizes may be open, go by the costs."""
    parallel, chunked = attend("parallel"), attend("chunked")
    assert not torch.equal(parallel, chunked), "or the test shows nothing"
    attend("auto")
    tuned.keep_forms("cpu", {SETTING: form, SETTING._replace(tokens=41): "chunked"})
    torch._dynamo.reset()
    run = torch.compile(attend, backend="eager", fullgraph=True) if compiled else attend
    found = attend("auto")
    assert torch.equal(found, {"parallel": parallel, "chunked": chunked}[form])
    shipped = {"parallel": parallel, "chunked": chunked}[tune.shipped_form(SETTING)]
    torch.testing.assert_close(run("auto", *tensors()), shipped if compiled else found)
    assert tuned.tuned_form("cpu", *SETTING._replace(rows=6)) is None
    tuned.path_of("cpu").write_text("{torn")
    tuned._forms.cache_clear()
    assert tuned.tuned_form("cpu", *SETTING) is None


def test_a_form_is_changed_for_a_gain_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = tune.shipped_form(SETTING)
    other = next(form for form in tune.forms_of(SETTING) if form != shipped)
    for gain, chosen in ((1.01, shipped), (1.5, other)):
        times = {shipped: gain, other: 1.0}
        monkeypatch.setattr(tune, "measure", lambda setting, form, *_, times=times: times[form])
        assert tune.main(["--shape", "2,2,40,8,8,16"]) == 0
        assert tuned.tuned_form("cpu", *SETTING) == chosen
        said = capsys.readouterr().out
        assert ("1.50 x" in said) == (chosen == other)
    assert "kept in" in said
    assert tune.main(["--shape", "2,2,48,8,8,16", "--dry-run"]) == 0
    assert "kept in" not in capsys.readouterr().out
    assert tuned.tuned_form("cpu", *SETTING._replace(tokens=48, blocks=6)) is None


def test_all_forms_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["--shape", "1,2,33,8,8,16,causal", "--shape", "1,1,20,6,8,8"]
    assert tune.main([*shapes, "--seconds", "0", "--exponential", "3"]) == 0
    found = capsys.readouterr()
    assert len(re.findall(r"parallel \d+\.\d+ ms, chunked \d+\.\d+ ms, spanning \d+\.\d+ ms", found.err)) == 2
    assert "ExponentialMixing causal" in found.out
    assert tune.measure(SETTING._replace(tokens=2**15), "parallel", torch.device("cpu"), 0.0) == float("inf")


def test_the_shapes_of_a_run(tmp_path: Path) -> None:
    """By the command line, with options of the run; the run itself leaves nothing."""
    config = yaml.safe_load((ROOT / "configs/classification/digits.yaml").read_text())
    config["trainer"]["logger"] = False
    config["trainer"].pop("callbacks")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    words = [
        "tune",
        "--config",
        "own.yaml",
        "--model.depth=1",
        "--data.batch_size=3",
        "--seconds",
        "0",
    ]
    status, said = fork_server().run(*words, module="mhla_tasks", folder=tmp_path, MHLA_CACHE=str(tmp_path / "cache"))
    assert status == 0, said[-4000:]
    assert "torch float32 12x64/16 16x16 DenseMixing normalize" in said
    assert {path.name for path in tmp_path.iterdir()} == {"own.yaml", "cache"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --shape or --config"),
        (["--shape", "1,2,3"], "is not B,H,N,C,Dk,Dv"),
        (["--shape", "1,1,0,1,1,1"], "is not B,H,N,C,Dk,Dv"),
        (["--shape", "1,1,8,4,8,8", "--model.x=1"], "need --config"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(words)
    assert message in capsys.readouterr().err


def test_launches_are_measured_kept_and_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the number of warps that a call was launched with; kernels that are launched otherwise are tried anew."""
    launched: dict[str, Launch] = {}
    asked = tuned.tuned_launch

    def note(device: str, kernel: str, shipped: Launch) -> Launch:
        launched[kernel] = asked(device, kernel, shipped)
        return launched[kernel]

    def milliseconds(setting: Setting, form: Any, *_: Any, **options: Any) -> float:
        launched.clear()
        q, k, v = (torch.rand(1, 10, 1, width).requires_grad_() for width in (8, 8, 16))
        mixing = torch.rand(2, 2).requires_grad_()
        mhla_attention(q, k, v, mixing, block_size=8, form=form, backend=options["backend"]).sum().backward()
        if launched["mix float32 8x16 chunked dense"].stages == 4:
            raise RuntimeError("out of resource: shared memory")
        return 10 - launched["attend dk float32 8x16 chunked dense"].warps

    monkeypatch.setattr("mhla_kernels.triton_backend.call.tuned_launch", note)
    monkeypatch.setattr(tune, "measure", milliseconds)
    monkeypatch.setattr(tune, "STAGES", (1, 4))
    before = verdicts.folder_of("cpu")
    found, first, best = tune.launches_of(SETTING, "chunked", torch.device("cpu"), 0)
    assert {kernel: launch.warps for kernel, launch in found.items()} == {"attend dk float32 8x16 chunked dense": 8}
    assert (first, best) == (6, 2)
    assert tuned.trying is None
    tuned.keep_launches("cpu", found)
    tuned.keep_launches("cpu", {"other": Launch(4, 2)})
    assert verdicts.folder_of("cpu") != before
    assert milliseconds(SETTING, "chunked", backend="triton") == 2, "taken"
    verdicts.launches_path("cpu").write_text("[1, {torn")
    tuned._launches.cache_clear()
    assert milliseconds(SETTING, "chunked", backend="triton") == 6
    monkeypatch.setattr(tune, "INTERPRETED", False)
    with pytest.raises(SystemExit):
        tune.main(["--shape", "2,2,40,8,8,16", "--launches"])
    assert "needs a GPU" in capsys.readouterr().err
