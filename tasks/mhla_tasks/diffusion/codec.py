"""Between images and what the network denoises: a diffusers VAE, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK = 8
"""Images that go through the VAE together: its activations are far larger than the images."""


class LatentCodec:
    """A frozen VAE of diffusers, loaded when first used; not a module, so that it is neither trained nor kept in checkpoints.

    Args:
        path: folder of a diffusers ``AutoencoderKL`` (or of a pipeline that has one in ``vae/``), or a name on the hub.
        model: the VAE itself, where it is loaded already.
    """

    def __init__(self, path: str, model: Any = None) -> None:
        self.path = path
        self._model = model

    def model(self, device: torch.device) -> Any:
        """The VAE on ``device``, in float32.

        Raises:
            FileNotFoundError: when there is none at the path.
        """
        if self._model is None:
            from diffusers import AutoencoderKL

            options = {"subfolder": "vae"} if (Path(self.path) / "vae").is_dir() else {}
            try:
                self._model = AutoencoderKL.from_pretrained(self.path, **options).eval().requires_grad_(False)
            except OSError as error:
                reason = str(error).splitlines()[0]
                raise FileNotFoundError(f"vae {self.path} is no folder and no name on the hub ({reason})") from error
        return self._model.to(device)

    @torch.no_grad()
    def moments(self, images: Tensor) -> Tensor:
        """Mean and standard deviation ``[B, 2 * C, s, s]`` float32 of the latents of images ``[B, 3, S, S]`` in -1 .. 1."""
        model = self.model(images.device)
        with torch.autocast(images.device.type, enabled=False):
            posteriors = [model.encode(part).latent_dist for part in images.float().split(CHUNK)]
        return torch.cat([torch.cat([each.mean, each.std], 1) for each in posteriors])

    def encode(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Latents ``[B, C, s, s]`` drawn from the posterior, scaled as diffusion wants them.

        Args:
            images: ``[B, 3, S, S]`` in -1 .. 1.
            noise: standard normal, as the latents; None to draw it.
        """
        return draw_latents(self.moments(images), self.scale(images.device), noise)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images ``[B, 3, S, S]`` in about -1 .. 1 of scaled latents."""
        model = self.model(latents.device)
        scaled = (latents.float() / self.scale(latents.device)).to(model.dtype)
        with torch.autocast(latents.device.type, enabled=False):
            return torch.cat([model.decode(part).sample.float() for part in scaled.split(CHUNK)])

    def scale(self, device: torch.device) -> float:
        """Factor from the VAE's latents to those that diffusion works on."""
        return float(self.model(device).config.scaling_factor)


def draw_latents(moments: Tensor, scale: float, noise: Tensor | None = None) -> Tensor:
    """Scaled latents drawn from ``[..., 2 * C, s, s]`` of means and standard deviations, with ``noise`` if given."""
    mean, deviation = moments.float().chunk(2, dim=-3)
    return (mean + deviation * (torch.randn_like(mean) if noise is None else noise)) * scale
