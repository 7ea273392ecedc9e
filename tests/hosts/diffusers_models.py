"""Swapped models in diffusers' own tests of DiT, SANA, PixArt and Wan."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_mhla import AttentionConfig, swap_attention

MODULES = {
    "test_models_dit_transformer2d": AttentionConfig(block_grid=[2, 2], mixing_init="uniform"),
    "test_models_transformer_sana": AttentionConfig(block_grid=[2, 2], feature_map="sana"),
    "test_models_pixart_transformer2d": AttentionConfig(block_grid=[2, 2]),
    "test_models_transformer_wan": AttentionConfig(block_grid=[1, 2, 2], normalize=False, gate=True),
}
"""Modules of diffusers' tests, each with the attention to swap into its models."""

LEFT_OUT = (
    "test_correct_class_remapping_from_pretrained_config",  # reads a configuration from the hub
    "test_keep_in_fp32_modules_as_str",  # changes an attribute of the tests' class, which is not that of the model here
    "SingleFile", "GGUF", "BitsAndBytes", "TorchAo", "Quanto", "ModelOpt", "Nunchaku",  # published weights or a GPU
)  # fmt: skip


class Swapping(type):
    """Metaclass of classes whose constructor calls return swapped models, as the tests build their models."""

    host: Any
    attention: AttentionConfig

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Build the library's model, and swap its attention."""
        model = cls.host(*args, **options)
        swap_attention(model, cls.attention)
        return model


def swapped_class(host: Any, attention: AttentionConfig, options: dict[str, Any]) -> Any:
    """Return a class that builds swapped models from the arguments of the library's class."""
    model = host(**options)
    swap_attention(model, attention)
    loading = {name: staticmethod(getattr(type(model), name)) for name in ("from_pretrained", "from_config")}
    return Swapping(host.__name__, (type(model),), {**loading, "host": host, "attention": attention})


def define(module: Any, attention: AttentionConfig) -> None:
    """Define the test classes of a module again for its model after the swap."""
    for name, tests in list(vars(module).items()):
        if not name.startswith("Test") or any(part in name for part in LEFT_OUT):
            continue
        if not hasattr(tests, "get_init_dict"):
            continue
        instance = tests()
        ours = swapped_class(instance.model_class, attention, instance.get_init_dict())
        left_out = {each: None for each in LEFT_OUT if hasattr(tests, each)}
        globals()[f"{name}Swapped"] = type(
            f"{name}Swapped", (tests,), {**left_out, "model_class": property(lambda self, ours=ours: ours)}
        )


for name, attention in MODULES.items():
    define(import_module(f".{name}", __package__), attention)
