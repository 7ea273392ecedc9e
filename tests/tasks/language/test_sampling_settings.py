"""A run, its export, transformers and the commands sample alike, and a command's own options take precedence."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped import grouped
from lightning import Trainer
from mhla_tasks.language import LanguageModel
from mhla_tasks.language.chat import Chat
from mhla_tasks.language.chat import chat as talk
from mhla_tasks.language.chat_template import CHATML, reply_end_tokens
from mhla_tasks.language.conversation import Conversation
from mhla_tasks.language.export import export, load_model
from mhla_tasks.language.generate import continue_prompts
from mhla_tasks.language.linearized import LinearizedModel
from mhla_tasks.language.prompts import GenerationOptions, sampling_options
from mhla_tasks.language.tokenizer import train_tokenizer
from small import SENTENCES, attention
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, set_seed

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.3, "top_k": 0, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 0, "beams": 3},
]
IDS = ["defaults", "greedy", "top_p", "top_k", "beams"]
SIZES = {"vocab_size": 340, "dim": 32, "depth": 1, "heads": 2, "mlp_width": 64, "initializer_range": 0.2}


def chat_tokenizer() -> Any:
    return train_tokenizer(SENTENCES * 4, 340, chat=True)


def run_model(generation: GenerationOptions, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    module = LanguageModel(
        attention("exponential"), context=256, generation=generation, **grouped(**SIZES, **options)
    ).eval()
    module.use_tokenizer(chat_tokenizer())
    return module


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_a_run_and_its_export_sample_alike(settings: dict[str, Any], tmp_path: Path) -> None:
    module = run_model(GenerationOptions(max_new_tokens=12, **settings))
    export(module, tmp_path / "exported")
    model, tokenizer = load_model(tmp_path / "exported")
    ids = torch.tensor([tokenizer("The river runs")["input_ids"]])
    set_seed(4)
    texts = module.continue_prompts(["The river runs"])
    set_seed(4)
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
    assert tokenizer.batch_decode(tokens[:, ids.shape[1] :], skip_special_tokens=True) == texts


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=IDS[:4])
@pytest.mark.parametrize("place", ["run", "exported"])
def test_commands_sample_as_transformers_does(
    settings: dict[str, Any],
    place: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = run_model(GenerationOptions(**settings))
    export(module, tmp_path / "exported")
    model, tokenizer = load_model(tmp_path / "exported")
    ids = torch.tensor([tokenizer("The river runs")["input_ids"]])
    set_seed(4)
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
    if place == "run":  # what load_model returns for a checkpoint
        monkeypatch.setattr("mhla_tasks.language.generate.load_model", lambda path: (module.network, module.tokenizer))
    unset = {"temperature": None, "top_k": None, "top_p": None, "control_tokens": False}
    capsys.readouterr()
    continue_prompts(str(tmp_path / "exported"), "The river runs", 12, unset, 4, "cpu")
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(tokens[0], skip_special_tokens=True).rstrip("\n")

    network = module.network if place == "run" else model
    asked = torch.tensor([Conversation(tokenizer).ask("Well?")])
    chat = Chat(network, tokenizer, None, 12, {})
    set_seed(4)
    chat.answer("Well?")
    set_seed(4)
    stops = chat._stops()
    answered = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=12, eos_token_id=stops)[0]
    answered = answered[:-1] if int(answered[-1]) in stops else answered
    assert chat.conversation.ids == answered.tolist()
    assert tokenizer.chat_template == CHATML


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("seed", [0, 7])
def test_one_seed_gives_one_text_from_a_checkpoint_and_its_export(
    command: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a checkpoint draws random numbers for a model whose weights it then replaces."""
    module = run_model(GenerationOptions())
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    export(module, tmp_path / "exported")
    texts = []
    for name in ("last.ckpt", "exported"):
        capsys.readouterr()
        if command == "generate":
            continue_prompts(str(tmp_path / name), "The river runs", 12, {}, seed, "cpu")
        else:
            monkeypatch.setattr("sys.stdin", io.StringIO("Well?\nAnd?\n"))
            talk(str(tmp_path / name), None, 12, {}, seed, "cpu")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 10


