"""Linearized models keep what lies beside the original's weights: end tokens, sampling, and entries that no class knows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from mhla_tasks.language import LinearizedModel
from mhla_tasks.language.export import load_checkpoint, load_model, write
from mhla_tasks.language.linearized import read_source
from mhla_tasks.language.tokenizer import train_tokenizer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 128,
}  # fmt: skip
CHAT = {"eos_token_id": [0, 7], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


def original(folder: Path, generation: dict[str, Any] | None = None, **entries: Any) -> Path:
    """Save a small Llama with its tokenizer, additional entries in its config.json, and generation settings."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    train_tokenizer(["some text"], 300).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def linearized(source: Path, **options: Any) -> LinearizedModel:
    from transformers import AutoTokenizer

    model = LinearizedModel(str(source), context=48, **options)
    model.configure_model()
    model.use_tokenizer(AutoTokenizer.from_pretrained(source))
    return model


def trained(model: LinearizedModel, path: Path) -> Path:
    """Train for one step, and return the checkpoint."""
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader([{"tokens": torch.arange(49)} for _ in range(2)], batch_size=2))
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"]["_class_path"] = "mhla_tasks.language.LinearizedModel"  # as the command line does
    torch.save(content, path)
    return path


OPEN = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
settings = model.generation_config
only = {"suppress_tokens": [token for token in range(300) if token != 7], "max_new_tokens": 20}
made = model.generate(torch.tensor([[5, 6, 8]]), **only)
print(json.dumps([settings.to_diff_dict(), made.shape[1], type(model).__name__]))
"""


def test_from_the_original_to_generation_in_another_process(tmp_path: Path) -> None:
    """Linearize, train, save, linearize again from the checkpoint, export by the command line, generate."""
    source = original(tmp_path / "chat", CHAT, chat_note="kept")
    first = trained(linearized(source), tmp_path / "first.ckpt")
    second = linearized(source, layer_kinds=["keep", "replace"])
    assert second.network.generation_config.eos_token_id == [0, 7]
    third = LinearizedModel(str(first), context=48)
    assert third.network.generation_config.temperature == 0.6
    done = subprocess.run(
        [sys.executable, "-c", "from mhla_tasks.commandline.main import main; main()", "export", str(first), str(tmp_path / "exported")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path / "exported")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    settings, length, kind = json.loads(done.stdout.strip().splitlines()[-1])
    assert CHAT.items() <= settings.items()
    assert length == 4  # three tokens and the end of the turn
    assert kind == "LlamaForCausalLM"
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["chat_note"] == "kept"
    model, tokenizer = load_model(tmp_path / "exported")  # lightning generate and lightning evaluate
    assert model.generation_config.eos_token_id == [0, 7]
    assert tokenizer.eos_token_id == 0


@pytest.mark.parametrize(
    ("generation", "end", "sampling"),
    [
        ({"eos_token_id": 7}, 7, (None, None)),
        ({"eos_token_id": [7, 8]}, [7, 8], (None, None)),
        ({"eos_token_id": [0, 7], "temperature": 0.6, "top_k": 5}, [0, 7], (0.6, 5)),
        ({"temperature": 0.7, "do_sample": True, "own_setting": "x"}, 0, (0.7, None)),
        (None, 0, (None, None)),
    ],
    ids=["one other end", "without the tokenizer's", "without do_sample", "without ends", "none"],
)
def test_settings_of_generation_are_exported(generation: Any, end: Any, sampling: Any, tmp_path: Path) -> None:
    module = linearized(original(tmp_path / "source", generation))
    write(module, tmp_path / "exported")
    model, _ = load_model(tmp_path / "exported")
    settings = model.generation_config
    assert settings.eos_token_id == end
    assert (settings.temperature, settings.top_k) == sampling
    assert bool(settings.do_sample) == (sampling[0] is not None)


def test_settings_that_contradict_each_other_are_an_error(tmp_path: Path) -> None:
    source = original(tmp_path / "source", {"num_beams": 1, "length_penalty": 2.0})
    with pytest.raises(ValueError, match=r"generation_config.json: .*length_penalty.*; correct it, or remove the file"):
        linearized(source)


CODE = "import pathlib\npathlib.Path({marker!r}).touch()\nclass Config:\n    pass\n"


@pytest.mark.parametrize(
    "entries",
    [
        {"unk_token_id": 0, "sep_token_id": 1},
        {"is_llama_config": True, "rope_interleaved": False},
        {"quantization_config": None, "torch_dtype": "bfloat16"},
        {"_model_name_or_path": "x", "_flash_attn_2_enabled": True, "_auto_class": "AutoConfig"},
        {"nested": {"a": [1, 2.5, None]}, "transformers.js_config": {"dtype": "q4"}},
    ],
    ids=lambda entries: next(iter(entries)),
)
def test_entries_that_no_class_knows_are_kept_and_ignored(entries: dict[str, Any], tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    source = original(
        tmp_path / "source", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}, **entries
    )
    (source / "code.py").write_text(CODE.format(marker=str(marker)))
    checkpoint = trained(linearized(source), tmp_path / "one.ckpt")
    write(load_checkpoint(checkpoint), tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    kept = {
        name: value
        for name, value in entries.items()
        if not name.startswith("_") and name not in ("quantization_config", "torch_dtype")
    }
    assert kept.items() <= config.items()
    assert config["auto_map"]["AutoConfig"] == "modeling_swapped.SwappedLlamaConfig"
    assert not (tmp_path / "exported" / "code.py").exists()
    assert read_source(str(tmp_path / "exported")).config.hidden_size == 32  # as a teacher
    assert not marker.exists()


def test_code_and_quantised_weights_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    source = original(tmp_path / "code", model_type="stranger", auto_map={"AutoConfig": "code.Config"})
    (source / "code.py").write_text(CODE.format(marker=str(marker)))
    with pytest.raises(ValueError, match="trust_remote_code"):
        LinearizedModel(str(source), context=48)
    assert not marker.exists()
    source = original(tmp_path / "quantised", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"is quantized \(gptq\), and its attention cannot be trained"):
        LinearizedModel(str(source), context=48)
    source = original(tmp_path / "settings", {"num_beams": 1, "num_return_sequences": 3})
    with pytest.raises(ValueError, match=r"generation_config\.json: .*num_return_sequences.*; correct it, or remove"):
        LinearizedModel(str(source), context=48)
    (source / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json: .*; correct it, or remove"):
        LinearizedModel(str(source), context=48)
