"""Writer of ``report.html``, a web page that reports on a run and embeds its pictures, so that it needs no other files.

The page first says what was trained, how good the model is, what was skipped, and which command comes next. Samples, results by
class, curves, pictures and the configuration follow. Everything that comes from the run is escaped. The page has no scripts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mhla.callbacks.class_tables import class_section
from lightning_mhla.callbacks.markup import Curve, document, html_text, picture, plot
from lightning_mhla.callbacks.next_steps import next_steps
from lightning_mhla.callbacks.originals import ORIGINAL
from lightning_mhla.callbacks.points import LARGEST, MATCHING, finite_points, panels_of, separate_stages
from lightning_mhla.callbacks.sample_texts import LONGEST, sample_sections
from lightning_mhla.callbacks.stored_pictures import newest_pictures, read_picture, step_of
from lightning_mhla.system.files import write_whole
from lightning_mhla.system.numbers import duration, metric_text, plural, rounded
from lightning_mhla.system.redaction import redact

PAGE = "report.html"
"""Name of the file with the web page of a run."""
MAIN = ("accuracy", "bits_per_byte", "perplexity", "cosine", "loss")
"""Names, without prefix, of metrics that a page may show first, in order of preference.

They are used if no metric selects checkpoints.
"""
LOSS = "train/loss"
"""Metric to show if a run has no validation metrics."""
ATTENTION = ("attention", "mixing")
"""Names of the pictures that belong to the section about attention."""


def write_page(
    folder: Path,
    checkpoints: Path,
    record: Mapping[str, Any],
    training: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> None:
    """Write the web page of a run, ``report.html``, atomically.

    Args:
        folder: folder of the run, to which the page is written.
        checkpoints: folder of the run's checkpoints.
        record: metrics, duration, library versions and other facts about the run, as stored in ``run.json``.
        training: (step, value) pairs of metrics that are not in the record, such as ``train/loss``, by name; None if there are
            no such metrics.
    """
    title = "/".join(folder.parts[-2:])
    finite = finite_points({**(training or {}), **record["metrics"]})
    points = separate_stages(finite, record.get("matching_steps", 0))
    state = "finished" if record["finished"] else "not finished"
    main = _main_metric(record)
    parts = [
        f'<h1>{html_text(title)} <span class="badge">{state}</span></h1>',
        f'<div class="top">{_facts(record)}{_score(record, main, points)}{_next(folder, checkpoints, record)}</div>',
        _skipped(record),
        *sample_sections(folder),
        _pictures(folder, "Pictures", drawn=True),
        _classes(folder),
        _curves(record, points, main),
        _metrics(record),
        _pictures(folder, "Attention", drawn=False),
        _configuration(folder / "config.yaml"),
        f"<h2>Versions</h2><p>{html_text(', '.join(f'{name} {value}' for name, value in record['versions'].items()))}</p>",
    ]
    write_whole(folder / PAGE, document(title, "\n".join(part for part in parts if part)))


def _facts(record: Mapping[str, Any]) -> str:
    """Return an HTML list of the data, model, attention, options, time and hardware of a run.

    ``record`` is the content of ``run.json``.
    """
    seconds, steps = record["seconds"], record["steps"]
    trained, parameters = record["trained_parameters"], record["parameters"]
    size = plural(parameters, "parameter") + ("" if trained == parameters else f", {trained:,} of them trained")
    speed = f", {rounded(steps / seconds)} steps per second" if seconds and steps else ""
    processes = plural(record["processes"], "process", "processes")
    precision = f"precision {record['precision']}" if record.get("precision") else ""
    facts = {
        "Data": _named(record.get("data", ""), record.get("data_options", {})),
        "Model": ", ".join(filter(None, (record.get("model", ""), size))),
        "Attention": _attention(record),
        "Training": _training(record),
        "Time": f"{plural(steps, 'step')} in {duration(seconds)}{speed}",
        "Hardware": ", ".join(filter(None, (record.get("hardware", ""), processes, precision))),
    }
    rows = [f"<dt>{name}</dt><dd>{html_text(text)}</dd>" for name, text in facts.items() if text]
    return f'<dl class="facts">{"".join(rows)}</dl>'


def _named(name: str, options: Mapping[str, Any]) -> str:
    """Return a name with its options in parentheses, such as ``mhla (block_grid=[4, 4], lepe=3)``."""
    text = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{name} ({text})" if text else name


def _attention(record: Mapping[str, Any]) -> str:
    if "attention" not in record:
        return ""
    groups = record["attention"]
    if not groups:
        return f"as in {record['network']}" if record.get("network") else ""
    return "; ".join(
        f"{_named(group['kind'], group['options'])} in {plural(group['layers'], 'layer')}" for group in groups
    )


def _training(record: Mapping[str, Any]) -> str:
    rate, size = record.get("lr"), record.get("batch_size")
    start = record.get("pretrained")
    parts = [
        f"started from {start}" if start else "",
        f"peak learning rate {rate:g}" if rate is not None else "",
        f"batch size {size:,}" if size else "",
    ]
    return ", ".join(part for part in parts if part)


def _main_metric(record: Mapping[str, Any]) -> str | None:
    """Return the name of the metric to show first, or None if there are no metrics.

    ``record`` is the content of ``run.json``. The result is the metric that selects checkpoints. If no metric does, it is the
    first recorded one of the preferred metrics in ``MAIN``, such as the accuracy, or else the first of all metrics.
    """
    metrics = record["metrics"]
    if record["best"]:
        return record["best"]["metric"]
    named = [f"val/{name}" for name in MAIN if f"val/{name}" in metrics]
    return next(iter([*named, *metrics]), None)


def _score(record: Mapping[str, Any], main: str | None, points: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Return HTML with the last value, the best value and the curve of the main metric.

    If ``main`` is None, because the run has no validation metrics, the training loss is shown instead. ``record`` is the
    content of ``run.json``, and ``points`` contains the (step, value) pairs of each metric.
    """
    if main is None:
        losses = points.get(LOSS)
        last = f"<p>The last {LOSS} is {rounded(losses[-1][1])} at step {losses[-1][0]:,}.</p>" if losses else ""
        curve = plot("", [Curve(LOSS, losses)]) if losses else ""
        empty = "No validation" if record["finished"] or record.get("skipped") else "No validation yet"
        return f'<div class="main"><p class="score">{empty}</p>{last}{curve}</div>'
    step, value = record["metrics"][main][-1]
    best = record["best"]
    notes = [f"at step {step:,}"]
    if best and best["metric"] == main:
        better = "lower" if best["mode"] == "min" else "higher"
        is_last = best["step"] == step
        notes.append(
            "the best so far" if is_last else f"best {metric_text(main, best['value'])} at step {best['step']:,}"
        )
        notes.append(f"{better} is better")
    text = f'<p class="score">{metric_text(main, value)}</p><p><b>{html_text(main)}</b>, {"; ".join(notes)}</p>'
    curve = plot("", [Curve(main, points[main])], _original(record, main)) if points.get(main) else ""
    return f'<div class="main">{text}{curve}</div>'


