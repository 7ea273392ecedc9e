"""Image classification: vision transformers with mhla, linear or softmax attention."""

from mhla_tasks.classification.data import Digits, ImageNetShards
from mhla_tasks.classification.model import VisionTransformer
from mhla_tasks.classification.module import ImageClassifier

__all__ = ["Digits", "ImageClassifier", "ImageNetShards", "VisionTransformer"]
