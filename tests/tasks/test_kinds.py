"""Every attention kind beside mhla, linear and softmax in every domain: one command on the embedded data, and the next tools."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from processes import fork_server, run_in_turn

from lightning_mhla.attention import BlockLayout, build_attention
from lightning_mhla.attention.config import KINDS, AttentionConfig

ROOT = Path(__file__).parents[2]
NEW = ("retention", "gla", "gated_deltanet", "mamba2")
FOR_IMAGES = ("rala", "mala")
SHORT = ["--trainer.max_steps=2", "--trainer.max_epochs=-1", "--trainer.val_check_interval=2",
         "--trainer.check_val_every_n_epoch=null", "--trainer.limit_val_batches=1", "--trainer.accelerator=cpu",
         "--trainer.enable_progress_bar=false", "--trainer.num_sanity_val_steps=0"]  # fmt: skip
SMALL = {
    "classification/digits": ["--model.shape.depth=2"],
    "diffusion/digits": ["--model.shape.depth=2", "--model.sampling.steps=2"],
    "language/stdlib": ["--model.shape.depth=2", "--model.shape.dim=32", "--model.context=64",
                        "--model.vocab_size=512", "--data.vocab_size=512",
                        "--data.context=64", "--model.generation.max_new_tokens=4"],
    "text_to_image/digits_finetune": ["--model.transformer.num_layers=2", "--model.sampling.steps=2"],
    "video/digits_finetune": ["--model.transformer.num_layers=2", "--model.sampling.steps=2"],
}  # fmt: skip


def run(folder: Path, *words: str) -> None:
    status, said = fork_server().run(*words, folder=folder)
    assert status == 0, said[-4000:]


@pytest.fixture(scope="module", params=SMALL)
def domain(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def start(domain: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a model with its own attention, for domains that fine-tune one."""
    if "finetune" not in domain:
        return []
    folder = tmp_path_factory.mktemp("pretrained")
    config = str(ROOT / f"configs/{domain.replace('finetune', 'pretrain')}.yaml")
    run(folder, "fit", "--config", config, *SMALL[domain], *SHORT, "--trainer.callbacks=[]")
    return [f"--model.pretrained={next(folder.rglob('*.ckpt'))}"]


