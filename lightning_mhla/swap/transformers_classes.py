"""Subclasses of transformers models and configurations that save and load replaced attention.

A model class has the name of its transformers parent, such as ``LlamaForCausalLM``. A configuration class has its parent's name
with the prefix ``Swapped``, such as ``SwappedLlamaConfig``. Each class is created when this module's attribute of that name is
first accessed. :func:`lightning_mhla.swap_attention` changes the class of a model to such a subclass. The model's
``save_pretrained`` then writes a folder that transformers' original classes reject.
"""

# Longer than other modules because saving and loading must match each other.

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_mhla.swap.host import SAVED
from lightning_mhla.swap.saved import (
    NOTICE,
    REMOTE,
    SwappedClass,
    SwappedModel,
    check_complete,
    derive,
    guarded,
    remove_stale,
    restored,
    write_module,
)
from lightning_mhla.swap.transformers import TransformersHost
from lightning_mhla.system.transformers_module import publish

PREFIX = "Swapped"
MODEL_TYPE = "mhla_swapped"
"""Saved ``model_type``, unknown to transformers, so that its Auto classes ask for ``trust_remote_code``."""

UNUSABLE = "lightning_mhla.load_swapped"
"""Attention implementation named in a loaded configuration. transformers rejects it if its own classes build the model."""

TYPED = ("initializer_range", "hidden_size", "vision_config", "text_config", "d_model")
"""Configuration entries to overwrite with :data:`NOTICE`. Every model family checks the type of at least one of them."""

PARTS = {"add_pooling_layer": "pooler.", "use_mask_token": "mask_token"}
"""Arguments of model classes that transformers does not save, each with a substring of the names of the weights it adds."""


class SwappedConfig(SwappedClass):
    """Base class of the configurations of transformers models with replaced attention.

    The configuration is saved in a form that transformers' own configuration classes reject, because with them the model would
    be built with its original attention.
    """

    @classmethod
    def derive_from(cls, host: Any) -> Any:
        """Return the configuration class for models with replaced attention that is derived from a transformers class.

        The derived class is created on the first call for each transformers class.

        Args:
            host: transformers configuration class. A class for models with replaced attention is returned unchanged.
        """
        return derive(cls, host, f"{PREFIX}{host.__name__}")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing, so that transformers does not copy the source of this class to the folder of a saved model.

        The folder contains a module that imports the class instead.
        """

    @classmethod
    def get_config_dict(cls, *args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the configuration of a model with replaced attention, and restore its original values.

        The saved file contains some invalid values, so that transformers' own classes reject it. The arguments are the same as
        for the transformers method.

        Returns:
            Configuration entries, and the keyword arguments that were not used.
        """
        config, unused = super().get_config_dict(*args, **options)  # type: ignore[misc]
        config = restored(config)
        if names := config.get("architectures"):
            config["architectures"] = [_publish(name) for name in names]
        return {"attn_implementation": UNUSABLE, **config}, unused

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Save the configuration, and a Python module that lets Auto classes import this class (``trust_remote_code=True``).

        Args:
            save_directory: folder to write to.
            args: further positional arguments of the transformers method.
            options: further keyword arguments of the transformers method.
        """
        if (names := self._auto_map()) and not Path(save_directory).is_file():
            write_module(save_directory, __name__, sorted({name.rpartition(".")[2] for name in names.values()}))
        super().save_pretrained(save_directory, *args, **options)  # type: ignore[misc]

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write the configuration to a JSON file that only this class can load.

        Some values are replaced by invalid ones, so that transformers' own classes reject the file with an error message that
        says how to load it.

        Args:
            json_file_path: file to write.
            use_diff: whether to omit entries that have their default value.
        """
        content = json.loads(self.to_json_string(use_diff))  # type: ignore[attr-defined]
        content["auto_map"] = self._auto_map()
        if names := content.get("architectures"):
            content["architectures"] = [name.removeprefix(PREFIX) for name in names]
        # A configuration class accepts unknown entries, so that only one whose type it checks makes it fail.
        typed = next(name for name in TYPED if _rejects(self.host, name))
        content = guarded(content, {"model_type": MODEL_TYPE, TYPED[0]: NOTICE, typed: NOTICE})
        Path(json_file_path).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _auto_map(self) -> dict[str, str]:
        """Return the configuration entry ``auto_map``, which tells Auto classes where to find the classes of this model.

        Returns:
            Mapping from the name of an Auto class, such as ``AutoConfig``, to the module and class to import, such as
            ``modeling_swapped.SwappedLlamaConfig``. Empty if transformers does not export the original configuration class.
        """
        import transformers

        # The saved module imports classes by name, which works only for classes that transformers exports.
        if getattr(transformers, self.host.__name__, None) is not self.host:
            return {}
        names = {"AutoConfig": type(self).__name__}
        saved = [name.removeprefix(PREFIX) for name in getattr(self, "architectures", None) or []]
        for auto in (name for name in dir(transformers) if name.startswith("AutoModel")):
            mapping = getattr(getattr(transformers, auto), "_model_mapping", None)
            fitting = None if mapping is None else mapping.get(self.host, None)
            if fitting is None:
                continue
            kinds = fitting if isinstance(fitting, tuple) else (fitting,)
            choices = [kind.__name__ for kind in kinds if kind is not None and kind.config_class is self.host]
            if choices:
                names[auto] = next((name for name in choices if name in saved), choices[0])
        return {auto: f"{REMOTE}.{name}" for auto, name in names.items()}


