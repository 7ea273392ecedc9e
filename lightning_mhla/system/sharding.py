"""Sharding by FSDP2, imported when something is sharded: its imports take half a second, and most runs need none of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

SEQUENCE = "sequence_parallel"
"""Name of the dimension of the device mesh whose processes share sequences."""


def is_shard(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a ``DTensor``, of which every process holds a share."""
    return _is("torch.distributed.tensor", "DTensor", value)


def is_sharded_module(module: object) -> TypeGuard[FSDPModule]:
    """Whether a module was given to ``fully_shard``."""
    return _is("torch.distributed.fsdp", "FSDPModule", module)


def _is(package: str, name: str, value: object) -> bool:
    found: Any = sys.modules.get(package)  # without its package there is no instance of a class
    return found is not None and isinstance(value, getattr(found, name))


def shard(
    network: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, gathered: torch.dtype, kept: Iterable[nn.Module]
) -> None:
    """Shard a network layer by layer, in place.

    Args:
        network: whose parameters are float32, and are updated in float32.
        layers: layers of the network, gathered one at a time.
        mesh: the processes, in one dimension.
        gathered: dtype that weights are gathered in, and computed with; gradients are reduced in float32.
        kept: parts of the network that stay float32, and stay whole after their forward pass, since they are used after it.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if gathered != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in kept:
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
