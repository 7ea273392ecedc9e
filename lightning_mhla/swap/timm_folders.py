"""Folders of swapped vision transformers of timm, in timm's own layout.

Their ``config.json`` names the architecture ``mhla_swapped``, which timm does not know. ``import lightning_mhla.timm`` makes
it known: from then on ``timm.create_model("local-dir:FOLDER", pretrained=True)`` and timm's scripts load such a folder, as
:func:`lightning_mhla.load_swapped` always does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.swap.host import SAVED
from lightning_mhla.swap.timm import TimmHost, vision_transformer

ARCHITECTURE = "mhla_swapped"
HOST_MODEL = "model"
"""Option of :data:`ARCHITECTURE`: timm's name of the model that was swapped."""


class TimmFolders(TimmHost):
    """Swapped models of timm, and their folders."""

    options = ("cache_dir",)

    @override
    def record(self, model: Any) -> Mapping[str, Any] | None:
        return getattr(vision_transformer(model), SAVED, None)

    @override
    def remember(self, model: Any, record: Mapping[str, Any]) -> None:
        setattr(vision_transformer(model), SAVED, dict(record))

    @override
    def wrote(self, config: Mapping[str, Any]) -> bool:
        return "architecture" in config and "pretrained_cfg" in config

    @override
    def load(
        self, source: str, config: Mapping[str, Any], dtype: torch.dtype | None, options: Mapping[str, Any]
    ) -> nn.Module:
        import timm

        register()
        local = Path(source).is_dir()
        name = f"local-dir:{Path(source).resolve()}" if local else f"hf-hub:{source}"
        if config["architecture"] == ARCHITECTURE:
            model: nn.Module = timm.create_model(name, pretrained=True, **options)
        else:  # saved by its own name, without the record among the model's arguments
            model = timm.create_model(name, pretrained=False, **options)
            _swap(model, config[SAVED])
            _load(model, **options)
        if dtype is not None:
            for name, parameter in model.named_parameters():
                if "mixing" not in name.split("."):
                    parameter.data = parameter.data.to(dtype)
        return model


def save_swapped(
    model: Any,
    folder: str | Path,
    model_args: Mapping[str, Any] | None = None,
    label_names: Sequence[str] | None = None,
    data_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a swapped model of timm as timm keeps models, ``config.json`` and safetensors, for ``load_swapped``.

    Args:
        model: after :func:`lightning_mhla.swap_attention`.
        folder: to write to.
        model_args: options of the model that timm's factory did not see, as for ``timm.models.save_for_hf``.
        label_names: names of the classes.
        data_config: preprocessing of images, as for ``timm.models.save_for_hf``.

    Raises:
        ValueError: for a model that was not swapped, and one that is wrapped (``features_only``).
    """
    from safetensors.torch import save_file
    from timm.models import save_for_hf

    record = TimmFolders().record(model)
    if record is None:
        raise ValueError(
            f"the attention of this {type(model).__name__} is not swapped; timm.models.save_for_hf writes it"
        )
    if vision_transformer(model) is not model:
        raise ValueError(
            f"timm cannot save a {type(model).__name__}; save the model without it (forward_intermediates gives features too)"
        )
    options = {**(model_args or {}), HOST_MODEL: model.pretrained_cfg["architecture"], SAVED: record}
    config = {"architecture": ARCHITECTURE, SAVED: record, **({"label_names": label_names} if label_names else {})}
    images = None if data_config is None else dict(data_config)
    save_for_hf(model, str(folder), config, options, safe_serialization=True, data_config=images)
    save_file(_marked(model), Path(folder) / "model.safetensors", metadata={"format": "pt"})


def _marked(model: nn.Module) -> dict[str, Tensor]:
    """Weights for a file; those beside new attention have one more axis.

    timm ignores unknown weights where a model has other classes than the file, and a shape that differs is an error always.
    """
    replaced = [name for name, module in model.named_modules() if hasattr(module, "swapped")]
    prefixes = tuple(f"{name}." for name in replaced)
    return {
        name: (tensor[None] if name.startswith(prefixes) and ".swapped." not in name else tensor).contiguous()
        for name, tensor in model.state_dict().items()
    }


def _unmarked(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights before :func:`_marked`."""
    own = model.state_dict()
    return {
        name: tensor[0] if name in own and tensor.shape == (1, *own[name].shape) else tensor
        for name, tensor in state.items()
    }


def register() -> None:
    """Make :data:`ARCHITECTURE` known to timm."""
    from timm.models import is_model, register_model

    if not is_model(ARCHITECTURE):
        register_model(mhla_swapped)


def mhla_swapped(
    pretrained: bool = False, model: str = "", swapped_attention: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module:
    """A model of timm with the attention that a saved record describes, for :func:`timm.create_model`.

    Args:
        pretrained: read the weights of the folder or repository.
        model: timm's name of the model.
        swapped_attention: the record of the swap.
        options: of the model, and where its weights are.

    Raises:
        ValueError: without a record: the architecture is that of saved folders only.
    """
    import timm

    if not model or swapped_attention is None:
        raise ValueError(
            f"{ARCHITECTURE} is the architecture of folders that save_swapped wrote; create it as local-dir:FOLDER"
        )
    if saved := options.get("pretrained_model_args"):
        options["pretrained_model_args"] = {k: v for k, v in saved.items() if k not in (HOST_MODEL, SAVED)}
    built: nn.Module = timm.create_model(model, pretrained=False, **options)
    _swap(built, swapped_attention)
    if pretrained:
        _load(built, cache_dir=options.get("cache_dir"))
    return built


def _swap(model: nn.Module, record: Mapping[str, Any]) -> None:
    host = TimmFolders()
    host.put_in(model, record)
    host.remember(model, record)


def _load(model: Any, **options: Any) -> None:
    from timm.models import load_pretrained

    channels = vision_transformer(model).patch_embed.proj.in_channels
    load_pretrained(model, num_classes=model.num_classes, in_chans=channels, filter_fn=_unmarked, **options)
