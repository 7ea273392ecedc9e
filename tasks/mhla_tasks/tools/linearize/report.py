"""Report of ``lightning linearize``: a self-contained web page with quality, speed, and code that loads the model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mhla.callbacks.axes import Axis
from lightning_mhla.callbacks.markup import Curve, document, html_text, picture, plot
from lightning_mhla.callbacks.originals import ORIGINAL
from lightning_mhla.callbacks.points import panels_of
from lightning_mhla.callbacks.stored_pictures import read_picture
from lightning_mhla.system.figures import make_panels, save_figure
from lightning_mhla.system.files import write_whole
from lightning_mhla.system.numbers import duration, metric_text, rounded
from lightning_mhla.training.encoders import Pooling
from mhla_tasks.tools.linearize.source import PretrainedSource
from mhla_tasks.tools.linearize.stages import MONITORS, Settings

LOADING = """\
from transformers import {class_name}{tokenizer}

model = {class_name}.from_pretrained("{folder}", trust_remote_code=True)"""
"""Template of the Python code that loads an exported transformers model."""

USE_TEXT_ENCODER = """

rows = tokenizer(["A text.", "Another text."], padding=True, truncation=True, return_tensors="pt")
vectors, mask = model(**rows).last_hidden_state, rows["attention_mask"].unsqueeze(-1)
embeddings = (vectors * mask).sum(1) / mask.sum(1)  # means of the token vectors"""
"""Python code that computes embeddings of texts. The comparison with the original uses the same mean."""

USE_LANGUAGE_MODEL = """

tokens = model.generate(**tokenizer("The river", return_tensors="pt"), max_new_tokens=20)
print(tokenizer.decode(tokens[0]))"""
"""Python code that continues a text."""

LOADING_TIMM = """\
from lightning_mhla import load_swapped
from timm.data import create_transform, resolve_data_config

model = load_swapped("{folder}")
size = {{"input_size": ({channels}, {side}, {side})}}  # of the images in training
transform = create_transform(**resolve_data_config(size, model=model))  # from an image of Pillow to the model's input
vectors = model.forward_features(images)  # of class and register tokens and patches
{embeddings}"""
"""Template of the Python code that loads an exported timm model."""

EMBEDDINGS: dict[Pooling, str] = {
    "head": """\
embeddings = model.forward_head(vectors, pre_logits=True)
outputs = model(images)  # scores of the classes if the original has a classifier, otherwise the embeddings""",
    "first": "embeddings = vectors[:, 0]  # of the class token",
    "mean": "embeddings = vectors.mean(1)",
}
"""Python code that computes embeddings from the token vectors of a timm model, by pooling method."""

MEANING = {
    "val/perplexity": "perplexity on held-out text; lower is better",
    "val/bits_per_byte": "bits per byte of held-out text; lower is better",
    "val/cosine": "cosine similarity of embeddings with the original's; 1 is equal",
    "val/token_cosine": "cosine similarity of token vectors with the original's; 1 is equal",
    "val/recall_at_10": "share of the original's 10 nearest neighbors that are found",
    "val/mixed_recall_at_10": "the same, searched for in an index of the original's embeddings",
    "val/loss": "loss on held-out data; lower is better",
}
"""Explanation of each metric in the table of quality, in the order of the table."""

SPEED = "pictures/speed.png"
"""Path of the picture of the speed, relative to the working folder."""

DECIMALS = 6
"""Number of decimal places of the original's metrics. The distance of an encoder from itself is a smaller rounding error."""


def write_report(
    target: Path, work: Path, source: PretrainedSource, settings: Settings, results: Mapping[str, Any]
) -> None:
    """Write the report of a linearization, ``report.html``, and its plot of the speed, ``pictures/speed.png``.

    Args:
        target: folder of the exported model.
        work: working folder, to which both files are written.
        source: pretrained model.
        settings: options that determined the training.
        results: measurements and metrics of all steps of ``lightning linearize``, by name.
    """
    title = f"{source.name}, linearized"
    parts = [
        f"<h1>{html_text(title)}</h1>",
        f'<p class="muted">{_summary(source, settings.kind, results)}</p>',
        _quality(source, results),
        _positions(results),
        _curves(results),
        _speed(source, work, results),
        _generation(results),
        _layers(source, results),
        f"<h2>Use it</h2><pre>{html_text(loading_code(source, target.name, settings.length), lines=True)}</pre>",
    ]
    write_whole(work / "report.html", document(title, "\n".join(part for part in parts if part)))