@pytest.fixture(scope="module")
def runs(domain: str, start: list[str], tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    """A folder with a run of each kind, by its name."""
    folder = tmp_path_factory.mktemp("runs")
    options = ["--config", str(ROOT / f"configs/{domain}.yaml"), *SMALL[domain], *SHORT, *start]
    if domain == "language/stdlib":
        options.append(f"--data.cache_dir={cache_dir}")
    if domain.startswith(("diffusion", "text_to_image", "video")):
        options.append("--trainer.callbacks=[]")  # samples and their scores have tests of their own
    calls = [["fit", *options, f"--model.attention.kind={kind}", f"--run_dir={kind}"] for kind in NEW]
    for status, said in run_in_turn(*calls, folder=folder):
        assert status == 0, said[-4000:]
    return folder


@pytest.mark.parametrize("kind", NEW)
def test_one_command_trains(kind: str, runs: Path) -> None:
    checkpoint = sorted((runs / kind).rglob("*.ckpt"))[-1]
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    marks = {
        "retention": "norm.weight",
        "gla": "reduce.weight",
        "gated_deltanet": "beta.weight",
        "mamba2": "through.weight",
    }
    assert any(name.endswith(marks[kind]) for name in weights)
    assert all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("kind", FOR_IMAGES)
def test_kinds_for_images_train_there_and_are_refused_for_text(kind: str, tmp_path: Path, cache_dir: Path) -> None:
    options = {name: ["--trainer.callbacks=[]"] for name in ("classification/digits", "diffusion/digits")}
    options["language/stdlib"] = [f"--data.cache_dir={cache_dir}"]
    calls = [
        [
            "fit",
            "--config",
            str(ROOT / f"configs/{name}.yaml"),
            *SMALL[name],
            *SHORT,
            *more,
            f"--model.attention.kind={kind}",
        ]
        for name, more in options.items()
    ]
    *trained, (status, said) = run_in_turn(*calls, folder=tmp_path)
    assert [status for status, _ in trained] == [0, 0], trained
    assert len(list(tmp_path.glob("runs/*/version_0/checkpoints/last.ckpt"))) == 2
    assert status == 1, said
    assert f"attention kind {kind!r} sees every token; choose another" in said.strip().splitlines()[-1]


@pytest.mark.parametrize("kind", NEW)
def test_trained_on_packed_documents_it_writes_exports_and_is_scored(
    kind: str, tmp_path: Path, cache_dir: Path
) -> None:
    config = str(ROOT / "configs/language/stdlib.yaml")
    options = [*SMALL["language/stdlib"], *SHORT, f"--model.attention.kind={kind}",
               f"--data.cache_dir={cache_dir}", "--data.separate_documents=true"]  # fmt: skip
    checkpoint = "runs/stdlib/version_0/checkpoints/last.ckpt"
    calls = [["fit", "--config", config, *options], ["generate", checkpoint, "import", "--max_new_tokens=4"],
             ["export", checkpoint, "exported"]]  # fmt: skip
    for status, said in run_in_turn(*calls, folder=tmp_path):
        assert status == 0, said[-4000:]
    status, said = fork_server().program(
        "import torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from lm_eval.models.huggingface import HFLM\n"
        "from lm_eval.api.instance import Instance\n"
        "model = AutoModelForCausalLM.from_pretrained('exported', trust_remote_code=True).eval()\n"
        "tokenizer = AutoTokenizer.from_pretrained('exported')\n"
        "scorer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)\n"
        "pairs = [('import', ' os'), ('def main(', 'self):\\n    return 1')]\n"
        "scores = scorer.loglikelihood([Instance('loglikelihood', {}, pair, 0) for pair in pairs])\n"
        "for (context, text), (found, _) in zip(pairs, scores):\n"
        "    ids = tokenizer(context + text, return_tensors='pt')['input_ids']\n"
        "    first = len(tokenizer(context)['input_ids'])\n"
        "    each = model(ids).logits.log_softmax(-1)[0, first - 1 : -1]\n"
        "    want = each.gather(1, ids[0, first:, None]).sum()\n"
        "    assert abs(float(want) - found) < 1e-3, (want, found)\n"
        "print('same scores')\n",
        folder=tmp_path,
    )
    assert status == 0, said
    assert "same scores" in said


def test_what_a_kind_cannot_do_is_refused_in_one_line_before_training(tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "plainkind.py").write_text(
        "from lightning_mhla.attention import Attention\n\n"
        "class Plain(Attention, kind='plain'):\n"
        "    handles = ('rotary',)\n"
        "    causal_only = True\n"
        "    def attend(self, inputs):\n"
        "        return inputs.v.cumsum(1)\n"
    )
    plain = ["--allow=plainkind", "--model.attention.kind=plain"]
    language = [*SMALL["language/stdlib"], *SHORT, f"--data.cache_dir={cache_dir}"]
    stdlib, digits = (str(ROOT / f"configs/{name}.yaml") for name in ("language/stdlib", "classification/digits"))
    cases = [
        (
            (stdlib, *language, *plain),
            "'plain' cannot generate: it has no continue_from; leave out predict and TextSamples",
        ),
        (
            (stdlib, *language, *plain, "--trainer.callbacks=[]", "--data.separate_documents=true"),
            "'plain' does not take cu_seqlens: do not pack sequences (separate_documents: false)",
        ),
        ((digits, *SHORT, *plain), "'plain' is causal only"),
    ]
    calls = [["fit", "--config", *options] for options, _ in cases]
    for (status, said), (_, message) in zip(run_in_turn(*calls, folder=tmp_path), cases, strict=True):
        assert status == 1, said
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, said
        assert message in errors[0]
        assert "Traceback" not in said
    assert not list(tmp_path.rglob("*.ckpt"))


def test_recurrences_do_not_share_sequences() -> None:
    for kind in NEW:
        layer = build_attention(AttentionConfig(kind=kind), 8, 2, BlockLayout((8,), (1,)), causal=True)
        with pytest.raises(ValueError, match=f"'{kind}' does not take share: train without sequence parallelism"):
            layer.require("share")


def test_every_kind_is_in_the_help_and_in_this_file() -> None:
    ours = {name for name, kind in KINDS.items() if kind.__module__.startswith("lightning_mhla.")}
    assert ours == {"mhla", "mhla_window", "linear", "softmax", "gated_conv", *FOR_IMAGES, *NEW}
    for name in ours:
        assert name in (AttentionConfig.__doc__ or "")


def test_the_help_lists_the_options_of_every_kind_with_their_defaults() -> None:
    text = " ".join((AttentionConfig.__doc__ or "").partition("options: ")[2].split())
    clauses = text.replace(". ", "; ").split("; ")
    for name, kind in KINDS.items():
        if kind.Options is None or not kind.__module__.startswith("lightning_mhla."):
            continue
        for field in fields(kind.Options):
            (clause,) = (clause for clause in clauses if name in clause and f"{field.name} (" in clause)
            assert f"default {field.default!r})" in clause.partition(f"{field.name} (")[2], (name, field.name)
