"""Checks of a checkpoint against a run, each by the entries of the checkpoint alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lightning_mhla.checkpoints import compat

MHLA = {"kind": "mhla", "block_grid": [4, 4], "block_size": None}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (MHLA, None),
        (None, None),
        ({}, None),
        ({**MHLA, "block_grid": [2, 2]}, r"attention block_grid \[4, 4\], this run asks for \[2, 2\]"),
        ({**MHLA, "kind": "softmax"}, r"set --model\.attention\.kind=mhla"),
    ],
)
def test_attention_of_a_checkpoint(run: dict[str, Any] | None, message: str | None) -> None:
    checkpoint = {"hyper_parameters": {"attention": MHLA}}
    if message is None:
        compat.check_attention(checkpoint, {"attention": run})
        return
    with pytest.raises(ValueError, match=message):
        compat.check_attention(checkpoint, {"attention": run})


CROSS = {"kind": "mhla", "block_grid": [4, 4], "key_block_size": 8, "key_tokens": None}


@pytest.mark.parametrize(
    ("saved", "run", "message"),
    [
        (CROSS, {"cross_attention": CROSS}, None),
        (None, {"cross_attention": None}, None),
        (CROSS, {}, None),  # a model without the option
        (
            CROSS,
            {"cross_attention": None},
            "cross_attention 'mhla', this run asks for none; set --model.cross_attention.kind=mhla and",
        ),
        (
            None,
            {"cross_attention": CROSS},
            r"cross_attention none, this run asks for 'mhla'; set --model\.cross_attention=null",
        ),
        (CROSS, {"cross_attention": {**CROSS, "key_block_size": 4}}, r"set --model\.cross_attention\.key_block_size=8"),
        (
            CROSS,
            {"cross_attention": {**CROSS, "kind": "linear"}},
            "cross_attention kind 'mhla', this run asks for 'linear'",
        ),
    ],
)
def test_cross_attention_of_a_checkpoint(saved: Any, run: dict[str, Any], message: str | None) -> None:
    checkpoint = {"hyper_parameters": {"attention": MHLA, "cross_attention": saved}}
    if message is None:
        compat.check_attention(checkpoint, run)
        return
    with pytest.raises(ValueError, match=message):
        compat.check_attention(checkpoint, run)


def test_blocks_matter_to_mhla_alone() -> None:
    softmax = {"kind": "softmax", "block_grid": None}
    run = {"attention": {**softmax, "block_grid": [2, 2]}}
    compat.check_attention({"hyper_parameters": {"attention": softmax}}, run)


def test_changed_options_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    memory = {"size": "S", "training": {"optimizer": {"lr": 0.1}}, "gone": 1}
    with caplog.at_level(logging.INFO):
        compat.log_changed_options("model", memory, {"size": "S", "training": {"optimizer": {"lr": 0.2}}, "new": 1})
        compat.log_changed_options("data", None, {"batch_size": 2})
    assert caplog.messages == ["resumed with a changed option: model.training.optimizer.lr 0.1 -> 0.2"]


def test_optimizer_of_a_checkpoint() -> None:
    saved = compat.saved_groups({"optimizer_states": [{"param_groups": [{"params": [0, 1], "betas": (0.9, 0.95)}]}]})
    assert saved is not None
    compat.check_optimizer(saved, "adamw", 2, [2])
    with pytest.raises(ValueError, match="a different optimizer than muon"):
        compat.check_optimizer(saved, "muon", 3, [2])
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, this run's of \[1, 1\]"):
        compat.check_optimizer(saved, "adamw", 2, [1, 1])


@pytest.mark.parametrize("checkpoint", [{}, {"optimizer_states": []}, {"optimizer_states": ["sharded"]}])
def test_a_checkpoint_without_an_optimizer_has_no_groups(checkpoint: dict[str, Any]) -> None:
    assert compat.saved_groups(checkpoint) is None


def test_weights_of_a_checkpoint() -> None:
    state = {"a": torch.zeros(2), "b": torch.zeros(3)}
    compat.check_weights({"state_dict": {"a": torch.ones(2), "c": torch.ones(9)}}, state)
    compat.check_weights({}, state)
    with pytest.raises(ValueError, match=r"b is \[4\], here \[3\] \(1 tensors in all\)"):
        compat.check_weights({"state_dict": {"b": torch.ones(4)}}, state)
    with pytest.raises(ValueError, match="trained with LoRA adapters, this run is without"):
        compat.check_weights({"state_dict": {"a.lora_A.weight": torch.ones(1)}}, state)
