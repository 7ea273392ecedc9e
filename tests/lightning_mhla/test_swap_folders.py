"""Folders of swapped models of transformers: right where the swap is known, an error everywhere else."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_mhla import AttentionConfig, load_swapped, swap_attention
from lightning_mhla.swap import SAVED, swapped_layers
from lightning_mhla.swap.saved import NOTICE, restored

TEXT = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
CAUSAL, BLOCKS = AttentionConfig(block_size=8, mixing="exponential"), AttentionConfig(block_size=8)
GRID = AttentionConfig(block_grid=[2, 2])
UNDROPPED = {"attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[dict[str, Any], AttentionConfig]] = {
    "LlamaForCausalLM": ({**TEXT, "num_key_value_heads": 1}, CAUSAL),
    "Qwen2ForCausalLM": ({**TEXT, "num_key_value_heads": 1}, CAUSAL),
    "Qwen3ForSequenceClassification": ({**TEXT, "num_key_value_heads": 1, "head_dim": 16}, CAUSAL),
    "GemmaForCausalLM": ({**TEXT, "num_key_value_heads": 1, "head_dim": 16}, CAUSAL),
    "Olmo2Model": (TEXT, CAUSAL),
    "BertForMaskedLM": ({**TEXT, **UNDROPPED}, BLOCKS),
    "RobertaForSequenceClassification": ({**TEXT, **UNDROPPED, "num_labels": 3}, BLOCKS),
    "DistilBertForTokenClassification": (
        {"vocab_size": 100, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 2, "attention_dropout": 0.0}, BLOCKS,
    ),
    "ViTForImageClassification": (IMAGES, GRID),
    "Dinov2ForImageClassification": (IMAGES, GRID),
    "CLIPVisionModel": (IMAGES, GRID),
    "SiglipVisionModel": (IMAGES, GRID),
}  # fmt: skip


def inputs(name: str) -> dict[str, torch.Tensor]:
    if "vision" in name.lower() or "Image" in name:
        return {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    return {"input_ids": torch.arange(3, 27)[None]}


def swapped(name: str = "LlamaForCausalLM", seed: int = 0) -> Any:
    """A small model of a class, one layer of two swapped, with weights that differ from their start."""
    options, attention = MODELS[name]
    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**options)).eval()
    swap_attention(model, attention, layers=[1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def output(model: Any, name: str = "LlamaForCausalLM") -> torch.Tensor:
    result: torch.Tensor = model(**inputs(name))[0]
    return result


def run(program: str, *arguments: Any) -> Any:
    """The JSON that a program prints last, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each class, and what the model in it computes."""
    where = tmp_path_factory.mktemp("swapped")
    for name in MODELS:
        model = swapped(name)
        model.save_pretrained(where / name)
        torch.save((inputs(name), output(model, name)), where / f"{name}.pt")
    return where


OPEN = """
import json, sys, torch, transformers
from pathlib import Path
where, trust, found = Path(sys.argv[1]), bool(int(sys.argv[2])), {}

def opened(name, kind, **options):
    given, expected = torch.load(where / f"{name}.pt")
    try:
        model = kind.from_pretrained(where / name, **options)
    except Exception as error:
        return str(error)
    if not isinstance(model, torch.nn.Module):
        return 0
    with torch.no_grad():
        out = model.eval()(**{k: v.to(model.dtype) if v.is_floating_point() else v for k, v in given.items()})[0]
    return float((out.float() - expected).abs().max()) if out.shape == expected.shape else -1

for name in json.loads(sys.argv[3]):
    config = json.loads((where / name / "config.json").read_text())
    host = getattr(transformers, name)
    kinds = {auto: getattr(transformers, auto) for auto in config["auto_map"]}
    if not trust:
        found[name] = {auto: opened(name, kind) for auto, kind in kinds.items()}
        found[name] |= {
            "host": opened(name, host),
            "host, eager": opened(name, host, attn_implementation="eager"),
            "configuration": opened(name, host.config_class),
            "another": opened(name, transformers.BertModel),
        }
        assert not any("lightning_mhla" in module for module in sys.modules)
        continue
    own = [auto for auto, kind in config["auto_map"].items() if kind.endswith("." + name)]
    found[name] = {auto: opened(name, kinds[auto], trust_remote_code=True) for auto in own}
    found[name]["placed"] = opened(name, kinds[own[0]], trust_remote_code=True, device_map="cpu")
    half = kinds[own[0]].from_pretrained(where / name, trust_remote_code=True, dtype=torch.bfloat16)
    dtypes = {key: tensor.dtype for key, tensor in half.named_parameters()}
    found[name]["half"] = [
        sum(dtype == torch.bfloat16 for dtype in dtypes.values()),
        {str(dtype) for key, dtype in dtypes.items() if "mixing" in key} == {"torch.float32"},
    ]
    found[name]["configuration into the plain class"] = opened(
        name, host, config=transformers.AutoConfig.from_pretrained(where / name, trust_remote_code=True)
    )
