"""Generation: time per token and memory of the state, by the length of the context.

    lightning bench generation --out benchmarks/results

For each kind of attention, a model with random weights reads a context and then generates greedily. The time does not depend
on the weights. Dense mixing covers the longest context from the start.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from mhla_tasks.language import MHLAConfig, MHLAForCausalLM
from mhla_tasks.language.config import plain_attention

from benchmarks.machine import describe
from lightning_mhla import AttentionConfig, GenerationCache
from lightning_mhla.system.figures import plain_numbers

KINDS: dict[str, dict[str, Any]] = {
    "exponential": {"kind": "mhla", "mixing": "exponential"},
    "dense": {"kind": "mhla", "mixing": "dense"},
    "linear": {"kind": "linear"},
    "softmax": {"kind": "softmax"},
    **{kind: {"kind": kind} for kind in ("retention", "gla", "gated_deltanet", "mamba2")},
}
SIZE = {"vocab_size": 2048, "dim": 256, "depth": 4, "heads": 4, "mlp_width": 704}
BLOCK, READ_AT_ONCE = 64, 2048


def build(kind: str, context: int) -> MHLAForCausalLM:
    """Build a small language model with random weights.

    Args:
        kind: kind of attention, a key of :data:`KINDS`.
        context: maximum number of tokens of a sequence.
    """
    torch.manual_seed(0)
    attention = AttentionConfig(block_size=BLOCK, normalize=False, rotary=True, gate=True, **KINDS[kind])
    return MHLAForCausalLM(MHLAConfig(**SIZE, context=context, attention=plain_attention(attention))).eval()


@torch.inference_mode()
def measure(kind: str, contexts: list[int], steps: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure generation with one kind of attention after contexts of several lengths.

    Args:
        kind: kind of attention.
        contexts: lengths of the contexts in tokens.
        steps: number of tokens to generate after each context. It should be a multiple of the block size, so that the cost
            of opening a block is counted in proportion.
        device: device of the model.

    Returns:
        A row for each context: milliseconds per token, bytes of the state, and seconds to read the context.
    """
    model = build(kind, max(contexts) + BLOCK + steps).to(device)
    rows = []
    model.generate(torch.zeros(1, BLOCK, dtype=torch.long, device=device), max_new_tokens=BLOCK + 2)  # warm-up
    cache, read, spent = GenerationCache(model.config.depth), 0, 0.0
    for context in contexts:
        start = time.perf_counter()
        while read < context:
            count = min(READ_AT_ONCE, context - read)
            tokens = torch.randint(0, SIZE["vocab_size"], (1, count), device=device)
            model(tokens, past_key_values=cache, logits_to_keep=1)
            read += count
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent += time.perf_counter() - start
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            # Waits until a GPU has computed the token.
            token.item()
            times.append((time.perf_counter() - begin) * 1e3)
        read += steps
        average, size = sum(times) / len(times), cache.bytes
        rows.append(
            {
                "kind": kind,
                "context": context,
                "milliseconds_per_token": average,
                "median_milliseconds": median(times),
                "state_bytes": size,
                "read_seconds": spent,
            }
        )
        print(f"| {kind} | {context:,} | {average:.2f} | {size / 2**20:.2f} |", flush=True)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot time per token and memory of the state over the length of the context, in two panels."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = {"milliseconds_per_token": "ms per token", "state_bytes": "MiB of state"}
    for axis, (key, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for kind in KINDS:
            scale = 2**20 if key == "state_bytes" else 1
            points = [(row["context"], row[key] / scale) for row in rows if row["kind"] == kind]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=kind)
        axis.set(xlabel="context, tokens", ylabel=label, xscale="log", yscale="log")
        plain_numbers(axis)
        axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure every kind, print a table, and write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument(
        "--steps", type=int, default=128, help="number of tokens to generate at each length (default: 128)"
    )
    parser.add_argument("--out", type=Path, help="folder for JSON and picture")
    args = parser.parse_args()
    device = torch.device(args.device)
    print("| attention | context | ms per token | state, MiB |\n| --- | ---: | ---: | ---: |")
    rows = [row for kind in KINDS for row in measure(kind, sorted(args.contexts), args.steps, device)]
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        result = {"machine": describe(device), "model": {**SIZE, "block_size": BLOCK, "batch": 1}, "rows": rows}
        (args.out / f"generation-{device.type}.json").write_text(json.dumps(result, indent=2) + "\n")
        draw(rows, args.out / f"generation-{device.type}.png")


if __name__ == "__main__":
    main()
