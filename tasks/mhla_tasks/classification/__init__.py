"""Image classification: vision transformers with any kind of attention."""

from mhla_tasks.classification.data import Digits, ImageNetShards, Mnist
from mhla_tasks.classification.model import VisionTransformer
from mhla_tasks.classification.module import ImageClassifier

__all__ = ["Digits", "ImageClassifier", "ImageNetShards", "Mnist", "VisionTransformer"]
