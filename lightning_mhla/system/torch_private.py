"""Private names of torch that this project uses. ``tests/test_private_names.py`` states why each of them is needed."""

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store as get_default_store
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

foreach_add_, foreach_copy_, foreach_mul_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_mul_


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a one-dimensional device mesh of all devices in a mesh; its dimension gets the name ``name``."""
    return mesh._flatten(name)


def set_last_rates(schedule: LRScheduler, rates: list[float]) -> None:
    """Set the learning rates that ``schedule.get_last_lr()`` returns until the next step of the schedule."""
    schedule._last_lr = list(rates)


def is_fake(x: Tensor) -> bool:
    """Return whether a tensor has no values, because it is a meta tensor or a fake tensor."""
    return x.is_meta or isinstance(x, FakeTensor)


def makes_fake_tensors() -> bool:
    """Return whether new tensors have no values, because torch.compile or a FakeTensorMode is tracing the code."""
    # Dynamo cannot trace detect_fake_mode, so the order matters: under compilation it must not be called.
    return torch.compiler.is_compiling() or detect_fake_mode() is not None


def in_backward() -> bool:
    """Return whether a backward pass is running. If so, a forward pass that calls this function recomputes activations."""
    return torch._C._current_graph_task_id() != -1


def compilations() -> tuple[int, float]:
    """Return the number of graphs that torch.compile has compiled in this process, and the total compile time in seconds."""
    from torch._dynamo.utils import calculate_time_spent, counters  # takes a second to import, so not at the top

    return counters["stats"]["unique_graphs"], float(calculate_time_spent().get("total_wall_time", 0.0))


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled with its method ``compile``."""
    return module._compiled_call_impl is not None


def raise_recompile_limit(least: int) -> None:
    """Raise torch's limit on recompilations of one function to ``least``, unless the limit is already higher.

    Layers that share a forward function each compile it, so the limit has to cover the number of layers.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, least)


__all__ = [
    "compilations",
    "flatten_mesh",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "get_default_store",
    "in_backward",
    "is_compiled",
    "is_fake",
    "makes_fake_tensors",
    "raise_recompile_limit",
    "set_last_rates",
    "tree_leaves",
]
