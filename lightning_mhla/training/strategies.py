"""Lightning strategy that shards weights with FSDP2, and can split sequences among processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from lightning_mhla.checkpoints.io import READ_FROM, read_file, remove_secrets, resolve_checkpoint
from lightning_mhla.checkpoints.sharded import load_rest
from lightning_mhla.checkpoints.sharded_tensors import load_tensors, save_sharded, saved_names
from lightning_mhla.checkpoints.weights import LIVE, load_weights
from lightning_mhla.system.sharding import SEQUENCE


class FullyShardedStrategy(ModelParallelStrategy):
    """Strategy that shards weights with FSDP2, and optionally splits sequences among processes (sequence parallelism).

    The strategy works on GPUs (NCCL) and CPUs (gloo), on any number of nodes. Checkpoints are written atomically, and load on
    any number of processes. Weights are sharded over all processes, including those that share a sequence.

    Args:
        save_distributed_checkpoint: whether to write a checkpoint as a folder of shards, one file for each process, instead of
            one file.
        gather_dtype: dtype in which the weights of a block are gathered and used. Gradients are reduced in float32, and the
            weights that the optimizer updates stay in float32. Mixing coefficients are always gathered in float32.
        sequence_parallel_size: number of neighboring processes that split each sequence among them, for sequences that do not
            fit on one device; a divisor of the number of processes. Language models only.

    Raises:
        ValueError: from :meth:`setup_environment`, if ``sequence_parallel_size`` does not divide the number of processes.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        gather_dtype: Literal["float32", "bfloat16"] = "float32",
        sequence_parallel_size: int = 1,
    ) -> None:
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint)
        self.gather_dtype, self.sequence_parallel_size = gather_dtype, sequence_parallel_size

    def setup_environment(self) -> None:
        """Start the process group, after which the number of processes is known, and create the device mesh.

        Raises:
            ValueError: if ``sequence_parallel_size`` does not divide the number of processes.
        """
        # Not ModelParallelStrategy's method, which would build a mesh for data and tensor parallelism.
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        group_size, processes = self.sequence_parallel_size, self.world_size
        if group_size < 1 or processes % group_size:
            raise ValueError(f"sequence_parallel_size={group_size} does not divide the {processes} processes")
        names = ("data_parallel", SEQUENCE)
        self._device_mesh = init_device_mesh(
            self.root_device.type, (processes // group_size, group_size), mesh_dim_names=names
        )
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, as a folder of shards if ``save_distributed_checkpoint`` was set, otherwise as one file.

        Every process must call this method.

        Args:
            checkpoint: entries of the checkpoint by name, as Lightning collects them; may be changed in place.
            filepath: path of the folder or file.
            storage_options: ignored.
        """
        path = Path(self.broadcast(filepath))  # all processes must write into the same folder
        if not self._save_distributed_checkpoint:
            # Not ModelParallelStrategy's method, which deletes an existing sharded checkpoint before it writes.
            Strategy.save_checkpoint(self, checkpoint, path)
            return
        tensors = {name: checkpoint.pop(name) for name in ("state_dict", LIVE) if name in checkpoint}
        for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
            tensors[f"optimizer_{index}"] = state
        remove_secrets(checkpoint)
        save_sharded(path, tensors, checkpoint)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and optimizer states from a sharded checkpoint or a single file.

        If the checkpoint has both a moving average and the trained weights, the average is loaded.

        Args:
            checkpoint_path: path of a checkpoint, or of the folder of a run, whose latest complete checkpoint is then loaded.
            weights_only: ignored; code in a checkpoint is never run.

        Returns:
            Entries of the checkpoint that remain for Lightning to restore, such as the progress of training, and the path that
            was read. If the moving average was loaded, the trained weights are among the entries. From a sharded checkpoint,
            they are sharded like the weights of the module.
        """
        path = resolve_checkpoint(Path(self.broadcast(checkpoint_path)))
        assert self.model is not None
        if path.is_file():
            content = read_file(path)
            load_weights(self.model, content.pop("state_dict"), self._strict)
            for optimizer, state in zip(self.optimizers, content.get("optimizer_states", []), strict=False):
                # A single file numbers the parameters, as Optimizer.state_dict() does; torch's distributed loading needs names.
                named = _named(state, optimizer, self.model)
                set_optimizer_state_dict(
                    self.model, optimizer, optim_state_dict=named, options=StateDictOptions(full_state_dict=True)
                )
            return {**content, READ_FROM: str(path)}
        names = saved_names(path)
        model_weights: dict[str, Any] = get_model_state_dict(self.model)
        # the reader fills tensors in place, so both sets of weights need storage that is not the model's
        weights = {
            name: {key: value.clone() for key, value in model_weights.items()}
            for name in ("state_dict", LIVE)
            if name in names
        }
        load_tensors(path, weights)
        set_model_state_dict(self.model, weights.pop("state_dict"), options=StateDictOptions(strict=self._strict))
        # One optimizer at a time, so that only one additional copy of a state is in memory.
        for index, optimizer in enumerate(self.optimizers):
            state = {f"optimizer_{index}": get_optimizer_state_dict(self.model, optimizer)}
            load_tensors(path, state)
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state[f"optimizer_{index}"])
        return {**load_rest(path), **weights, READ_FROM: str(path)}

    @property
    def _strict(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.strict_loading


def _named(state: dict[str, Any], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Convert an optimizer's state dict from parameter indices to parameter names, which torch's distributed loading needs.

    Args:
        state: state dict, in which parameters are numbered.
        optimizer: optimizer with the parameters in the same order.
        model: model that has the parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "state": {order[number]: values for number, values in state["state"].items()},
        "param_groups": [{**g, "params": [order[number] for number in g["params"]]} for g in state["param_groups"]],
    }
