"""Loading of weights into a model whose attention was replaced."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

log = logging.getLogger(__name__)


def give_weights(model: nn.Module, state: Mapping[str, Tensor], path: str, tied: Sequence[str] = ()) -> None:
    """Load weights into a model with replaced attention. The weights may have been saved before or after the replacement.

    Parameters of the new attention and of adapters keep their initial values if ``state`` does not contain them.

    Args:
        model: model whose attention :func:`lightning_mhla.swap_attention` replaced, with or without LoRA adapters; changed in
            place.
        state: weights by parameter name. If the model has adapters, the names may be those of the model without adapters.
        path: file or folder that the weights come from, for messages.
        tied: names of weights that share memory with other weights. They may be missing from ``state``.

    Raises:
        ValueError: if names or shapes do not match the model, or if ``state`` contains LoRA adapters and the model has none.
    """
    model_state = model.state_dict()
    # peft moves an adapted layer to `base_layer`, so the weights of a model without adapters have names without it.
    adapted = {name.replace(".base_layer.", "."): name for name in model_state}
    if any(".lora_" in name for name in state) and not any(".lora_" in name for name in model_state):
        raise ValueError(
            f"{path} contains LoRA adapters; merge them first, and start from the exported folder: "
            f"lightning export {path} FOLDER"
        )
    state = {adapted.get(name, name): tensor for name, tensor in state.items()}
    added = [name for name in model_state if ".swapped." in name or ".lora_" in name]
    wrong = [f"{name} is not known" for name in state if name not in model_state]
    wrong += [f"{name} is missing" for name in model_state if name not in state and name not in {*added, *tied}]
    wrong += [
        f"{name} is {list(tensor.shape)}, not {list(model_state[name].shape)}"
        for name, tensor in state.items()
        if name in model_state and tensor.shape != model_state[name].shape
    ]
    if wrong:
        raise ValueError(
            f"{path} does not match the model or its attention: {'; '.join(wrong[:3])} ({len(wrong)} in all)"
        )
    model.load_state_dict(state, strict=False)
    log.info("started from %s: %d tensors loaded, %d new", path, len(state), len(model_state) - len(state))
