"""Our language model in place of Llama in peft's ``test_decoder_models.py``, and the conftest of these tests."""

from __future__ import annotations

import sys

import pytest

LEFT_OUT = {
    "trl-internal-testing/": "a model of the hub",
    "hf-internal-testing/": "a model of the hub",
    "peft-internal-testing/": "a model of the hub",
    "ShadowConfig": "looks for layers called layers.0, layers.1, ...; give target_modules",
    "PrefixTuningConfig": "trains keys and values, which the model has none of: an error",
}
"""Parts of the names of tests that cannot apply, each with the reason."""


def save(folder: str) -> None:
    """Write a small language model and its tokenizer."""
    import torch
    from mhla_tasks.language import MHLAConfig, MHLAForCausalLM
    from mhla_tasks.language.tokenizer import train_tokenizer

    from lightning_mhla import AttentionConfig

    torch.manual_seed(0)
    attention = AttentionConfig(mixing="exponential", block_size=4, normalize=False, rotary=True)
    config = MHLAConfig(
        vocab_size=1000, dim=32, depth=2, heads=4, key_value_heads=4, mlp_width=64, context=2048, attention=attention,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    MHLAForCausalLM(config).save_pretrained(folder)
    train_tokenizer(["a few words"], 300).save_pretrained(folder)


def pytest_configure(config: pytest.Config) -> None:
    """Register the language model with transformers."""
    import mhla_tasks.language  # noqa: F401

    for marker in ("single_gpu_tests", "multi_gpu_tests", "regression", "bitsandbytes"):
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that do not apply to the language model."""
    for item in items:
        for part, reason in LEFT_OUT.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))


if __name__ == "__main__":
    save(sys.argv[1])
