"""Small language models, shared by the tests."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from grouped import grouped
from mhla_tasks.language import LanguageModel

from lightning_mhla import AttentionConfig

SENTENCES = [
    "The river runs through the old town and under two stone bridges.",
    "A prime number has no divisors but one and itself.",
    "What is the capital of France? A. Paris B. London C. Rome D. Madrid Answer: A",
    "def add(a, b):\n    return a + b",
    "Question: who wrote the letter? Answer: Maria",
]

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "mhla"},
    "exponential": {"kind": "mhla", "mixing": "exponential"},
    "linear": {"kind": "linear"},
    "softmax": {"kind": "softmax"},
    "learned": {"kind": "mhla", "feature_map": "learned"},
    "window": {"kind": "mhla_window", "feature_map": "learned", "mixing": "exponential"},
    **{kind: {"kind": kind} for kind in ("retention", "gla", "gated_deltanet", "mamba2", "gated_conv")},
}


def attention(name: str) -> AttentionConfig:
    return AttentionConfig(block_size=8, normalize=False, rotary=True, gate=True, **KINDS[name])


def small_model(kind: str = "exponential", context: int = 2048, **options: Any) -> LanguageModel:
    """Build a small language model, with weights large enough for distinct logits."""
    lightning.seed_everything(0, verbose=False)
    sizes = {"vocab_size": 320, "dim": 32, "depth": 2, "heads": 4, "mlp_width": 64, "initializer_range": 0.2}
    return LanguageModel(attention(kind), context=context, **grouped(**{**sizes, **options})).eval()


def greedy(network: Any, ids: torch.Tensor, **options: Any) -> list[list[int]]:
    """Generate greedily, and return the tokens of each row up to its end token."""
    tokens = network.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=1, **options)
    rows = tokens[:, ids.shape[1] :].tolist()
    end = network.config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]
