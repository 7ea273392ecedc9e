"""Subclasses of diffusers model classes that save and load models with replaced attention.

Each subclass has the name of its diffusers parent, such as ``DiTTransformer2DModel``, and is created when this module's
attribute of that name is first accessed. :func:`lightning_mhla.swap_attention` changes the class of a model to such a subclass.
The model's ``save_pretrained`` then writes a folder that the original diffusers class rejects. In a saved pipeline,
``model_index.json`` names this module, so diffusers can load the pipeline after ``import lightning_mhla``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_mhla.swap.diffusers import DiffusersHost
from lightning_mhla.swap.host import SAVED
from lightning_mhla.swap.saved import (
    NOTICE,
    REMOTE,
    SwappedModel,
    derive,
    guarded,
    remove_stale,
    restored,
    write_module,
)

DTYPE = "dtype"
"""Key of the saved record that holds the dtype of the weights, which diffusers does not save."""


class SwappedDiffusersModel(SwappedModel):
    """Base class of diffusers models with replaced attention, with methods to save, load and build them."""

    _all_weights = True

    @classmethod
    def derive_from(cls, host: Any) -> Any:
        """Return the subclass of a diffusers model class that saves and loads models with replaced attention.

        The subclass is created on the first call for each model class.

        Args:
            host: diffusers model class. A subclass that this method created is returned unchanged.
        """
        # diffusers converts loaded weights to the requested dtype, except for modules with these names.
        float32_modules = sorted({*(host._keep_in_fp32_modules or ()), "mixing"})
        return derive(cls, host, host.__name__, _keep_in_fp32_modules=float32_modules)

    @classmethod
    def load_config(cls, *args: Any, **options: Any) -> Any:
        """Load the configuration of a model with replaced attention, and restore its original values.

        The saved file contains some invalid values, so that the original diffusers class rejects it. Arguments and return
        values are the same as for the diffusers method.
        """
        loaded = super().load_config(*args, **options)  # type: ignore[misc]
        return (restored(loaded[0]), *loaded[1:]) if isinstance(loaded, tuple) else restored(loaded)

    @classmethod
    def from_config(cls, config: Any, return_unused_kwargs: bool = False, **options: Any) -> Any:
        """Build a model with replaced attention from its configuration, without loading weights.

        Args:
            config: configuration that :meth:`load_config` returned.
            return_unused_kwargs: whether to also return the keyword arguments that the model does not use.
            options: further arguments of the diffusers method.

        Returns:
            The model; with ``return_unused_kwargs``, a tuple of the model and a dict of the unused arguments.

        Raises:
            ValueError: if the configuration does not record how the attention was replaced.
        """
        record = config.get(SAVED)
        if record is None:
            raise ValueError(
                f"the configuration has no record of a swap; load diffusers.{cls.host.__name__}, then swap its attention"
            )
        plain = {name: value for name, value in config.items() if name != SAVED}
        model, unused = super().from_config(plain, return_unused_kwargs=True, **options)  # type: ignore[misc]
        DiffusersFolders().restore(model, record)
        return (model, unused) if return_unused_kwargs else model

    def save_config(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Save the configuration, and a Python module that lets diffusers' ``AutoModel`` import this class.

        ``AutoModel`` imports the module only with ``trust_remote_code=True``. The module is not written if diffusers does not
        export the original class. The arguments are the same as for the diffusers method.
        """
        if self._is_public() and not Path(save_directory).is_file():
            write_module(save_directory, __name__, [type(self).__name__])
        super().save_config(save_directory, *args, **options)  # type: ignore[misc]

    def to_json_file(self, json_file_path: Any) -> None:
        """Write the configuration to a JSON file that only this class can load.

        Some values are replaced by invalid ones, so that the original diffusers class rejects the file with an error message
        that says how to load it.

        Args:
            json_file_path: file to write.
        """
        content = json.loads(self.to_json_string())  # type: ignore[attr-defined]
        content[SAVED][DTYPE] = str(self.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
        replaced: dict[str, Any] = {"quantization_config": {"quant_method": NOTICE}}
        if self._is_public():
            replaced["auto_map"] = {"AutoModel": f"{REMOTE}.{type(self).__name__}"}
        text = json.dumps(guarded(content, replaced), indent=2, sort_keys=True) + "\n"
        Path(json_file_path).write_text(text, encoding="utf-8")

    def _is_public(self) -> bool:
        """Return whether ``diffusers`` exports the parent class, so that this class can be created again from its name."""
        import diffusers

        return getattr(diffusers, self.host.__name__, None) is self.host

    @override
    def _remove_older(self, arguments: Mapping[str, Any]) -> None:
        if not arguments.get("use_flashpack"):
            suffix = "safetensors" if arguments.get("safe_serialization", True) else "bin"
            remove_stale(arguments["save_directory"], "diffusion_pytorch_model", arguments.get("variant"), suffix)


def __getattr__(name: str) -> Any:
    """Return the subclass of the diffusers model class ``name`` that saves and loads models with replaced attention.

    The name ``ModelMixin`` gives diffusers' own base class, which diffusers looks up in the modules of pipeline components.

    Raises:
        AttributeError: if diffusers does not have a model class of this name.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    import diffusers

    if name == "ModelMixin":  # diffusers looks up base classes of a pipeline's component in its module
        return diffusers.ModelMixin
    host = getattr(diffusers, name, None)
    if isinstance(host, type) and issubclass(host, diffusers.ModelMixin):
        return SwappedDiffusersModel.derive_from(host)
    raise AttributeError(f"diffusers has no model {name}")


class DiffusersFolders(DiffusersHost):
    """Implementation of attention replacement for diffusers models, including saving and loading of the resulting models."""

    @override
    def record(self, model: Any) -> Mapping[str, Any] | None:
        return model.config.get(SAVED)

    @override
    def remember(self, model: Any, record: Mapping[str, Any]) -> None:
        model.register_to_config(**{SAVED: dict(record)})
        model.__class__ = SwappedDiffusersModel.derive_from(type(model))

    @override
    def wrote(self, config: Mapping[str, Any]) -> bool:
        return "_diffusers_version" in config

    @override
    def load(
        self, source: str, config: Mapping[str, Any], dtype: torch.dtype | None, options: Mapping[str, Any]
    ) -> nn.Module:
        import diffusers

        name = config["_class_name"]
        host = getattr(diffusers, name, None)
        if host is None:
            raise ValueError(
                f"{source} is of class {name}, which diffusers does not have; build it and load its weights"
            )
        folder = Path(source, options.get("subfolder") or "")
        saved = getattr(torch, config[SAVED][DTYPE]) if DTYPE in config[SAVED] else _saved_dtype(folder)
        return SwappedDiffusersModel.derive_from(host).from_pretrained(source, torch_dtype=dtype or saved, **options)


def _saved_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of a query projection in the safetensors files of a folder; None if the files do not contain one."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.endswith(".to_q.weight"):
                    return tensors.get_tensor(name).dtype
    return None
