"""Video: text-to-video transformers (Wan) with replaced attention, and a model that continues clips frame by frame."""

from mhla_tasks.video.bouncing import BouncingDigits
from mhla_tasks.video.callbacks import ClipPictures
from mhla_tasks.video.continuation import VideoContinuation
from mhla_tasks.video.continued_pictures import ContinuationPictures
from mhla_tasks.video.data import MovingDigits, MovingMnist, VideoFolders, VideoLatentShards, VideoShards
from mhla_tasks.video.frames import FrameTransformer
from mhla_tasks.video.module import VideoDiffusion

__all__ = [
    "BouncingDigits",
    "ClipPictures",
    "ContinuationPictures",
    "FrameTransformer",
    "MovingDigits",
    "MovingMnist",
    "VideoContinuation",
    "VideoDiffusion",
    "VideoFolders",
    "VideoLatentShards",
    "VideoShards",
]
