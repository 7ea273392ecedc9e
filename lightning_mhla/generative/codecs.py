"""Frozen autoencoders from diffusers, which convert images and video clips to latents and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lightning_mhla.system.untrusted import reason

CHUNK = 8
"""Number of images that a VAE processes at once, which limits the memory for its activations."""


class FrozenVAE:
    """Frozen VAE from the diffusers library, loaded on first use.

    This class is not an ``nn.Module``, so the VAE is neither trained nor saved in checkpoints.

    Args:
        path: local folder of the VAE, local folder of a pipeline that contains the VAE in ``vae/``, or name of either on the
            Hugging Face Hub.
        model: VAE that has already been loaded; None to load it from ``path``.
    """

    vae_class: ClassVar[str]
    """Name of the VAE's class in diffusers."""

    def __init__(self, path: str, model: Any = None) -> None:
        self.path = path
        self._model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # copies of the module, such as the weight average, share it

    def rest(self) -> None:
        """Move the VAE to the CPU, if it has been loaded, to free GPU memory."""
        if self._model is not None:
            self._model.cpu()

    def model(self, device: torch.device) -> Any:
        """Return the diffusers model of the VAE, moved to the given device. The first call loads the model.

        Raises:
            FileNotFoundError: if there is no VAE at the path given to the constructor.
        """
        if self._model is None:
            self._model = self._read().eval().requires_grad_(False)
        return self._model.to(device)

    def config(self) -> Any:
        """Return the configuration of the diffusers model. The model is loaded if necessary, and stays on its device.

        Raises:
            FileNotFoundError: if there is no VAE at the path given to the constructor.
        """
        model = self.model(torch.device("cpu")) if self._model is None else self._model
        return model.config

    def check_channels(self, channels: int) -> None:
        """Load the VAE if necessary, and check that its latents have as many channels as the samples that a network denoises.

        Args:
            channels: number of channels of the samples that the network denoises.

        Raises:
            ValueError: if the VAE's latents have a different number of channels.
            FileNotFoundError: if there is no VAE at the path given to the constructor.
        """
        config = self.config()
        own_channels = config.z_dim if hasattr(config, "z_dim") else config.latent_channels
        if own_channels != channels:
            raise ValueError(
                f"the latents of VAE {self.path} have {own_channels} channels, and the model denoises {channels}; name the "
                "VAE that encoded the data, or change the channels of the model"
            )

    def _read(self) -> Any:
        """Load the diffusers model of the VAE from the path itself or its subfolder ``vae``, whichever contains the VAE."""
        import diffusers

        kind, local = getattr(diffusers, self.vae_class), Path(self.path)
        failed: list[OSError] = []
        # A local folder with config.json is first tried as the VAE itself; anything else is first tried as a pipeline.
        places = [{"subfolder": "vae"}, {}]
        for where in reversed(places) if (local / "config.json").is_file() else places:
            try:
                return kind.from_pretrained(self.path, **where)
            except OSError as error:
                failed.append(error)
        raise FileNotFoundError(
            f"vae {self.path} is neither a folder nor a model on the hub ({reason(failed[0])})"
        ) from failed[0]


class ScaledVAE(FrozenVAE):
    """Base class of codecs that convert images to latents and back, with latents multiplied by the VAE's scaling factor."""

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Convert latents back to images.

        Args:
            latents: batch of latents ``[B, C, h, w]``, multiplied by the scaling factor, with C channels and h x w positions.

        Returns:
            Images ``[B, 3, H, W]`` of H x W pixels, float32 with values from about -1 to 1.
        """
        model = self.model(latents.device)
        scaled = (latents.float() / self.scale(latents.device)).to(model.dtype)
        # Autocast would use half precision, in which the activations of some VAEs overflow.
        with torch.autocast(latents.device.type, enabled=False):
            return torch.cat([model.decode(part).sample.float() for part in scaled.split(CHUNK)])

    def scale(self, device: torch.device) -> float:
        """Return the scaling factor in the VAE's configuration, by which latents are multiplied after encoding.

        Args:
            device: device to which the VAE is moved.
        """
        return float(self.model(device).config.scaling_factor)


class LatentCodec(ScaledVAE):
    """Codec between images and latents that uses diffusers' VAE class ``AutoencoderKL``.

    The constructor takes the arguments of :class:`FrozenVAE`.
    """

    vae_class = "AutoencoderKL"

    @torch.no_grad()
    def moments(self, images: Tensor) -> Tensor:
        """Compute the means and standard deviations of the latents that the VAE predicts for images.

        Args:
            images: batch of floating-point images ``[B, 3, S, S]`` of S x S pixels, with values from -1 to 1.

        Returns:
            Means followed by standard deviations along the channel axis, ``[B, 2 * C, s, s]`` float32, for latents with C
            channels and s x s positions.
        """
        model = self.model(images.device)
        with torch.autocast(images.device.type, enabled=False):
            posteriors = [model.encode(part).latent_dist for part in images.float().split(CHUNK)]
        return torch.cat([torch.cat([posterior.mean, posterior.std], 1) for posterior in posteriors])

    def encode(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode images into latents, which are drawn at random from the VAE's posterior and multiplied by its scaling factor.

        Args:
            images: batch of floating-point images ``[B, 3, S, S]`` of S x S pixels, with values from -1 to 1.
            noise: standard normal noise with the shape of the latents; None to draw it.

        Returns:
            Latents ``[B, C, s, s]`` float32, with C channels and s x s positions.
        """
        return draw_latents(self.moments(images), self.scale(images.device), noise)


