"""Private names of other libraries: listed, and still there; what breaks when one goes.

Those of torch and Lightning are imported in one module each. Those of transformers, diffusers and argparse are attributes of
classes that the suite derives from or wraps, and stand where they are used.
"""

from __future__ import annotations

import ast
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import mhla_kernels.torch_private
import pytest
import torch
from diffusers import DiffusionPipeline, ModelMixin
from huggingface_hub import PyTorchModelHubMixin
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, launchers
from mhla_tasks.language.model import MHLAForCausalLM, MHLAModel
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModel, GenerationMixin, PreTrainedModel

import lightning_mhla.system.checkpoint_private
import lightning_mhla.system.torch_private

ROOT = Path(__file__).parents[1]
OWN = (
    "kernels/mhla_kernels/torch_private.py",
    "lightning_mhla/system/checkpoint_private.py",
    "lightning_mhla/system/torch_private.py",
)


class Remembering(LightningModule):
    """Module with saved hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()


TORCH = {
    (mhla_kernels.torch_private, "assert_async"): "wrong decays and cu_seqlens on a GPU, and in compiled graphs, pass",
    (
        mhla_kernels.torch_private,
        "cpu_flash_attention",
    ): "mhla_window stores all scores of near tokens, and is slower than softmax on a CPU",
    (
        mhla_kernels.torch_private,
        "cpu_flash_attention_backward",
    ): "training mhla_window stores all scores of near tokens",
    (
        mhla_kernels.torch_private,
        "relu_gradient",
    ): "the parallel form allocates memory for each part of its backward pass on a CPU",
    (mhla_kernels.torch_private, "has_values"): "negative features are looked for where no number can be read",
    (mhla_kernels.torch_private, "FakeTensor"): "bounds of packed sequences are read where there are no numbers",
    (
        mhla_kernels.torch_private,
        "is_mapped",
    ): "counts that torch.vmap maps end in an error of torch that names nothing",
    (mhla_kernels.torch_private, "is_traced"): "numbers are read, and states written to, while a graph is recorded",
    (mhla_kernels.torch_private, "is_batched_gradient"): "a batch of gradients cannot be written into plain memory",
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
    (
        LightningModule(),
        "_on_before_batch_transfer",
    ): "pictures of the final weights show a batch that hooks did not see",
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
    (
        launchers._MultiProcessingLauncher(DDPStrategy()),
        "_start_method",
    ): "a run in spawned processes that fails at its end loses its log files",
    (DDPStrategy(), "_ddp_kwargs"): "layer-wise distillation does not see find_unused_parameters",
    (RichProgressBar, "_get_train_description"): "the progress bar shows Epoch 0/-2",
    (ModelParallelStrategy, "_setup_distributed"): "FullyShardedStrategy starts no process group",
    (
        ModelParallelStrategy(save_distributed_checkpoint=False),
        "_save_distributed_checkpoint",
    ): "FSDP2 ignores the choice",
}
HOSTS: dict[tuple[Any, str], str] = {
    (
        PreTrainedModel,
        "_is_stateful",
    ): "decoding that takes tokens back is not rejected, and states hold tokens too many",
    (PreTrainedModel, "_can_compile_fullgraph"): "static caches are not rejected",
    (PreTrainedModel, "_keep_in_fp32_modules_strict"): "mixing coefficients are loaded in half precision",
    (PreTrainedModel, "_no_split_modules"): "device_map=auto cuts blocks in two",
    (PreTrainedModel, "_tied_weights_keys"): "the head is saved twice, and loaded as a matrix of its own",
    (PreTrainedModel, "_keys_to_ignore_on_load_unexpected"): "a model without a head warns of the head's weights",
    (PreTrainedModel, "_init_weights"): "new weights are not drawn by the configuration's initializer_range",
    (GenerationMixin, "_supports_default_dynamic_cache"): "generate puts in a cache of keys and values",
    (GenerationMixin, "_prepare_cache_for_generation"): "generate reads the whole text again for every token",
    (AutoModel, "_model_mapping"): "saved models do not name their classes, and open as softmax",
    (ModelMixin, "_keep_in_fp32_modules"): "mixing coefficients are loaded in half precision",
    (DiffusionPipeline, "_execution_device"): "the DiT pipeline does not find its device",
    (ArgumentParser(), "_actions"): "the shell does not complete the options of tools",
}
"""Names of transformers, diffusers and argparse."""

ATTRIBUTES: dict[tuple[Any, str], str] = {
    (torch.ones(1), "_version"): "positions that were written to are taken for those of the call before",
    (torch.nn.Module(), "_buffers"): "tables of a layout do not follow a model to its device",
    (PyTorchModelHubMixin, "_hub_mixin_config"): "a vision model is saved without the options that it was built with",
    (LightningModule(), "_trainer"): "a module that is not attached to a trainer cannot be asked for its callbacks",
}
"""Attributes of torch and Lightning that are read where they are used."""

PYTHON = {"_replace", "_fields", "_field_defaults", "_current_frames", "_exit"}
"""Names with an underscore that Python documents."""


@pytest.mark.parametrize(
    ("where", "name"),
    [*TORCH, *LIGHTNING, *HOSTS, *ATTRIBUTES],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_name_is_still_there(where: Any, name: str) -> None:
    assert hasattr(where, name), f"{name} is gone: {({**TORCH, **LIGHTNING, **HOSTS, **ATTRIBUTES})[where, name]}"


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


def test_private_attributes_of_others_are_listed() -> None:
    """Attributes with an underscore that nothing here defines, and those that classes of transformers' give again."""
    trees = {
        path: ast.parse(path.read_text())
        for folder in ("kernels", "lightning_mhla", "tasks")
        for path in (ROOT / folder).rglob("*.py")
    }
    defined = {name for tree in trees.values() for name in _defined_in(tree)}
    listed = {name for _, name in (*LIGHTNING, *HOSTS, *ATTRIBUTES)} | PYTHON
    for path, tree in trees.items():
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        private = {name for name in used if name.startswith("_") and not name.startswith("__")}
        if str(path.relative_to(ROOT)) not in OWN:
            assert private - defined <= listed, f"{path}: {private - defined - listed}"


@pytest.mark.parametrize("kind", [MHLAModel, MHLAForCausalLM])
def test_private_names_that_models_give_again_are_listed(kind: type) -> None:
    theirs = {name for base in kind.__mro__ if base.__module__.startswith("transformers") for name in vars(base)}
    ours = {name for base in kind.__mro__ if base.__module__.startswith("mhla_tasks") for name in vars(base)}
    again = {name for name in ours & theirs if name.startswith("_") and not name.startswith("__")}
    assert again, "the models override none of them"
    assert again <= {name for _, name in HOSTS}


def _defined_in(tree: ast.Module) -> set[str]:
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return names | {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
