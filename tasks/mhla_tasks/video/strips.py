"""Pictures of clips: a figure with a row of frames for each clip, and an animated GIF of all clips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP = 96
"""Gray level, from 0 to 255, of the gaps between frames."""

PART = 4
"""Maximum number of frames to show up to the trained length, and from each interval in which the length doubles."""

SMALLEST = 96
"""Smallest side of a clip in an animation, in pixels; smaller clips are enlarged."""

FRAME, LETTER = 0.9, 0.075
"""Shorter side of a frame, and width of a letter, in inches."""


def draw_strips(clips: Sequence[tuple[str, Tensor]], frames: int | Sequence[int], title: str = "") -> Figure:
    """Draw a Matplotlib figure with a row for each clip, which shows its caption and some of its frames.

    Args:
        clips: caption and frames ``[F, C, H, W]`` uint8 of each clip, all with the same height and width.
        frames: number of evenly spaced frames in a row, reduced to the length of the shortest clip; or indices of the frames to
            show, whose numbers, counted from 1, are then written above them.
        title: title of the figure.
    """
    height, width = clips[0][1].shape[-2:]
    numbered = not isinstance(frames, int)
    count = len(frames) if not isinstance(frames, int) else min(frames, min(len(clip) for _, clip in clips))
    canvas = torch.full((3, len(clips) * (height + 1) - 1, count * (width + 1) - 1), GAP, dtype=torch.uint8)
    for row, (_, clip) in enumerate(clips):
        indices = torch.linspace(0, len(clip) - 1, count).round().long() if isinstance(frames, int) else list(frames)
        chosen = clip[indices]
        for column, image in enumerate(chosen):
            top, left = row * (height + 1), column * (width + 1)
            canvas[:, top : top + height, left : left + width] = image
    captions = [_short(caption) for caption, _ in clips]
    across = FRAME * count * max(1.0, width / height)
    down = across * canvas.shape[1] / canvas.shape[2]
    margin, above = LETTER * max(map(len, captions)) + 0.1, 0.05 + 0.25 * bool(title) + 0.2 * numbered
    wide, high = margin + across + 0.05, down + above + 0.05
    from matplotlib.figure import Figure  # slow to import, so only when there is something to draw

    figure = Figure(figsize=(wide, high))
    axis = figure.add_axes((margin / wide, 0.05 / high, across / wide, down / high))
    axis.set_title(title, fontsize=10, parse_math=False)
    axis.imshow(canvas.permute(1, 2, 0).numpy(), interpolation="nearest")
    positions = [row * (height + 1) + height / 2 for row in range(len(clips))]
    axis.set_yticks(positions, captions, fontsize=9)
    axis.set_xticks([])
    if not isinstance(frames, int):
        axis.set_xticks(
            [column * (width + 1) + width / 2 for column in range(count)],
            [str(index + 1) for index in frames],
            fontsize=9,
        )
        axis.xaxis.tick_top()
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return figure


def draw_continuations(truth: Sequence[Tensor], clips: Sequence[Tensor], start: int, trained: int) -> Figure:
    """Draw a Matplotlib figure with two rows for each clip: frames of the true clip, and frames of the continued clip below.

    :func:`shown_frames` chooses the frames.

    Args:
        truth: true clips ``[F, C, H, W]`` uint8. If one is shorter than its continuation, its missing frames are gray.
        clips: continued clips, all of the same length, in the same format and order.
        start: number of frames at the beginning that were copied from the true clip.
        trained: number of frames of a training clip.
    """
    rows = []
    for number, (true, clip) in enumerate(zip(truth, clips, strict=True), 1):
        rows += [(f"{number}: truth", _of_length(true, clip)), ("continued", clip)]
    title = f"frames 1 to {start} are copied, the model was trained on {trained} frames"
    return draw_strips(rows, shown_frames(trained, len(clips[0])), title)


def side_by_side(truth: Sequence[Tensor], clips: Sequence[Tensor]) -> Tensor:
    """Join each true clip and its continuation into one clip, with the true clip on the left.

    Args:
        truth: true clips ``[F, C, H, W]`` uint8. If one is shorter than its continuation, its missing frames are gray.
        clips: continued clips, all of the same length, in the same format and order.

    Returns:
        Clips ``[n, F, C, H, 2 W + 1]`` uint8, with a gray line between the two halves.
    """
    joined = []
    for true, clip in zip(truth, clips, strict=True):
        joined.append(torch.cat([_of_length(true, clip), torch.full_like(clip[..., :1], GAP), clip], -1))
    return torch.stack(joined)


def _of_length(true: Tensor, clip: Tensor) -> Tensor:
    """Cut a true clip ``[F, C, H, W]`` to the length of a continued clip, or pad it to this length with gray frames."""
    return torch.cat([true[: len(clip)], torch.full_like(clip[len(true) :], GAP)])


def shown_frames(trained: int, frames: int) -> Sequence[int]:
    """Choose which frames of a continued clip to show: a few up to the trained length, and a few from each doubling of it.

    Args:
        trained: number of frames of a training clip.
        frames: number of frames of the continued clip.

    Returns:
        Indices of frames, in ascending order; the last one is ``frames - 1``.
    """
    chosen, start, end = set[int](), 0, min(trained, frames)
    while start < frames:
        count = min(PART, end - start)
        chosen |= {start + round(number * (end - start) / count) - 1 for number in range(1, count + 1)}
        start, end = end, min(2 * end, frames)
    return sorted(chosen)


def write_animation(path: Path, clips: Tensor, fps: float, caption: str = "") -> None:
    """Write clips side by side, at most four in a row, as an animated GIF that repeats forever.

    Args:
        path: path of the GIF file.
        clips: clips ``[B, F, C, H, W]`` uint8 with one or three channels.
        fps: frames per second. Values above 50 are reduced to 50, the fastest rate that browsers show.
        caption: description of the animation. It is stored as a comment in the file, which ``report.html`` displays.
    """
    count, frames, _, height, width = clips.shape
    scale = max(1, -(-SMALLEST // max(height, width)))
    large = clips.expand(-1, -1, 3, -1, -1).repeat_interleave(scale, -1).repeat_interleave(scale, -2).cpu()
    high, wide = height * scale + 2, width * scale + 2
    columns = min(4, count)
    canvas = torch.full((frames, 3, -(-count // columns) * high - 2, columns * wide - 2), GAP, dtype=torch.uint8)
    for number, clip in enumerate(large):
        top, left = number // columns * high, number % columns * wide
        canvas[:, :, top : top + high - 2, left : left + wide - 2] = clip
    first, *rest = (Image.fromarray(frame.numpy()) for frame in canvas.permute(0, 2, 3, 1))
    duration, comment = max(20, round(1000 / fps)), caption.encode()
    first.save(path, save_all=True, append_images=rest, duration=duration, loop=0, comment=comment)


def _short(caption: str, limit: int = 44) -> str:
    return caption if len(caption) <= limit else caption[: limit - 2] + ".."
