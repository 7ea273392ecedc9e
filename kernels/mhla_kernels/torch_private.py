"""Private names of torch that this package uses; ``tests/test_private_names.py`` states the purpose of each."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

PROXY = torch._C._TorchDispatchModeKey.PROXY
"""Dispatch mode that is active while a graph is recorded."""

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is inside a transformation of ``torch.func``: it is mapped, or derivatives of it are taken."""


is_batched_gradient = torch._C._functorch.is_legacy_batchedtensor
"""Whether a gradient is a batch of gradients, as from ``torch.autograd.grad(..., is_grads_batched=True)``."""


def unwrapped(x: Tensor) -> Tensor:
    """Return the plain tensor inside all wrappers of ``torch.func``. It includes the axes that ``torch.vmap`` maps over."""
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def is_mapped(x: Tensor) -> bool:
    """Return whether ``torch.vmap`` maps over the tensor, directly or inside other transformations of ``torch.func``."""
    while is_wrapped(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def is_traced() -> bool:
    """Return whether ``torch.compile``, ``torch.export``, ``make_fx`` or ``torch.func.linearize`` is recording a graph."""
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(PROXY) is not None


def has_values(*tensors: Tensor) -> bool:
    """Return whether the values of all tensors can be read.

    They cannot be read while a tracer such as ``torch.compile`` runs (see :func:`is_traced`), inside transformations of
    ``torch.func``, on the meta device, or in fake tensors.
    """
    return not is_traced() and all(not (x.is_meta or isinstance(x, FakeTensor) or is_wrapped(x)) for x in tensors)


assert_async = torch._assert_async
"""Check a condition on the device, without waiting for the device."""

cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Softmax attention that also returns the logarithm of each query's sum of weights."""

cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Gradients of :data:`cpu_flash_attention`, from its output and the logarithms."""

relu_gradient = torch.ops.aten.threshold_backward.grad_input
"""Gradient of relu, written to an existing tensor: the first argument where the second is above the third or NaN, else 0."""

__all__ = [
    "FakeTensor",
    "assert_async",
    "cpu_flash_attention",
    "cpu_flash_attention_backward",
    "has_values",
    "is_batched_gradient",
    "is_mapped",
    "is_traced",
    "is_wrapped",
    "pytree",
    "relu_gradient",
    "unwrapped",
]
