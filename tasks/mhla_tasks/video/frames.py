"""Transformer that continues a video frame by frame, with block-causal attention: a frame is one block of tokens.

Shape letters: B clips, F frames, C channels, H and W height and width in pixels, T tokens of a frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from lightning_mhla import AttentionConfig, Backbone
from lightning_mhla.attention import attention_per_layer
from lightning_mhla.model import GenerationCache
from lightning_mhla.system.options import as_dataclass


class FrameTransformer(ModelMixin, ConfigMixin):
    """Transformer that predicts the next frame of a video from all frames so far.

    The colors of a pixel are levels, integers from 0 to ``levels - 1``. Each frame is divided into square patches, and the
    model reads a patch and its surroundings as one token. A token attends to all tokens of its frame and of earlier frames
    (block-causal attention). From the token of a patch, the model predicts the levels of the same patch in the next frame.
    Unless the mixing coefficients are dense, the model continues clips of any length.

    ``save_pretrained(folder)`` writes safetensors and ``config.json``; ``FrameTransformer.from_pretrained(folder)`` loads them.

    Args:
        height: height of the frames in pixels.
        width: width of the frames in pixels.
        attention: options of the attention. ``block_size`` is the number of patches of a frame, and may be left out.
        channels: number of channels of the frames.
        frames: number of frames of a training clip. Dense mixing coefficients do not support longer clips.
        layer_kinds: pattern of attention kinds that repeats over all layers; the number of layers must be a multiple of its
            length; None to use ``attention.kind`` in all layers.
        levels: number of gray or color levels of a pixel, from 2 to 256.
        patch_size: side of the square patches, in pixels, an even number.
        dim: width of the tokens.
        depth: number of layers.
        heads: number of attention heads.
        mlp_ratio: inner width of the MLPs divided by ``dim``.
        checkpointing: whether to recompute the activations of each layer in the backward pass, to save memory.

    Raises:
        ValueError: if the patches do not divide the frames, a kind of attention is not block-causal, or a size is out of range.
    """

    @register_to_config
    def __init__(
        self,
        height: int,
        width: int,
        attention: AttentionConfig,
        *,
        channels: int = 1,
        frames: int = 8,
        layer_kinds: list[str] | None = None,
        levels: int = 2,
        patch_size: int = 4,
        dim: int = 96,
        depth: int = 3,
        heads: int = 3,
        mlp_ratio: float = 2.0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if patch_size < 2 or patch_size % 2 or height % patch_size or width % patch_size:
            raise ValueError(
                f"patch_size={patch_size} must be an even number that divides the frames of {height} x {width} pixels"
            )
        if not 2 <= levels <= 256:
            raise ValueError(f"levels={levels} must lie between 2 and 256")
        self.grid, self.size = (height // patch_size, width // patch_size), (channels, height, width)
        tokens = self.grid[0] * self.grid[1]
        attention = as_dataclass(AttentionConfig, attention)
        if attention.block_grid is not None or attention.block_size not in (None, tokens):
            raise ValueError(
                f"a block is one frame of {tokens} patches; leave block_grid={attention.block_grid} and "
                f"block_size={attention.block_size} out"
            )
        self.register_to_config(attention=asdict(attention))  # JSON values; the decorator has stored an object
        self.tokens, self.levels, self.patch_size = tokens, levels, patch_size
        # A patch and its surroundings: the distance that a frame can move per step is then visible in one token.
        self.patches = nn.Conv2d(channels, dim, 2 * patch_size, patch_size, patch_size // 2)
        self.position = nn.Parameter(0.5 * torch.randn(tokens, dim))
        configs = attention_per_layer(replace(attention, block_size=tokens), layer_kinds, depth)
        self.backbone = Backbone(
            dim, depth, heads, (frames * tokens,), configs, causal="block", mlp="swiglu", mlp_ratio=mlp_ratio,
            checkpointing=checkpointing,
        )  # fmt: skip
        self.head = nn.Linear(dim, channels * patch_size**2 * levels)

    @property
    def max_frames(self) -> int | None:
        """Number of frames in the longest clip that the attention supports; None for clips of any length."""
        limit = self.backbone.max_tokens
        return None if limit is None else limit // self.tokens

    def to_levels(self, video: Tensor) -> Tensor:
        """Quantize the values of clips to the integer levels that the model predicts.

        Args:
            video: clips ``[B, C, F, H, W]`` with values in -1 .. 1.

        Returns:
            Nearest level of each value, from 0 to the number of levels minus 1, ``[B, F, C, H, W]`` int64.

        Raises:
            ValueError: if the frames have channels or sides that differ from those of the model.
        """
        if (sizes := (video.shape[1], *video.shape[3:])) != self.size:
            raise ValueError(
                f"the clips have channels, height and width {sizes}, the model {self.size}; set --model.channels, "
                "--model.height and --model.width"
            )
        return ((video.float().transpose(1, 2) + 1) / 2 * (self.levels - 1)).round().long()

    def to_bytes(self, frames: Tensor) -> Tensor:
        """Convert pixel levels, in a tensor of any shape, to gray or color values from 0 to 255, uint8."""
        return (frames.float() * (255 / (self.levels - 1))).round().to(torch.uint8)

    def forward(self, frames: Tensor) -> Tensor:
        """Predict, after each frame of a clip, the frame that follows it.

        Args:
            frames: levels ``[B, F, C, H, W]``, int64.

        Returns:
            Logits of the levels of the following frames, ``[B, F, C, H, W, levels]``, in the dtype of the weights.
        """
        return self._levels(self.backbone(self._tokens(frames)), frames)

    def next_frame(self, frames: Tensor, cache: GenerationCache) -> Tensor:
        """Predict the next frame of each clip from all earlier frames, which are in a cache or passed as ``frames``.

        Args:
            frames: levels of the frames after those in the cache, ``[B, F, C, H, W]``, int64.
            cache: generation states of all layers, updated in place.

        Returns:
            The most probable level of each pixel of the next frame, ``[B, 1, C, H, W]`` int64.
        """
        tokens = self._tokens(frames)
        out = self.backbone.next_tokens(tokens, cache, [tokens.shape[1]] * len(tokens))
        # the tokens of the last frame, from which the next one is predicted
        return self._levels(out[:, -self.tokens :], frames[:, -1:]).argmax(-1)

    def new_cache(self) -> GenerationCache:
        """Create the empty generation states with which :meth:`next_frame` begins a batch of clips."""
        return GenerationCache(len(self.backbone.layers))

    @torch.no_grad()
    def continue_clips(self, first: Tensor, frames: int) -> Iterator[tuple[Tensor, int]]:
        """Continue clips frame by frame, from generation states that represent all earlier frames.

        Args:
            first: first frames as levels, see :meth:`to_levels`, ``[B, F, C, H, W]`` int64.
            frames: number of frames of the complete clips, including the first ones.

        Yields:
            Each new frame as levels, ``[B, 1, C, H, W]`` int64, and the size in bytes of the generation states of all clips.

        Raises:
            ValueError: if the attention does not support clips of that length, or ``frames`` does not exceed the number of
                first frames.
        """
        self.check_length(first.shape[1], frames)
        cache, newest = self.new_cache(), first
        for _ in range(frames - first.shape[1]):
            newest = self.next_frame(newest, cache)
            yield newest, cache.bytes

    def check_length(self, first: int, frames: int) -> None:
        """Check that the model can continue clips to a given length.

        Args:
            first: number of first frames.
            frames: number of frames of the complete clips, including the first ones.

        Raises:
            ValueError: if the attention does not support clips of that length, or ``frames`` does not exceed ``first``.
        """
        if frames <= first:
            raise ValueError(f"clips of {frames} frames do not continue their {first} first frames; ask for more")
        if self.max_frames is not None and frames > self.max_frames:
            raise ValueError(
                f"clips of {frames} frames are longer than the {self.max_frames} of the model's mixing coefficients; ask "
                f"for {self.max_frames}, or train with mixing: exponential, which continues clips of any length"
            )

    def _tokens(self, frames: Tensor) -> Tensor:
        pixels = frames.flatten(0, 1).to(self.head.weight.dtype) * (2 / (self.levels - 1)) - 1
        tokens = self.patches(pixels).flatten(2).transpose(1, 2) + self.position
        return tokens.reshape(len(frames), -1, tokens.shape[-1])

    def _levels(self, tokens: Tensor, frames: Tensor) -> Tensor:
        channels, size, (rows, columns) = self.size[0], self.patch_size, self.grid
        # [B, F, rows, columns, C, p, p, levels], moved to [B, F, C, rows, p, columns, p, levels]
        parts = self.head(tokens).view(*frames.shape[:2], rows, columns, channels, size, size, self.levels)
        return parts.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(*frames.shape, self.levels)


def relative_errors(frames: Tensor, truth: Tensor) -> Tensor:
    """Compute the relative error of each predicted frame.

    Args:
        frames: predicted gray or color values ``[F, C, H, W]``, of any dtype; 0 is black.
        truth: true values, in the same shape and scale.

    Returns:
        Errors ``[F]`` float32: the norm of the difference divided by the norm of the true frame. The error is 0 for a perfect
        frame, and 1 for a black one. If only the true frame is black, its norm is zero and the error is NaN.
    """
    frames, truth = frames.float().flatten(1), truth.float().flatten(1)
    differences, sizes = (frames - truth).norm(dim=1), truth.norm(dim=1)
    return torch.where(differences == 0, 0, differences / sizes.masked_fill(sizes == 0, torch.nan))
