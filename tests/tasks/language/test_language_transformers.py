"""Use of an exported model with transformers and peft, each time loaded in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mhla_tasks.language import MHLAForCausalLM
from processes import fork_server
from small import KINDS, small_model
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, pipeline

from lightning_mhla import GenerationCache

IDS = torch.arange(20)[None] + 3


def in_a_new_process(program: str, *arguments: Path, **environment: str) -> str:
    """Run a program in a process that has imported nothing of this package, and return its output."""
    preamble = "import sys, torch, transformers; transformers.logging.set_verbosity_error()\n"
    status, said = fork_server().program(preamble + program, *arguments, **environment)
    assert status == 0, said[-4000:]
    return said


LOAD = """
for folder in sys.argv[1:]:
    assert not [name for name in sys.modules if name.startswith("mhla") and folder == sys.argv[1]]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    torch.save(model(torch.arange(20)[None] + 3).logits.detach(), folder + "/logits.pt")
"""


def loaded(exported: Path, **options: Any) -> MHLAForCausalLM:
    model: MHLAForCausalLM = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, **options)
    return model.eval()


class Rows(Dataset):
    """Data set of eight rows of random tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


def trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, **options,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())


def test_a_model_that_transformers_saved_again_loads_in_a_new_process(exported: Path, tmp_path: Path) -> None:
    """Models are saved in bfloat16, with a different vocabulary, with a longer context, by Trainer, and without an export."""
    bf16 = loaded(exported, dtype=torch.bfloat16)
    resized, longer = loaded(exported), loaded(exported)
    resized.resize_token_embeddings(333)
    longer.extend(5000)
    tuned = trainer(loaded(exported), tmp_path / "runs")
    tuned.train()
    never_exported = small_model("dense").network
    models = {"bf16": bf16, "resized": resized, "longer": longer, "tuned": tuned.model.eval(), "own": never_exported}
    for name, model in models.items():
        if name == "tuned":
            tuned.save_model(str(tmp_path / name))
        else:
            model.save_pretrained(tmp_path / name)
    in_a_new_process(LOAD, *(tmp_path / name for name in models))
    for name, model in models.items():
        torch.testing.assert_close(torch.load(tmp_path / name / "logits.pt", weights_only=True), model(IDS).logits)
    assert loaded(tmp_path / "resized").config.vocab_size == 333
    assert loaded(tmp_path / "longer").config.context == 5000


def test_a_model_is_saved_and_loaded_again_and_again(exported: Path, tmp_path: Path) -> None:
    """Each time by a process that knows the classes by the folder alone."""
    program = LOAD + "model.save_pretrained(sys.argv[1] + '/again')\n"
    in_a_new_process(program, exported)
    in_a_new_process(program, exported / "again")
    in_a_new_process(LOAD, exported / "again/again")
    first, last = (
        torch.load(folder / "logits.pt", weights_only=True) for folder in (exported, exported / "again/again")
    )
    assert torch.equal(first, last)


