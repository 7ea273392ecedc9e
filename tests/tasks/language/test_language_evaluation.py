"""lm-evaluation-harness three ways: its own command on an exported folder, our command on a checkpoint, the callback."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lm_eval.models.huggingface import HFLM
from mhla_tasks.language.callbacks import TokenThroughput
from mhla_tasks.language.evaluation.callback import LMEval
from mhla_tasks.language.evaluation.lm import MHLALM, cut_middle
from mhla_tasks.language.evaluation.script import main
from mhla_tasks.language.evaluation.tasks import local_data
from mhla_tasks.language.export import export, load_checkpoint, load_model
from processes import run_apart
from small import SENTENCES, small_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lightning_mhla.training.optim import OptimizerConfig

TASKS = ["mmlu_abstract_algebra", "mmlu_anatomy", "longbench_2wikimqa", "longbench_trec"]
STEPS = 120


@pytest.fixture(scope="module")
def trained(tokenizer: Any, task_data: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Train a model on one answer; its checkpoint has a weight average, and the results of the callback are returned."""
    folder = tmp_path_factory.mktemp("trained")
    texts = [f"{SENTENCES[i % 5]}\n\nQuestion: who wrote letter {i % 4}?\nAnswer: Maria\n" for i in range(80)]
    tokens = torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in ids])
    rows = [{"tokens": row} for row in tokens.unfold(0, 65, 64)]
    optimizer = OptimizerConfig(lr=1e-2, schedule="constant")
    model = small_model(optimizer=optimizer, ema_decay=0.9, initializer_range=0.02)
    model.use_tokenizer(tokenizer)
    callback = LMEval(TASKS, every_n_steps=STEPS // 2, batch_size=2, data_dir=str(task_data))
    keep = ModelCheckpoint(folder, filename="last", every_n_train_steps=STEPS)
    trainer = Trainer(
        max_steps=STEPS, accelerator="cpu", callbacks=[TokenThroughput(), callback, keep],
        logger=TensorBoardLogger(folder, name="run"),
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model.train(), DataLoader(rows, batch_size=8, shuffle=True))
    return SimpleNamespace(folder=folder, checkpoint=folder / "last.ckpt", scores=callback.scores)


def results_in(folder: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Read the scores of each task, and all samples."""
    (scores,) = folder.rglob("results_*.json")
    samples = {}
    for path in folder.rglob("samples_*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        samples[path.name.removeprefix("samples_").rsplit("_", 1)[0]] = sorted(rows, key=lambda row: row["doc_id"])
    return json.loads(scores.read_text()), samples


@pytest.mark.timeout(600)
def test_three_ways_to_the_same_numbers(
    trained: SimpleNamespace, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(load_checkpoint(trained.checkpoint), tmp_path / "exported")
    common = ["--tasks", ",".join(TASKS), "--batch_size", "2", "--log_samples"]
    arguments = f"pretrained={tmp_path / 'exported'},trust_remote_code=True,dtype=float32"
    stock = [Path(sys.executable).with_name("lm_eval"), "--model", "hf", "--model_args", arguments, "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [*stock, *common, "--output_path", tmp_path / "stock"], cwd=task_data, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    theirs, their_samples = results_in(tmp_path / "stock")

    ours_at = ["--model_args", f"pretrained={trained.checkpoint}", "--data_dir", str(task_data)]
    monkeypatch.setattr(sys, "argv", ["mhla-lm-eval", *ours_at, *common, "--output_path", str(tmp_path / "ours")])
    main()
    ours, our_samples = results_in(tmp_path / "ours")

    cut = ours["config"]["prompts_cut"]
    assert cut == {"longbench_2wikimqa": 0, "longbench_trec": 0.5, "mmlu_abstract_algebra": 0, "mmlu_anatomy": 0}
    assert ours["results"]["longbench_2wikimqa"]["qa_f1_score,none"] > 0
    for task, share in cut.items():
        for metric, value in ours["results"][task].items():
            name = f"{task}/{metric.removesuffix(',none')}"
            if isinstance(value, float) and "stderr" not in metric:
                assert value == pytest.approx(trained.scores[name], rel=1e-6), name
                if not share:
                    assert value == pytest.approx(theirs["results"][task][metric], rel=1e-6), name
        assert trained.scores[f"{task}/prompts_cut"] == share
        for our, their in zip(our_samples[task], their_samples[task], strict=True):
            if task == "longbench_trec" and our["doc_id"] >= 2:
                continue
            for found, wanted in zip(our["resps"], their["resps"], strict=True):
                if isinstance(found[0], str):
                    assert found == wanted
                else:
                    assert float(found[0][0]) == pytest.approx(float(wanted[0][0]), rel=1e-4)


@pytest.mark.parametrize("tool", ["evaluate", "generate"])
def test_tools_say_which_checkpoint_they_use(
    trained: SimpleNamespace, task_data: Path, server: ForkServer, tmp_path: Path, tool: str
) -> None:
    """On standard error: standard output is for results."""
    checkpoint = str(trained.checkpoint)
    words = {
        "evaluate": ["--model_args", f"pretrained={checkpoint}", "--tasks", TASKS[0], "--data_dir", str(task_data)],
        "generate": [checkpoint, "a", "--max_new_tokens", "2", "--device", "cpu"],
    }[tool]
    status, said, errors = run_apart(server, tool, *words, folder=tmp_path)
    assert status == 0, errors[-3000:]
    assert f"using checkpoint {checkpoint}: epoch " in errors
    assert f"step {STEPS}" in errors
    assert "using checkpoint" not in said


def test_callback_logs_every_metric_at_every_step(trained: SimpleNamespace) -> None:
    files = sorted(trained.folder.rglob("lm_eval/step*.json"))
    assert [path.name for path in files] == [f"step{STEPS // 2:07d}.json", f"step{STEPS:07d}.json"]
    assert json.loads(files[-1].read_text())["scores"] == trained.scores
    assert {name.split("/")[0] for name in trained.scores} == set(TASKS)
    events = EventAccumulator(str(trained.folder / "run/version_0")).Reload()
    for name, value in trained.scores.items():
        points = events.Scalars(f"lm_eval/{name}")
        assert [point.step for point in points] == [STEPS // 2, STEPS], name
        assert points[-1].value == pytest.approx(value), name


def test_the_time_of_an_evaluation_is_left_out_once(trained: SimpleNamespace) -> None:
    events = EventAccumulator(str(trained.folder / "run/version_0")).Reload()
    undisturbed, disturbed = (point.value for point in events.Scalars("train/tokens_per_second"))
    assert 0 < disturbed < 10 * undisturbed


@pytest.mark.parametrize("option", ["--data_dir", "--allow"])
def test_an_option_without_its_value_is_told(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mhla-lm-eval", "--tasks", "mmlu", option])
    with pytest.raises(SystemExit) as ended:
        main()
    assert f"{option} needs a value" in f"{ended.value.code}{capsys.readouterr().err}"


def test_log_likelihood_does_not_depend_on_the_batch(exported: Path) -> None:
    model, tokenizer = load_model(exported)
    requests = [((text, "x"), tokenizer(text)["input_ids"], tokenizer(" old town")["input_ids"]) for text in SENTENCES]
    together = MHLALM(model, tokenizer, batch_size=5)._loglikelihood_tokens(requests, disable_tqdm=True)
    alone = MHLALM(model, tokenizer, batch_size=1)._loglikelihood_tokens(requests, disable_tqdm=True)
    for (a, a_greedy), (b, b_greedy) in zip(together, alone, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
        assert a_greedy == b_greedy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("continuation", [1, 5, 40])
def test_log_likelihoods_are_sums_in_float32_of_a_model_in_any_dtype(
    dtype: str, continuation: int, exported: Path
) -> None:
    lm = MHLALM(str(exported), dtype=dtype, device="cpu")
    assert lm.model.dtype == getattr(torch, dtype)
    tokens = torch.randint(5, 200, (50,), generator=torch.Generator().manual_seed(continuation)).tolist()
    prompt, target = tokens[:-continuation], tokens[-continuation:]
    ((score, _),) = lm._loglikelihood_tokens([(("", ""), prompt, target)], disable_tqdm=True)
    with torch.no_grad():
        logits = lm.model(torch.tensor([tokens[:-1]])).logits[0, -continuation:]
    assert logits.dtype == lm.model.dtype
    exact = logits.double().log_softmax(-1).gather(1, torch.tensor(target)[:, None]).sum().item()
    assert score == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16)]
)
def test_the_callback_evaluates_in_the_precision_of_training(
    precision: Any, dtype: torch.dtype, tokenizer: Any, task_data: Path, tmp_path: Path
) -> None:
    model = small_model(optimizer=OptimizerConfig(lr=1e-3))
    model.use_tokenizer(tokenizer)
    seen = set()
    model.network.head.register_forward_hook(lambda module, args, out: None if module.training else seen.add(out.dtype))
    trainer = Trainer(
        max_steps=1, accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False,
        callbacks=[LMEval(TASKS, limit=1, data_dir=str(task_data))], default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model.train(), DataLoader([{"tokens": torch.arange(65)}], batch_size=1))
    assert seen == {dtype}


def test_prompts_are_cut_in_the_middle_as_longbench_does(exported: Path) -> None:
    assert cut_middle(list(range(10)), 4) == [0, 1, 8, 9]
    assert cut_middle(list(range(10)), 5) == [0, 1, 7, 8, 9]
    assert cut_middle([1, 2], 5) == [1, 2]
    model, tokenizer = load_model(exported)
    lm = MHLALM(model, tokenizer, max_length=64)
    texts = ["A prime number", "The river " * 60 + "end"]
    ids, mask = lm.tok_batch_encode(texts, left_truncate_len=20)
    whole = tokenizer(texts[1])["input_ids"]
    assert ids[1].tolist() == whole[:10] + whole[-10:]
    assert ids[0][mask[0].bool()].tolist() == tokenizer(texts[0])["input_ids"]
    left, _ = MHLALM(model, tokenizer, max_length=64, cut="left").tok_batch_encode(texts, left_truncate_len=20)
    assert left[1].tolist() == whole[-20:]


def test_checkpoints_and_folders_hold_the_average(trained: SimpleNamespace, tmp_path: Path) -> None:
    average, live = load_checkpoint(trained.checkpoint), load_checkpoint(trained.checkpoint, live=True)
    assert not torch.equal(average.network.embedding.weight, live.network.embedding.weight)
    export(average, tmp_path)
    model, tokenizer = load_model(tmp_path)
    ids = tokenizer(SENTENCES[0], return_tensors="pt")["input_ids"]
    assert torch.equal(model(ids).logits, average.network(ids).logits)
    assert tokenizer(SENTENCES)["input_ids"] == average.tokenizer(SENTENCES)["input_ids"]


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("echo executed",)

    torch.save({"state_dict": {}, "hyper_parameters": Evil()}, tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match="not a checkpoint that can be read safely"):
        load_model(tmp_path / "evil.ckpt")
    (tmp_path / "short.ckpt").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        load_model(tmp_path / "short.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"is not a checkpoint of .*LanguageModel"):
        load_model(tmp_path / "other.ckpt")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_model(tmp_path / "none.ckpt")


def test_changed_local_data_is_read_anew(task_data: Path, tmp_path: Path) -> None:
    """``datasets`` keeps local data sets by their layout alone, and would give the first copy for ever."""
    import datasets

    copy = tmp_path / "data"
    shutil.copytree(task_data, copy)
    path = copy / "cais/mmlu/anatomy/test.jsonl"
    for _ in range(2):
        with local_data(copy):
            rows = datasets.load_dataset("cais/mmlu", "anatomy")["test"]
        assert len(rows) == len(path.read_text().splitlines())
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))


def test_tasks_that_are_not_there(task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    fit = SimpleNamespace(strategy=None)
    with pytest.raises(ValueError, match=r"no task 'mmlu_anatomi'; did you mean mmlu_anatomy"):
        LMEval(["mmlu_anatomi"], data_dir=str(task_data)).on_fit_start(fit, None)  # type: ignore[arg-type]
    with pytest.raises(
        FileNotFoundError, match=rf"data set cais/mmlu is neither at {tmp_path}/cais/mmlu nor available"
    ):
        LMEval(["mmlu_anatomy"], data_dir=str(tmp_path)).on_fit_start(fit, None)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="is not a folder"), local_data(tmp_path / "none"):
        pass
    with pytest.raises(ValueError, match="tasks is empty"):
        LMEval([])


def test_the_share_of_cut_prompts_is_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = MHLALM.__new__(MHLALM)
    lm._world_size, lm.prompts, lm.prompts_cut = 2, Counter(trec=3, other=1), Counter(trec=0, other=0)

    def gather(everyone: list[Any], mine: Any) -> None:
        everyone[:] = [mine, ({"trec": 1}, {"trec": 1})]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert lm.cut_shares() == {"other": 0, "trec": 0.25}


@pytest.mark.parametrize("name", ["loglikelihood", "generate_until"])
def test_requests_show_their_progress_as_lm_evals_own_models_do(name: str) -> None:
    ours, theirs = (
        inspect.signature(getattr(kind, name)).parameters["disable_tqdm"].default for kind in (MHLALM, HFLM)
    )
    assert ours is theirs is False
