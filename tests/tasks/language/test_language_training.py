"""Training through the command line: metrics, resume, continuations, and rejected options."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from grouped import grouped
from mhla_tasks.commandline.parser import main
from mhla_tasks.language import PythonSource
from mhla_tasks.language.export import load_checkpoint
from mhla_tasks.language.prompts import GenerationOptions
from mhla_tasks.language.tokenizer import pack_tokenizer, train_tokenizer, unpack_tokenizer
from processes import fork_server
from small import SENTENCES, small_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def stdlib(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Run a small version of the shipped configuration for six steps."""
    folder = tmp_path_factory.mktemp("stdlib")
    config = yaml.safe_load((ROOT / "configs/language/stdlib.yaml").read_text())
    model = {"dim": 32, "depth": 2, "heads": 2, "mlp_width": 64, "context": 64, "vocab_size": 512, "ema_decay": 0.5}
    model["generation"] = {"max_new_tokens": 8, "temperature": 0.7}
    config["model"]["init_args"] = grouped(config["model"]["init_args"], **model)
    config["data"]["init_args"] |= {
        "context": 64,
        "vocab_size": 512,
        "batch_size": 4,
        "cache_dir": str(cache_dir),
    }
    config["trainer"] |= {
        "max_steps": 6, "val_check_interval": 3, "limit_val_batches": 3, "log_every_n_steps": 1,
        "enable_progress_bar": False, "accelerator": "cpu",
    }  # fmt: skip
    config["trainer"]["logger"][0]["init_args"]["save_dir"] = str(folder)
    config["trainer"]["callbacks"][0]["init_args"]["save_top_k"] = -1
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    lightning("fit", "--config", str(folder / "small.yaml"))
    run = folder / "stdlib/version_0"
    return SimpleNamespace(folder=folder, config=folder / "small.yaml", run=run, last=run / "checkpoints/last.ckpt")


