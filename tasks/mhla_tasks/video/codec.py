"""Between clips and what the network denoises: Wan's VAE, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class ClipCodec:
    """A frozen Wan VAE of diffusers, loaded when first used; no module, so that it is neither trained nor kept.

    Args:
        path: folder of a diffusers ``AutoencoderKLWan`` (or of a pipeline that has one in ``vae/``), or the hub name of a
            Wan pipeline.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._model: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ClipCodec:
        return self  # the weight average copies the module

    def rest(self) -> None:
        """Leave the GPU to training."""
        if self._model is not None:
            self._model.cpu()

    def model(self, device: torch.device) -> Any:
        """The VAE on ``device``, in float32.

        Raises:
            FileNotFoundError: when there is none at the path.
        """
        if self._model is None:
            from diffusers import AutoencoderKLWan

            options = {} if (Path(self.path) / "config.json").is_file() else {"subfolder": "vae"}
            try:
                self._model = AutoencoderKLWan.from_pretrained(self.path, **options).eval().requires_grad_(False)
            except OSError as error:
                reason = str(error).splitlines()[0]
                raise FileNotFoundError(f"vae {self.path} is no folder and no name on the hub ({reason})") from error
        return self._model.to(device)

    @torch.no_grad()
    def encode(self, clips: Tensor) -> Tensor:
        """Latents ``[B, C, f, h, w]`` float32 of clips ``[B, 3, F, H, W]`` in -1 .. 1: the posterior's mean, normalised.

        Wan is trained on means, not on draws from the posterior; mean and deviation of each channel are the VAE's own.

        Raises:
            ValueError: for sizes that the VAE does not compress evenly.
        """
        model = self.model(clips.device)
        self.check_size(clips.shape[2:])
        with torch.autocast(clips.device.type, enabled=False):
            latents = torch.cat([model.encode(clip[None].float()).latent_dist.mode() for clip in clips])
        mean, deviation = self._moments(clips.device)
        return (latents - mean) / deviation

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Clips ``[B, 3, F, H, W]`` in about -1 .. 1 of normalised latents, one after another: they are large."""
        model = self.model(latents.device)
        mean, deviation = self._moments(latents.device)
        with torch.autocast(latents.device.type, enabled=False):
            return torch.cat([model.decode(each[None].float() * deviation + mean).sample for each in latents])

    def _moments(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel of the VAE's latents."""
        config = self._model.config
        mean, deviation = (torch.tensor(each, device=device) for each in (config.latents_mean, config.latents_std))
        return mean.view(1, -1, 1, 1, 1), deviation.view(1, -1, 1, 1, 1)

    def latent_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Frames, rows and columns of the latent of a clip."""
        config = self.model(torch.device("cpu")).config if self._model is None else self._model.config
        space = config.scale_factor_spatial
        return (frames - 1) // config.scale_factor_temporal + 1, height // space, width // space

    def check_size(self, size: tuple[int, ...]) -> None:
        """Refuse clips whose size the VAE would round.

        Raises:
            ValueError: naming the sizes that there are.
        """
        config = self._model.config
        time, space = config.scale_factor_temporal, config.scale_factor_spatial
        frames, height, width = size
        if frames % time != 1 or height % space or width % space:
            raise ValueError(
                f"clips of {frames} frames of {height} x {width}: the VAE wants 1 frame more than a multiple of {time}, and "
                f"sides that are multiples of {space}"
            )
