"""Text-to-image generation: pretraining, fine-tuning and sampling of SANA transformers with replaced attention."""

from mhla_tasks.text_to_image.callbacks import ClipScore, ImagePictures, SceneScores
from mhla_tasks.text_to_image.data import CaptionedImageShards, DigitScenes, ImageLatentShards
from mhla_tasks.text_to_image.module import TextToImage

__all__ = [
    "CaptionedImageShards",
    "ClipScore",
    "DigitScenes",
    "ImageLatentShards",
    "ImagePictures",
    "SceneScores",
    "TextToImage",
]
