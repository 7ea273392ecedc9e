"""Private names of torch that the suite uses; ``tests/test_private_names.py`` says what each is for."""

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner as EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict as load_state_dict
from torch.distributed.distributed_c10d import _get_default_store as get_default_store
from torch.utils._pytree import tree_leaves

foreach_add_, foreach_copy_, foreach_mul_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_mul_

__all__ = [
    "EmptyStateDictLoadPlanner",
    "StorageInfo",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "get_default_store",
    "load_state_dict",
    "set_element",
    "tree_leaves",
]
