"""Checks of a checkpoint against the model and the options of the run that loads it.

The checks run before Lightning copies tensors. If a checkpoint does not fit, the error message therefore names the option to
change instead of a list of tensors.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_mhla.checkpoints.io import READ_FROM
from lightning_mhla.system.hyperparameters import plain
from lightning_mhla.system.redaction import redacted

log = logging.getLogger(__name__)

ATTENTION_OPTIONS = ("kind", "block_grid", "block_size", "key_block_size", "key_tokens")
"""Attention options on which the weights depend. All of them except ``kind`` are compared only for the kind ``mhla``."""


def log_origin(checkpoint: Mapping[str, Any]) -> None:
    """Log the path, epoch and step of a checkpoint, or nothing if :class:`WholeCheckpointIO` did not add its path."""
    if READ_FROM in checkpoint:
        position = "epoch {epoch}, step {global_step}".format_map(defaultdict(lambda: "?", checkpoint))
        log.info("using checkpoint %s: %s", checkpoint[READ_FROM], position)


def check_attention(checkpoint: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check that a run uses the same kinds of attention as a checkpoint and, for MHLA, the same attention blocks.

    Args:
        checkpoint: entries of the checkpoint.
        options: options of the run's model. ``attention`` is compared if the checkpoint and the run have it.
            ``cross_attention``, which describes the replacement of cross-attention in a pretrained model, is compared if the
            run's model has this option, even with the value None.

    Raises:
        ValueError: if an option differs. The message names the option and the value to set.
    """
    memory = checkpoint.get("hyper_parameters") or {}
    for name in ("attention", "cross_attention"):
        saved, present = memory.get(name) or {}, options.get(name) or {}
        if memory and name == "cross_attention" in options and bool(saved) != bool(present):
            kinds = [repr(x["kind"]) if x else "none" for x in (saved, present)]
            remedy = f"{name}.kind={saved['kind']} and its other options as in training" if saved else f"{name}=null"
            raise ValueError(
                f"the checkpoint was trained with {name} {kinds[0]}, this run asks for {kinds[1]}; set --model.{remedy}, or "
                "train from the start"
            )
        for key in ATTENTION_OPTIONS if saved and present else ():
            if saved.get(key) != present.get(key) and (key == "kind" or present["kind"] == "mhla"):
                raise ValueError(
                    f"the checkpoint was trained with {name} {key} {saved.get(key)!r}, this run asks for "
                    f"{present.get(key)!r}; set --model.{name}.{key}={saved.get(key)}, or train from the start"
                )


def log_changed_options(part: str, memory: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
    """Log each option whose value in this run differs from the value in the checkpoint that the run resumes from.

    Args:
        part: prefix of the options in the log: ``"model"`` for options of the model, ``"data"`` for options of the data module.
        memory: options stored in the checkpoint, with former names replaced by current ones; None if it stores none.
        options: options of this run.
    """
    # checkpoints hold redacted secrets, so both sides are compared redacted
    saved, present = (plain(redacted(dict(values or {}))) for values in (memory, options))
    for name in sorted(saved.keys() & present.keys()):
        if name[0] != "_" and saved[name] != present[name]:
            log.info("resumed with a changed option: %s.%s %s -> %s", part, name, saved[name], present[name])


def saved_groups(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the optimizer's parameter groups from a checkpoint, or None if the checkpoint has no optimizer state."""
    states = checkpoint.get("optimizer_states") or []
    if not states or not isinstance(states[0], dict):
        return None
    groups: list[dict[str, Any]] = states[0].get("param_groups", [])
    return groups


def check_optimizer(saved: Sequence[Mapping[str, Any]], kind: str, betas: int, group_sizes: Sequence[int]) -> None:
    """Check that the optimizer state in a checkpoint fits the optimizer of the run.

    Args:
        saved: parameter groups in the checkpoint, as returned by :func:`saved_groups`.
        kind: name of the run's optimizer, for the error message.
        betas: number of beta coefficients of the run's optimizer. This number tells AdamW (two) from CAME (three).
        group_sizes: number of parameter tensors in each group of the run.

    Raises:
        ValueError: if the numbers of beta coefficients, the numbers of groups or the group sizes differ.
    """
    # The name of the optimizer is not stored in its state.
    saved_betas = len(saved[0].get("betas", ())) if saved else 0
    if saved_betas and saved_betas != betas:
        raise ValueError(
            f"the checkpoint was trained with a different optimizer than {kind}; set training.optimizer.kind back, or "
            "start a new run from the weights (--model.pretrained)"
        )
    # torch assigns states to parameters by position, so a different grouping would load states of other parameters.
    saved_sizes = [len(group["params"]) for group in saved]
    if saved_sizes != list(group_sizes):
        raise ValueError(
            f"the checkpoint's optimizer has groups of {saved_sizes} parameters, this run's of {list(group_sizes)}: the "
            "trained parameters or layer_decay differ. Set them back, or start a new run from the weights (--model.pretrained)"
        )


def check_weights(checkpoint: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Check that the weights in a checkpoint fit the model: both or neither have LoRA adapters, and all shapes agree.

    Args:
        checkpoint: entries of the checkpoint.
        state: ``state_dict`` of the model.

    Raises:
        ValueError: if only the checkpoint or only the model has adapters, or if shapes differ. For different shapes, the
            message names up to three tensors.
    """
    saved: Mapping[str, Any] = checkpoint.get("state_dict", {})
    if _has_adapters(saved) != _has_adapters(state):
        saved_kind, current_kind = ("with", "without") if _has_adapters(saved) else ("without", "with")
        raise ValueError(
            f"the checkpoint was trained {saved_kind} LoRA adapters, this run is {current_kind}; set --model.train and lora "
            "as they were, or leave out --config to take the options that the checkpoint remembers"
        )
    different = [
        f"{name} is {list(tensor.shape)}, here {list(state[name].shape)}"
        for name, tensor in saved.items()
        if name in state and hasattr(tensor, "shape") and tensor.shape != state[name].shape
    ]
    if different:
        raise ValueError(
            f"the checkpoint was saved from a model with different sizes: {'; '.join(different[:3])} ({len(different)} tensors "
            "in all). Leave the model options out to take those that the checkpoint remembers"
        )


def _has_adapters(state: Mapping[str, Any]) -> bool:
    return any(".lora_" in name for name in state)
