"""Weights for a swapped model, of the model before the swap or after it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

log = logging.getLogger(__name__)


def give_weights(model: nn.Module, state: Mapping[str, Tensor], path: str, tied: Sequence[str] = ()) -> None:
    """Give ``model`` the weights of ``state``; what a swap or adapters added keeps its start where they have none of it.

    Args:
        model: after :func:`lightning_mhla.swap_attention`, and with adapters or without.
        state: by the names that they have without adapters.
        path: where they come from, for messages.
        tied: names of weights that are others once more, and may be left out.

    Raises:
        ValueError: when they are of another model.
    """
    own = model.state_dict()
    adapted = {name.replace(".base_layer.", "."): name for name in own}
    if any(".lora_" in name for name in state) and not any(".lora_" in name for name in own):
        raise ValueError(
            f"{path} holds LoRA adapters beside the weights; put them together first, and start from the folder: "
            f"lightning export {path} FOLDER"
        )
    state = {adapted.get(name, name): tensor for name, tensor in state.items()}
    added = [name for name in own if ".swapped." in name or ".lora_" in name]
    wrong = [f"{name} is not known" for name in state if name not in own]
    wrong += [f"{name} is missing" for name in own if name not in state and name not in {*added, *tied}]
    wrong += [
        f"{name} is {list(tensor.shape)}, not {list(own[name].shape)}"
        for name, tensor in state.items()
        if name in own and tensor.shape != own[name].shape
    ]
    if wrong:
        raise ValueError(f"{path} is of another model or other attention: {'; '.join(wrong[:3])} ({len(wrong)} in all)")
    model.load_state_dict(state, strict=False)
    log.info("started from %s: %d tensors taken, %d new", path, len(state), len(own) - len(state))