print()  # transformers asks in the terminal before it fails
print(json.dumps(found))
"""


def test_no_class_opens_it_without_trust(folders: Path) -> None:
    """Auto classes, the plain class, its configuration, and a class of another architecture."""
    found = run(OPEN, folders, 0, json.dumps(list(MODELS)))
    for name in MODELS:
        assert {"AutoConfig", "AutoModel", "host", "another"} <= set(found[name])
        for way, error in found[name].items():
            assert isinstance(error, str), f"{name} by {way}: {error}"
            assert "trust_remote_code=True" in error, f"{name} by {way}: {error}"
        assert "lightning_mhla.load_swapped" in found[name]["host"]


def test_every_auto_class_opens_it_with_trust(folders: Path) -> None:
    found = run(OPEN, folders, 1, json.dumps(list(MODELS)))
    for name in MODELS:
        error = found[name].pop("configuration into the plain class")
        assert "lightning_mhla.load_swapped" in error
        many, kept = found[name].pop("half")
        assert many > 5, name
        assert kept, name
        assert len(found[name]) >= 2, name
        for way, away in found[name].items():
            assert isinstance(away, float), f"{name} by {way}: {away}"
            assert 0 <= away < 1e-5, f"{name} by {way}: {away}"


def test_the_folder_holds_no_code_but_an_import(folders: Path) -> None:
    text = (folders / "LlamaForCausalLM" / "modeling_swapped.py").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith(('"""', "__all__"))]
    assert len(lines) == 1
    assert lines[0].startswith("from lightning_mhla.swap.transformers_classes import ")
    config = json.loads((folders / "LlamaForCausalLM" / "config.json").read_text())
    assert config["model_type"] == "mhla_swapped"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_swapped.LlamaForCausalLM"
    assert config["initializer_range"] == NOTICE


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification"])
def test_a_loaded_model_is_saved_and_loaded_again(name: str, folders: Path, tmp_path: Path) -> None:
    auto = {"L": "AutoModelForCausalLM", "B": "AutoModelForMaskedLM", "V": "AutoModelForImageClassification"}[name[0]]
    kind = getattr(transformers, auto)
    first = kind.from_pretrained(folders / name, trust_remote_code=True)
    assert type(first).__name__ == name  # what transformers' tools decide by
    first.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    second = kind.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert torch.equal(output(second.eval(), name), output(first.eval(), name))
    assert (tmp_path / "again" / "config.json").read_text() == (folders / name / "config.json").read_text()
    assert torch.equal(output(load_swapped(tmp_path / "again"), name), output(first, name))


def test_peft_pipelines_and_the_configuration_see_the_plain_model(folders: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    folder = folders / "LlamaForCausalLM"
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0").save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert model.config.model_type == "llama"
    assert model.config.initializer_range == 0.02
    assert isinstance(model.config, LlamaConfig)
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False)[0, 3:]
    write = pipeline("text-generation", model=str(folder), trust_remote_code=True)
    (answer,) = write("w5 w6 w7", max_new_tokens=5, do_sample=False, return_full_text=False)
    assert [int(word[1:]) for word in answer["generated_text"].split()] == expected.tolist()
    adapted = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False)).eval()  # targets by the type of model
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True), tmp_path)
    assert torch.equal(output(again), output(adapted))


def test_copies_and_pickles_are_swapped(tmp_path: Path) -> None:
    model = swapped()
    torch.save(model, tmp_path / "model.pt")
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        assert type(other) is type(model)
        assert torch.equal(output(other), output(model))
        other.save_pretrained(tmp_path / "copy")
        assert torch.equal(output(load_swapped(tmp_path / "copy")), output(model))
    config = pickle.loads(pickle.dumps(model.config))
    assert type(config) is type(model.config)
    assert torch.equal(
        torch.tensor(sorted(swapped_layers(type(model)(config)))), torch.tensor(sorted(swapped_layers(model)))
    )
    with pytest.raises(ValueError, match=r"has no record of a swap; build transformers\.LlamaForCausalLM"):
        type(model)(LlamaConfig(**MODELS["LlamaForCausalLM"][0]))


def test_another_model_of_the_same_configuration_stays_plain(tmp_path: Path) -> None:
    config = LlamaConfig(**MODELS["LlamaForCausalLM"][0])
    plain, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    swap_attention(other, CAUSAL)
    plain.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM
    with pytest.raises(ValueError, match=r"never swapped; load it with LlamaForCausalLM\.from_pretrained"):
        load_swapped(tmp_path)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification"])