def _original(record: Mapping[str, Any], metric: str) -> tuple[str, float] | None:
    value = record.get("original", {}).get(metric)
    return (ORIGINAL, float(value)) if value is not None and abs(value) < LARGEST else None


def _skipped(record: Mapping[str, Any]) -> str:
    parts = "".join(f"<li>{html_text(part)}</li>" for part in record.get("skipped", ()))
    return f'<div class="note"><b>This run skipped:</b><ul>{parts}</ul></div>' if parts else ""


def _next(folder: Path, checkpoints: Path, record: Mapping[str, Any]) -> str:
    steps = next_steps(folder, checkpoints, record)
    if not steps:
        return ""
    title = "Use it" if record["finished"] else "Resume"
    lines = [f'<p>{html_text(step.purpose)}:</p><pre class="command">{_command(step.command)}</pre>' for step in steps]
    return f'<div class="next"><h2>{title}</h2>{"".join(lines)}{_weights(folder, checkpoints, record)}</div>'


def _weights(folder: Path, checkpoints: Path, record: Mapping[str, Any]) -> str:
    """Return HTML that says which weights the suggested commands read, and where the best weights are.

    ``record`` is the content of ``run.json``. The result is empty for an unfinished run.
    """
    if not record["finished"]:
        return ""
    text, best = f"These commands read the weights of the last step, {record['steps']:,}.", record["best"]
    if best and "file" in best and best["step"] != record["steps"]:
        file = os.path.relpath(checkpoints / best["file"], folder)
        is_inside = not file.startswith(os.pardir)
        file = file if is_inside else os.path.abspath(checkpoints / best["file"])
        text += (
            f" The best {html_text(best['metric'])} is that of step {best['step']:,}: for these weights, name "
            f"<code>{html_text(file)}</code>{' in the folder of the run' if is_inside else ''}."
        )
    return f"<p>{text}</p>"


