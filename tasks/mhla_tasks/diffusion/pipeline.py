"""diffusers pipeline that draws images with a trained DiT, its scheduler and its VAE.

``DiTPipeline.from_pretrained("exported")`` loads a folder that ``lightning export`` wrote;
``pipe(class_labels=[3, 7], seed=0).images`` draws images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, DDPMScheduler, DiffusionPipeline, ImagePipelineOutput
from PIL import Image

from lightning_mhla.data.sampling import sample_generator
from lightning_mhla.generative.codecs import LatentCodec
from lightning_mhla.generative.flow import TIMESTEPS
from lightning_mhla.generative.images import check_finite, to_pixels
from mhla_tasks.diffusion.model import DiT
from mhla_tasks.diffusion.module import ClassToImage
from mhla_tasks.diffusion.sampling import check_labels, denoise


class DiTPipeline(DiffusionPipeline):
    """diffusers pipeline that draws images of given classes with a DiT.

    Args:
        transformer: network that predicts noise or velocity.
        scheduler: diffusers scheduler for the noise process that the network was trained on. Only DDPM uses a predicted
            variance: create other schedulers with ``variance_type=None``.
        vae: VAE that decodes latents; None if the network generates pixels.
        steps: default number of sampling steps.
        guidance: default scale of classifier-free guidance; 1 to sample without guidance.
        guidable: whether the network was also trained without labels, which classifier-free guidance requires.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components: ClassVar[list[str]] = ["vae"]

    def __init__(
        self,
        transformer: DiT,
        scheduler: Any,
        vae: AutoencoderKL | None = None,
        steps: int = 250,
        guidance: float = 1.0,
        guidable: bool = True,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.register_to_config(steps=steps, guidance=guidance, guidable=guidable)

    @classmethod
    def of_module(cls, module: ClassToImage) -> DiTPipeline:
        """Build the pipeline that draws the same samples as ``module.draw`` with the current weights of the module."""
        process, sampling, codec = module.process, module.sampling, module.codec
        return cls(
            module.network,
            process.scheduler(sampling.sampler or process.samplers[0]),
            None if codec is None else codec.model(torch.device("cpu")),
            sampling.steps,
            sampling.guidance,
            process.config.label_dropout > 0,
        )

    @torch.no_grad()
    def __call__(
        self,
        class_labels: Sequence[int],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        seed: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        """Draw one image for each class label.

        Args:
            class_labels: class label of each image.
            num_inference_steps: number of sampling steps; None for the default of the pipeline.
            guidance_scale: scale of classifier-free guidance; None for the default of the pipeline.
            generator: random generator of the noise, or a list with one for each image; None for the global generator.
            seed: random seed, in place of ``generator``; None to use ``generator``. With the seed of the predict command, image
                i equals sample i of that command if both have the same label.
            output_type: format of the images: ``pil``, ``np`` (uint8 ``[B, H, W, C]``), ``pt`` (uint8 ``[B, C, H, W]``), or
                ``latent`` for the denoised samples ``[B, C, h, w]`` float32 without decoding.
            return_dict: whether to return an ``ImagePipelineOutput`` instead of a tuple.

        Returns:
            The images, in an ``ImagePipelineOutput`` or in a tuple with one entry.

        Raises:
            ValueError: if a label is not a class, guidance is requested for a network that was never trained without labels,
                the number of steps is out of range, or the output type is unknown.
        """
        steps = self.config.steps if num_inference_steps is None else num_inference_steps
        guidance = self.config.guidance if guidance_scale is None else guidance_scale
        check_labels(class_labels, self.transformer.num_classes)
        if guidance != 1 and not self.config.guidable:
            raise ValueError(f"guidance_scale={guidance} needs a network that was also trained without labels")
        minimum = 2 if isinstance(self.scheduler, DDPMScheduler) else 1  # one step of DDPM would return noise
        if not minimum <= steps <= TIMESTEPS:
            raise ValueError(f"num_inference_steps={steps} must lie between {minimum} and {TIMESTEPS:,}")
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"output_type={output_type!r} is not one of 'pil', 'np', 'pt', 'latent'")
        if seed is not None:
            generator = [sample_generator(seed, index) for index in range(len(class_labels))]
        labels = torch.tensor(list(class_labels), device=self._execution_device)
        images: Any = denoise(self.transformer, self.scheduler, labels, steps, guidance, generator)
        if output_type != "latent":
            images = images if self.vae is None else LatentCodec("", self.vae).decode(images)
            check_finite(images)
            images = to_pixels(images).cpu()
            if output_type != "pt":
                images = images.permute(0, 2, 3, 1).numpy()
            if output_type == "pil":
                images = [Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image) for image in images]
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images) if return_dict else (images,)