def loading_code(source: PretrainedSource, folder: str, length: int) -> str:
    """Return Python code that loads the exported model, for the report.

    Args:
        source: pretrained model.
        folder: folder of the exported model, as it appears in the code.
        length: side of the training images in pixels; used only for timm encoders.
    """
    if source.images is not None:
        channels, embeddings = source.images.preprocessing.channels, EMBEDDINGS[source.images.pooling]
        return LOADING_TIMM.format(folder=folder, channels=channels, side=length, embeddings=embeddings)
    class_name = "AutoModelForCausalLM" if source.domain == "language" else "AutoModel"
    if source.domain == "image":
        return LOADING.format(class_name=class_name, tokenizer="", folder=folder)
    tokenizer = f'\ntokenizer = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=True)'
    use = USE_LANGUAGE_MODEL if source.domain == "language" else USE_TEXT_ENCODER
    return LOADING.format(class_name=class_name, tokenizer=", AutoTokenizer", folder=folder) + tokenizer + use


def _summary(source: PretrainedSource, kind: str, results: Mapping[str, Any]) -> str:
    replaced = source.depth - len(results.get("layers", {}).get("kept", []))
    seconds = results["matching"]["seconds"] + results["tuning"]["seconds"]
    return (
        f"attention of {replaced} of {source.depth} layers replaced by {html_text(kind)}; trained for "
        f"{duration(seconds)}, {results['matching']['steps']:,} steps to match the layers and "
        f"{results['tuning']['steps']:,} for the model"
    )


def softmax_layers(indices: Sequence[int], depth: int) -> str:
    """Describe which layers keep softmax attention, such as ``1 of 3 layers keeps softmax: layer 0 (counted from 0)``.

    Args:
        indices: indices of the layers that keep softmax attention, counted from 0.
        depth: number of layers of the model.
    """
    if not indices:
        return f"none of {depth} layers keeps softmax"
    verb, noun = ("keeps", "layer") if len(indices) == 1 else ("keep", "layers")
    return f"{len(indices)} of {depth} layers {verb} softmax: {noun} {', '.join(map(str, indices))} (counted from 0)"


