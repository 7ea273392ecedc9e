"""Linearized language models: the stages, what each trains, where weights come from, and what is left of it on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped import grouped
from lightning import LightningDataModule, Trainer
from mhla_tasks.language import DecoderShape, LanguageModel, LinearizedModel
from mhla_tasks.language.export import load_checkpoint
from mhla_tasks.language.linearized import source_network
from mhla_tasks.language.networks import build_network
from processes import fork_server
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_mhla import AttentionConfig, load_swapped, swap_attention
from lightning_mhla.swap import swapped_layers, transfer_loss
from lightning_mhla.swap.adapters import LoraOptions, merge_adapters
from lightning_mhla.swap.networks import load_source
from lightning_mhla.training.linearize import TransferOptions
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.training.options import TrainingOptions

NETWORK: dict[str, Any] = {
    "class_path": "transformers.LlamaConfig",
    "init_args": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48,
        "max_position_embeddings": 128, "tie_word_embeddings": True, "vocab_size": 40,
    },
}  # fmt: skip
WINDOW = AttentionConfig(kind="mhla_window", block_size=8, mixing="exponential", feature_map="learned")


PROCESS = """
import os, sys
from pathlib import Path
import torch
sys.path.append(sys.argv[3])
from test_linearized import Patterns, fit, linearized
from lightning_mhla.training.linearize import TransferOptions
torch.manual_seed(0)
replies = sys.argv[4] == "replies"
options = {"teacher": sys.argv[1]} if replies else {"layer_steps": 2}
model = linearized(sys.argv[1], distillation=TransferOptions(**options))
strategy = {"strategy": "ddp_find_unused_parameters_true", "devices": 2, "use_distributed_sampler": False}
fit(model, 4, Path(sys.argv[2]), Patterns((int(os.environ["RANK"]),), replies=replies), **strategy)
"""


class Patterns(LightningDataModule):
    """Rows of tokens that count up from a drawn start.

    Args:
        ranks: ranks whose batches this process reads in turn, of two processes that share the rows; none for one process.
        batch_size: number of rows in a batch of one process.
        replies: whether the loss counts some tokens only; the first batch of rank 1 has none of them.
    """

    def __init__(self, ranks: tuple[int, ...] = (), batch_size: int = 8, replies: bool = False) -> None:
        super().__init__()
        self.ranks, self.batch_size, self.replies = ranks, batch_size, replies

    def train_dataloader(self) -> Any:
        starts = torch.randint(40, (400, 1), generator=torch.Generator().manual_seed(0))
        samples = [{"tokens": row} for row in (starts + torch.arange(49)) % 40]
        if self.replies:
            for number, sample in enumerate(samples):
                counted = 0 if number < 16 and number % 2 else number * 7 % 40
                sample["target_mask"] = torch.arange(48) < counted
        if not self.ranks:
            return DataLoader(samples, batch_size=self.batch_size)
        batches = [range(start + rank, start + 16, 2) for start in range(0, 400, 16) for rank in self.ranks]
        return DataLoader(samples, batch_sampler=batches)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small Llama to a folder of transformers."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    torch.manual_seed(0)
    model = build_network(NETWORK, 40)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def linearized(source: Path, **options: Any) -> LinearizedModel:
    return LinearizedModel(str(source), WINDOW, context=48, **grouped(optimizer=OptimizerConfig(lr=0.01), **options))


def fit(model: Any, steps: int, folder: Path, data: Patterns | None = None, **options: Any) -> Path:
    """Train a model, and return the path of a checkpoint."""
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, data or Patterns())
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        (folder / "metrics.json").write_text(json.dumps(logged))
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.network.state_dict().items()}


def test_the_first_steps_train_what_the_swap_added_and_the_rest_the_model(source: Path, tmp_path: Path) -> None:
    original = AutoModelForCausalLM.from_pretrained(source).state_dict()
    model = linearized(source, distillation=TransferOptions(layer_steps=6))
    distances = []
    model.log_loss = lambda loss, size: distances.append(float(loss.detach())) or loss  # type: ignore[method-assign]
    fit(model, 6, tmp_path)
    first = weights(model)
    assert all(torch.equal(tensor, first[name]) for name, tensor in original.items())
    assert distances[-1] < distances[0]
    again = linearized(source, distillation=TransferOptions(layer_steps=3))
    fit(again, 6, tmp_path)
    assert not any(
        torch.equal(tensor, again.network.state_dict()[name]) for name, tensor in original.items() if "proj" in name
    )


@pytest.mark.parametrize("kind", ["layers", "replies"])
def test_two_processes_train_as_one_does(kind: str, source: Path, tmp_path: Path) -> None:
    """In the stage that matches layers, and with a teacher and different numbers of tokens that the loss counts."""
    status, output = fork_server().program(
        PROCESS,
        *(source, tmp_path / "two", Path(__file__).parents[1], kind),
        processes=2,
        PATH_OF_TESTS=str(Path(__file__).parent),
    )
    assert status == 0, output
    torch.manual_seed(0)
    if kind == "layers":
        model = linearized(source, distillation=TransferOptions(layer_steps=2))
        one = fit(model, 4, tmp_path / "one", Patterns((0, 1)), accumulate_grad_batches=2)
    else:
        model = linearized(source, distillation=TransferOptions(teacher=str(source)))
        one = fit(model, 4, tmp_path / "one", Patterns(batch_size=16, replies=True))
        alone, shared = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two"))
        assert "train/text_loss" in alone
        assert shared == pytest.approx(alone, rel=1e-4)
    expected, learned = (torch.load(path, weights_only=True) for path in (one, tmp_path / "two/last.ckpt"))
    assert learned["global_step"] == 4
    for name, tensor in expected["state_dict"].items():
        torch.testing.assert_close(
            learned["state_dict"][name],
            tensor,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def test_accumulated_batches_with_a_teacher_train_as_one_does(source: Path, tmp_path: Path) -> None:
    """The batches have different numbers of tokens that the loss counts."""
    learned = []
    for rows, count in ((4, 4), (16, 1)):
        torch.manual_seed(0)
        model = linearized(source, distillation=TransferOptions(teacher=str(source), logits_weight=1e-6))
        fit(model, 3, tmp_path / str(rows), Patterns(batch_size=rows, replies=True), accumulate_grad_batches=count)
        learned.append(weights(model))
    for name, tensor in learned[0].items():
        torch.testing.assert_close(
            learned[1][name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("train", ["new", "attention", "lora"])
def test_only_what_is_asked_for_is_trained(train: Any, source: Path, tmp_path: Path) -> None:
    model = linearized(source, train=train, lora=LoraOptions(2, 2), distillation=TransferOptions(layer_steps=1))
    load_source(model.network, str(source), AutoModelForCausalLM)
    before = weights(model)
    path = fit(model, 4, tmp_path)
    changed = {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}
    parts = {"new": (".swapped.",), "attention": (".self_attn.",), "lora": (".swapped.", ".lora_")}[train]
    assert changed == {name for name in before if any(part in name for part in parts)}
    loaded = load_checkpoint(path)
    assert isinstance(loaded, LinearizedModel)
    x = torch.arange(20)[None]
    torch.testing.assert_close(loaded(x), model.eval()(x))
    merge_adapters(loaded.network)
    loaded.network.save_pretrained(tmp_path / "exported")
    torch.testing.assert_close(load_swapped(tmp_path / "exported")(x).logits, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("train", ["all", "attention", "lora"])
def test_recomputed_layers_are_matched_alike(train: Any, source: Path) -> None:
    tokens, gradients = torch.arange(48)[None] % 40, []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = linearized(source, train=train, lora=LoraOptions(2, 2), checkpointing=checkpointing)
        load_source(model.network, str(source), AutoModelForCausalLM)
        network = model.network.train()
        transfer_loss(network, lambda network=network: network.base_model(tokens, use_cache=False)).backward()
        gradients.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(".swapped." in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_a_run_with_adapters_is_not_mistaken(source: Path, tmp_path: Path) -> None:
    path = fit(linearized(source, train="lora", lora=LoraOptions(2, 2)), 1, tmp_path)
    with pytest.raises(ValueError, match=r"contains LoRA adapters; .* lightning export .* FOLDER"):
        load_source(linearized(path).network, str(path), AutoModelForCausalLM)
    content = torch.load(path, weights_only=True)
    with pytest.raises(ValueError, match="was trained with LoRA adapters, this run is without"):
        linearized(source).on_load_checkpoint(content)


def test_a_teachers_predictions_are_matched(source: Path, tmp_path: Path) -> None:
    """With no weight on the text, the distance to the teacher falls."""
    options = TransferOptions(teacher=str(source), loss_weight=0.0)
    model = linearized(source, distillation=options)
    losses = []
    model.log_loss = lambda loss, size: losses.append(float(loss.detach())) or loss  # type: ignore[method-assign]
    path = fit(model, 30, tmp_path)
    assert losses[-1] < 0.5 * losses[0]
    names = torch.load(path, weights_only=True)["state_dict"]
    assert not any("teacher" in name for name in names)


def test_weights_come_from_checkpoints_folders_and_swapped_models(source: Path, tmp_path: Path) -> None:
    options = {name: value for name, value in NETWORK["init_args"].items() if name != "vocab_size"}
    plain = LanguageModel(
        network={**NETWORK, "init_args": options},
        vocab_size=40,
        context=48,
        training=TrainingOptions(OptimizerConfig(lr=0.01)),
    )
    checkpoint = fit(plain, 2, tmp_path)
    model = linearized(checkpoint)
    load_source(model.network, str(checkpoint), AutoModelForCausalLM)
    assert all(
        torch.equal(tensor, model.network.state_dict()[name]) for name, tensor in plain.network.state_dict().items()
    )
    (tmp_path / "stage").mkdir()
    stage = fit(linearized(source, distillation=TransferOptions(layer_steps=2)), 2, tmp_path / "stage")
    second = linearized(stage)
    load_source(second.network, str(stage), AutoModelForCausalLM)
    saved = torch.load(stage, weights_only=True)["state_dict"]
    assert all(torch.equal(tensor, saved[f"network.{name}"]) for name, tensor in second.network.state_dict().items())
    swapped = AutoModelForCausalLM.from_pretrained(source)
    for layer in swap_attention(swapped, WINDOW).values():
        torch.nn.init.normal_(layer.far.weight)
    swapped.save_pretrained(tmp_path / "swapped")
    third = linearized(tmp_path / "swapped")
    load_source(third.network, str(tmp_path / "swapped"), AutoModelForCausalLM)
    for mine, theirs in zip(swapped_layers(third.network).values(), swapped_layers(swapped).values(), strict=True):
        assert torch.equal(mine.far.weight, theirs.far.weight)


def test_hybrids_keep_their_layers(source: Path) -> None:
    model = linearized(source, layer_kinds=["keep", "replace"])
    assert list(swapped_layers(model.network)) == [1]


def test_what_does_not_fit_is_said_in_one_line(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name the model to linearize: --model.pretrained=FOLDER_OR_NAME"):
        LinearizedModel()
    with pytest.raises(FileNotFoundError, match="nowhere/at/all is not a checkpoint, a folder or a model on the hub"):
        linearized(Path("nowhere/at/all"))
    ours = LanguageModel(vocab_size=40, context=48, shape=DecoderShape(dim=16, depth=1, heads=2, mlp_width=16))
    with pytest.raises(
        ValueError,
        match="does not hold a transformers model; to replace softmax layers of an MHLA language model, set --model",
    ):
        source_network(str(fit(ours, 1, tmp_path)))
    with pytest.raises(ValueError, match=r"distillation.layer_steps=-1 must be at least 0"):
        TransferOptions(layer_steps=-1)
    other = build_network({**NETWORK, "init_args": {**NETWORK["init_args"], "hidden_size": 64}}, 40)
    other.save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="wide does not match the model or its attention: "):
        load_source(linearized(source).network, str(tmp_path / "wide"), AutoModelForCausalLM)
    linear = AttentionConfig(kind="linear")
    idle = LinearizedModel(str(source), linear, context=48, distillation=TransferOptions(layer_steps=2))
    with pytest.raises(
        ValueError, match=r"attention kind 'linear' added nothing that is trained; set distillation.layer_steps=0"
    ):
        fit(idle, 1, tmp_path)
    with pytest.raises(ValueError, match="leaves nothing to train: the replacement added no parameters"):
        LinearizedModel(str(source), linear, context=48, train="new")
