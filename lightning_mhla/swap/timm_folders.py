"""Saving and loading of timm vision transformers with replaced attention, in timm's own file format.

A saved ``config.json`` names the architecture ``mhla_swapped``, which ``import lightning_mhla.timm`` registers with timm. After
this import, timm's scripts and ``timm.create_model("local-dir:FOLDER", pretrained=True)`` load a saved folder.
:func:`lightning_mhla.load_swapped` loads a saved folder without this import.
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
"""Name of the model argument of :data:`ARCHITECTURE` that holds timm's name of the original model."""


class TimmFolders(TimmHost):
    """Implementation of attention replacement for timm models, including saving and loading of the resulting models."""

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
        else:  # an older folder, saved under the original architecture, without the record among the model's arguments
            model = timm.create_model(name, pretrained=False, **options)
            self.restore(model, config[SAVED])
            _load(model, **options)
        if dtype is not None:
            # Not `model.to(dtype)`, because mixing coefficients stay in float32.
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
    """Save a timm model with replaced attention as ``config.json`` and ``model.safetensors``, in timm's format.

    :func:`lightning_mhla.load_swapped` loads the model again.

    Args:
        model: model whose attention :func:`lightning_mhla.swap_attention` replaced.
        folder: folder to write to.
        model_args: keyword arguments to save, with which ``timm.create_model`` builds the model again, such as ``img_size``;
            None for no arguments.
        label_names: names of the classes, in the order of the model's outputs; None to save no names.
        data_config: image preprocessing to save, by timm's names such as ``mean``, ``std`` and ``interpolation``; None to save
            the preprocessing of the pretrained model.

    Raises:
        ValueError: if the attention of the model was not replaced, or the model was built with ``features_only``.
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
            f"timm cannot save a {type(model).__name__}; save a model that is built without features_only "
            "(its forward_intermediates returns features, too)"
        )
    options = {**(model_args or {}), HOST_MODEL: model.pretrained_cfg["architecture"], SAVED: record}
    config = {"architecture": ARCHITECTURE, SAVED: record, **({"label_names": label_names} if label_names else {})}
    images = None if data_config is None else dict(data_config)
    save_for_hf(model, str(folder), config, options, safe_serialization=True, data_config=images)
    # Overwrites the weights that save_for_hf wrote, which the original architecture would accept.
    save_file(_marked(model), Path(folder) / "model.safetensors", metadata={"format": "pt"})


def _marked(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights to save, with an extra leading axis on the original weights of replaced attention modules.

    The extra axis makes timm reject the file if the model has its original attention. timm always rejects a wrong shape, but it
    ignores unknown weights if the model has a different number of classes than the file.
    """
    replaced = [name for name, module in model.named_modules() if hasattr(module, "swapped")]
    prefixes = tuple(f"{name}." for name in replaced)
    return {
        name: (tensor[None] if name.startswith(prefixes) and ".swapped." not in name else tensor).contiguous()
        for name, tensor in model.state_dict().items()
    }


def _unmarked(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Remove the extra leading axes that :func:`_marked` added to saved weights.

    Args:
        state: saved weights by parameter name.
        model: model for these weights. A weight loses its leading axis of length 1 if the remaining shape is that of the
            model's parameter of the same name.
    """
    model_state = model.state_dict()
    return {
        name: tensor[0] if name in model_state and tensor.shape == (1, *model_state[name].shape) else tensor
        for name, tensor in state.items()
    }


def register() -> None:
    """Register the architecture ``mhla_swapped`` with timm, so that timm can build saved models with replaced attention.

    Nothing changes if the name is registered already.
    """
    from timm.models import is_model, register_model

    if not is_model(ARCHITECTURE):
        register_model(mhla_swapped)


def mhla_swapped(
    pretrained: bool = False, model: str = "", swapped_attention: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module:
    """Build a timm model with replaced attention. ``timm.create_model`` calls this function for folders of saved models.

    Args:
        pretrained: whether to load the weights from the saved folder or hub repository.
        model: timm's name of the original model.
        swapped_attention: record of how the attention was replaced. Its entry ``attention`` maps the fields of
            :class:`lightning_mhla.AttentionConfig` to their values, and ``layers`` maps the number of each replaced layer to
            its attention kind.
        options: further arguments for building the original model, and the location of the weights.

    Returns:
        The model with its new attention.

    Raises:
        ValueError: if ``model`` or ``swapped_attention`` is missing. Both come from a saved folder, so the architecture cannot
            be created by its name alone.
    """
    import timm

    if not model or swapped_attention is None:
        raise ValueError(
            f"{ARCHITECTURE} is the architecture of folders that save_swapped wrote; create it as local-dir:FOLDER"
        )
    if saved := options.get("pretrained_model_args"):
        options["pretrained_model_args"] = {k: v for k, v in saved.items() if k not in (HOST_MODEL, SAVED)}
    built: nn.Module = timm.create_model(model, pretrained=False, **options)
    TimmFolders().restore(built, swapped_attention)
    if pretrained:
        _load(built, cache_dir=options.get("cache_dir"))
    return built


def _load(model: Any, **options: Any) -> None:
    from timm.models import load_pretrained

    channels = vision_transformer(model).patch_embed.proj.in_channels
    load_pretrained(model, num_classes=model.num_classes, in_chans=channels, filter_fn=_unmarked, **options)
