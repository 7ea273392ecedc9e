"""Callbacks that draw and score images during training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor
from torch.nn import functional as F

from lightning_mhla.system.figures import log_figure
from lightning_mhla.system.files import to_json, write_whole
from lightning_mhla.system.ranges import check_range
from lightning_mhla.system.untrusted import reason
from mhla_tasks.captioned.callbacks import DrawnSamples
from mhla_tasks.captioned.module import CaptionedDiffusion
from mhla_tasks.text_to_image.judge import parse_caption, score_scenes
from mhla_tasks.text_to_image.module import TextToImage
from mhla_tasks.text_to_image.pictures import draw_captioned
from mhla_tasks.text_to_image.scenes import every_caption


class ImagePictures(DrawnSamples):
    """Callback that draws an image for each prompt during training, and shows all images in one picture.

    The picture is logged to TensorBoard and written to a file in the log folder, for example
    ``pictures/images-step0001000.png`` at step 1,000. Images are drawn with the moving average of the weights if training
    maintains one, otherwise with the current weights. An image for a prompt starts from the same noise at every step, so that
    changes in it come from the weights alone.

    Args:
        prompts: prompts; one image is drawn for each.
        every_n_steps: number of optimizer steps between two pictures; null for no pictures during training.
        at_end: whether to draw images at the end of training.
        at_start: whether to draw images before the first optimizer step, too.
        seed: random seed for the noise that sampling starts from.

    Raises:
        ValueError: if ``prompts`` is empty, ``every_n_steps`` is below 1, or ``seed`` is out of range.
    """

    module_class = TextToImage

    def __init__(
        self,
        prompts: list[str],
        every_n_steps: int | None = 1000,
        at_end: bool = True,
        at_start: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(prompts, every_n_steps, at_end, at_start, seed)

    def keep(self, trainer: Trainer, module: CaptionedDiffusion, samples: Tensor, folder: Path) -> None:
        """Write one picture that shows all images with their prompts, and log it to TensorBoard.

        Args:
            trainer: Lightning trainer that runs the callback.
            module: module that drew the images.
            samples: images ``[n, C, H, W]`` uint8 on the CPU, one for each prompt.
            folder: log folder of the training run.
        """
        step = trainer.global_step
        figure = draw_captioned(list(zip(self.prompts, samples, strict=True)), f"step {step:,}")
        caption = (
            f"Images drawn from captions at step {step:,}, from the same noise at every step. Look for what the caption names: "
            "objects, colors, counts and positions."
        )
        log_figure(trainer, figure, "images", folder / "pictures", caption)


class SceneScores(ImagePictures):
    """Callback that draws scenes of digits, and logs the shares of images with correct digits, colors, count and positions.

    The metrics are ``scenes/digit``, ``scenes/colour``, ``scenes/count``, ``scenes/relation`` (position), and ``scenes/all``
    for images that pass all checks. Each evaluation also adds a line to ``scenes.jsonl`` in the log folder. The checks use a
    digit classifier and are not perfect: 87% of the held-out scenes in the data pass all of them.

    Args:
        prompts: captions of scenes of digits, such as "a red three left of a green seven"; null for sixty fixed captions.
        per_prompt: number of images for each prompt.
        every_n_steps: number of optimizer steps between two evaluations; null for no evaluations during training.
        at_end: whether to score the weights at the end of training.
        at_start: whether to score the weights before the first optimizer step, too.
        seed: random seed for the noise that sampling starts from.

    Raises:
        ValueError: if ``per_prompt`` or ``every_n_steps`` is below 1, ``prompts`` is empty, a prompt is not a caption of a
            scene of digits, or ``seed`` is out of range.
    """

    def __init__(
        self,
        prompts: list[str] | None = None,
        per_prompt: int = 1,
        every_n_steps: int | None = None,
        at_end: bool = True,
        at_start: bool = False,
        seed: int = 0,
    ) -> None:
        check_range(least=1, per_prompt=per_prompt)
        chosen = every_caption() if prompts is None else prompts
        for prompt in chosen:
            parse_caption(prompt)
        super().__init__(chosen * per_prompt, every_n_steps, at_end, at_start, seed)

    def keep(self, trainer: Trainer, module: CaptionedDiffusion, samples: Tensor, folder: Path) -> None:
        """Check each image against its prompt, log the shares of correct images, and add a line to ``scenes.jsonl``.

        Args:
            trainer: Lightning trainer that runs the callback.
            module: module that drew the images.
            samples: images ``[n, 3, H, W]`` uint8 on the CPU; the sequence of prompts is repeated ``per_prompt`` times.
            folder: log folder of the training run.
        """
        scores, step = score_scenes(samples, self.prompts), trainer.global_step
        path = folder / "scenes.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        # A run that resumes from an earlier step evaluates later steps again; their old lines are dropped.
        earlier_lines = [line for line in lines if json.loads(line)["step"] < step]
        line = to_json({"step": step, "images": len(samples), "seed": self.seed, **scores})
        write_whole(path, "\n".join([*earlier_lines, line]) + "\n")
        self.log_values(trainer, "scenes", scores)


class ClipScore(ImagePictures):
    """Callback that draws an image for each prompt, and logs the mean CLIP score (arXiv 2104.08718) as ``clip/score``.

    The score of an image is 100 times the cosine similarity of the CLIP embeddings of the image and its prompt. Negative values
    are replaced by 0.

    Args:
        model: folder or Hugging Face Hub name of a transformers CLIP model with its processor.
        prompts: prompts; one image is drawn for each.
        every_n_steps: number of optimizer steps between two evaluations; null for no evaluations during training.
        at_end: whether to score the weights at the end of training.
        at_start: whether to score the weights before the first optimizer step, too.
        seed: random seed for the noise that sampling starts from.

    Raises:
        ValueError: if ``prompts`` is empty, ``every_n_steps`` is below 1, or ``seed`` is out of range.
    """

    def __init__(
        self,
        model: str,
        prompts: list[str],
        every_n_steps: int | None = None,
        at_end: bool = True,
        at_start: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(prompts, every_n_steps, at_end, at_start, seed)
        self.model = model
        self._parts: tuple[Any, Any] | None = None

    def check(self, module: CaptionedDiffusion) -> None:
        """Load the CLIP model, and check that the Lightning module can draw samples.

        Args:
            module: Lightning module that is trained.

        Raises:
            ValueError: if an autoencoder is required but not configured, or the configured sample size is not supported.
            FileNotFoundError: if the CLIP model, the text encoder or the autoencoder does not exist.
        """
        super().check(module)
        self._load()

    @torch.no_grad()
    def score(self, pixels: Tensor) -> float:
        """Compute the mean CLIP score of images.

        Args:
            pixels: images ``[n, C, H, W]`` uint8, one for each prompt of the callback.

        Returns:
            Mean score from 0 to 100.
        """
        model, processor = self._load()
        values = []
        for image, prompt in zip(pixels.expand(-1, 3, -1, -1), self.prompts, strict=True):
            inputs = processor(text=[prompt], images=[image], return_tensors="pt", truncation=True)
            out = model(**inputs)
            values.append(100 * F.cosine_similarity(out.image_embeds, out.text_embeds).clamp(min=0))
        return float(torch.cat(values).mean())

    def keep(self, trainer: Trainer, module: CaptionedDiffusion, samples: Tensor, folder: Path) -> None:
        """Compute the mean CLIP score of the images, and log it as ``clip/score``.

        Args:
            trainer: Lightning trainer that runs the callback.
            module: module that drew the images.
            samples: images ``[n, C, H, W]`` uint8 on the CPU, one for each prompt.
            folder: log folder of the training run.
        """
        self.log_values(trainer, "clip", {"score": self.score(samples)})

    def _load(self) -> tuple[Any, Any]:
        """Return the ``CLIPModel`` and the ``CLIPProcessor`` of transformers, which are loaded on the first call.

        Raises:
            FileNotFoundError: if ``model`` does not name a CLIP model.
        """
        if self._parts is None:
            from transformers import CLIPModel, CLIPProcessor

            try:
                model = CLIPModel.from_pretrained(self.model, trust_remote_code=False).eval().requires_grad_(False)
                self._parts = model, CLIPProcessor.from_pretrained(self.model, trust_remote_code=False)
            except (OSError, ValueError) as error:
                raise FileNotFoundError(
                    f"model {self.model} is not a folder or hub name of a CLIP model ({reason(error)})"
                ) from error
        return self._parts
