"""Base model, heads and packed documents, as transformers' tools use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mhla_tasks.language import MHLAForSequenceClassification, MHLAModel
from mhla_tasks.language.export import export
from processes import fork_server
from small import small_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
TRUSTED: dict[str, Any] = {"trust_remote_code": True}


def in_a_new_process(program: str, *arguments: Path) -> str:
    status, said = fork_server().program("import sys, torch, transformers\n" + program, *arguments)
    assert status == 0, said[-4000:]
    return said


def test_the_base_model_is_that_of_the_language_model(exported: Path, tmp_path: Path) -> None:
    """Each loads what the other saved, with every weight, and ``base_model`` is the same."""
    causal = AutoModelForCausalLM.from_pretrained(exported, **TRUSTED).eval()
    base, report = AutoModel.from_pretrained(exported, output_loading_info=True, **TRUSTED)
    assert not report["missing_keys"]
    hidden = base.eval()(IDS).last_hidden_state
    assert torch.equal(hidden, causal(IDS, output_hidden_states=True).hidden_states[-1])
    assert torch.equal(hidden, causal.base_model(IDS).last_hidden_state)
    assert torch.equal(hidden, causal.get_decoder()(IDS).last_hidden_state)
    torch.testing.assert_close(causal.head(hidden), causal(IDS).logits)
    assert isinstance(base, MHLAModel)
    base.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, **TRUSTED).eval()
    torch.testing.assert_close(again(IDS).logits, causal(IDS).logits)
    program = """
model = transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
torch.save(model(torch.arange(9)[None] + 3).last_hidden_state.detach(), sys.argv[2])
"""
    in_a_new_process(program, exported, tmp_path / "hidden.pt")
    got = torch.load(tmp_path / "hidden.pt", weights_only=True)
    torch.testing.assert_close(got, base(torch.arange(9)[None] + 3).last_hidden_state)


def test_a_classifier_of_texts_is_trained_saved_and_run_in_a_pipeline(exported: Path, tmp_path: Path) -> None:
    """Texts are of the class that their first word says; padding on either side changes nothing."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForSequenceClassification.from_pretrained(exported, num_labels=2, **TRUSTED)
    assert isinstance(model, MHLAForSequenceClassification)
    base = AutoModel.from_pretrained(exported, **TRUSTED)
    assert torch.equal(model.model.embedding.weight, base.embedding.weight)
    model.config.pad_token_id = tokenizer.pad_token_id
    texts = [f"{word} town bridges {n}" for n in range(8) for word in ("The river", "def add")]
    rows = [{**tokenizer(text), "labels": place % 2} for place, text in enumerate(texts)]
    arguments = TrainingArguments(
        str(tmp_path / "runs"), max_steps=30, per_device_train_batch_size=8, learning_rate=1e-2, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.2
    trainer.save_model(str(tmp_path / "classifier"))
    program = """
classify = transformers.pipeline("text-classification", model=sys.argv[1], trust_remote_code=True)
print([found["label"] for found in classify(["The river 3", "def add 9", "The river"], batch_size=3)])
"""
    said = in_a_new_process(program, tmp_path / "classifier")
    assert said.strip().splitlines()[-1] == "['LABEL_0', 'LABEL_1', 'LABEL_0']"
    model.eval()
    alone = [model(**tokenizer(text, return_tensors="pt")).logits for text in ("The river", "def add two bridges")]
    for side in ("left", "right"):
        tokenizer.padding_side = side
        inputs = tokenizer(["The river", "def add two bridges"], return_tensors="pt", padding=True)
        torch.testing.assert_close(model(**inputs).logits, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "softmax", "gla"])
def test_heads_of_tokens_and_answers(kind: str, tmp_path: Path) -> None:
    network = small_model(kind).network
    network.save_pretrained(tmp_path)
    tagger = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=3, **TRUSTED)
    out = tagger(IDS, labels=IDS % 3)
    out.loss.backward()
    assert out.logits.shape == (2, 9, 3)
    finder = AutoModelForQuestionAnswering.from_pretrained(tmp_path, **TRUSTED)
    out = finder(IDS, start_positions=torch.tensor([1, 2]), end_positions=torch.tensor([3, 4]))
    out.loss.backward()
    assert out.start_logits.shape == (2, 9)
    for model in (tagger, finder):
        assert torch.equal(model.model.embedding.weight, network.embedding.weight)


