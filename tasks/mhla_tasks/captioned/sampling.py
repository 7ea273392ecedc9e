"""Sampling from a transformer with its diffusers pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.generative.flow import TIMESTEPS
from lightning_mhla.swap import read_texts_once
from lightning_mhla.system.ranges import check_range
from mhla_tasks.captioned.host import Host


class Sampling(Protocol):
    """Protocol of the sampler options that image models and video models share."""

    @property
    def sampler(self) -> str:
        """Name of the sampler, such as ``euler``. The class of the transformer determines which samplers are available."""

    @property
    def steps(self) -> int:
        """Number of sampling steps. Each step evaluates the network once, or twice with guidance."""

    @property
    def guidance(self) -> float:
        """Scale of classifier-free guidance (arXiv 2207.12598), at least 1; 1 to sample without guidance."""

    @property
    def size(self) -> tuple[int, ...]:
        """Size of a sample: (height, width) of an image or (frames, height, width) of a clip. Sides are in pixels."""


def check_sampling(sampling: Sampling) -> None:
    """Check that the size, the number of steps and the guidance scale of sampler options are in range.

    Raises:
        ValueError: if a value is out of range; the message names the option and its value.
    """
    names = ("frames", "height", "width")[-len(sampling.size) :]
    check_range("sampling.", least=1, **dict(zip(names, sampling.size, strict=True)))
    if not 1 <= sampling.steps <= TIMESTEPS:
        raise ValueError(f"sampling.steps={sampling.steps} must lie between 1 and {TIMESTEPS:,}")
    check_range("sampling.", least=1, guidance=sampling.guidance)


def latent_shape(network: Any, codec: Any, sampling: Sampling, samples: str) -> tuple[int, ...]:
    """Compute the shape of the tensor that the network denoises for one sample.

    Args:
        network: transformer.
        codec: autoencoder between pixels and latents; None if the network denoises pixels.
        sampling: sampler options.
        samples: plural noun for the samples in error messages, such as ``images``.

    Returns:
        Channels, frames (for clips only), rows and columns.

    Raises:
        ValueError: if the size of the samples is not a multiple of the autoencoder's downsampling factor, or the size of the
            latents is not a multiple of the patch size.
    """
    grid = sampling.size if codec is None else codec.latent_size(*sampling.size)
    check_patches(grid, network.config.patch_size, samples if codec is None else "latents")
    return (network.config.in_channels, *grid)


@torch.no_grad()
def denoise(
    host: Host,
    network: Any,
    shape: Sequence[int],
    sampling: Sampling,
    shift: float,
    captions: dict[str, Tensor],
    indices: Sequence[int],
    seed: int,
) -> Tensor:
    """Draw samples, each of which depends only on the weights, the sampler options, its caption, the seed and its index.

    Args:
        host: description of the transformer class.
        network: transformer in evaluation mode.
        shape: shape of one sample, as :func:`latent_shape` returns it.
        sampling: sampler options.
        shift: timestep shift that the network was trained with.
        captions: embedded captions and negative captions of the B samples, as keyword arguments of the diffusers pipeline.
        indices: index of each sample, which determines its noise.
        seed: random seed, the same for all samples.

    Returns:
        Samples ``[B, *shape]`` float32. They are latents, or pixels in -1 .. 1 if the network denoises pixels.
    """
    device = captions["prompt_embeds"].device
    generators = [sample_generator(seed, index) for index in indices]
    noise = randn_tensor((len(indices), *shape), generator=generators, device=device, dtype=torch.float32)
    scheduler = host.schedulers[sampling.sampler](shift)
    # Only the denoising loop of the pipeline is used: captions are already embedded, and latents are decoded by the caller.
    pipeline = host.pipeline(tokenizer=None, text_encoder=None, vae=None, transformer=network, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    with read_texts_once(network):
        latents: Tensor = pipeline(
            **captions,
            **host.pipeline_options,
            latents=noise,
            num_inference_steps=sampling.steps,
            guidance_scale=sampling.guidance,
            output_type="latent",
            return_dict=False,
        )[0]
    return latents


def check_patches(size: Sequence[int], patch: int | Sequence[int], what: str) -> None:
    """Check that every side of a sample is a multiple of the patch size.

    Args:
        size: size of the sample: rows and columns, preceded by the number of frames for a clip.
        patch: size of a patch: one number for all axes, or one number for each axis.
        what: plural noun for the samples in the error message, such as ``latents``.

    Raises:
        ValueError: if a side is not a multiple of the patch size.
    """
    steps = [patch] * len(size) if isinstance(patch, int) else list(patch)
    if any(length % step for length, step in zip(size, steps, strict=True)):
        axes = "frames, rows and columns" if len(size) == 3 else "rows and columns"
        raise ValueError(f"{what} of {list(size)} {axes} do not divide into patches of {steps}")
