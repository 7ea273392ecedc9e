"""Private names of torch that the operator uses; ``tests/test_private_names.py`` says what each is for."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

PROXY = torch._C._TorchDispatchModeKey.PROXY
"""The mode in which a graph is recorded."""

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a transformation of ``torch.func`` stands around a tensor: it is mapped, or derivatives of it are taken."""


def unwrapped(x: Tensor) -> Tensor:
    """The tensor inside, of all rows that are mapped."""
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def is_mapped(x: Tensor) -> bool:
    """Whether ``torch.vmap`` stands for several tensors by this one."""
    while is_wrapped(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def is_traced() -> bool:
    """Whether a graph is recorded now: ``torch.compile``, ``torch.export``, ``make_fx``, ``torch.func.linearize``."""
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(PROXY) is not None


def has_values(*tensors: Tensor) -> bool:
    """Whether numbers of tensors can be read: not while a graph is recorded, under ``torch.func``, or on the meta device."""
    return not is_traced() and all(not (x.is_meta or isinstance(x, FakeTensor) or is_wrapped(x)) for x in tensors)


assert_async = torch._assert_async
"""Check a condition on the device, without waiting for it."""

__all__ = ["FakeTensor", "assert_async", "has_values", "is_mapped", "is_traced", "is_wrapped", "pytree", "unwrapped"]
