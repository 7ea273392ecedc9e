"""Checks that options with the same name, such as the image size, agree in a model and in its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AGREE = ("num_classes", "image_size", "sample_size", "channels", "context")
"""Names of options with the same meaning for a model and for its data."""


OF_PIXELS = ("image_size", "sample_size", "channels")
"""Names of options that describe images in the data, but latents in a model that works on latents."""


def shared_options(model: Mapping[str, Any]) -> list[str]:
    """Return the names of options that must agree in a model and in its data.

    Args:
        model: hyperparameters of the model. If they include a ``vae`` (image autoencoder), the model works on latents, and
            options that describe images are left out.
    """
    return [name for name in AGREE if name not in OF_PIXELS or not model.get("vae")]


def agrees(name: str, model: Any, data: Any) -> bool:
    """Return whether the value of an option in a model agrees with its value in the data.

    The values must be equal, except that the ``context`` of the data may be shorter than that of the model.

    Args:
        name: name of the option.
        model: value of the option in the model.
        data: value of the option in the data.
    """
    return bool(data <= model if name == "context" else data == model)


def disagreement(name: str, model: Any, data: Any) -> str:
    """Return an error message for an option that has different values in a model and in its data.

    Args:
        name: name of the option.
        model: value of the option in the model.
        data: value of the option in the data.
    """
    if name == "context":
        return f"data.context={data} is longer than model.context={model}; give one of them, and it is taken for both"
    return f"model.{name}={model} and data.{name}={data} must be equal; give one of them, and it is taken for both"


def check_agreement(model: Any, data: Any) -> None:
    """Check that options with the same meaning, such as the image size, agree in a model and a data module.

    An option is not checked if its value is unknown in the model or in the data module.

    Args:
        model: LightningModule with its hyperparameters.
        data: LightningDataModule with its hyperparameters; None to check nothing.

    Raises:
        ValueError: if the values of an option do not agree. The message names both values.
    """
    if data is None:
        return
    for name in shared_options(model.hparams):
        model_value, data_value = _value(model, name), _value(data, name)
        if model_value is None or data_value is None or agrees(name, model_value, data_value):
            continue
        if name in data.hparams:
            raise ValueError(disagreement(name, model_value, data_value))
        raise ValueError(
            f"model.{name}={model_value} does not fit the data, which has {name}={data_value}; give --model.{name}={data_value}"
        )


def _value(module: Any, name: str) -> Any:
    """Return a hyperparameter of a model or data module, or else its attribute of the same name.

    The attribute is used if the hyperparameter is None or missing. The result is None if the module has neither.

    Args:
        module: LightningModule or LightningDataModule.
        name: name of the hyperparameter.
    """
    option = module.hparams.get(name)
    return vars(module).get(name) if option is None else option
