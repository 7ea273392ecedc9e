"""Lightning module that trains, validates and samples a model that continues videos frame by frame."""

# Longer than other modules because Lightning calls all of its hooks on one module, which is documented with its options.

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mhla import AttentionConfig
from lightning_mhla.generative.module import GenerativeModule
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from lightning_mhla.system.sharding import gathered_weights
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.video.frames import FrameTransformer, relative_errors
from mhla_tasks.video.writer import ContinuationWriter


@dataclass(frozen=True)
class FrameShape:
    """Shape of a frame transformer: colors, patches, widths and depth.

    Args:
        levels: number of gray or color levels of a pixel, from 2 (black and white) to 256.
        patch_size: side of the square patch that becomes one token, in pixels, an even number. A token also covers half a
            patch on each side of its own patch.
        dim: width of the tokens.
        depth: number of layers.
        heads: number of attention heads.
        mlp_ratio: inner width of the MLPs divided by the width of the tokens.

    Raises:
        ValueError: if ``patch_size``, ``dim``, ``depth``, ``heads`` or ``mlp_ratio`` is not positive.
    """

    levels: int = 2
    patch_size: int = 4
    dim: int = 96
    depth: int = 3
    heads: int = 3
    mlp_ratio: float = 2.0

    def __post_init__(self) -> None:
        check_range("shape.", least=1, patch_size=self.patch_size, dim=self.dim, depth=self.depth, heads=self.heads)
        check_range("shape.", above=0, mlp_ratio=self.mlp_ratio)


@dataclass(frozen=True)
class ErrorsConfig:
    """Errors that training adds to the frames that the model sees, so that the model learns to correct its own errors.

    Args:
        own: share of clips in which the model's own predictions replace the frames after the first ones (option start).
        noise: share of pixels that get a random level.

    Raises:
        ValueError: if a share is negative, or not below 1.
    """

    own: float = 0.0
    noise: float = 0.01

    def __post_init__(self) -> None:
        check_range("errors.", least=0, below=1, own=self.own, noise=self.noise)


@dataclass(frozen=True)
class ContinuationSampling:
    """Options for continuing clips and writing them to MP4 files.

    Args:
        frames: number of frames of a clip, including the first ones, which are copied.
        fps: frames per second of the MP4 files.
        crf: constant rate factor of x264, from 0 (loses only color resolution) to 51 (lowest quality).

    Raises:
        ValueError: if ``fps`` or ``crf`` is out of range.
    """

    frames: int = 64
    fps: float = 8.0
    crf: float = 15.0

    def __post_init__(self) -> None:
        check_range("sampling.", above=0, fps=self.fps)
        if not 0 <= self.crf <= 51:
            raise ValueError(f"sampling.crf={self.crf} must lie between 0 and 51")