class SwappedTransformersModel(SwappedModel):
    """Base class of transformers models whose constructor replaces the attention as recorded in the model's configuration."""

    @classmethod
    def derive_from(cls, host: Any) -> Any:
        """Return the class for models with replaced attention that is derived from a transformers model class.

        The derived class is created on the first call for each transformers class.

        Args:
            host: transformers model class. A class for models with replaced attention is returned unchanged.
        """
        config = SwappedConfig.derive_from(host.config_class)
        float32_modules = {*(getattr(host, "_keep_in_fp32_modules_strict", None) or ()), "mixing"}
        # with these, transformers itself rejects static caches and decoding that removes tokens again
        state = {"_is_stateful": True, "_can_compile_fullgraph": False}
        return derive(
            cls, host, host.__name__, config_class=config, _keep_in_fp32_modules_strict=float32_modules, **state
        )

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing, so that transformers does not copy the source of this class to the folder of a saved model.

        The folder contains a module that imports the class instead.
        """

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, so that transformers still renames weights in files that older versions of transformers saved.

        transformers skips this renaming for classes that are not its own.
        """
        return False

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        record = getattr(config, SAVED, None)
        if record is None:
            raise ValueError(
                f"the configuration has no record of a swap; build transformers.{self.host.__name__}, then swap its "
                "attention"
            )
        plain = copy.copy(config)  # an Auto class may build parts of the model, and must build them without the swap
        plain.__class__ = config.host if isinstance(config, SwappedConfig) else type(config)
        plain.__dict__.pop("auto_map", None)
        if plain._attn_implementation == UNUSABLE:  # transformers chooses the attention of layers that are not replaced
            plain._attn_implementation = None
        # Not every class of a model family takes options such as add_pooling_layer.
        parameters = inspect.signature(self.host.__init__).parameters  # type: ignore[misc]
        unsaved = {name: value for name, value in record.get("options", {}).items() if name in parameters}
        super().__init__(plain, *args, **{**unsaved, **options})  # type: ignore[call-arg]
        TransformersFolders().restore(self, record)

    @override
    def _remove_older(self, arguments: Mapping[str, Any]) -> None:
        if not getattr(self, "_hf_peft_config_loaded", False):
            remove_stale(arguments["save_directory"], "model", arguments.get("variant"), "safetensors")


