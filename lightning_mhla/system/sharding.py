"""Sharding of the parameters of a network with FSDP2, and a hash of weights, sharded or not.

The packages of FSDP2 are imported on first use, because importing them takes 0.5 s and most runs do not shard.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

SEQUENCE = "sequence_parallel"
"""Name of the device mesh dimension for sequence parallelism."""


def is_shard(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a ``DTensor``, that is, a tensor of which each process holds a shard."""
    return _is("torch.distributed.tensor", "DTensor", value)


def is_sharded_module(module: object) -> TypeGuard[FSDPModule]:
    """Return whether a module is sharded with FSDP2, that is, was passed to ``fully_shard``."""
    return _is("torch.distributed.fsdp", "FSDPModule", module)


@contextmanager
def gathered_weights(module: nn.Module) -> Iterator[None]:
    """Gather all sharded weights of a module on every process, for methods other than ``forward``.

    FSDP2 gathers weights when ``forward`` of a sharded module is called, but not when other methods are called, such as those
    that generate token by token. Within this context, every process holds all weights and may call any method, any number of
    times. Every process must enter and leave the context. The context has no effect on a module without sharded weights.

    Args:
        module: module with sharded parts.
    """
    sharded = [part for part in module.modules() if is_sharded_module(part)]
    for part in sharded:
        part.unshard()
    try:
        yield
    finally:
        for part in sharded:
            part.reshard()


def fingerprint(network: nn.Module) -> str:
    """Compute a hash of a network's weights, to be recorded with results that depend on them.

    If weights are sharded, every process must call this function; each of them gets the hash of the complete weights.

    Returns:
        String of 16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        whole = tensor.full_tensor() if is_shard(tensor) else tensor
        # `view(-1)` first, because a scalar cannot be viewed as bytes.
        digest.update(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _is(package: str, name: str, value: object) -> bool:
    module: Any = sys.modules.get(package)  # if the package was never imported, no instance of its classes exists
    return module is not None and isinstance(value, getattr(module, name))


def shard(
    network: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    gathered: torch.dtype,
    float32_parts: Iterable[nn.Module],
) -> None:
    """Shard the parameters of a network over processes with FSDP2, layer by layer, in place.

    Args:
        network: network with float32 parameters; the optimizer updates them in float32.
        layers: layers of the network. Their parameters are gathered one layer at a time.
        mesh: one-dimensional mesh of the processes.
        gathered: dtype in which weights are gathered and used; gradients are reduced in float32.
        float32_parts: parts of the network that stay in float32. Their parameters remain gathered from the forward pass
            to the backward pass. This argument has no effect if ``gathered`` is float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if gathered != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in float32_parts:
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # Last: the network then takes only the parameters that no layer has taken.
    fully_shard(network, mesh=mesh, mp_policy=policy)
