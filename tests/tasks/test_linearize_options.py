"""Options of ``lightning linearize``: lengths that a model allows, and working folders of earlier calls with other options."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from mhla_tasks.commandline import registry
from mhla_tasks.language.prepare import write_token_shards
from mhla_tasks.tools.linearize import speed
from mhla_tasks.tools.linearize.command import only_call_in
from mhla_tasks.tools.linearize.measure import samples_in_window
from mhla_tasks.tools.linearize.pipeline import Pipeline
from mhla_tasks.tools.linearize.source import PretrainedSource, find_domain, sample_length
from mhla_tasks.tools.linearize.speed import longest_sample
from mhla_tasks.tools.linearize.stages import Settings
from mhla_tasks.tools.processes import run_command
from test_encoders import MiniTexts

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SETTINGS = Settings(
    train=["a"], val=["b"], kind="mhla_window", block_size=8, length=64, batch_size=4, keep=0.5, trained="attention",
    match_lr=0.01, tune_lr=0.01, precision="32-true", accelerator="cpu", seed=0, val_batches=2,
)  # fmt: skip


def save_configuration(folder: Path, name: str, **options: Any) -> str:
    """Save the configuration of a model of transformers without weights."""
    config = getattr(transformers, f"{name}Config")(**options)
    config.architectures = [f"{name}{'ForCausalLM' if name in ('Llama', 'OPT') else 'Model'}"]
    if name == "GPT2":
        config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("Bert", {**SIZES, "max_position_embeddings": 128}, 128),
        ("Roberta", {**SIZES, "max_position_embeddings": 66, "pad_token_id": 1}, 64),
        ("DistilBert", {"dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 96}, 96),
        ("ModernBert", {**SIZES, "max_position_embeddings": 80, "pad_token_id": 0}, 80),
        ("GPT2", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48}, 48),
        ("Llama", {**SIZES, "max_position_embeddings": 256}, 256),
        ("Bloom", {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 2}, None),
    ],
)
def test_the_default_length_is_one_that_the_model_allows(
    name: str, options: dict[str, Any], limit: int | None, tmp_path: Path
) -> None:
    folder = save_configuration(tmp_path, name, **options)
    domain = find_domain(folder)
    assert sample_length(folder, domain, 512) == (limit or 512)
    assert sample_length(folder, domain, 32) == 32
    if limit is None or name == "Llama":  # without a table of positions, more tokens are possible
        assert sample_length(folder, domain, 32, 100_000) == 32
        return
    assert sample_length(folder, domain, 32, limit) == 32
    with pytest.raises(
        ValueError, match=f"--length={limit + 1} is above the {limit} tokens that .* use --length={limit}"
    ):
        sample_length(folder, domain, 32, limit + 1)


def test_speed_is_not_measured_beyond_the_positions_of_a_model() -> None:
    config = transformers.RobertaConfig(**SIZES, max_position_embeddings=128, pad_token_id=1)
    source = PretrainedSource("roberta", "text", 2, "roberta")
    assert longest_sample(source, transformers.RobertaModel(config)) == 126


def test_generation_is_not_measured_where_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, max_position_embeddings=128))
    forward = type(network).forward

    def limited(self: Any, tokens: Any, **options: Any) -> Any:
        if tokens.shape[1] > 16:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
        return forward(self, tokens, **options)

    monkeypatch.setattr(type(network), "forward", limited)
    monkeypatch.setattr(speed, "CONTEXTS", (8, 16, 32, 64))
    with caplog.at_level("INFO"):
        results = speed.generation_by_length({"original": network, "mhla": network}, 128)
    assert {length: sorted(times) for length, times in results.items()} == {
        8: ["mhla", "original"],
        16: ["mhla", "original"],
    }
    assert "generation is not measured after 32 tokens" in caplog.text
    monkeypatch.setattr(speed, "CONTEXTS", (8,))
    monkeypatch.setattr(type(network), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a fault of the model is not hidden
        speed.generation_by_length({"original": network}, 128)


def test_the_context_of_a_gguf_file_is_the_default_length(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_context_length(96)
    for add in (writer.add_block_count, writer.add_head_count, writer.add_head_count_kv):
        add(2)
    for add in (writer.add_embedding_length, writer.add_feed_forward_length, writer.add_vocab_size):
        add(32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert sample_length(str(tmp_path / "a.gguf"), "language", 1024) == 96
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"transformers cannot read .*b.gguf"):
        sample_length(str(tmp_path / "b.gguf"), "language", 1024)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> MiniTexts:
    return MiniTexts(tmp_path_factory.mktemp("texts"))


def pipeline(folder: Path, settings: Settings, steps: tuple[int, int] | None = (4, 4)) -> Pipeline:
    if not (folder / "bert").exists():
        save_configuration(folder / "bert", "Bert", **SIZES)
    return Pipeline(str(folder / "bert"), folder / "out", folder / "work", settings, 60.0, steps)


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({"length": 32}, (4, 4)), ({"train": ["c"], "val": ["d"]}, (4, 4)), ({}, (5, 4)), ({"kind": "linear"}, None)],
    ids=str,
)
def test_a_call_that_trained_nothing_does_not_bind_the_next_one(
    changes: dict[str, Any], steps: tuple[int, int] | None, texts: MiniTexts, tmp_path: Path
) -> None:
    work, other = tmp_path / "work", replace(SETTINGS, **changes)
    pipeline(tmp_path, SETTINGS)
    write(work / "plan.json", {"steps": [4, 4]})
    write(work / "results.json", {"prepared": True, "original": {}, "swapped": {}})
    write(work / "matching/config.yaml", "of a run that failed before its first step")
    mine = write(work / "shards/mine.txt", "a file of the user")
    shards = write_token_shards(work / "shards", [str(texts.train)], texts.tokenizer)
    again = pipeline(tmp_path, SETTINGS)
    assert again.results["prepared"], "the same options continue"
    assert all(shard.exists() for shard in shards)
    corrected = pipeline(tmp_path, other, steps)
    assert corrected.plan == corrected.results == {}
    assert not any(shard.exists() for shard in shards), "they may be of other texts"
    assert mine.exists()
    choices = json.loads((work / "choices.json").read_text())
    assert choices == corrected.choices != again.choices


@pytest.mark.parametrize(
    "trace", ["results.json", "matching/checkpoints/last.ckpt", "matching/checkpoints/recovery/a.ckpt"]
)
def test_a_call_that_trained_binds_the_next_one(trace: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    pipeline(tmp_path, SETTINGS)
    files = [write(work / trace, {"matching": {}}), write(work / "plan.json", {"steps": [4, 4]})]
    message = (
        f"{work} was begun with --length=64, not 32. Continue with the same options, .* or delete {work} to begin again"
    )
    with pytest.raises(ValueError, match=message):
        pipeline(tmp_path, replace(SETTINGS, length=32))
    assert all(file.exists() for file in files)
    assert pipeline(tmp_path, SETTINGS).plan == {"steps": [4, 4]}


def test_shards_of_another_program_are_not_deleted(tmp_path: Path) -> None:
    pipeline(tmp_path, SETTINGS)
    shard = write(tmp_path / "work/shards/train-0000.tar", "of another program")
    with pytest.raises(ValueError, match="so they are not deleted"):
        pipeline(tmp_path, replace(SETTINGS, length=32))
    assert shard.exists()


def test_one_call_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    words = [save_configuration(tmp_path / "bert", "Bert", **SIZES), str(tmp_path / "out")]
    words += ["--train", str(tmp_path / "missing.txt"), "--val", str(tmp_path / "missing.txt"), "--steps", "4", "4"]
    work = tmp_path / "out-work"
    work.mkdir()
    other_call = os.open(work, os.O_RDONLY)
    fcntl.flock(other_call, fcntl.LOCK_EX)
    with pytest.raises(SystemExit, match=f"another lightning linearize works in {work}; wait until it has finished"):
        registry.run("linearize", words)
    assert work.exists()
    os.close(other_call)
    with pytest.raises(SystemExit) as error:
        registry.run("linearize", words)
    assert "another lightning linearize" not in str(error.value)
    with only_call_in(work):
        assert list(work.iterdir())
    assert work.exists()
    with only_call_in(tmp_path / "empty/work"):
        pass
    assert not (tmp_path / "empty/work").exists(), "a call that fails at once leaves no empty folder"


def test_the_lock_lasts_as_long_as_any_command_of_the_call(tmp_path: Path) -> None:
    """A command of a call that was killed goes on writing."""
    work = tmp_path / "work"
    with only_call_in(work) as lock:
        (work / "shard").touch()
        check = [sys.executable, "-c", f"import os; os.fstat({lock})"]
        assert run_command(check, inherited=[lock]) == 0
        assert run_command([*check[:2], f"import os, sys; sys.stderr = None; os.fstat({lock})"]) == 1
        command = subprocess.Popen(["sleep", "600"], pass_fds=[lock])
    with pytest.raises(ValueError, match="another lightning linearize works in"), only_call_in(work):
        pass
    command.kill()
    command.wait()
    with only_call_in(work):
        pass


def test_a_lock_on_a_removed_folder_excludes_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, lock = tmp_path / "work", fcntl.flock
    removals = [work.rmdir]

    def other_call_ends_first(descriptor: int, flags: int) -> None:
        while removals:
            removals.pop()()
        lock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", other_call_ends_first)
    with only_call_in(work):
        assert work.exists()
        with pytest.raises(ValueError, match="another lightning linearize works in"), only_call_in(work):
            pass


def test_an_empty_folder_of_the_user_stays(tmp_path: Path) -> None:
    with only_call_in(tmp_path):
        pass
    assert tmp_path.exists()


def test_speed_is_measured_at_the_trained_length_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the context of a rotary model, after a length that a model rejects, and after one that takes long."""
    networks = {"original": 1, "linearized": 2}
    text, image = PretrainedSource("llama", "language", 2, "llama"), PretrainedSource("vit", "image", 2, "vit")

    def forward(_: PretrainedSource, network: int, length: int) -> None:
        tried.append(length)
        if length in rejected:
            raise ValueError("no such size")
        if length > memory:
            raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(speed, "_forward", forward)
    rejected: set[int] = set()
    tried: list[int] = []
    memory = 10_000
    assert list(speed.seconds_by_length(text, networks, 2048, 4096)) == [128, 512, 1024, 2048, 4096]
    rejected = {224}
    assert list(speed.seconds_by_length(image, networks, None, 384))[:2] == [336, 384]
    rejected = {384, 512}
    assert 384 not in speed.seconds_by_length(text, networks, None, 384)
    rejected, memory = set(), 600
    tried.clear()
    assert list(speed.seconds_by_length(text, networks, None, 2048)) == [128, 512]
    assert sorted(set(tried)) == [128, 512, 1024, 2048], "after a lack of memory, only the trained length is tried"
    memory = 10_000
    monkeypatch.setattr(speed, "LONG_PASS", -1.0)
    assert list(speed.seconds_by_length(text, networks, None, 1024)) == [128, 1024]


@pytest.mark.parametrize(
    ("lengths", "blocks", "block_size", "share", "smaller"),
    [
        ([34, 48, 59, 71, 86], 3, 32, 1.0, 16),
        ([34, 48, 59, 71, 97], 3, 32, 0.8, 16),
        ([24, 25], 3, 8, 0.5, 8),
        ([512], 2, 256, 1.0, 128),
        ([513], 2, 256, 0.0, 256),
        ([3, 3, 3], 3, 32, 1.0, 1),
    ],
)
def test_samples_in_the_window_and_the_block_size_to_try(
    lengths: list[int], blocks: int, block_size: int, share: float, smaller: int
) -> None:
    window = samples_in_window(lengths, blocks, block_size)
    assert window == {
        "block_size": block_size, "tokens": blocks * block_size, "share": share, "smaller_block_size": smaller
    }  # fmt: skip
    if min(lengths) > blocks:
        assert samples_in_window(lengths, blocks, smaller)["share"] <= 0.5