@pytest.mark.parametrize(
    ("saved", "requested", "wanted"),
    [
        ({}, {}, {}),
        ({}, {"top_k": 5}, {"top_k": 5}),
        ({"do_sample": True}, {}, {"temperature": 1.0, "top_k": 50, "top_p": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"top_p": 0.5}, {"temperature": 0.6, "top_k": 50, "top_p": 0.5}),
        ({"do_sample": True, "top_k": 0}, {"temperature": None}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        ({"do_sample": False}, {}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": False}, {"top_k": 5}, {"top_k": 5}),
        ({"do_sample": False, "num_beams": 4}, {"temperature": 0.5}, {"temperature": 0.5}),
    ],
)  # fmt: skip
def test_options_of_the_user_come_before_saved_ones(
    saved: dict[str, Any], requested: dict[str, Any], wanted: dict[str, Any]
) -> None:
    options = sampling_options(GenerationConfig(**saved), requested)
    assert options == wanted
    assert GenerationOptions(**options).for_generate()["num_beams"] == 1


ORIGINAL = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
UNSAID = {"eos_token_id": 0}


@pytest.mark.parametrize(
    ("original", "generation", "wanted"),
    [
        (ORIGINAL, GenerationOptions(), (True, 0.6, None, 0.9)),
        (ORIGINAL, GenerationOptions(max_new_tokens=9), (True, 0.6, None, 0.9)),
        (ORIGINAL, GenerationOptions(temperature=0.3), (True, 0.3, 50, 1.0)),
        (ORIGINAL, GenerationOptions(temperature=0), (False, None, None, None)),
        (UNSAID, GenerationOptions(), (None, None, None, None)),
        (UNSAID, GenerationOptions(temperature=0.3), (True, 0.3, 50, 1.0)),
    ],
)
def test_a_linearized_model_keeps_the_settings_of_the_original(
    original: dict[str, Any], generation: GenerationOptions, wanted: tuple[Any, ...], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    source = LlamaForCausalLM(LlamaConfig(vocab_size=340, **sizes))
    source.save_pretrained(tmp_path / "source")
    (tmp_path / "source/generation_config.json").write_text(json.dumps(original))
    module = LinearizedModel(str(tmp_path / "source"), context=64, generation=generation)
    module.configure_model()
    module.use_tokenizer(chat_tokenizer())
    export(module.eval(), tmp_path / "exported")
    model, _ = load_model(tmp_path / "exported")
    settings = model.generation_config
    assert (settings.do_sample, settings.temperature, settings.top_k, settings.top_p) == wanted
    if (
        original is ORIGINAL or generation.temperature == 0.3
    ):  # else it does not say how, and predict has its own defaults
        set_seed(4)
        texts = module.continue_prompts(["The river"])
        ids = torch.tensor([module.tokenizer("The river")["input_ids"]])
        set_seed(4)
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=generation.max_new_tokens)
        assert module.tokenizer.batch_decode(tokens[:, ids.shape[1] :], skip_special_tokens=True) == texts


@pytest.mark.parametrize("template", ["chatml", "plain text", "broken", "none"])
def test_generated_texts_end_where_a_reply_of_the_template_does(template: str, tmp_path: Path) -> None:
    """In the run, in its export, and with transformers' own ``generate``, not only in ``lightning chat``."""
    module, tokenizer = run_model(GenerationOptions(max_new_tokens=12, temperature=0)), chat_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert module.network.generation_config.eos_token_id == sorted([tokenizer.eos_token_id, end])
    assert next(iter(module.usage)) == "Talk to it"  # what a report suggests first
    module.use_tokenizer(tokenizer)  # again, as a resumed run does
    assert module.network.generation_config.eos_token_id == sorted([tokenizer.eos_token_id, end])
    assert module.network.config.eos_token_id == tokenizer.eos_token_id
    export(module, tmp_path / "exported")
    model, _ = load_model(tmp_path / "exported")
    prompt = torch.tensor([Conversation(tokenizer).ask("hello there")])

    def third(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Let the third token, and no other one, be the one that ends a turn."""
        scores[:, [end, tokenizer.eos_token_id]] = -torch.inf
        if ids.shape[1] == prompt.shape[1] + 2:
            scores[:, end] = torch.inf
        return scores

    out = model.generate(prompt, max_new_tokens=12, do_sample=False, logits_processor=[third])
    assert out.shape[1] == prompt.shape[1] + 3
    assert out[0, -1] == end
    tokenizer.chat_template = {
        "chatml": CHATML,
        "plain text": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
        "broken": "{{ raise_exception('no roles') }}",
        "none": None,
    }[template]
    assert reply_end_tokens(tokenizer) == ({end} if template == "chatml" else set())