class VideoContinuation(GenerativeModule):
    """Model that continues videos frame by frame, with block-causal attention in which a frame is one block of tokens.

    Training predicts each frame from all frames before it. The predict command copies the first frames of a clip, and
    generates the others one at a time. With exponential mixing coefficients, the size of the model's state does not depend
    on the number of frames.

    Args:
        attention: options of the attention. A block is one frame, so leave out block_grid and block_size.
        height: height of the frames in pixels.
        width: width of the frames in pixels.
        channels: number of channels of the frames, 1 or 3.
        frames: number of frames of a training clip.
        start: number of frames at the beginning of a clip that are given instead of predicted. The motion is visible in two
            or more frames.
        layer_kinds: pattern of attention kinds that repeats over all layers; the number of layers must be a multiple of its
            length. null uses attention.kind in all layers.
        shape: shape of the transformer.
        errors: errors that training adds to the frames that the model sees.
        sampling: length and format of the clips that the predict command and callbacks generate.
        output: folder for the clips that the predict command generates; clips that exist there are kept. null for the
            log folder.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        ValueError: if ``start`` is not between 1 and ``frames - 1``, ``channels`` is neither 1 nor 3, or the patches do not
            divide the frames.
    """

    network: FrameTransformer
    train_batch = ("video",)
    evaluation_batch = ("video", "index")
    predict_batch = ("video", "index", "caption")

    def __init__(
        self,
        attention: AttentionConfig,
        height: int,
        width: int,
        channels: int = 1,
        frames: int = 8,
        start: int = 2,
        layer_kinds: list[str] | None = None,
        shape: FrameShape = FrameShape(),
        errors: ErrorsConfig = ErrorsConfig(),
        sampling: ContinuationSampling = ContinuationSampling(),
        output: str | None = None,
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        super().__init__(training)
        self.save_hyperparameters(ignore=["output"])
        keep_plain(self)
        if not 1 <= start < frames:
            raise ValueError(f"start={start} must be at least 1 and below the number of frames, {frames}")
        if channels not in (1, 3):
            raise ValueError(f"channels={channels} must be 1 (gray) or 3 (color)")
        self.start, self.frames = start, frames
        self.errors = as_dataclass(ErrorsConfig, errors)
        self.sampling = as_dataclass(ContinuationSampling, sampling)
        self.network = FrameTransformer(
            height,
            width,
            attention,
            channels=channels,
            frames=frames,
            layer_kinds=layer_kinds,
            checkpointing=self.training_options.checkpointing,
            **asdict(as_dataclass(FrameShape, shape, "shape")),
        )
        self._writer = ContinuationWriter(output)

    @property
    @override
    def usage(self) -> dict[str, str]:
        """Mapping from purpose to command, for the report of a run. Its only command continues held-out clips.

        In the command, ``{run}`` stands for the option that names the run. The command requests no more frames than the
        attention supports.
        """
        most = self.network.max_frames
        length = f" --frames {most}" if most is not None and most < self.sampling.frames else ""
        return {"Continue held-out clips": "lightning predict {run}" + length}

    @override
    def layers(self) -> list[nn.Module]:
        return list(self.network.backbone.blocks)

    @override
    def prediction_callbacks(self) -> list[Callback]:
        return [self._writer]

    def forward(self, frames: Tensor) -> Tensor:
        """Predict, after each frame of a clip, the frame that follows it.

        Args:
            frames: levels ``[B, F, C, H, W]``, int64.

        Returns:
            Logits of the levels of the following frames, ``[B, F, C, H, W, levels]`` float32.
        """
        return self.network(frames).float()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute and log the mean cross-entropy of frames that are predicted from earlier frames with random errors.

        Args:
            batch: dict with the clips ``video``, ``[B, C, F, H, W]`` with values in -1 .. 1.
            batch_idx: not used.

        Returns:
            Scalar loss, float32, in nats per pixel and channel.

        Raises:
            ValueError: if the clips do not have the number of frames that the option ``frames`` states.
        """
        frames = self.network.to_levels(batch["video"])
        if frames.shape[1] != self.frames:  # pictures and predictions would name a wrong trained length
            raise ValueError(
                f"training clips have {frames.shape[1]} frames, but model.frames={self.frames}; set --data.frames and "
                "--model.frames to the same number"
            )
        return self.log_loss(self._losses(self._with_errors(frames), frames).mean(), len(frames))

    @override
    def sample_losses(self, batch: dict[str, Any], generators: list[torch.Generator]) -> Tensor:
        """Compute the mean cross-entropy of each clip, with each frame predicted from the true earlier frames.

        Args:
            batch: dict with the clips ``video``, ``[B, C, F, H, W]`` with values in -1 .. 1.
            generators: not used, because the loss has no randomness.

        Returns:
            Losses ``[B]`` float32, in nats per pixel and channel.
        """
        frames = self.network.to_levels(batch["video"])
        return self._losses(frames, frames)

    def _losses(self, seen: Tensor, frames: Tensor) -> Tensor:
        """Compute the mean cross-entropy of each clip over the frames that the model predicts: all after the first ``start``.

        Args:
            seen: levels of the pixels that the model sees, ``[B, F, C, H, W]`` int64, see :meth:`FrameTransformer.to_levels`.
            frames: true levels, in the same shape.

        Returns:
            Losses ``[B]`` float32, in nats per pixel and channel.

        Raises:
            ValueError: if the clips have no frames after the first ``start``.
        """
        if frames.shape[1] <= self.start:
            raise ValueError(f"clips of {frames.shape[1]} frames have none after the first start={self.start}")
        # The output at frame i predicts frame i + 1, so the first output that counts is that of the last given frame.
        logits = self(seen[:, :-1])[:, self.start - 1 :]
        losses = F.cross_entropy(logits.flatten(0, -2), frames[:, self.start :].flatten(), reduction="none")
        return losses.view(len(frames), -1).mean(1)

    @torch.no_grad()
    def _with_errors(self, frames: Tensor) -> Tensor:
        """Replace frames of some clips by the model's predictions of these frames, and give some pixels random levels.

        Training on such errors teaches the model to correct its own errors when it continues clips.

        Args:
            frames: levels ``[B, F, C, H, W]`` int64.

        Returns:
            Levels with errors, in the same shape and dtype. The argument stays unchanged.
        """
        levels, errors = self.network.levels, self.errors
        if errors.noise:
            random = torch.randint_like(frames, levels)
            frames = torch.where(torch.rand(frames.shape, device=frames.device) < errors.noise, random, frames)
        if errors.own:
            predicted = self(frames[:, :-1])[:, self.start - 1 :].argmax(-1)
            replaced = torch.rand(len(frames), 1, 1, 1, 1, device=frames.device) < errors.own
            frames = torch.cat([frames[:, : self.start], torch.where(replaced, predicted, frames[:, self.start :])], 1)
        return frames

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Continue the clips of a batch, except those whose files already exist.

        Args:
            batch: dict with ``video``, ``[B, C, F, H, W]`` in -1 .. 1; ``valid``, ``[B]`` bool, False for clips that only fill
                up the batch; ``index`` in the data set and ``caption`` of each clip; and optionally ``frames``, the number of
                frames of each true clip.
            batch_idx: not used.

        Returns:
            A dict with three entries for the n continued clips, which are empty lists if n is 0:

            * ``pixels``: continued clips ``[n, F, C, H, W]`` uint8.
            * ``truth``: list of the true clips ``[F, C, H, W]`` uint8. They may be shorter if the batch has their lengths in
              the entry ``frames``.
            * ``rows``: a dict for each clip with ``file`` (file name), ``prompt`` (the caption), ``index`` (in the data set),
              ``video`` (a digest of the true clip), ``seconds`` (mean time per clip in seconds) and ``at_once`` (number of
              clips continued together).

            Each row also has three lists with a number for each predicted frame:

            * ``frame_seconds``: time in seconds for all clips that are continued together.
            * ``state_bytes``: size in bytes of the generation states of one clip.
            * ``error``: error relative to the norm of the true frame. This list ends where the true clip ends.
        """
        slots = batch["valid"].nonzero()[:, 0].tolist()
        levels = self.network.to_levels(batch["video"])
        lengths = batch["frames"].tolist() if "frames" in batch else [levels.shape[1]] * len(levels)
        true_levels = [levels[slot, : lengths[slot]] for slot in slots]
        requests = [
            {
                "file": f"{int(batch['index'][slot]):04d}.mp4",
                "prompt": batch["caption"][slot],
                "index": int(batch["index"][slot]),
                "video": clip_digest(clip[: self.sampling.frames]),
            }
            for slot, clip in zip(slots, true_levels, strict=True)
        ]
        missing = self._writer.missing(requests)
        with gathered_weights(self.network):  # every process takes part in it, also one without a missing clip
            if not missing:
                return {"pixels": [], "truth": [], "rows": []}
            first = torch.stack([true_levels[at][: self.start] for at in missing])
            pixels, measured = self.continue_clips(first, self.sampling.frames)
        truths = [self.network.to_bytes(true_levels[at]) for at in missing]
        took = {"seconds": sum(measured["frame_seconds"]) / len(missing), "at_once": len(missing), **measured}
        rows = []
        for number, (clip, true) in enumerate(zip(pixels, truths, strict=True)):
            common = slice(self.start, min(len(clip), len(true)))
            # four digits, of which a small error keeps the first ones: zero says that no pixel is wrong
            errors = [float(f"{error:.4g}") for error in relative_errors(clip[common], true[common]).tolist()]
            rows.append({**requests[missing[number]], **took, "error": errors})
        return {"pixels": pixels, "truth": truths, "rows": rows}

    def continue_clips(self, first: Tensor, frames: int) -> tuple[Tensor, dict[str, Any]]:
        """Continue clips frame by frame, and measure the time and the size of the generation states.

        If the weights are sharded, call this method inside :func:`gathered_weights`.

        Args:
            first: levels of the first frames, ``[B, F, C, H, W]`` int64.
            frames: number of frames of the complete clips.

        Returns:
            Clips ``[B, frames, C, H, W]`` uint8, and a dict of two lists with a number for each predicted frame:
            ``frame_seconds`` (time for all clips) and ``state_bytes`` (size of the generation states of one clip).

        Raises:
            ValueError: if the attention does not support clips of that length, or ``frames`` does not exceed the number of
                first frames.
        """
        clips = [first]
        measured: dict[str, Any] = {"frame_seconds": [], "state_bytes": []}
        begin = time.perf_counter()
        for frame, size in self.network.continue_clips(first, frames):
            if frame.is_cuda:
                torch.cuda.synchronize()
            end = time.perf_counter()
            measured["frame_seconds"].append(round(end - begin, 6))
            measured["state_bytes"].append(size // len(first))
            clips.append(frame)
            begin = end
        return self.network.to_bytes(torch.cat(clips, 1)), measured


def clip_digest(levels: Tensor) -> str:
    """Return a digest of 16 hexadecimal digits that identifies a clip by its levels ``[F, C, H, W]``."""
    content = str(list(levels.shape)).encode() + levels.to(torch.uint8).cpu().contiguous().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()
