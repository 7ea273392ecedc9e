"""Choice of the trainable parameters in a model whose attention was replaced, and its LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import nn

from lightning_mhla.swap.swapping import host_of

TrainedPart = Literal["all", "attention", "new", "lora"]


@dataclass(frozen=True)
class LoraOptions:
    """Options of the LoRA adapters (arXiv 2106.09685) for the linear projections of layers with replaced attention.

    Args:
        rank: rank of each adapter, at least 1.
        alpha: scale, at least 1; the output of each adapter is multiplied by ``alpha / rank``.
        dropout: dropout probability on the input of each adapter.

    Raises:
        ValueError: if ``rank`` or ``alpha`` is below 1, or ``dropout`` is not a probability below 1.
    """

    rank: int = 64
    alpha: int = 64
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank} must be at least 1; train: new trains without adapters")
        if self.alpha < 1:
            raise ValueError(
                f"lora.alpha={self.alpha} must be at least 1: adapters are multiplied by alpha / rank, and would have no effect"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout={self.dropout} must be at least 0 and below 1")


def choose_trained(model: nn.Module, part: TrainedPart, lora: LoraOptions) -> None:
    """Freeze all parameters of a model with replaced attention except those to be trained.

    Mixing coefficients stay frozen if the configuration of the new attention has ``mixing_trainable=False``.

    Args:
        model: model whose attention :func:`lightning_mhla.swap_attention` replaced; changed in place.
        part: parameters to train. ``"all"`` freezes nothing. ``"attention"`` trains the replaced attention layers,
            including their projections. ``"new"`` trains only the parameters that the new attention added. ``"lora"`` trains
            the same parameters as ``"new"``, and also inserts and trains LoRA adapters for the projections.
        lora: options of the adapters; used only if ``part`` is ``"lora"``.

    Raises:
        ValueError: if ``part`` is not ``"all"`` and the model has no replaced layer, or if no parameter is left to train.
        ModuleNotFoundError: if ``part`` is ``"lora"`` and peft is not installed.
    """
    if part == "all":
        return
    replaced = host_of(model).replaced(model)
    if not replaced:
        raise ValueError(f"train={part!r} trains replaced attention, but no layer is replaced; set train: all")
    model.requires_grad_(False)
    for _, _, layer, attention in replaced:
        trained: nn.Module = layer if part == "attention" else attention
        for name, parameter in trained.named_parameters():
            # requires_grad was cleared above, so what `mixing_trainable: false` froze has to be told apart again.
            fixed = "mixing." in name and not attention.config.mixing_trainable
            parameter.requires_grad_(not fixed)
    if part == "lora":
        _add_adapters(model, [name for _, _, layer, new in replaced for name in _projections(model, layer, new)], lora)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"train={part!r} leaves nothing to train: the replacement added no parameters")


def _projections(model: nn.Module, host: nn.Module, new: nn.Module) -> list[str]:
    """Return the names, within ``model``, of the linear layers in ``host`` that do not belong to the new attention.

    Layers of transformers' class ``Conv1D``, which GPT-2 uses instead of ``nn.Linear``, are included.

    Args:
        model: model whose attention :func:`lightning_mhla.swap_attention` replaced.
        host: attention module of a layer whose attention was replaced.
        new: the new attention, a submodule of ``host``.
    """
    names, added = {module: name for name, module in model.named_modules()}, set(new.modules())
    linear = [module for module in host.modules() if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"]
    return [names[module] for module in linear if module not in added]


def _add_adapters(model: nn.Module, targets: list[str], lora: LoraOptions) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "train: lora needs peft: pip install 'lightning-mhla[video]' (or [language], [text-to-image])"
        ) from error
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, init_lora_weights=True
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inject_adapter_in_model(config, model)
    for parameter in trained:  # peft freezes every parameter that is not part of an adapter
        parameter.requires_grad_(True)


def merge_adapters(model: Any) -> None:
    """Merge the LoRA adapters of ``model`` into the weights that they adapt, in place, and remove the adapters.

    A model without adapters does not change.
    """
    _remove_adapters(model, merge=True)


def save_adapters(model: Any, folder: str | Path, pipeline: Any) -> None:
    """Save the LoRA adapters of a diffusers transformer to a folder, and remove them from the model, in place.

    The other weights of the transformer do not change. To add the saved adapters to the transformer again, call
    ``load_lora_weights(folder)`` on its pipeline, or ``peft.PeftModel.from_pretrained(transformer, folder)``.

    Args:
        model: transformer with adapters, changed in place.
        folder: folder to write the adapters to.
        pipeline: diffusers pipeline class that uses this transformer.

    Raises:
        ValueError: if the model has no adapters.
    """
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        raise ValueError("the transformer has no LoRA adapters; they come from training with train: lora")
    from peft import get_peft_model_state_dict

    (config,) = adapters.values()
    # safetensors rejects tensors that are not contiguous.
    state = {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(model).items()}
    pipeline.save_lora_weights(
        folder, transformer_lora_layers=state, transformer_lora_adapter_metadata=config.to_dict()
    )
    plain = replace(config, inference_mode=True)
    plain.save_pretrained(folder)
    save_file({f"base_model.model.{n}": t for n, t in state.items()}, Path(folder) / "adapter_model.safetensors")
    _remove_adapters(model, merge=False)


def _remove_adapters(model: Any, merge: bool) -> None:
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            if merge:
                module.merge()
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.base_layer)
    if hasattr(model, "peft_config"):
        del model.peft_config  # with it left in place, adapters could not be loaded again
        model._hf_peft_config_loaded = False