def test_adapters_of_peft_train_and_load_in_a_new_process(exported: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
    model = get_peft_model(loaded(exported), config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), 1e-2)
    for _ in range(2):  # lora_A moves once lora_B is not zero
        model(input_ids=IDS, labels=IDS).loss.backward()
        assert all(p.grad is not None for p in trained.values())
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(p, before[name]) for name, p in trained.items())
    model.eval().save_pretrained(str(tmp_path / "adapters"))
    want = model(input_ids=IDS).logits
    assert model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False).shape[1] <= 23
    program = """
from peft import PeftModel
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model = PeftModel.from_pretrained(model, sys.argv[2]).eval()
torch.save(model(torch.arange(20)[None] + 3).logits.detach(), sys.argv[2] + "/logits.pt")
"""
    in_a_new_process(program, exported, tmp_path / "adapters")
    got = torch.load(tmp_path / "adapters/logits.pt", weights_only=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(model.merge_and_unload()(IDS).logits, want, rtol=1e-4, atol=1e-4)


def test_trainer_trains_and_evaluates(exported: Path, tmp_path: Path) -> None:
    """With and without accumulation the loss is the mean over all tokens of the step."""
    whole = trainer(loaded(exported), tmp_path, seed=1)
    pieces = trainer(loaded(exported), tmp_path, seed=1, gradient_accumulation_steps=2)
    pieces.args.per_device_train_batch_size = 2
    losses = [each.train().training_loss for each in (whole, pieces)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    found = whole.evaluate()
    model = whole.model.eval()
    rows = torch.stack([Rows()[i]["input_ids"] for i in range(8)])
    assert found["eval_loss"] == pytest.approx(float(model(rows, labels=rows).loss), rel=1e-4)
    assert whole.predict(Rows()).predictions.shape == (8, 24, model.config.vocab_size)


def test_labels_give_logits_too(exported: Path) -> None:
    model = loaded(exported)
    out = model(IDS, labels=IDS)
    torch.testing.assert_close(out.logits, model(IDS).logits)
    want = torch.nn.functional.cross_entropy(out.logits[0, :-1], IDS[0, 1:])
    torch.testing.assert_close(out.loss, want)
    half = model(IDS, labels=IDS, num_items_in_batch=38).loss
    torch.testing.assert_close(half, want / 2)
    assert model(IDS, labels=IDS, skip_logits=True).logits is None
    with pytest.raises(TypeError, match="unexpected arguments"):
        model(IDS, lables=IDS)
    with pytest.raises(ValueError, match="keeps no attention matrices"):
        model(IDS, output_attentions=True)
    model.config.output_attentions = True
    for part in (model, model.base_model):
        with pytest.raises(ValueError, match="the model keeps no attention matrices"):
            part(IDS)
        assert part(IDS, output_attentions=False)[0].shape[:2] == IDS.shape


@pytest.mark.parametrize("case", ["all tokens", "few targets", "padding", "loss of each token", "last columns only"])
def test_the_loss_reads_the_logits_that_are_computed_anyway(case: str) -> None:
    model = small_model("exponential").network.train()
    labels, options = IDS.clone(), {}
    if case == "few targets":
        labels[:, :-3] = -100
    elif case == "padding":
        options = {"attention_mask": torch.ones_like(IDS).index_fill(1, torch.arange(4), 0)}
    elif case == "loss of each token":
        options = {"loss_reduction": "none"}
    elif case == "last columns only":
        options = {"logits_to_keep": 2}
    results = []
    for skip in (False, True):
        model.zero_grad()
        loss = model(IDS, labels=labels, skip_logits=skip, **options).loss
        if case != "loss of each token":  # it has no gradient without logits
            loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("labels", ["all tokens", "few tokens"])
def test_a_loss_adds_no_product_to_the_logits(labels: str) -> None:
    model = small_model("exponential").network.train()
    targets = IDS if labels == "all tokens" else IDS.index_fill(1, torch.arange(IDS.shape[1] - 3), -100)
    counts = []
    for options in ({}, {"labels": targets}):
        with FlopCounterMode(display=False) as counter:
            model(IDS, use_cache=False, **options)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_changes_no_gradient(kind: str) -> None:
    model = small_model(kind).network.train()
    model(IDS, labels=IDS).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.activation_checkpointing_enable()
    calls = []
    model.backbone.layers[0].attn.register_forward_pre_hook(lambda *_: calls.append(1))
    model(IDS, labels=IDS).loss.backward()
    assert len(calls) == 2, "the layer was not computed again"
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert torch.equal(p.grad, want[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_what_goes_into_each_layer_and_the_head(kind: str) -> None:
    model = small_model(kind).network
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    ids = IDS.repeat(2, 1)
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.depth + 1
    assert torch.equal(out.hidden_states[0], model.embedding(ids))
    torch.testing.assert_close(model.head(out.hidden_states[-1]), out.logits)
    alone = model(ids[:1, 6:], output_hidden_states=True)
    torch.testing.assert_close(out.hidden_states[1][:1, 6:], alone.hidden_states[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", sorted(set(KINDS) - {"gla", "gated_deltanet", "mamba2", "gated_conv"})
)  # these have no positions
def test_positions_count(kind: str) -> None:
    """Default positions change nothing, different ones do (a common shift does not), and a restart is a new document."""
    model = small_model(kind).network
    plain = model(IDS).logits
    torch.testing.assert_close(model(IDS, position_ids=torch.arange(20)[None]).logits, plain)
    if "feature_map" not in KINDS[kind]:  # features of what rotary has turned know where they are
        shifted = model(IDS, position_ids=torch.arange(7, 27)[None]).logits
        torch.testing.assert_close(shifted, plain, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(model(IDS, position_ids=torch.arange(0, 60, 3)[None]).logits, plain, atol=1e-2)
    packed = model(IDS, position_ids=torch.cat([torch.arange(12), torch.arange(8)])[None]).logits
    alone = torch.cat([model(IDS[:, :12]).logits, model(IDS[:, 12:]).logits], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_goes_back_in_under_the_name_by_which_it_came(kind: str) -> None:
    model = small_model(kind).network
    ids = torch.randint(3, 300, (1, 30))
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    out = model.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **options)
    longer = model.generate(out.sequences, max_new_tokens=5, past_key_values=out.past_key_values, **options)
    assert torch.equal(longer, model.generate(ids, max_new_tokens=10, **options))
    state = model(ids, use_cache=True).past_key_values
    assert isinstance(state, GenerationCache)
    assert state.get_seq_length() == 30
    in_pieces = model.generate(ids, max_new_tokens=5, prefill_chunk_size=7, **options)
    assert torch.equal(in_pieces, out.sequences)


def test_a_pipeline_writes_text_and_the_tokenizer_runs_no_code(exported: Path) -> None:
    program = """
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
assert not [name for name in sys.modules if name.startswith("mhla")]
print(tokenizer.decode(tokenizer("The river")["input_ids"]))
"""
    assert in_a_new_process(program, exported).strip() == "The river"
    write = pipeline("text-generation", model=str(exported), trust_remote_code=True)
    text = write("The river", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert text.startswith("The river")


def test_positions_that_stand_still_begin_a_document() -> None:
    """A document of one token, then another."""
    model = small_model("softmax").network
    packed = model(IDS, position_ids=torch.tensor([[0, *range(19)]])).logits
    alone = torch.cat([model(IDS[:, :1]).logits, model(IDS[:, 1:]).logits], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
