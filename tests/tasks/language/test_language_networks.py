"""Models of transformers in place of our model: trained, resumed, continued and exported by the same commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mhla_tasks.language.networks import build_network, examine, network_loss
from processes import fork_server, run_in_turn
from torch.nn import functional as F

from lightning_mhla.training.optim import OptimizerConfig, parameter_groups

ROOT = Path(__file__).parents[3]
NETWORKS: dict[str, dict[str, Any]] = {
    "transformers.LlamaConfig": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "tie_word_embeddings": True,
    },
    "transformers.MambaConfig": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "transformers.Mamba2Config": {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1,
    },
}  # fmt: skip


def run(folder: Path, *words: str, status: int = 0, module: str = "mhla_tasks.commandline.parser") -> str:
    found, said = fork_server().run(*words, module=module, folder=folder)
    assert found == status, said[-4000:]
    return said


def configuration(folder: Path, path: str, **options: Any) -> str:
    """Write a small stdlib.yaml with a different model."""
    config = yaml.safe_load((ROOT / "configs/language/stdlib.yaml").read_text())
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    model |= {"network": {"class_path": path, "init_args": {**NETWORKS.get(path, {}), **options}}, "vocab_size": 512}
    del model["attention"]
    model |= {"context": 64, "generation": {"max_new_tokens": 4}}
    data |= {"context": 64, "vocab_size": 512, "batch_size": 4}
    trainer |= {
        "max_steps": 4,
        "val_check_interval": 2,
        "limit_val_batches": 1,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
    }
    trainer["callbacks"][0]["init_args"]["save_top_k"] = -1
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return "config.yaml"


@pytest.mark.parametrize("path", NETWORKS)
def test_trained_resumed_continued_and_exported(path: str, tmp_path: Path, cache_dir: Path) -> None:
    config = configuration(tmp_path, path)
    fit = ["fit", "--config", config, f"--data.cache_dir={cache_dir}"]
    said = run(tmp_path, *fit)
    assert "val/bits_per_byte" in said
    checkpoint = next(tmp_path.glob("runs/*/version_0/checkpoints/step000002*.ckpt"))
    last = str(next(tmp_path.glob("runs/*/version_0/checkpoints/last.ckpt")))
    write = ("import", "--max_new_tokens=4")
    calls = ([*fit, "--ckpt_path", str(checkpoint)], ["generate", last, *write], ["export", last, "exported"],
             ["generate", "exported", *write])  # fmt: skip
    for status, said in run_in_turn(*calls, folder=tmp_path):
        assert status == 0, said[-4000:]
    whole, resumed = (
        torch.load(next(tmp_path.glob(f"runs/*/version_{n}/checkpoints/last.ckpt")), weights_only=True)["state_dict"]
        for n in (0, 1)
    )
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    status, said = fork_server().program(
        "import torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained('exported').eval()\n"
        f"weights = torch.load({last!r}, weights_only=True)['state_dict']\n"
        "for name, value in model.state_dict().items():\n"
        "    assert torch.equal(value, weights['network.' + name]), name\n"
        "assert not type(model).__module__.startswith('mhla')\n"
        "AutoTokenizer.from_pretrained('exported')\n"
        "print('the same weights')\n",
        folder=tmp_path,
    )
    assert status == 0, said
    assert "the same weights" in said


SCALED = {"class_path": "transformers.RecurrentGemmaConfig", "init_args": {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "lru_width": 32, "logits_soft_cap": 0.1, "attention_window_size": 16,
}}  # fmt: skip


@pytest.mark.parametrize("path", [*NETWORKS, "scaled logits"])
def test_its_loss_is_that_of_its_logits(path: str) -> None:
    torch.manual_seed(0)
    network = build_network({"class_path": path, "init_args": NETWORKS[path]} if path in NETWORKS else SCALED, 300)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3)
    plain = examine(network, 16)
    assert plain == (path in NETWORKS)
    tokens = torch.randint(0, 300, (2, 21))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = network(inputs).logits
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    torch.testing.assert_close(network_loss(network, inputs, targets, False, plain), each, rtol=1e-4, atol=1e-4)
    mean = network_loss(network, inputs, targets, True, plain)
    torch.testing.assert_close(mean, each.mean(), rtol=1e-4, atol=1e-4)
    weight = network.get_output_embeddings().weight
    slopes = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (mean, each.mean()))
    torch.testing.assert_close(*slopes, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"class_path": "transformers.BertConfig", "init_args": {"hidden_size": 12, "num_hidden_layers": 1}}, "see later ones"),
        (
            {"class_path": "transformers.GPT2Config", "init_args": {"n_embd": 12, "n_layer": 1, "n_positions": 16}},
            "max_position_embeddings=16 is below context=64",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_be_trained_so_are_named(network: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        examine(build_network(network, 300), 64)


def test_decays_of_mamba_are_not_decayed() -> None:
    network = build_network(
        {"class_path": "transformers.MambaConfig", "init_args": NETWORKS["transformers.MambaConfig"]}, 300
    )
    groups = {group["name"]: {id(p) for p in group["params"]} for group in parameter_groups(network, OptimizerConfig())}
    kept = {name for name, p in network.named_parameters() if id(p) in groups["no_decay"]}
    assert any(name.endswith("A_log") for name in kept)
    assert any(name.endswith("mixer.D") for name in kept)


def test_two_processes_shard_it(tmp_path: Path, cache_dir: Path) -> None:
    config = configuration(tmp_path, "transformers.LlamaConfig")
    fsdp = str(ROOT / "configs/trainer/fsdp.yaml")
    devices = ["--trainer.devices=2", "--trainer.precision=32-true", f"--data.cache_dir={cache_dir}"]
    said = run(tmp_path, "fit", "--config", config, "--config", fsdp, *devices)
    assert "val/bits_per_byte" in said


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"class_path": "transformers.LamaConfig"}, "is not a configuration of transformers"),
        ({"class_path": "os.system"}, "is not a configuration of transformers"),
        ({"class": "transformers.LlamaConfig"}, "takes class_path and init_args"),
        ({"class_path": "transformers.LlamaConfig", "init_args": {"hiden_size": 3}}, "LlamaConfig has no option 'hiden_size'"),
        ({"class_path": "transformers.LlamaConfig", "init_args": {"vocab_size": 3}}, "differ"),
        ({"class_path": "transformers.T5Config"}, "T5Config does not build a causal language model"),
    ],
)  # fmt: skip
def test_wrong_networks_are_named(network: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_network(network, 300)


def test_packed_documents_are_refused_in_one_line(tmp_path: Path, cache_dir: Path) -> None:
    config = configuration(tmp_path, "transformers.LlamaConfig")
    options = [f"--data.cache_dir={cache_dir}", "--data.separate_documents=true"]
    said = run(tmp_path, "fit", "--config", config, *options, status=1)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert "LlamaForCausalLM does not take cu_seqlens: do not pack sequences" in errors[0]
