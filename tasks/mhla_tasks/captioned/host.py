"""Description of diffusers transformers whose attention can be replaced, and loading of pretrained weights into them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from lightning_mhla import AttentionConfig, CrossAttentionConfig
from lightning_mhla.attention.cross_mixing import DenseCrossCoefficients
from lightning_mhla.attention.mixing import DenseCoefficients
from lightning_mhla.checkpoints.pretrained import Pretrained, read_trained
from lightning_mhla.generative.flow import TIMESTEPS
from lightning_mhla.generative.reading import read_diffusers, read_safely, read_weights_file
from lightning_mhla.swap import SAVED, is_swapped, load_swapped, swap_attention
from lightning_mhla.swap.host import CROSS
from lightning_mhla.system.untrusted import read_json

log = logging.getLogger(__name__)

ADDED = ".attn1.processor.attention."
"""Part of the names of the parameters that the replacement of self-attention adds."""

ADDED_CROSS = ".attn2.processor.attention."
"""Part of the names of the parameters that the replacement of cross-attention adds."""

CONTAINERS = ("state_dict", "model", "module")
"""Names of the entries of a training checkpoint that may hold the weights."""


@dataclass(frozen=True)
class Host:
    """Description of a diffusers transformer class whose attention can be replaced, such as that of SANA or Wan.

    Args:
        transformer: class of the transformer.
        pipeline: class of the diffusers pipeline that draws samples with the transformer.
        name: name of the transformer in error messages, with an article, such as ``a Wan transformer``.
        first_block: prefix of the names of the first block's weights, such as ``blocks.0.``.
        is_published: function that takes weights by name, and returns whether the names are those of the model's original
            release instead of diffusers'.
        published_names: function that converts weights from the names of the original release to diffusers' names.
        schedulers: for each sampler name, a function that builds a diffusers scheduler from the timestep shift of training.
        pipeline_options: keyword arguments for every call of the pipeline, such as height and width. The pipeline only
            validates these sizes; the shape of the initial latents determines the size of a sample.
    """

    transformer: Any
    pipeline: Any
    name: str
    first_block: str
    is_published: Callable[[Mapping[str, Tensor]], bool]
    published_names: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    schedulers: Mapping[str, Callable[[float], Any]]
    pipeline_options: Mapping[str, Any]


def euler_scheduler(shift: float) -> FlowMatchEulerDiscreteScheduler:
    """Build diffusers' Euler scheduler for a flow matching model that was trained with the timestep shift ``shift``."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=TIMESTEPS, shift=shift)


def build_transformer(
    host: Host,
    shape: Any,
    attention: AttentionConfig,
    layer_kinds: Sequence[str] | None,
    cross_attention: CrossAttentionConfig | None = None,
) -> Any:
    """Build a transformer with random weights and replace its attention.

    Args:
        host: description of the transformer class.
        shape: dataclass instance with the options of the transformer.
        attention: options of the new attention.
        layer_kinds: pattern that repeats over all layers, as for :func:`lightning_mhla.swap_attention`. An entry is an
            attention kind, ``"replace"`` for the kind of ``attention``, or ``"keep"`` for the original attention. The number of
            layers must be a multiple of the pattern's length. None to replace the attention of all layers.
        cross_attention: options of the new cross-attention of all layers; None to keep the original.

    Returns:
        Transformer with the new attention and random weights.

    Raises:
        ValueError: if the attention of the transformer cannot be replaced in this way.
    """
    model = host.transformer(**asdict(shape))
    swap_attention(model, attention, layer_kinds=layer_kinds)
    if cross_attention is not None:
        try:
            swap_attention(model, cross_attention, cross=True)
        except ValueError as error:
            raise ValueError(f"cross_attention: {error}; cross_attention: null keeps the original") from error
    return model


def read_transformer(path: str, host: Host, shape: Any) -> Any:
    """Build a transformer with its original attention and load pretrained weights into it.

    Args:
        path: source of the weights: a run folder, a training checkpoint, a weights file, a folder that ``save_pretrained``
            wrote, or a name on the Hugging Face Hub; see :func:`read_weights`.
        host: description of the transformer class.
        shape: dataclass instance with the options of the transformer.

    Returns:
        Transformer with the original attention and the loaded weights.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if the source cannot be read safely, or the weights do not fit the transformer.
    """
    model = host.transformer(**asdict(shape))
    load_weights(model, path, host)
    return model


