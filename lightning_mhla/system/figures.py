"""Matplotlib figures with several plots, and picture files for light and dark screens."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning import Trainer
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

DARK = "dark"
"""Name of the subfolder, beside a picture, with the variant of the picture for dark screens."""
INK, PAPER = "#e6e8eb", "#14171c"
"""Colors of text and background on dark screens, the same as on the web pages."""
DOTS = 130
"""Resolution of picture files in dots per inch."""
MARGIN = 0.1
"""Margin of picture files in inches."""
NO_ENGINE = {"figure.autolayout": False, "figure.constrained_layout.use": False}
"""Settings of matplotlib under which a figure has no layout engine unless it is given one.

The user's settings may choose an engine. It would replace the one that a figure gives up, and may reject its colorbars.
"""


def make_panels(
    count: int, columns: int, size: tuple[float, float], margin: tuple[float, float] = (0, 0)
) -> tuple[Figure, list[Any]]:
    """Create a matplotlib figure with plots arranged in rows. The last row may be shorter.

    Args:
        count: number of plots, at least 1.
        columns: maximum number of plots in a row.
        size: width and height of a plot in inches.
        margin: width and height in inches that the figure has in addition to its plots.

    Returns:
        The figure, and a list of the axes of its plots, row by row.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    from matplotlib.figure import Figure  # slow to import, and most commands draw nothing

    figure = Figure(figsize=(size[0] * columns + margin[0], size[1] * rows + margin[1]), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def plain_numbers(axis: Axes) -> None:
    """Label the axes of a plot with plain numbers instead of powers of ten.

    Logarithmic axes get labels at 1, 2, 5, 10, 20 and so on.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for one_axis in (axis.xaxis, axis.yaxis):
        if one_axis.get_scale() == "log":
            one_axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        one_axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        one_axis.set_minor_formatter(NullFormatter())


def hide_ticks(axis: Axes) -> None:
    """Remove the ticks of both axes of a plot, and hide each axis that has no label, to save time when the figure is drawn."""
    axis.set(xticks=[], yticks=[])
    for one_axis in (axis.xaxis, axis.yaxis):
        one_axis.set_visible(bool(one_axis.get_label_text()))


def set_title(figure: Figure, text: str) -> None:
    """Write a title above all plots of a figure, in as many lines as its width requires.

    Args:
        figure: figure without a title.
        text: title, without markup.
    """
    size = 10  # in points
    characters = int(figure.get_figwidth() * 72 / (size * 0.55))  # a character is about 0.55 times as wide as high
    lines = textwrap.wrap(text, max(characters, 12))
    figure.suptitle("\n".join(lines), fontsize=size, parse_math=False)


def arrange(figure: Figure, dpi: float) -> Bbox:
    """Place all parts of a figure, and return the smallest box in inches, with a margin, that contains them.

    The arrangement takes longer than drawing. Without this function, ``savefig`` would arrange the figure again for every file,
    and draw it a second time to measure it.

    Args:
        figure: figure to arrange. Its parts keep their places afterwards.
        dpi: resolution of the picture files in dots per inch.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(dpi)  # sizes of text are rounded to pixels
    renderer = FigureCanvasAgg(figure).get_renderer()
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        with rc_context(NO_ENGINE):
            figure.set_layout_engine(None)
    return figure.get_tightbbox(renderer).padded(MARGIN)


def save_figure(figure: Figure, path: Path, caption: str = "") -> None:
    """Write a figure as a PNG file, and its variant for dark screens to the subfolder ``dark``.

    The caption is stored in both files, for the run's ``report.html``, which shows it with the figure.

    Args:
        figure: figure to write. Its colors are restored afterwards; the positions of its parts stay fixed.
        path: path of the PNG file. Missing folders are created.
        caption: text that says what the figure shows, and what to look for; empty for no caption.
    """
    from matplotlib import rc_context

    dark = path.parent / DARK / path.name
    dark.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Description": caption} if caption else {}
    options: dict[str, Any] = {"metadata": metadata, "dpi": DOTS, "format": "png", "bbox_inches": arrange(figure, DOTS)}
    with rc_context(NO_ENGINE):  # `savefig` removes the engine, and sets it again afterwards
        figure.savefig(path, **options)
        with _dark_colors(figure):
            figure.savefig(dark, **options)


def log_figure(trainer: Trainer, figure: Figure, name: str, folder: Path, caption: str) -> None:
    """Write a figure to a file such as ``NAME-step0001000.png``, as :func:`save_figure` does, and log it to TensorBoard.

    Args:
        trainer: trainer of the run. Its ``global_step`` is recorded in the file name and in TensorBoard.
        figure: figure to log.
        name: beginning of the file name, and tag of the figure in TensorBoard.
        folder: folder of the file.
        caption: text that says what the figure shows, and what to look for.
    """
    from lightning.pytorch.loggers import TensorBoardLogger  # slow to import, and other pictures need no logger
    from matplotlib.image import imread

    path = folder / f"{name}-step{trainer.global_step:07d}.png"
    save_figure(figure, path, caption)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, imread(path)[..., :3], trainer.global_step, dataformats="HWC")


@contextmanager
def _dark_colors(figure: Figure) -> Iterator[None]:
    """Context manager in which a figure has a dark background, and light colors for text, frames and ticks."""
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    changes: list[tuple[Any, Any]] = []

    def change(setter: Any, old: Any, new: str) -> None:
        changes.append((setter, old))
        setter(new)

    change(figure.set_facecolor, figure.get_facecolor(), PAPER)
    for axis in figure.axes:
        change(axis.set_facecolor, axis.get_facecolor(), PAPER)
        for scale in (axis.xaxis, axis.yaxis):
            for tick in (*scale.get_major_ticks(), *scale.get_minor_ticks()):
                for line in (tick.tick1line, tick.tick2line):
                    change(line.set_color, line.get_color(), INK)
        if (legend := axis.get_legend()) is not None:
            change(legend.get_frame().set_facecolor, legend.get_frame().get_facecolor(), PAPER)
    for text in figure.findobj(Text):
        change(text.set_color, text.get_color(), INK)
    for spine in figure.findobj(Spine):
        change(spine.set_edgecolor, spine.get_edgecolor(), INK)
    try:
        yield
    finally:
        for setter, old in reversed(changes):
            setter(old)