def window_note(results: Mapping[str, Any]) -> str:
    """Return a warning if most held-out samples fit in the softmax window of the kind ``mhla_window``; empty otherwise.

    Args:
        results: measurements of ``lightning linearize``, by name.
    """
    window = results.get("window")
    if window is None or window["share"] <= 0.5:
        return ""
    return (
        f"{window['share']:.0%} of the held-out samples have at most {window['tokens']:,} tokens and fit in the softmax window "
        f"of mhla_window (blocks of {window['block_size']} tokens). The replaced layers are nearly softmax there, so the "
        "scores say little about longer samples. Use longer samples, or "
        f"--block_size={window['smaller_block_size']} with a different --work"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table whose first column contains text and whose other columns contain numbers."""
    first, *others = head
    lines = [f"<tr><th>{first}{''.join(f'<th class=n>{name}' for name in others)}</tr>"]
    lines += [f"<tr><td>{row[0]}{''.join(f'<td class=n>{cell}' for cell in row[1:])}</tr>" for row in rows]
    return _scrolling("".join(lines))


def _scrolling(rows: str) -> str:
    """Return an HTML table with the given HTML rows, which scrolls inside its own box if it is wider than the page."""
    return f'<div class="scroll"><table>{rows}</table></div>'


def _quality(source: PretrainedSource, results: Mapping[str, Any]) -> str:
    stages = {
        "original": _original(results),
        "swapped": results["swapped"],
        "layers matched": results["matching"]["metrics"],
        "trained": results["tuning"]["metrics"],
    }
    monitor, _ = MONITORS[source.domain]
    names = [name for name in MEANING if name in results["swapped"]]
    names.sort(key=lambda name: name != monitor)
    rows = [f"<tr>{''.join(f'<th class=n>{stage}' for stage in stages)}</tr>"]
    for name in names:
        # The explanation has a row of its own, so that all stages fit on the screen of a phone.
        title = f"{name.removeprefix('val/')} <span class=muted>({MEANING[name]})</span>"
        rows.append(f"<tr class=group><td colspan={len(stages)}>{title}</tr>")
        rows.append(f"<tr>{''.join(f'<td class=n>{_metric(name, values)}' for values in stages.values())}</tr>")
    note = "On held-out data. Swapped: right after the attention was replaced, before any training."
    if source.domain == "language":
        note += (
            " Training also taught the model texts of this kind, which it did not teach the original. So a better figure than "
            "that of the original does not mean that the new attention is better."
        )
    note = f"<p class=muted>{note}</p>"
    if warning := window_note(results):
        note += f"<p><b>Warning:</b> {warning}.</p>"
    return f"<h2>Quality</h2>{note}{_scrolling(''.join(rows))}"


def _metric(name: str, values: Mapping[str, float | None]) -> str:
    value = values.get(name)
    return "" if value is None else metric_text(name, value)


def _original(results: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics of the original model, rounded to six decimal places; None for a metric that is not finite."""
    return {name: value if value is None else round(value, DECIMALS) for name, value in results["original"].items()}


def _positions(results: Mapping[str, Any]) -> str:
    if "positions" not in results:
        return ""
    values = results["positions"]
    models = ("original", "linearized")
    ranges = [f"{low:,} to {high:,}" for low, high in itertools.pairwise(values["bounds"])]
    rows = zip(ranges, *(map(rounded, values[name]) for name in models), strict=True)
    note = "<p class=muted>Perplexity of the tokens at these positions of a held-out text.</p>"
    return f"<h2>By position</h2>{note}{_table(['position', *models], list(rows))}"


def _curves(results: Mapping[str, Any]) -> str:
    """Return HTML with a plot for each metric: its curves in both training runs, and its value for the original model."""
    curves = {
        f"{stage}/{name.removeprefix('val/')}": [(step, value) for step, value in points if value is not None]
        for name in MEANING
        for stage in ("matching", "tuning")
        if (points := results[stage]["curves"].get(name))
    }
    plots, originals = [], _original(results)
    for title, names in panels_of(curves).items():
        original = originals.get(f"val/{title}")
        lines = [Curve(name.split("/")[0], curves[name]) for name in names]
        plots.append(plot(title, lines, None if original is None else (ORIGINAL, original)))
    return f'<h2>Training</h2><div class="curves">{"".join(plots)}</div>' if plots else ""


def _speed(source: PretrainedSource, work: Path, results: Mapping[str, Any]) -> str:
    speed = {int(length): values for length, values in results["speed"].items()}
    if not speed:
        return ""
    unit = "pixels of a side" if source.domain == "image" else "tokens"
    rows = []
    for length, values in speed.items():
        milliseconds = [f"{values[name] * 1e3:,.0f}" for name in ("original", "linearized")]
        rows.append([f"{length:,}", *milliseconds, f"{values['original'] / values['linearized']:.2f}"])
    length = results["break_even"]
    verdict = (
        f"The linearized model is the faster one from {length:,} {unit} on, among the lengths measured."
        if length is not None
        else f"The linearized model is slower at the longest length measured, {max(speed):,} {unit}."
    )
    figure, (axis,) = make_panels(1, 1, (6, 3.2))
    for name in ("original", "linearized"):
        axis.plot(list(speed), [1e3 * values[name] for values in speed.values()], marker="o", label=name)
    axis.set_xlabel(unit)
    axis.set_ylabel("milliseconds of a forward pass")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(list(speed), [f"{length:,}" for length in speed])
    lowest, highest = axis.get_ylim()
    ticks = Axis(lowest, highest, 0, 1, logarithmic=True, margin=0).ticks()
    axis.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    save_figure(figure, work / SPEED, f"Milliseconds of a forward pass by {unit}")
    stored = read_picture(work / SPEED)
    assert stored is not None
    drawing = picture(stored.description, stored)
    table = _table([unit, "original, ms", "linearized, ms", "times as fast"], rows)
    return f"<h2>Speed by length</h2><p>{verdict} One sample, float32, this machine.</p>{table}{drawing}"


def _generation(results: Mapping[str, Any]) -> str:
    if not results.get("generation"):
        return ""
    rows = [
        [
            f"{int(length):,}",
            *(f"{values[name]['seconds'] * 1e3:,.0f}" for name in ("original", "linearized")),
            *(f"{values[name]['bytes'] / 2**20:,.1f}" for name in ("original", "linearized")),
        ]
        for length, values in results["generation"].items()
    ]
    head = ["tokens before", "original, ms", "linearized, ms", "original, MiB", "linearized, MiB"]
    note = "<p>Time of one more token, and memory of the cache, for one text in float32 on this machine.</p>"
    return f"<h2>Generation</h2>{note}{_table(head, rows)}"


def _layers(source: PretrainedSource, results: Mapping[str, Any]) -> str:
    if "layers" not in results:
        return ""
    costs, rows = results["layers"], []
    for index, value in costs["alone"].items():
        cost = value - costs["original"]
        kind = "softmax" if int(index) in costs["kept"] else "replaced"
        rows.append([f"layer {index}", f"{'+' * (cost >= 0)}{rounded(cost)}", kind])
    head = ["after matching", f"loss by replacing it alone, per {costs['unit']}", "in the result"]
    return f"<h2>Layers</h2><p>{softmax_layers(costs['kept'], source.depth)}.</p>{_table(head, rows)}"
