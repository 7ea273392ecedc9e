"""Private names of torch and Lightning: imported in one module each, and still there; what breaks when one goes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import mhla_kernels.torch_private
import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh

import lightning_mhla.system.checkpoint_private
import lightning_mhla.system.torch_private

ROOT = Path(__file__).parents[1]
OWN = (
    "kernels/mhla_kernels/torch_private.py",
    "lightning_mhla/system/checkpoint_private.py",
    "lightning_mhla/system/torch_private.py",
)


class Remembering(LightningModule):
    """A module with saved hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()


TORCH = {
    (mhla_kernels.torch_private, "assert_async"): "wrong decays and cu_seqlens on a GPU, and in compiled graphs, pass",
    (mhla_kernels.torch_private, "has_values"): "negative features are looked for where no number can be read",
    (mhla_kernels.torch_private, "FakeTensor"): "bounds of packed sequences are read where there are no numbers",
    (
        mhla_kernels.torch_private,
        "is_mapped",
    ): "counts that torch.vmap maps end in an error of torch that names nothing",
    (mhla_kernels.torch_private, "is_traced"): "numbers are read, and states written to, while a graph is recorded",
    (mhla_kernels.torch_private, "is_wrapped"): "steps under torch.func write into ordinary tensors",
    (mhla_kernels.torch_private, "pytree"): "ExponentialMixing and the states cannot be compiled or exported",
    (mhla_kernels.torch_private, "unwrapped"): "decays under torch.func are not checked",
    (
        lightning_mhla.system.checkpoint_private,
        "EmptyStateDictLoadPlanner",
    ): "sharded checkpoints are not read on one process",
    (
        lightning_mhla.system.checkpoint_private,
        "StorageInfo",
    ): "sharded checkpoints are not read without unpickling .metadata",
    (lightning_mhla.system.torch_private, "compilations"): "a compiled run does not say what it compiled",
    (lightning_mhla.system.torch_private, "is_compiled"): "layers are compiled again at every stage",
    (
        lightning_mhla.system.torch_private,
        "raise_recompile_limit",
    ): "of many layers that differ, those from the eighth graph on are left uncompiled",
    (lightning_mhla.system.torch_private, "flatten_mesh"): "no sequence parallelism under FSDP2",
    (lightning_mhla.system.torch_private, "foreach_add_"): "no moving average of the weights",
    (lightning_mhla.system.torch_private, "foreach_copy_"): "no moving average of the weights",
    (lightning_mhla.system.torch_private, "foreach_mul_"): "no moving average of the weights",
    (lightning_mhla.system.torch_private, "get_default_store"): "a process that stands still is not named",
    (lightning_mhla.system.checkpoint_private, "load_state_dict"): "sharded checkpoints are not read on one process",
    (lightning_mhla.system.checkpoint_private, "set_element"): "plain values of sharded checkpoints are not read",
    (
        lightning_mhla.system.torch_private,
        "in_backward",
    ): "recomputed layers take images of one size for those of another",
    (lightning_mhla.system.torch_private, "is_fake"): "attention masks are read while a swapped model is exported",
    (
        lightning_mhla.system.torch_private,
        "makes_fake_tensors",
    ): "a swapped model keeps tables without values after an export",
    (lightning_mhla.system.torch_private, "set_last_rates"): "options changed on resume show one step late",
    (lightning_mhla.system.torch_private, "tree_leaves"): "where numbers stop being finite is not found",
}
TRAINER = Trainer(barebones=True)
LIGHTNING: dict[tuple[Any, str], str] = {
    (TRAINER, "_logger_connector"): "a stop inside an epoch loses its mean metrics",
    (TRAINER.fit_loop.epoch_loop, "_batches_that_stepped"): "a stop loses a row of the log",
    (TRAINER.fit_loop.epoch_loop, "_should_check_val_fx"): "checkpoints at a stop miss the validation of their step",
    (TRAINER.fit_loop.epoch_loop, "_should_accumulate"): "a stop inside an accumulation loses gradients",
    (TRAINER.fit_loop, "_data_fetcher"): "checkpoints at a stop miss the validation of their step",
    (
        TRAINER.fit_loop.epoch_loop,
        "_is_training_done",
    ): "the state at the end of an epoch is saved before callbacks see it",
    (TRAINER.fit_loop, "_can_stop_early"): "the state at an early stop is saved before callbacks see it",
    (
        TRAINER.fit_loop.epoch_loop,
        "_num_ready_batches_reached",
    ): "a longer run skips the rest of the epoch it stopped in",
    (TRAINER.fit_loop, "_restarting"): "with max_steps, an epoch that is over ends again on resume",
    (
        ModelCheckpoint(every_n_train_steps=3),
        "_every_n_train_steps",
    ): "no warning that checkpoints lag behind their metric",
    **{
        (ModelCheckpoint(), name): "checkpoints lack what callbacks learn at their step"
        for name in ("_save_checkpoint", "_remove_checkpoint", "_save_last_checkpoint", "_last_checkpoint_saved")
    },
    (ModelCheckpoint(), "_last_global_step_saved"): "one state is saved twice",
    (DeviceMesh, "_flatten"): "no sequence parallelism under FSDP2",
    (Remembering(), "_hparams"): "checkpoints hold dataclasses and cannot be read safely",
    (Remembering(), "_hparams_initial"): "loggers get dataclasses",
    (DDPStrategy(), "_ddp_kwargs"): "layer-wise distillation does not see find_unused_parameters",
    (RichProgressBar, "_get_train_description"): "the progress bar shows Epoch 0/-2",
    (ModelParallelStrategy, "_setup_distributed"): "FullyShardedStrategy starts no process group",
    (
        ModelParallelStrategy(save_distributed_checkpoint=False),
        "_save_distributed_checkpoint",
    ): "FSDP2 ignores the choice",
}


@pytest.mark.parametrize(
    ("where", "name"), [*TORCH, *LIGHTNING], ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_name_is_still_there(where: Any, name: str) -> None:
    assert hasattr(where, name), f"{name} is gone: {({**TORCH, **LIGHTNING})[where, name]}"


def test_what_the_compiler_is_asked_for_is_there() -> None:
    module = lightning_mhla.system.torch_private
    layer = torch.nn.Linear(2, 2)
    assert not module.is_compiled(layer)
    layer.compile(backend="eager")
    assert module.is_compiled(layer)
    torch._dynamo.reset()
    graphs, seconds = module.compilations()
    layer(torch.ones(1, 2))
    assert module.compilations()[0] == graphs + 1
    assert module.compilations()[1] > seconds
    before = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(recompile_limit=before):
        module.raise_recompile_limit(before + 1)
        assert torch._dynamo.config.recompile_limit == before + 1
        module.raise_recompile_limit(1)
        assert torch._dynamo.config.recompile_limit == before + 1


def test_they_are_listed_whole() -> None:
    for module in {where for where, _ in TORCH}:
        assert set(module.__all__) == {name for where, name in TORCH if where is module}


def test_no_other_module_imports_private_names() -> None:
    for folder in ("kernels", "lightning_mhla", "tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            if str(path.relative_to(ROOT)) in OWN:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "lightning"):
                    words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                    words = [node.attr]
                else:
                    continue
                private = [word for word in words if word.startswith("_") and not word.startswith("__")]
                assert not private, f"{path}: {private}"
