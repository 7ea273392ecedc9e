"""``lightning linearize`` on small pretrained models of three kinds, each used by the next tool in a new process."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from PIL import Image
from test_encoders import MiniTexts, small_bert

from lightning_mhla import load_swapped

LLAMA = {
    "vocab_size": 0, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip


def small_llama(folder: Path, texts: MiniTexts) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": len(texts.tokenizer)}))
    model.save_pretrained(folder)
    texts.tokenizer.save_pretrained(folder)
    return folder


def small_dino(folder: Path) -> Path:
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    Dinov2Model(Dinov2Config(**sizes)).save_pretrained(folder)
    return folder


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "mhla_tasks", "linearize", *words]


def linearize(server: ForkServer, *words: str) -> str:
    status, said = server.run("linearize", *words, module="mhla_tasks")
    assert status == 0, said[-3000:]
    return said


def use(page: str, folder: Path, ending: str) -> str:
    """Run the code that the report gives, followed by ``ending``, in a new process; return what it prints."""
    code = html.unescape(page.partition("Use it</h2><pre>")[2].partition("</pre>")[0])
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{ending}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> MiniTexts:
    return MiniTexts(tmp_path_factory.mktemp("texts"))


OPTIONS = ["--length=64", "--batch_size=4", "--val_batches=2", "--accelerator=cpu", "--keep=0.5"]


def test_a_language_model_and_the_same_options_again(texts: MiniTexts, server: ForkServer, tmp_path: Path) -> None:
    source = small_llama(tmp_path / "llama", texts)
    words = [str(source), str(tmp_path / "out"), "--train", str(texts.train), "--val", str(texts.val), *OPTIONS]
    said = linearize(server, *words, "--steps", "4", "4", "--block_size=16")
    assert "val/perplexity" in said
    assert "report:" in said
    work = tmp_path / "out-work"
    results = json.loads((work / "results.json").read_text())
    assert sorted(results["layers"]["layer_kinds"]) == ["keep", "replace"]
    assert len(results["positions"]["original"]) == len(results["positions"]["linearized"]) == 4
    page = (work / "report.html").read_text()
    assert "Speed by length" in page
    assert str(tmp_path) not in page, "the page is to be shown to others"
    model = load_swapped(tmp_path / "out")
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)
    assert use(page, tmp_path, "assert tokens.shape[1] > 10").startswith("The river")
    again = linearize(server, *words, "--steps", "4", "4", "--block_size=16")
    assert "matching" not in again, "all steps are complete"
    status, said = server.run("linearize", *words, "--steps", "5", "4", module="mhla_tasks")
    assert status == 1
    message = (
        "out-work was begun with --steps=4 4, not 5 4; --block_size=16, not 128. Continue with the same options, choose"
    )
    assert message in said
    assert f"or delete {work} to begin again" in said


def test_a_text_encoder_with_a_budget_after_two_wrong_calls(
    texts: MiniTexts, server: ForkServer, tmp_path: Path
) -> None:
    source = small_bert(tmp_path / "bert", texts.tokenizer)  # for 128 tokens, fewer than the default length
    _, *options = OPTIONS
    words = [str(source), str(tmp_path / "out"), "--train", str(texts.train), "--budget=2s", "--block_size=8", *options]
    status, said = server.run("linearize", *words, "--val", str(texts.val), "--length=512", module="mhla_tasks")
    assert status == 1
    assert f"--length=512 is above the 128 tokens that {source} allows; use --length=128 or less" in said
    assert not (tmp_path / "out-work").exists(), "nothing was written"
    (tmp_path / "short.txt").write_text("Too short.")
    status, said = server.run("linearize", *words, "--val", str(tmp_path / "short.txt"), module="mhla_tasks")
    assert status == 1
    assert "no paragraph of at least 40 characters" in said
    said = linearize(server, *words, "--val", str(texts.val))
    assert f"out-work was begun with --val={tmp_path}/short.txt, not {texts.val}; nothing was trained" in said
    assert "warning:" not in said, "most samples exceed the window of 24 tokens"
    assert "1 of 2 layers keeps softmax: layer " in said
    assert json.loads((tmp_path / "out-work/choices.json").read_text())["settings"]["length"] == 128
    plan = json.loads((tmp_path / "out-work/plan.json").read_text())
    assert all(steps >= 4 for steps in plan["steps"])
    assert all(seconds > 0 for seconds in plan["seconds_per_step"])
    results = json.loads((tmp_path / "out-work/results.json").read_text())
    assert results["original"]["val/cosine"] == pytest.approx(1, abs=1e-5)
    assert results["swapped"]["val/cosine"] < 0.9999
    assert results["tuning"]["metrics"]["val/loss"] < results["swapped"]["val/loss"]
    ending = (  # the longer text, which is not padded: this tokenizer pads on the left, and BERT counts positions from there
        "import torch\n"
        "alone = model(**tokenizer('Another text.', return_tensors='pt')).last_hidden_state.mean(1)\n"
        "print(tuple(embeddings.shape), torch.allclose(embeddings[1:], alone, atol=1e-5))"
    )
    assert use((tmp_path / "out-work/report.html").read_text(), tmp_path, ending) == "(2, 32) True\n"


def test_an_image_encoder(server: ForkServer, tmp_path: Path) -> None:
    source = small_dino(tmp_path / "dino")
    for stage, count in (("train", 8), ("val", 4)):
        folder = tmp_path / "photos" / stage / "photo"
        folder.mkdir(parents=True)
        for number in range(count):
            generator = torch.Generator().manual_seed(number)
            pixels = torch.randint(256, (60, 70, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    photos = tmp_path / "photos"
    linearize(server, str(source), str(tmp_path / "out"), "--train", str(photos / "train"), "--val", str(photos / "val"), "--steps", "4", "4",
        "--length=56", "--batch_size=4", "--val_batches=1", "--accelerator=cpu", "--keep=0", "--block_size=4",
    )  # fmt: skip
    speed = json.loads((tmp_path / "out-work/results.json").read_text())["speed"]
    assert "56" in speed, "the side of the training samples"
    program = (
        "import sys, torch; from transformers import AutoModel\n"
        "model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(tuple(model(pixel_values=torch.zeros(1, 3, 84, 84)).last_hidden_state.shape))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "(1, 37, 32)", done.stderr[-2000:]


def test_a_second_run_that_makes_the_model_worse_is_said_and_its_best_state_exported(
    texts: MiniTexts, server: ForkServer, tmp_path: Path
) -> None:
    source = small_bert(tmp_path / "bert", texts.tokenizer)
    words = [str(source), str(tmp_path / "out"), "--train", str(texts.train), "--val", str(texts.val), *OPTIONS]
    said = linearize(server, *words, "--steps", "4", "8", "--block_size=32", "--keep=0", "--tune_lr=0.3")
    warning = "100% of the held-out samples have at most 96 tokens and fit in the softmax window of mhla_window"
    assert f"warning: {warning}" in said
    assert warning in (tmp_path / "out-work/report.html").read_text()
    assert "the second run made the model worse: val/cosine" in said
    results = json.loads((tmp_path / "out-work/results.json").read_text())
    curve = [value for _, value in results["tuning"]["curves"]["val/cosine"]]
    assert len(curve) == 4
    assert results["tuning"]["metrics"]["val/cosine"] == max(curve)
    best = next((tmp_path / "out-work/tuning/checkpoints").glob("epoch=*-step=*.ckpt"))
    weights = torch.load(best, weights_only=True)["state_dict"]
    exported = load_swapped(tmp_path / "out").state_dict()
    learned = [name for name in exported if f"network.{name}" in weights and "mixing." not in name]  # those are bounded
    assert len(learned) > 40
    assert all(torch.equal(exported[name], weights[f"network.{name}"]) for name in learned)


STEPS = 200
"""Steps of a run that takes seconds after its first checkpoint, in which a signal reaches it."""

RESUMABLE = 75
"""Exit status of a run that SIGTERM stopped."""


def training_process(command_number: int, folder: Path) -> int | None:
    """Return the number of the process in which a command trains the run in a folder; None if there is none at present."""
    for number in Path(f"/proc/{command_number}/task/{command_number}/children").read_text().split():
        try:
            words = Path(f"/proc/{number}/cmdline").read_text().split("\0")
        except OSError:  # it has ended since
            continue
        if str(folder) in words:
            return int(number)
    return None


@pytest.fixture(scope="module")
def long_run(
    texts: MiniTexts, server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Source and options of a command that runs long enough to be stopped, and the weights of the undisturbed run."""
    folder = tmp_path_factory.mktemp("long-run")
    source = small_bert(folder / "bert", texts.tokenizer)
    options = ["--train", str(texts.train), "--val", str(texts.val), *OPTIONS, "--steps", "6", str(STEPS)]
    linearize(server, str(source), str(folder / "out"), *options)
    return [str(source), *options], load_swapped(folder / "out").state_dict()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_and_called_again_it_ends_with_the_same_weights(
    number: signal.Signals, long_run: tuple[list[str], dict[str, torch.Tensor]], server: ForkServer, tmp_path: Path
) -> None:
    """SIGTERM goes to the command, and SIGKILL to the process that trains, as if the system had no memory left."""
    (source, *options), undisturbed = long_run
    words = [source, str(tmp_path / "killed"), *options]
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command(*words), stderr=stream, stdout=stream)
    work = tmp_path / "killed-work" / "tuning"
    trainer = None
    while process.poll() is None and (trainer is None or not any(work.glob("checkpoints/*.ckpt"))):
        trainer = training_process(process.pid, work)
        time.sleep(0.02)
    assert process.poll() is None, f"it ended before the signal:\n{log.read_text()}"
    assert trainer is not None
    os.kill(trainer if number == signal.SIGKILL else process.pid, number)
    status = process.wait(timeout=120)
    said = log.read_text()
    assert status == (128 + signal.SIGKILL if number == signal.SIGKILL else RESUMABLE), said
    ending = "killed by signal 9, as if memory ran out" if number == signal.SIGKILL else "ended with status 75"
    assert f"{ending}; the same command continues here" in said
    advice = "to need less memory, use a smaller --batch_size or --length with a different --work"
    assert (advice in said) == (number == signal.SIGKILL)
    linearize(server, *words)
    weights = load_swapped(tmp_path / "killed").state_dict()
    assert all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["nowhere", "out", "--train", "a", "--val", "b"],
            "nowhere is not a checkpoint, a folder or a model on the hub",
        ),
        (["missing.gguf", "out", "--train", "a", "--val", "b"], "missing.gguf does not exist"),
        (["x", "out", "--train", "a", "--val", "b", "--keep=1"], "--keep=1.0 must be a share of the layers"),
        (["x", "out", "--train", "a", "--val", "b", "--steps", "-1", "5"], "--steps"),
        (["x", "out", "--train", "a", "--val", "b", "--val_batches=0"], "--val_batches"),
        (["x", "out", "--train", "a", "--val", "b", "--batch_size=-2"], "--batch_size"),
        (["x", "out", "--train", "a", "--val", "b", "--budget=5"], "'5' is not a time such as 90s, 30m or 2h"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, server: ForkServer, tmp_path: Path) -> None:
    status, said = server.run("linearize", *words, module="mhla_tasks", folder=tmp_path)
    assert status in (1, 2)
    assert message in said
    assert "Traceback" not in said
