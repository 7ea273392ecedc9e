"""Private names of torch that the suite uses; ``tests/test_private_names.py`` says what each is for."""

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
    """A mesh of one dimension, called ``name``, over the processes of a mesh of several."""
    return mesh._flatten(name)


def set_last_rates(schedule: LRScheduler, rates: list[float]) -> None:
    """Set the learning rates that a schedule reports until its next step."""
    schedule._last_lr = list(rates)


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has no values that could be read."""
    return x.is_meta or isinstance(x, FakeTensor)


def makes_fake_tensors() -> bool:
    """Whether tensors that are made now have no values."""
    return torch.compiler.is_compiling() or detect_fake_mode() is not None  # Dynamo does not trace the second


def in_backward() -> bool:
    """Whether a backward pass runs: what is computed now is computed again."""
    return torch._C._current_graph_task_id() != -1


def compilations() -> tuple[int, float]:
    """Graphs that this process has compiled, and the seconds that it took."""
    from torch._dynamo.utils import calculate_time_spent, counters  # a second of imports, for who compiles

    return counters["stats"]["unique_graphs"], float(calculate_time_spent().get("total_wall_time", 0.0))


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def raise_recompile_limit(least: int) -> None:
    """Let one function be compiled so many times, for as many layers that share it."""
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
