"""Private names of ``torch.distributed.checkpoint``, in a separate module because importing them takes 0.5 s."""

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner as EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict as load_state_dict

__all__ = ["EmptyStateDictLoadPlanner", "StorageInfo", "load_state_dict", "set_element"]
