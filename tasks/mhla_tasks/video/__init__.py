"""Text-to-video generation: pretraining, fine-tuning and sampling of Wan transformers with replaced attention."""

from mhla_tasks.video.callbacks import ClipPictures
from mhla_tasks.video.data import MovingDigits, MovingMnist, VideoLatentShards, VideoShards
from mhla_tasks.video.module import VideoDiffusion

__all__ = ["ClipPictures", "MovingDigits", "MovingMnist", "VideoDiffusion", "VideoLatentShards", "VideoShards"]