def lightning(*arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning", *arguments])
        main()


def logged(run: Path) -> dict[str, float]:
    events = EventAccumulator(str(run)).Reload()
    return {name: events.Scalars(name)[-1].value for name in events.Tags()["scalars"]}


def test_a_run_logs_what_a_person_looks_for(stdlib: SimpleNamespace) -> None:
    values = logged(stdlib.run)
    assert values["val/perplexity"] == pytest.approx(math.exp(values["val/loss"]), rel=1e-4)
    assert 1 < values["val/bits_per_byte"] < 8
    assert values["val/samples"] == 12
    assert values["train/tokens_per_second"] > 0
    page = (stdlib.run / "samples.md").read_text()
    assert page.count("## step") == 2
    assert "def read_lines(path):" in page
    assert list(stdlib.run.glob("checkpoints/step000006-bpb*.ckpt"))
    assert (stdlib.run / "checkpoints/learning_curves.png").exists()


def test_bits_per_byte_are_those_of_the_text(stdlib: SimpleNamespace, cache_dir: Path) -> None:
    """Against a computation from the text itself, under the averaged weights that validation uses."""
    model = load_checkpoint(stdlib.last)
    data = PythonSource(context=64, vocab_size=512, batch_size=4, cache_dir=str(cache_dir))
    windows = [data.windows("validate")[i]["tokens"] for i in range(12)]
    nats = size = 0.0
    for window in windows:
        scores = model(window[None, :-1])[0].log_softmax(-1)
        nats -= float(scores.gather(1, window[1:, None]).sum())
        size += len(data.tokenizer.decode(window[1:], skip_special_tokens=True).encode("utf-8", "replace"))
    assert logged(stdlib.run)["val/bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=5e-3)


def test_a_stopped_run_ends_in_the_same_bits(stdlib: SimpleNamespace) -> None:
    checkpoint = next(stdlib.run.glob("checkpoints/step000003-*.ckpt"))
    lightning("fit", "--config", str(stdlib.config), f"--ckpt_path={checkpoint}")
    newest = sorted(stdlib.folder.glob("stdlib/version_*"))[-1]
    first, again = (torch.load(path, weights_only=True) for path in (stdlib.last, newest / "checkpoints/last.ckpt"))
    assert again["global_step"] == 6
    for key in ("state_dict", "current_model_state"):
        for name, tensor in first[key].items():
            assert torch.equal(tensor, again[key][name]), name


def test_prompts_are_continued_in_their_order(stdlib: SimpleNamespace, tmp_path: Path) -> None:
    prompts = ["import os", "def main():", "class Queue:\n    x", "x" * 100, "é"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    lightning(
        "predict", f"--ckpt_path={stdlib.last}", f"--data.prompts={tmp_path / 'prompts.jsonl'}",
        f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false", "--trainer.accelerator=cpu",
        "--model.generation.temperature=0", "--trainer.enable_progress_bar=false",
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "continuations.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    model = load_checkpoint(stdlib.last)
    model.generation = GenerationOptions(max_new_tokens=8, temperature=0)
    for row in rows:
        assert row["continuation"] == model.continue_prompts([row["prompt"]])[0]


def test_text_streams_to_the_terminal(stdlib: SimpleNamespace) -> None:
    options = ["generate", str(stdlib.last), "import", "--max_new_tokens", "8"]
    status, said = fork_server().run(*options, module="mhla_tasks")
    assert status == 0
    written = f"\n{said}".rpartition("\nimport")[2]
    assert written.strip()


@torch.no_grad()
def test_packed_documents_train_as_if_alone(tokenizer: Any) -> None:
    model = small_model("dense", context=64)
    tokens = torch.randint(2, 320, (2, 65))
    starts = torch.zeros(2, 64, dtype=torch.bool)
    starts[0, 20] = starts[1, [0, 40]] = True
    data = PythonSource(vocab_size=300, separate_documents=True)
    batch = data.on_before_batch_transfer({"tokens": tokens, "starts": starts}, 0)
    assert batch["cu_seqlens"] == (0, 20, 64, 104, 128)
    model.trainer = SimpleNamespace(fast_dev_run=True, global_step=0)  # type: ignore[assignment]
    model.log = lambda *_, **__: None  # type: ignore[assignment]
    found = model.training_step(batch, 0)
    flat, targets = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
    parts = [slice(0, 20), slice(20, 64), slice(64, 104), slice(104, 128)]
    losses = [torch.nn.functional.cross_entropy(model(flat[None, p])[0], targets[p], reduction="sum") for p in parts]
    assert float(found) == pytest.approx(float(sum(losses)) / 128, rel=1e-5)


def test_tokenizers_without_padding(tokenizer: Any) -> None:
    bare = unpack_tokenizer(pack_tokenizer(tokenizer))
    bare.pad_token = None
    model = small_model()
    model.generation = GenerationOptions(max_new_tokens=8, temperature=0)
    texts = []
    for each in (tokenizer, bare):
        model.use_tokenizer(each)
        texts.append(model.continue_prompts(SENTENCES))
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="the prompt '' is empty"):
        model.continue_prompts(["a", ""])


def test_broken_weights_never_validate_as_perfect(stdlib: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = torch.load(stdlib.last, weights_only=True)
    checkpoint["state_dict"]["network.embedding.weight"].fill_(float("nan"))
    torch.save(checkpoint, stdlib.folder / "nan.ckpt")
    with pytest.raises(SystemExit):
        lightning("validate", f"--ckpt_path={stdlib.folder / 'nan.ckpt'}", "--trainer.limit_val_batches=2")
    assert "the val loss is nan" in capsys.readouterr().err


def test_another_tokenizer_than_the_checkpoints_is_refused(
    stdlib: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = torch.load(stdlib.last, weights_only=True)
    checkpoint["tokenizer"] = pack_tokenizer(train_tokenizer(SENTENCES, 300))
    torch.save(checkpoint, stdlib.folder / "other.ckpt")
    with pytest.raises(SystemExit):
        lightning("validate", f"--ckpt_path={stdlib.folder / 'other.ckpt'}", "--trainer.limit_val_batches=2")
    assert "trained with a different tokenizer than the data's" in capsys.readouterr().err


def test_flops_per_token_follow_from_the_sizes() -> None:
    softmax, linear = (small_model(kind, context=512) for kind in ("softmax", "linear"))
    matrices = sum(
        p.numel() for name, p in softmax.network.named_parameters() if p.dim() == 2 and "embedding" not in name
    )
    scores = 2 * 2 * (512 + 1) / 2 * 32 * 2  # two layers, two products, half the square, 32 wide
    assert softmax.flops_per_token == pytest.approx(3 * (2 * (matrices + 320 * 32) + scores))
    assert linear.flops_per_token < softmax.flops_per_token


def test_training_refuses(stdlib: SimpleNamespace, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            lightning(*arguments)
        return capsys.readouterr().err

    few = "--model.vocab_size=300"
    assert "the tokenizer needs vocab_size=512, the model has vocab_size=300" in failing(
        "fit", "--config", str(stdlib.config), few
    )
    assert "predict needs prompts" in failing("predict", f"--ckpt_path={stdlib.last}")
    empty = stdlib.folder / "empty.txt"
    empty.write_text("\n\n")
    assert "holds no prompt" in failing("predict", f"--ckpt_path={stdlib.last}", f"--data.prompts={empty}")
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        small_model().continue_prompts(SENTENCES)
    with pytest.raises(ValueError, match="set temperature: 0"):
        GenerationOptions(beams=4)
    for options in ({"top_p": 2.0}, {"top_p": -0.1}, {"top_k": -1}):
        with pytest.raises(ValueError, match=r"top_[pk]=-?[\d.]+ must be at least 0"):
            GenerationOptions(**options)
    assert GenerationOptions(top_p=1.0, top_k=0).top_p == 1


@torch.no_grad()
def test_windows_that_fill_up_a_batch_are_not_scored() -> None:
    """The last batch of several processes is filled up with windows that must not count."""
    model = small_model()
    tokens = torch.randint(2, 320, (3, 33))
    valid, size = torch.tensor([True, False, True]), torch.tensor([10, 20, 40])
    model.validation_step({"tokens": tokens, "valid": valid, "bytes": size}, 0)
    found = model._sums("val").compute()
    kept = tokens[valid]
    logits = model(kept[:, :-1]).flatten(0, 1)
    wanted = float(torch.nn.functional.cross_entropy(logits, kept[:, 1:].flatten(), reduction="sum"))
    assert found.pop("nats") == pytest.approx(wanted, rel=1e-5)
    assert found == {"tokens": 64, "bytes": 50, "samples": 2}


def test_a_block_longer_than_the_context_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "mhla_tasks"):
        small_model(context=8)
        assert "is above context" not in caplog.text
        small_model(context=7)
    assert "block_size=8 is above context=7: a sample is one block" in caplog.text
