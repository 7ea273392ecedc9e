"""Vision models of this package in timm's registry: after ``import lightning_mhla.timm``, ``timm.create_model`` builds them.

The first part of a model's name stands for its architecture and attention, the last part for its size:

- ``mhla_vlt_{t,s,b,l}``: VLT, a hierarchical vision transformer, with MHLA
- ``ravlt_{t,s,b,l}``: VLT with rank-augmented linear attention (RALA)
- ``mavit_{t,s,b,l}``: VLT with magnitude-aware linear attention (MALA) and the wider head of MAViT
- ``mhla_deit_{t,s,b}``: DeiT, a plain vision transformer, with MHLA

Options of the attention are set with ``timm.create_model("mhla_vlt_t", attention={...})``; see
:class:`lightning_mhla.AttentionConfig`. For VLT, ``stages={...}`` sets options of :class:`lightning_mhla.vision.StageConfig`.
No pretrained weights are published. To load weights that timm's training script wrote, pass ``checkpoint_path`` to
``timm.create_model``. ``lightning timm SCRIPT`` runs a script of timm with these models.
``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads a timm model with replaced attention that
:func:`lightning_mhla.swap.save_swapped` saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import timm
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from lightning_mhla.attention import AttentionConfig
from lightning_mhla.model.sizes import both_sides
from lightning_mhla.swap.timm_folders import register
from lightning_mhla.vision import VLT, StageConfig, VisionTransformer
from lightning_mhla.vision.stages import RAVLT

VLT_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mhla_vlt": ({**RAVLT, "kind": "mhla"}, {}),
    "ravlt": ({**RAVLT, "kind": "rala"}, {}),
    "mavit": ({**RAVLT, "kind": "mala"}, {"head_width": 2048}),
}
"""Default options of each family of VLT models: those of :class:`AttentionConfig`, then those of :class:`StageConfig`."""

DEIT: dict[str, Any] = {"kind": "mhla", "block_grid": [4, 4], "lepe": 3}
"""Default attention options of ``mhla_deit_*``, from the MHLA paper and ``configs/classification/deit_t_imagenet.yaml``."""

PADDED = {224: 256}
"""Side in pixels to which ``mhla_deit_*`` pads an image, by the image's side; after padding, all blocks are equal in size."""


def _vlt(size: str, family: str, **options: Any) -> VLT:
    attention, stages = VLT_KINDS[family]
    return VLT(
        options.pop("img_size", 224),
        options.pop("num_classes", 1000),
        AttentionConfig(**{**attention, **options.pop("attention", {})}),
        StageConfig(**{"size": size.upper(), **stages, **options.pop("stages", {})}),
        **_renamed(options),
    )


def _deit(size: str, **options: Any) -> VisionTransformer:
    side = options.pop("img_size", 224)
    if len(set(sides := both_sides("img_size", side))) > 1:
        raise ValueError(f"img_size={side}: mhla_deit takes squares; mhla_vlt takes rectangles")
    side = sides[0]
    return VisionTransformer(
        side,
        options.pop("num_classes", 1000),
        AttentionConfig(**{**DEIT, **options.pop("attention", {})}),
        **{"size": size, "pad_to": PADDED.get(side), **_renamed(options)},
    )


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Rename timm's options of a model to this package's names, such as ``in_chans`` to ``channels``.

    Args:
        options: arguments of ``timm.create_model`` by name. An entry ``drop_rate`` is removed in place.

    Raises:
        ValueError: if ``drop_rate`` is not 0, since the models have no dropout.
    """
    if options.pop("drop_rate", 0):
        raise ValueError("these models have no dropout (drop_rate); drop_path_rate is stochastic depth")
    names = {"in_chans": "channels", "drop_path_rate": "drop_path"}
    return {names.get(name, name): value for name, value in options.items()}


def _register(name: str, build: Callable[..., Any], feature_cfg: dict[str, Any]) -> None:
    def build_on(device: Any = None, dtype: torch.dtype | None = None, **options: Any) -> Any:
        with torch.device(device) if device is not None else nullcontext():
            model = build(**options)
        return model.to(device=device, dtype=dtype)  # tables of token orders are made on the CPU

    def create(pretrained: bool = False, **options: Any) -> Any:
        return build_model_with_cfg(build_on, name, pretrained, feature_cfg=dict(feature_cfg), **options)

    # timm reads the name from `__name__`, and the settings from `default_cfgs` of this module, which must exist by then.
    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{name}; options as for timm.create_model."
    register_model(create)


def _settings(**options: Any) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": timm.data.IMAGENET_DEFAULT_MEAN,
        "std": timm.data.IMAGENET_DEFAULT_STD,
        "classifier": "head",
        **options,
    }


VLT_NAMES = {f"{family}_{size}": (size, family) for family in VLT_KINDS for size in "tsbl"}
DEIT_NAMES = {f"mhla_deit_{size[0]}": size for size in ("tiny", "small", "base")}

default_cfgs = generate_default_cfgs(
    {
        **{f"{name}.untrained": _settings(pool_size=(7, 7), first_conv="stem.1") for name in VLT_NAMES},
        **{
            f"{name}.untrained": _settings(pool_size=None, first_conv="stem.proj", fixed_input_size=True)
            for name in DEIT_NAMES
        },
    }
)

for _name, (_size, _family) in VLT_NAMES.items():
    _register(_name, partial(_vlt, _size, _family), {"out_indices": (0, 1, 2, 3), "flatten_sequential": True})
for _name, _size in DEIT_NAMES.items():
    _register(_name, partial(_deit, _size), {"out_indices": 3, "feature_cls": "getter"})

register()
