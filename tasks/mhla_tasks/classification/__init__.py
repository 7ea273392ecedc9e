"""Image classification with plain and hierarchical vision transformers, for any kind of attention."""

from lightning_mhla.vision import VLT, VisionTransformer
from mhla_tasks.classification.data import Digits, ImageNetShards, Mnist
from mhla_tasks.classification.module import ImageClassifier, VisionShape
from mhla_tasks.classification.timm import TimmClassifier

__all__ = [
    "VLT",
    "Digits",
    "ImageClassifier",
    "ImageNetShards",
    "Mnist",
    "TimmClassifier",
    "VisionShape",
    "VisionTransformer",
]
