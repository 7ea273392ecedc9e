"""The trained part of a swapped model: all of it, its new attention, or LoRA adapters beside that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import nn

from lightning_mhla.attention import Attention
from lightning_mhla.swap.swapping import host_of, swapped_layers

TrainedPart = Literal["all", "attention", "new", "lora"]


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (arXiv 2106.09685) of the replaced layers' projections, with ``train: lora``.

    Args:
        rank: rank of an adapter.
        alpha: its output is scaled by alpha over rank.
        dropout: on its input.
    """

    rank: int = 64
    alpha: int = 64
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank} must be at least 1")


def choose_trained(model: nn.Module, part: TrainedPart, lora: LoraOptions) -> None:
    """Freeze all but what is to be trained.

    Args:
        model: in place; with ``"lora"`` adapters are put into it.
        part: ``"all"``; ``"attention"``, the self-attention of replaced layers with its projections; ``"new"``, only what
            the swap added; ``"lora"``, that and adapters of the projections.
        lora: rank and alpha of the adapters.

    Raises:
        ValueError: when no layer was replaced, so that nothing would be trained.
        ModuleNotFoundError: for ``"lora"`` without peft.
    """
    if part == "all":
        return
    replaced = swapped_layers(model)
    if not replaced:
        raise ValueError(f"train={part!r} trains replaced attention, and no layer is replaced; set train: all")
    model.requires_grad_(False)
    hosts = host_of(model).layers(model)
    for index, attention in replaced.items():
        trained: nn.Module = hosts[index] if part == "attention" else attention
        for name, parameter in trained.named_parameters():
            fixed = "mixing." in name and not attention.config.mixing_trainable
            parameter.requires_grad_(not fixed)
    if part == "lora":
        _add_adapters(
            model, [name for index, new in replaced.items() for name in _projections(model, hosts[index], new)], lora
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"train={part!r} leaves nothing to train: replacing added no parameters")


def _projections(model: nn.Module, host: nn.Module, new: Attention) -> list[str]:
    """Names of the projections of an attention module, without those that the swap added."""
    names, added = {module: name for name, module in model.named_modules()}, set(new.modules())
    return [names[module] for module in host.modules() if isinstance(module, nn.Linear) and module not in added]


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
    for parameter in trained:  # peft freezes everything else
        parameter.requires_grad_(True)


def merge_adapters(model: Any) -> None:
    """Add LoRA adapters, if there are any, to the weights that they adapt, and take them out, in place."""
    _take_out_adapters(model, merge=True)


def save_adapters(model: Any, folder: str | Path, pipeline: Any) -> None:
    """Write the LoRA adapters of ``model`` to a folder, and take them out, in place; the weights they adapt stay as they were.

    ``load_lora_weights(folder)`` of the model's pipeline and ``peft.PeftModel.from_pretrained(transformer, folder)`` put them
    onto the transformer that is left.

    Args:
        model: in place.
        folder: for the adapters.
        pipeline: class of diffusers that the model belongs to.

    Raises:
        ValueError: when there are none.
    """
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        raise ValueError("the transformer has no LoRA adapters; they come from training with train: lora")
    from peft import get_peft_model_state_dict

    (config,) = adapters.values()
    state = {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(model).items()}
    pipeline.save_lora_weights(
        folder, transformer_lora_layers=state, transformer_lora_adapter_metadata=config.to_dict()
    )
    plain = replace(config, inference_mode=True)
    plain.save_pretrained(folder)
    save_file({f"base_model.model.{n}": t for n, t in state.items()}, Path(folder) / "adapter_model.safetensors")
    _take_out_adapters(model, merge=False)


def _take_out_adapters(model: Any, merge: bool) -> None:
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            if merge:
                module.merge()
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.base_layer)
    if hasattr(model, "peft_config"):
        del model.peft_config  # or adapters could not be loaded again
        model._hf_peft_config_loaded = False