def read_weights(path: str, host: Host) -> dict[str, Tensor]:
    """Read the weights of a transformer without running code from the files.

    Args:
        path: source of the weights, one of these:

            * training checkpoint, or run folder, whose latest complete checkpoint is read; the moving average of the weights is
              read if the checkpoint has it;
            * ``.pt``, ``.pth`` or ``.safetensors`` file with the parameter names of diffusers or of the original release;
            * folder that ``save_pretrained`` of a transformer or a pipeline wrote;
            * name on the Hugging Face Hub.
        host: description of the transformer class.

    Returns:
        The weights by diffusers' names.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if the source cannot be read safely, contains unmerged LoRA adapters, or holds the weights of a different
            model.
    """
    local = Path(path)
    with read_safely(path):
        if (trained := read_trained(path)) is not None:
            state = trained.weights
        elif local.is_file():
            state = read_weights_file(local, CONTAINERS, mixed=True)
        elif swapped := [folder for folder in (local, local / "transformer") if is_swapped(folder)]:
            state = load_swapped(swapped[0]).state_dict()
        else:
            return read_diffusers(path, host.transformer, host.name)
    state = {name.removeprefix("network."): tensor for name, tensor in state.items()}
    if any(".lora_A." in name for name in state):
        raise ValueError(
            f"{path} holds LoRA adapters beside the weights; merge them first: lightning export {path} FOLDER"
        )
    if host.is_published(state):
        return host.published_names(state)
    if not any(name.startswith(host.first_block) for name in state):
        raise ValueError(f"{path} holds no weights of {host.name} (no {host.first_block.rstrip('.')})")
    return state


def load_weights(model: Any, path: str, host: Host) -> None:
    """Load pretrained weights into a transformer, whose attention may have been replaced.

    The weights may come from training with the original attention or with the same replacement attention as in ``model``.
    Parameters of the replacement attention and of LoRA adapters keep their current values if the weights lack them. If the
    weights were trained with a different grid of MHLA blocks, the mixing coefficients of self-attention are resized. A
    different grid in cross-attention is an error.

    Args:
        model: transformer of the class that ``host`` describes, changed in place.
        path: source of the weights: a run folder, a training checkpoint, a weights file, a folder that ``save_pretrained``
            wrote, or a name on the Hugging Face Hub; see :func:`read_weights`.
        host: description of the transformer class.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if the source cannot be read safely, contains unmerged LoRA adapters, lacks weights of the original model,
            or has weights whose name, shape or block grid does not fit ``model``.
    """
    model_state, (blocks, cross_blocks) = model.state_dict(), _blocks_of(path)
    state = {_inside_adapter(name, model_state): tensor for name, tensor in read_weights(path, host).items()}
    mixing = {
        f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, DenseCoefficients)
    }
    resized = [name for name in mixing if name in state and blocks not in (None, mixing[name].grid)]
    for name in resized:
        carried = mixing[name].carried("weight", state[name], blocks)
        state[name] = state[name] if carried is None else carried
    mismatched = [
        f"{n} {list(t.shape)} for {list(model_state[n].shape)}"
        for n, t in state.items()
        if n in model_state and t.shape != model_state[n].shape
    ]
    # Grids with equally many blocks give matrices of the same shape, so the shapes alone do not show a different grid.
    mismatched += [
        f"blocks {list(cross_blocks)} for {list(module.grid)} in {name}"
        for name, module in model.named_modules()
        if isinstance(module, DenseCrossCoefficients) and f"{name}.weight" in state and cross_blocks
        if tuple(cross_blocks) != module.grid
    ]
    unexpected = sorted(set(state) - set(model_state))
    if mismatched or unexpected:
        raise ValueError(
            f"the weights of {path} have different shapes or attention: {'; '.join([*mismatched, *unexpected][:3])}; set "
            "transformer, attention, layer_kinds and cross_attention as in their training"
        )
    added = [name for name in model_state if name not in state]
    new = (ADDED, ADDED_CROSS, ".lora_")
    missing = [name for name in added if not any(part in name for part in new)]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing[:3])} ({len(missing)} tensors)")
    model.load_state_dict(state, strict=False)
    loaded = len(state) - len(resized)
    log.info(
        "started from %s: %d tensors taken, %d resized, %d newly initialized", path, loaded, len(resized), len(added)
    )


def _blocks_of(path: str) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the number of MHLA blocks along each axis, in self-attention and in cross-attention, for the weights at ``path``.

    Each of the two results is None if the number is unknown or there are no MHLA layers.
    """
    if (trained := read_trained(path)) is not None:
        cross = {"attention": trained.options.get("cross_attention")}
        return trained.block_grid, Pretrained({}, cross).block_grid
    folder = next((folder for folder in (Path(path), Path(path) / "transformer") if is_swapped(folder)), None)
    saved: Any = {} if folder is None else read_json(folder / "config.json")[SAVED]
    return Pretrained({}, saved).block_grid, Pretrained({}, saved.get(CROSS, {})).block_grid


def _inside_adapter(name: str, state: Mapping[str, Tensor]) -> str:
    """Return the key of a weight in ``state``: ``name``, with ``.base_layer`` inserted if LoRA wraps the weight's layer."""
    parent, _, leaf = name.rpartition(".")
    adapted = f"{parent}.base_layer.{leaf}"
    return adapted if adapted in state else name