def _command(text: str) -> str:
    """Return a command as HTML in which lines break only at the spaces of the command."""
    return " ".join(f"<span>{html_text(argument)}</span>" for argument in text.split(" "))


def _classes(folder: Path) -> str:
    try:
        return class_section(folder)
    except ValueError as error:  # a broken file must not end a run
        return f'<div class="note">{html_text(str(error))}</div>'


def _curves(record: Mapping[str, Any], points: Mapping[str, Sequence[tuple[int, float]]], main: str | None) -> str:
    """Return an HTML section with plots of the metrics that change during the run.

    Metrics whose names differ only in their prefix share a plot. A plot of the main metric alone is left out, because it is at
    the top of the page. If ``main`` is None, the training loss takes the place of the main metric. ``record`` is the content of
    ``run.json``, and ``points`` contains the (step, value) pairs of each metric.
    """
    plots = []
    for title, names in panels_of(points).items():
        if names == [main or LOSS]:
            continue  # drawn at the top of the page
        original = next(filter(None, (_original(record, name) for name in names)), None)
        heading = "layer_distance (loss of the steps that match layers)" if names == [MATCHING] else title
        plots.append(plot(heading, [Curve(name, points[name]) for name in names], original))
    return f'<h2>Curves</h2><div class="curves">{"".join(plots)}</div>' if plots else ""


def _metrics(record: Mapping[str, Any]) -> str:
    if not record["metrics"]:
        return ""
    best = record["best"]
    rows = []
    for name, points in record["metrics"].items():
        step, value = points[-1]
        chosen = (
            f"{metric_text(name, best['value'])} at step {best['step']:,}" if best and best["metric"] == name else ""
        )
        cells = f'<td class="n">{metric_text(name, value)}</td><td class="n">{step:,}</td><td>{chosen}</td>'
        rows.append(f"<tr><td>{html_text(name)}</td>{cells}</tr>")
    head = '<tr><th>metric<th class="n">last<th class="n">step<th>best</tr>'
    return f'<h2>Metrics</h2><div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _pictures(folder: Path, title: str, drawn: bool) -> str:
    """Return a section with the newest picture of each series, as HTML; empty if there are no pictures.

    Args:
        folder: folder of the run.
        title: title of the section.
        drawn: True for pictures that the model generated, False for pictures of its attention.
    """
    newest = newest_pictures(folder / "pictures")
    figures = [_figure(path) for name, path in newest.items() if drawn != (Path(name).stem in ATTENTION)]
    return f"<h2>{title}</h2>{''.join(figures)}" if figures else ""


def _figure(path: Path) -> str:
    stored = read_picture(path)
    if stored is None:
        return f'<div class="note">{html_text(path.name)} is not a picture that can be read</div>'
    step, name = step_of(path), re.sub(r"-?step\d+", "", path.stem)
    caption = stored.description or (f"{name}, step {step:,}" if step >= 0 else name)
    return picture(caption, stored)


def _configuration(path: Path) -> str:
    if not path.exists():
        return ""
    # Beside a run that was started in Python, the file may be the user's own, with secrets.
    text = html_text(redact(path.read_text("utf-8", "replace"))[-LONGEST:], lines=True)
    return f"<h2>Configuration</h2><details><summary>{html_text(path.name)}</summary><pre>{text}</pre></details>"
