"""Sequences with questions: as Zoology defines associative recall, the needle, and answers counted by group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from mhla_tasks.language import AssociativeRecall, DecoderShape, LanguageModel, Needle
from mhla_tasks.language.callbacks import TokenThroughput
from mhla_tasks.language.loss import IGNORED
from mhla_tasks.language.recall import RecallPart
from mhla_tasks.language.sums import Answers, shares
from torch.utils.data import DataLoader

from lightning_mhla import AttentionConfig


def recall(**options: Any) -> AssociativeRecall:
    parts = [RecallPart(64, 4, 300), RecallPart(128, 16, 200)]
    return AssociativeRecall(**{"train": parts, "val": parts, "vocab_size": 256, "seed": 1, **options})


@pytest.mark.parametrize("fill", [True, False])
def test_recall_is_zoologys(fill: bool) -> None:
    data = recall(random_non_queries=fill)
    source = data.source("train")
    assert len(source) == 500
    for index in (0, 7, 299, 300, 499):
        sample, pairs, size = source[index], *((4, 64) if index < 300 else (16, 128))
        tokens, labels = sample["tokens"], sample["labels"]
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys.tolist())) == len(set(values.tolist())) == pairs
        assert keys.min() >= 1
        assert keys.max() < 128 <= values.min()
        asked = (labels != IGNORED).nonzero()[:, 0]
        assert len(asked) == pairs
        assert (asked % 2 == 0).all()
        assert 2 * pairs <= asked.min()
        assert asked.max() < size
        lookup = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert [lookup[int(tokens[place])] for place in asked] == labels[asked].tolist()
        rest = tokens[2 * pairs : size].clone()
        rest[asked - 2 * pairs] = 0
        assert bool(rest.any()) is fill
        assert not tokens[size:].any()
        assert data.groups[sample["group"]] == f"pairs{pairs}"
        again = recall(random_non_queries=fill).source("train")[index]
        assert torch.equal(again["tokens"], tokens), "a sample depends on the seed and its number alone"
    assert not torch.equal(recall().source("validate")[0]["tokens"], recall().source("train")[0]["tokens"])


def test_questions_stand_as_often_near_as_zoology_says() -> None:
    """The slot of one question of one pair: probability i^(a - 1) / sum."""
    data = recall(train=[RecallPart(64, 1, 4000)], power=0.3)
    places = [int((data.source("train")[i]["labels"] != IGNORED).nonzero()[0]) for i in range(4000)]
    found = np.bincount([(place - 2) // 2 for place in places], minlength=31) / 4000
    want = np.arange(1, 32) ** -0.7
    assert np.abs(found - want / want.sum()).max() < 0.03


def test_needles_lie_where_they_are_counted() -> None:
    data = Needle(tokens=40, lengths=[1, 3], vocab_size=30, samples=10, val_samples=100, seed=0)
    assert data.groups == [f"tokens{n}_depth{d}" for n in (40, 120) for d in range(5)]
    source = data.source("validate")
    seen = set()
    for index in range(200):
        sample, size = source[index], 40 if index < 100 else 120
        tokens, labels = sample["tokens"][:size], sample["labels"]
        assert int((labels != IGNORED).sum()) == 1
        assert labels[size - 1] == sample["labels"].max()
        place = int((tokens[:-1] < 10).nonzero()[0])
        assert tokens[place] == tokens[-1], "the key is asked for"
        assert tokens[place + 1] == labels[size - 1], "its value is the answer"
        assert (tokens[:place] >= 20).all()
        assert (tokens[place + 2 : -1] >= 20).all()
        assert data.groups[sample["group"]] == f"tokens{size}_depth{place * 5 // (size - 2)}"
        seen.add(sample["group"])
    assert len(seen) == 10
    assert len(data.source("train")[3]["tokens"]) == 40


def test_answers_are_counted_by_group_and_together() -> None:
    answers = Answers()
    answers.update(torch.tensor([True, False, True, True]), torch.tensor([0, 0, 1, 3]))
    names = ["tokens8_depth0", "tokens8_depth1", "tokens16_depth0", "tokens16_depth1"]
    assert shares(answers.compute(), names) == {
        "accuracy": 0.75,
        "accuracy_tokens8": pytest.approx(2 / 3),
        "accuracy_tokens8_depth0": 0.5,
        "accuracy_tokens8_depth1": 1.0,
        "accuracy_tokens16": 1.0,
        "accuracy_tokens16_depth1": 1.0,
    }


def test_losses_and_accuracy_are_those_of_the_asked_tokens() -> None:
    data = recall()
    model = LanguageModel(
        AttentionConfig(kind="softmax"), ["gated_conv", "softmax"], 256, 128,
        DecoderShape(dim=32, depth=2, heads=2, mlp_width=32, initializer_range=0.2),
    )  # fmt: skip
    source = data.source("validate")
    samples = [source[index] for index in (0, 1, 400)]
    batch = {name: torch.stack([torch.as_tensor(s[name]) for s in samples]) for name in samples[0]}
    logits = model.network(batch["tokens"]).logits
    asked = batch["labels"] != IGNORED
    each = torch.nn.functional.cross_entropy(logits[asked], batch["labels"][asked], reduction="none")
    torch.testing.assert_close(model._losses(batch, "mean", None), each.mean(), rtol=1e-5, atol=1e-5)
    model._evaluate({**batch, "valid": torch.tensor([True, True, False])}, "val")
    assert model._sums("val").compute()["tokens"] == 8, "a padded row does not count"
    torch.testing.assert_close(model._sums("val").compute()["nats"], float(each[:8].sum()), rtol=1e-5, atol=1e-5)
    right = logits[:2].argmax(-1)[asked[:2]] == batch["labels"][:2][asked[:2]]
    assert model._sums("val").answers.compute()[0].sum() == right.sum()
    trimmed = data.on_before_batch_transfer({k: v[:2] for k, v in batch.items()}, 0)
    assert trimmed["tokens"].shape[1] == int(asked[:2].any(0).nonzero()[-1]) + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecallPart(63, 4), "must be even and at least four times"),
        (lambda: RecallPart(64, 17), "must be even and at least four times"),
        (lambda: recall(vocab_size=100), "must exceed the 128 tokens"),
        (lambda: recall().source("predict"), "has no prompts to predict from"),
        (lambda: Needle(vocab_size=5), "vocab_size=5 must be at least 6"),
        (lambda: Needle(tokens=4), "tokens=4 must be at least 8"),
        (lambda: Needle(lengths=[]), "lengths=0 must be at least 1"),
        (lambda: recall(train=[]), r"train=\[\] has no set of sequences"),
        (lambda: recall(val=[]), r"val=\[\] has no set of sequences"),
    ],
)
def test_wrong_sizes_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("labeled", "count"), [(True, 2 * 8 * 64), (False, 2 * 8 * 63)])
def test_the_speed_counts_every_token_that_the_network_reads(labeled: bool, count: int, tmp_path: Path) -> None:
    samples = [recall(train=[RecallPart(64, 4, 16)]).source("train")[index] for index in range(16)]
    rows = [{name: sample[name] for name in ("tokens", *(["labels"] if labeled else []))} for sample in samples]
    model = LanguageModel(
        attention=AttentionConfig(block_size=16), vocab_size=256, context=64, shape=DecoderShape(16, 1, 2, mlp_width=32)
    )
    callback = TokenThroughput()
    trainer = Trainer(
        accelerator="cpu", max_steps=2, log_every_n_steps=99, callbacks=[callback], default_root_dir=tmp_path, logger=False,
        enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(rows, batch_size=8))
    assert callback._tokens == count


@pytest.mark.parametrize("peak_flops", [None, 2e9])
def test_the_share_of_the_peak_is_logged_if_the_peak_is_known(peak_flops: float | None, tmp_path: Path) -> None:
    model = LanguageModel(
        attention=AttentionConfig(block_size=16), vocab_size=256, context=64, shape=DecoderShape(16, 1, 2, mlp_width=32)
    )
    rows = [{"tokens": torch.arange(65)}] * 8
    trainer = Trainer(
        accelerator="cpu", max_steps=2, log_every_n_steps=1, callbacks=[TokenThroughput(peak_flops)], logger=False,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(rows, batch_size=4))
    metrics = trainer.callback_metrics
    assert ("train/mfu" in metrics) == (peak_flops is not None)
    if peak_flops is not None:
        share = float(metrics["train/tokens_per_second"]) * model.flops_per_token / peak_flops
        assert float(metrics["train/mfu"]) == pytest.approx(share)