FLATTENED: dict[str, dict[str, Any]] = {
    "positions": {},
    "flash": {"return_flash_attn_kwargs": True},
    "flash_alone": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "documents": {"return_seq_idx": True},
    "documents_alone": {"return_seq_idx": True, "return_position_ids": False},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True, "position_ids_start": 1},
    "separator": {"return_flash_attn_kwargs": True, "separator_id": 7},
}


@pytest.mark.parametrize("options", FLATTENED.values(), ids=FLATTENED)
@pytest.mark.parametrize("kind", ["dense", "softmax", "gla"])
def test_flattened_documents_are_what_they_are_alone(kind: str, options: dict[str, Any]) -> None:
    model = small_model(kind).network
    rows = [{"input_ids": torch.randint(3, 300, (length,)).tolist()} for length in (7, 1, 13)]
    inputs = DataCollatorWithFlattening(return_tensors="pt", **options)(rows)
    out = model(**inputs)
    alone = torch.cat([model(torch.tensor([row["input_ids"]])).logits for row in rows], 1)
    torch.testing.assert_close(out.logits, alone, rtol=1e-4, atol=1e-4)
    want = torch.nn.functional.cross_entropy(alone[0, :-1], inputs["labels"][0, 1:])
    torch.testing.assert_close(out.loss, want, rtol=1e-4, atol=1e-4)


def test_documents_packed_in_several_rows_are_what_they_are_alone() -> None:
    model = small_model().network
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
    packed = model(IDS, position_ids=positions, output_hidden_states=True)
    parts = [[IDS[:1, :4], IDS[:1, 4:]], [IDS[1:, :1], IDS[1:, 1:]]]
    alone = [[model(part, output_hidden_states=True) for part in row] for row in parts]
    logits = torch.cat([torch.cat([out.logits for out in row], 1) for row in alone])
    torch.testing.assert_close(packed.logits, logits, rtol=1e-4, atol=1e-4)
    assert len(packed.hidden_states) == len(alone[0][0].hidden_states)
    for layer, states in enumerate(packed.hidden_states):
        expected = torch.cat([torch.cat([out.hidden_states[layer] for out in row], 1) for row in alone])
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def test_marks_of_documents_that_contradict_each_other_are_rejected() -> None:
    model, bounds = small_model().network, torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="come together"):
        model(IDS[:1], cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match="differ"):
        model(IDS[:1], cu_seq_lens_q=bounds, cu_seq_lens_k=torch.tensor([0, 5, 9], dtype=torch.int32))
    with pytest.raises(ValueError, match="give one of the two"):
        model(IDS[:1], cu_seqlens=bounds, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with pytest.raises(ValueError, match="does not fit tokens"):
        model(IDS[:1], seq_idx=torch.zeros(1, 5))
    with pytest.raises(ValueError, match="no common state"):
        model(IDS[:1], seq_idx=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]]), use_cache=True)


def test_an_export_carries_the_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with_template = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    with_template.chat_template = template
    model = small_model()
    model.use_tokenizer(with_template)
    export(model, tmp_path / "export")
    program = """
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
print(repr(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)))
"""
    assert in_a_new_process(program, tmp_path / "export").strip().splitlines()[-1] == repr("user: Hi\n")


def test_generation_stops_at_strings(exported: Path) -> None:
    """``generate`` hands the tokenizer on to the model, as ``transformers serve`` does."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, **TRUSTED).eval()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    inputs = tokenizer("The river", return_tensors="pt")
    whole = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    stop = next(text for token in whole if (text := tokenizer.decode(token)).isascii() and text.strip())
    stopped = model.generate(**inputs, **options, stop_strings=[stop], tokenizer=tokenizer)
    assert tokenizer.decode(stopped[0]).endswith(stop)


def test_transformers_finds_the_class_of_an_export_by_its_name(exported: Path) -> None:
    """``transformers serve`` reads it so, from the module that its server imported first."""
    pytest.importorskip("fastapi")
    program = """
from transformers.cli.serving.model_manager import ModelManager
manager = ModelManager(device="cpu", trust_remote_code=True)
model, tokenizer = manager.load_model_and_processor(sys.argv[1] + "@main")
print(type(model).__name__, manager.get_model_modality(model).name)
manager.shutdown()
"""
    assert in_a_new_process(program, exported).strip().splitlines()[-1] == "MHLAForCausalLM LLM"