def test_folders_that_were_saved_before_load(name: str, tmp_path: Path) -> None:
    """Without values that keep others off, without classes, without options of the model."""
    model = swapped(name)
    model.save_pretrained(tmp_path)
    config = restored(json.loads((tmp_path / "config.json").read_text()))
    del config["auto_map"], config[SAVED]["options"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_swapped.py").unlink()
    assert AutoConfig.from_pretrained(tmp_path).model_type == model.config.model_type
    torch.testing.assert_close(output(load_swapped(tmp_path), name), output(model, name))


SAVES = [
    ({}, {"max_shard_size": "20KB"}),
    ({"max_shard_size": "20KB"}, {}),
    ({"max_shard_size": "20KB"}, {"max_shard_size": "40KB"}),
]


@pytest.mark.parametrize(("first", "second"), SAVES, ids=["sharded over whole", "whole over sharded", "fewer shards"])
def test_the_last_save_is_what_is_loaded(first: dict[str, Any], second: dict[str, Any], tmp_path: Path) -> None:
    old, new = swapped(), swapped(seed=1)
    old.save_pretrained(tmp_path, **first)
    new.save_pretrained(tmp_path, **second)
    assert torch.equal(output(load_swapped(tmp_path)), output(new))
    assert torch.equal(output(AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)), output(new))


def test_variants_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    old, new = swapped(), swapped(seed=1)
    old.save_pretrained(tmp_path)
    new.save_pretrained(tmp_path, variant="tuned", max_shard_size="20KB")
    assert torch.equal(output(load_swapped(tmp_path)), output(old))
    assert torch.equal(output(load_swapped(tmp_path, variant="tuned")), output(new))
    with pytest.raises(OSError, match=r"no file named model\.other\.safetensors"):
        load_swapped(tmp_path, variant="other")


def test_options_are_those_of_the_library(tmp_path: Path) -> None:
    model = swapped()
    model.save_pretrained(tmp_path / "inside")
    for options in (
        {"dtype": "bfloat16"},
        {"torch_dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "device_map": "cpu"},
    ):
        half = load_swapped(tmp_path, subfolder="inside", **options)
        assert half.model.embed_tokens.weight.dtype == torch.bfloat16
        assert {p.dtype for p in swapped_layers(half)[1].mixing.parameters()} == {torch.float32}
    with pytest.raises(
        ValueError,
        match="has no option 'varient' for models of transformers; its options are dtype, variant, device_map",
    ):
        load_swapped(tmp_path / "inside", varient="x")
    with pytest.raises(ValueError, match="dtype='half-ish' is not a dtype of weights"):
        load_swapped(tmp_path / "inside", "half-ish")
    with pytest.raises(ValueError, match="are two names of the same option"):
        load_swapped(tmp_path / "inside", torch.float32, torch_dtype=torch.bfloat16)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_swapped(tmp_path)


def test_trainer_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(3, 15)]
    results = []
    for resume in (False, True):
        options = TrainingArguments(
            str(tmp_path), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(swapped(), options, train_dataset=rows)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
        results.append(trainer.model.eval())
    torch.testing.assert_close(output(results[1]), output(results[0]))
    torch.testing.assert_close(output(load_swapped(tmp_path / "checkpoint-4")), output(results[0]))


class Exploit:
    """Code that a pickle would run."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_bin_files_are_read_without_running_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = swapped()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(output(load_swapped(tmp_path)), output(model))
    torch.save({"x": Exploit()}, tmp_path / "pytorch_model.bin")
    with pytest.raises((ValueError, OSError, pickle.UnpicklingError)):
        load_swapped(tmp_path)
    assert "executed" not in capsys.readouterr().out


def test_missing_weights_of_the_new_attention_are_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    swapped().save_pretrained(tmp_path)
    state = {
        name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items() if ".swapped." not in name
    }
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    for load in (load_swapped, lambda folder: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)):
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.swapped\..* is missing"):
            load(tmp_path)


def test_a_name_on_the_hub_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, commit = swapped(), "0" * 40
    repository = tmp_path / "models--someone--swapped"
    model.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    program = (
        "import json, sys, torch; from lightning_mhla import load_swapped\n"
        "model = load_swapped('someone/swapped', cache_dir=sys.argv[1], local_files_only=True)\n"
        "with torch.no_grad(): print(json.dumps(model(torch.arange(3, 27)[None]).logits[0, 0].tolist()))"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.testing.assert_close(torch.tensor(run(program, tmp_path)), output(model)[0, 0])
