"""Memory of linearizing a Llama of 1B parameters: a step of attention transfer, and a step of training afterwards.

    lightning bench linearize --out benchmarks/results

The sizes are those of Llama 3.2 1B, with one sequence. Nothing is computed: the storages of a step of fake tensors on a CPU are
tracked (frozen weights in bfloat16, trained ones and AdamW in float32, layers recomputed) for models of a few depths. Memory
grows linearly with the depth, so larger depths are extrapolated.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from benchmarks.machine import describe
from lightning_mhla import AttentionConfig, swap_attention
from lightning_mhla.swap import transfer_loss
from lightning_mhla.swap.adapters import LoraOptions, choose_trained
from lightning_mhla.system.files import write_json

SIZES: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 128_256, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
}  # fmt: skip
"""Sizes of Llama 3.2 1B, without the number of layers."""

ATTENTION = AttentionConfig(kind="mhla_window", block_size=64, mixing="exponential", feature_map="learned")


class Storages(TorchDispatchMode):
    """Dispatch mode that tracks the total bytes of live tensors, and its peak.

    Torch's own tracker does not support frozen parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak = 0, 0
        self.known: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Add a tensor's storage to the total until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        # Torch keeps the Python object of a storage as long as the storage itself, so this is called when the memory is freed.
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return out


def peak_of(layers: int, part: Any, step: Callable[[Any, tuple[Tensor, ...]], None], tokens: int) -> int:
    """Measure the peak memory of two training steps in bytes. The second step starts with the state of the optimizer.

    Args:
        layers: number of layers of the model.
        part: parameters to train, as for :func:`build`.
        step: function that runs the passes of a model on its inputs, such as :func:`train`.
        tokens: number of tokens of the sequence.
    """
    with FakeTensorMode():
        model, inputs = build(layers, part), (torch.ones(1, tokens, dtype=torch.long),)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True) if trained else None
        storages = Storages()
        for tensor in (*model.parameters(), *model.buffers(), *inputs):
            storages.add(tensor)
        with storages:
            for _ in range(2):
                step(model, inputs)
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
    return storages.peak


def build(layers: int, train: Any) -> Any:
    """Build a model with replaced attention. Parameters that are not trained are frozen and in bfloat16.

    Args:
        layers: number of layers of the model.
        train: parameters to train, as ``part`` of ``choose_trained``; ``"original"`` for the frozen original model.
    """
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers)).train()
    if train == "original":
        model.requires_grad_(False)
    else:
        swap_attention(model, ATTENTION)
        choose_trained(model, train, LoraOptions(8, 16))
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def transfer(model: Any, inputs: tuple[Tensor, ...]) -> None:
    """Run a forward and backward pass of attention transfer, which trains new layers to match the original ones.

    Args:
        model: model with replaced attention.
        inputs: tuple with the token ids, ``[B, N]``.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        transfer_loss(model, lambda: model.base_model(inputs[0], use_cache=False)).backward()


def train(model: Any, inputs: tuple[Tensor, ...]) -> None:
    """Run a forward and backward pass of language modeling.

    Args:
        model: language model.
        inputs: tuple with the token ids, ``[B, N]``.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(inputs[0], labels=inputs[0], use_cache=False).loss.backward()


def generate(model: Any, inputs: tuple[Tensor, ...]) -> None:
    """Run a forward pass without gradients, for comparison with training steps.

    Args:
        model: language model.
        inputs: tuple with the token ids, ``[B, N]``.
    """
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model.base_model(inputs[0], use_cache=False)


STEPS: dict[str, tuple[str, Callable[[Any, tuple[Tensor, ...]], None]]] = {
    "original, forward pass": ("original", generate),
    "layers matched": ("new", transfer),
    "replaced layers trained": ("attention", train),
}
"""Steps to measure by name, each with the trained part of the model and the function that runs the step."""


def peak(name: str, layers: int, tokens: int) -> dict[str, Any]:
    """Extrapolate the peak memory of a step in bytes from models of 2, 3 and 4 layers.

    Args:
        name: key of :data:`STEPS`.
        layers: number of layers of the model.
        tokens: number of tokens of the sequence.

    Raises:
        SystemExit: if memory does not grow linearly with the depth.
    """
    part, step = STEPS[name]
    depths = (2, 3, 4)
    peaks = [peak_of(n, part, step, tokens) for n in depths]
    grows = peaks[2] - peaks[1]
    if abs(grows - (peaks[1] - peaks[0])) > 0.01 * grows:
        raise SystemExit(f"error: models of {depths} layers take {peaks} bytes, which does not grow linearly")
    return {
        "step": name,
        "peak_bytes": peaks[2] + grows * (layers - depths[2]),
        "tracked": dict(zip(map(str, depths), peaks, strict=True)),
    }


def main() -> None:
    """Measure the memory of every step, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model (default: 16)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the sequence (default: 4096)")
    args = parser.parse_args()
    rows = [peak(name, args.layers, args.tokens) for name in STEPS]
    for row in rows:
        print(f"{row['step']}: {row['peak_bytes'] / 2**30:.2f} GiB")
    if args.out is not None:
        result = {"machine": describe(torch.device("cpu")), "layers": args.layers, "tokens": args.tokens, "rows": rows}
        write_json(args.out / "llama-1b-linearize-meta.json", result, indent=1)


if __name__ == "__main__":
    main()
