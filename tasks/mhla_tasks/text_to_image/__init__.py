"""Text-to-image: SANA with replaced attention, pretrained, fine-tuned and sampled."""

from mhla_tasks.text_to_image.callbacks import ImagePictures, SceneScores
from mhla_tasks.text_to_image.data import CaptionedImageShards, DigitScenes, ImageLatentShards
from mhla_tasks.text_to_image.module import TextToImage

__all__ = ["CaptionedImageShards", "DigitScenes", "ImageLatentShards", "ImagePictures", "SceneScores", "TextToImage"]
