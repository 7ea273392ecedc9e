"""Private names of torch that the operator uses; ``tests/test_private_names.py`` says what each is for."""

import torch
from torch.utils import _pytree as pytree

assert_async = torch._assert_async
"""Check a condition on the device, without waiting for it."""

__all__ = ["assert_async", "pytree"]