class ClipCodec(FrozenVAE):
    """Codec between video clips and latents that uses the VAE of Wan, diffusers' class ``AutoencoderKLWan``.

    The constructor takes the arguments of :class:`FrozenVAE`.
    """

    vae_class = "AutoencoderKLWan"

    @torch.no_grad()
    def encode(self, clips: Tensor) -> Tensor:
        """Encode video clips into normalized latents.

        The latents are the means of the VAE's posterior, not random draws, because Wan is trained on means. Each channel is
        normalized with a mean and a standard deviation from the configuration of the VAE.

        Args:
            clips: batch of floating-point clips ``[B, 3, F, H, W]`` with values from -1 to 1. A clip has F frames of H x W
                pixels.

        Returns:
            Latents ``[B, C, f, h, w]`` float32, with C channels and f frames of h x w positions.

        Raises:
            ValueError: unless the number of frames is 1 more than a multiple of the VAE's temporal compression factor, and
                height and width are multiples of its spatial compression factor.
        """
        model = self.model(clips.device)
        self.latent_size(*clips.shape[2:])
        with torch.autocast(clips.device.type, enabled=False):
            # One clip at a time, because the activations of a clip take as much memory as those of many images.
            latents = torch.cat([model.encode(clip[None].float()).latent_dist.mode() for clip in clips])
        mean, deviation = self._moments(clips.device)
        return (latents - mean) / deviation

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Convert latents back to video clips, one clip at a time.

        Args:
            latents: batch of latents ``[B, C, f, h, w]``, normalized as :meth:`encode` returns them, with C channels and f
                frames of h x w positions.

        Returns:
            Clips ``[B, 3, F, H, W]`` float32 with values from about -1 to 1. A clip has F frames of H x W pixels.
        """
        model = self.model(latents.device)
        mean, deviation = self._moments(latents.device)
        with torch.autocast(latents.device.type, enabled=False):
            return torch.cat([model.decode(latent[None].float() * deviation + mean).sample for latent in latents])

    def _moments(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the means and standard deviations that normalize the C latent channels, ``[1, C, 1, 1, 1]`` float32 each."""
        config = self.config()
        mean, deviation = (torch.tensor(values, device=device) for values in (config.latents_mean, config.latents_std))
        return mean.view(1, -1, 1, 1, 1), deviation.view(1, -1, 1, 1, 1)

    def latent_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the number of frames, rows and columns of the latents of a video clip.

        Args:
            frames: number of frames of the clip.
            height: height of a frame in pixels.
            width: width of a frame in pixels.

        Raises:
            ValueError: unless the number of frames is 1 more than a multiple of the VAE's temporal compression factor, and
                height and width are multiples of its spatial compression factor.
        """
        config = self.config()
        time, space = config.scale_factor_temporal, config.scale_factor_spatial
        if frames % time != 1 or height % space or width % space:
            raise ValueError(
                f"clips of {frames} frames of {height} x {width}: the VAE requires 1 frame more than a multiple of {time}, "
                f"and sides that are multiples of {space}"
            )
        # The first frame has a latent frame of its own.
        return (frames - 1) // time + 1, height // space, width // space


def draw_latents(moments: Tensor, scale: float, noise: Tensor | None = None) -> Tensor:
    """Draw latents from normal distributions with the given means and standard deviations, and multiply them by a factor.

    Args:
        moments: means followed by standard deviations along the channel axis, ``[..., 2 * C, s, s]`` of any floating-point
            dtype, for latents with C channels and s x s positions.
        scale: factor by which the latents are multiplied.
        noise: standard normal noise ``[..., C, s, s]``; None to draw it.

    Returns:
        Latents ``[..., C, s, s]`` float32.
    """
    mean, deviation = moments.float().chunk(2, dim=-3)
    return (mean + deviation * (torch.randn_like(mean) if noise is None else noise)) * scale


class ImageCodec(ScaledVAE):
    """Codec between images and latents that uses SANA's deep compression autoencoder, ``AutoencoderDC`` (arXiv 2410.10733).

    The constructor takes the arguments of :class:`FrozenVAE`.
    """

    vae_class = "AutoencoderDC"

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Encode images into latents, multiplied by the scaling factor in the configuration of the autoencoder.

        Args:
            images: batch of floating-point images ``[B, 3, H, W]`` of H x W pixels, with values from -1 to 1.

        Returns:
            Latents ``[B, C, h, w]`` float32, with C channels and h x w positions.

        Raises:
            ValueError: if the height or width is not a multiple of the autoencoder's compression factor.
        """
        model = self.model(images.device)
        self.latent_size(*images.shape[2:])
        with torch.autocast(images.device.type, enabled=False):
            latents = torch.cat([model.encode(part).latent for part in images.float().split(CHUNK)])
        return latents * self.scale(images.device)

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of rows and columns of an image's latents.

        Args:
            height: height of the image in pixels.
            width: width of the image in pixels.

        Raises:
            ValueError: if the height or width is not a multiple of the autoencoder's compression factor.
        """
        config = self.config()
        # Each block of the encoder but the last halves both sides (spatial_compression_ratio in diffusers).
        step = 2 ** (len(config.encoder_block_out_channels) - 1)
        if height % step or width % step:
            raise ValueError(
                f"images of {height} x {width}: the autoencoder requires multiples of {step}, such as "
                f"{max(step, round(height / step) * step)} x {max(step, round(width / step) * step)}"
            )
        return height // step, width // step