def __getattr__(name: str) -> Any:
    """Return the class ``name`` of this module, a model or configuration class for models with replaced attention.

    The name ``PreTrainedModel`` gives transformers' own base class, which diffusers looks up in the modules of pipeline
    components.

    Raises:
        AttributeError: if transformers does not have a corresponding class.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    import transformers

    if name == "PreTrainedModel":  # diffusers looks up base classes of a pipeline's component in its module
        return transformers.PreTrainedModel
    host = getattr(transformers, name.removeprefix(PREFIX), None)
    if isinstance(host, type) and name.startswith(PREFIX) and issubclass(host, transformers.PreTrainedConfig):
        return SwappedConfig.derive_from(host)
    if isinstance(host, type) and not name.startswith(PREFIX) and issubclass(host, transformers.PreTrainedModel):
        return SwappedTransformersModel.derive_from(host)
    raise AttributeError(f"transformers has no model or configuration for {name}")


def _publish(name: str) -> str:
    """Add the class for a model with replaced attention to the package ``transformers``, and return its name there.

    Pipelines and ``transformers serve`` look up model classes by name in ``transformers``.

    Args:
        name: name of the original class, such as ``LlamaForCausalLM``. If transformers does not have a model class of this
            name, ``name`` is returned unchanged.
    """
    import transformers

    host = getattr(transformers, name, None)
    if not (isinstance(host, type) and issubclass(host, transformers.PreTrainedModel)):
        return name
    publish(PREFIX + name, SwappedTransformersModel.derive_from(host))
    return PREFIX + name


def _rejects(host: Any, name: str) -> bool:
    """Return whether the constructor of a configuration class raises an error for a string as the argument called ``name``.

    Args:
        host: transformers configuration class.
        name: name of the argument, such as ``hidden_size``.
    """
    try:
        host(**{name: NOTICE})
    except Exception:  # the type does not matter: any error stops a class that does not support the swap
        return True
    return False


class TransformersFolders(TransformersHost):
    """Implementation of attention replacement for transformers models.

    The class records the replacement in the model's configuration, and loads saved models.
    """

    @override
    def record(self, model: Any) -> Mapping[str, Any] | None:
        is_swapped = any(hasattr(module, "swapped") for module in model.modules())
        return getattr(model.config, SAVED, None) if is_swapped else None

    @override
    def remember(self, model: Any, record: Mapping[str, Any]) -> None:
        shared = model.config
        if isinstance(shared, SwappedConfig):
            setattr(shared, SAVED, dict(record))
            return
        model_config = copy.copy(shared)  # a different model may use the same configuration
        model_config.__class__ = SwappedConfig.derive_from(type(shared))
        setattr(model_config, SAVED, {**record, "options": _unsaved(model, model.state_dict())})
        for module in model.modules():
            if getattr(module, "config", None) is shared:
                module.config = model_config
            if hasattr(module, "swapped"):
                module.host_config = model_config
        model.__class__ = SwappedTransformersModel.derive_from(type(model))

    @override
    def wrote(self, config: Mapping[str, Any]) -> bool:
        return "model_type" in config and "transformers_version" in config

    @override
    def load(
        self, source: str, config: Mapping[str, Any], dtype: torch.dtype | None, options: Mapping[str, Any]
    ) -> nn.Module:
        import transformers

        name = (config.get("architectures") or [""])[0]
        host = getattr(transformers, name, None)
        if host is None:
            raise ValueError(
                f"{source} is of class {name}, which transformers does not have; build it and load its weights"
            )
        kind, options = SwappedTransformersModel.derive_from(host), dict(options)
        if "options" not in config[SAVED]:  # an older folder, saved before options were recorded
            options |= _unsaved(host, _saved_names(Path(source, options.get("subfolder") or "")))
        model, info = kind.from_pretrained(source, dtype=dtype or "auto", output_loading_info=True, **options)
        check_complete(name, source, info, all_weights=True)
        return model


def _unsaved(model: Any, names: Any) -> dict[str, bool]:
    """Infer, from the names of a model's weights, the constructor arguments that transformers does not save.

    Args:
        model: transformers model, or its class.
        names: iterable of the names of the model's weights.

    Returns:
        Values of ``add_pooling_layer`` and ``use_mask_token``, if the constructor has these arguments. A value is True if the
        model has weights of a pooler or a mask token, respectively.
    """
    parameters = inspect.signature(getattr(model, "host", model).__init__).parameters
    return {option: any(part in name for name in names) for option, part in PARTS.items() if option in parameters}


def _saved_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    return names
