"""Report section about a classifier: its accuracy by class, its confusion matrix and its worst mistakes.

The section is built from ``classes.json`` in the folder of the run. The callback for image classification writes this file, and
callbacks for other classifiers may write it too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mhla.callbacks.markup import html_text
from lightning_mhla.system.numbers import plural
from lightning_mhla.system.untrusted import read_json

CLASSES = "classes.json"
"""Name of the file with a classifier's results by class, in the folder of a run. The file has these entries:

- ``step``: optimizer step of the validation;
- ``names``: names of the classes, in the order of their labels;
- ``confusion``: triples of true label, predicted label and number of samples, without zeros;
- ``mistakes``: wrongly classified samples, the worst first. A sample has ``label``, ``predicted``, ``probability`` (of the
  predicted class), ``label_probability``, ``picture`` (a PNG file in base64) and, optionally, ``name``."""

MOST_CLASSES = 20
"""Maximum number of classes for which a confusion matrix is shown, and maximum number of rows in the table of accuracies."""
MOST_PAIRS = 10
"""Maximum number of confused pairs of classes that are listed if there are too many classes for a confusion matrix, and maximum
number of classes without samples that are named."""


def class_section(folder: Path) -> str:
    """Return the report section about a classifier as HTML; empty if the run has no results by class.

    Args:
        folder: folder of the run. The results are read from its file ``classes.json``.

    Raises:
        ValueError: if the file exists but is not valid.
    """
    path = folder / CLASSES
    if not path.exists():
        return ""
    content = read_json(path)
    try:
        names = [str(name) for name in content["names"]]
        counts: dict[int, dict[int, int]] = defaultdict(dict)
        for label, predicted, count in content["confusion"]:
            counts[int(label)][int(predicted)] = int(count)
        total = sum(sum(row.values()) for row in counts.values())
        right = sum(row.get(label, 0) for label, row in counts.items())
        summary = f"{right:,} of {plural(total, 'validation sample')} right at step {int(content['step']):,}."
        confusions = _matrix(names, counts) if len(names) <= MOST_CLASSES else _pairs(names, counts)
        tables = f'<div class="sides"><div>{_accuracies(names, counts)}</div><div>{confusions}</div></div>'
        parts = [f"<h2>Classes</h2><p>{summary}</p>", tables, _mistakes(names, content["mistakes"])]
    except (KeyError, TypeError, IndexError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{path} is not a file of results by class: {error!r}; remove it, and validate again"
        ) from None
    return "".join(parts)


def _accuracies(names: Sequence[str], counts: Mapping[int, Mapping[int, int]]) -> str:
    """Return an HTML table of up to 20 classes with the lowest accuracies, in ascending order, the larger of equal ones first.

    ``names`` lists the class names by label. ``counts`` maps each true label to the number of samples by predicted label.
    """
    rows = []
    for label, row in counts.items():
        total = sum(row.values())
        wrong = {predicted: count for predicted, count in row.items() if predicted != label}
        most = max(wrong, key=lambda predicted: wrong[predicted], default=None)
        mistaken = "" if most is None else f"{html_text(names[most])} ({wrong[most]:,})"
        accuracy = row.get(label, 0) / total
        bar = f'<span class="rail"><span class="bar" style="width: {accuracy:.0%}"></span></span>'
        cells = f'<td class="n">{accuracy:.1%}</td><td>{bar}</td><td class="n">{total:,}</td><td>{mistaken}</td>'
        rows.append((accuracy, -total, label, f"<tr><td>{html_text(names[label])}</td>{cells}</tr>"))
    rows.sort()
    head = '<tr><th>class<th class="n">accuracy<th><th class="n">samples<th>taken for</tr>'
    shown = "".join(row for *_, row in rows[:MOST_CLASSES])
    notes = []
    if (left_out := len(rows) - MOST_CLASSES) > 0:
        notes.append(f"{plural(left_out, 'class', 'classes')} with an equal or higher accuracy not shown.")
    if absent := [name for label, name in enumerate(names) if label not in counts]:
        more = f" and {len(absent) - MOST_PAIRS:,} more" if len(absent) > MOST_PAIRS else ""
        notes.append(f"Without validation samples: {', '.join(absent[:MOST_PAIRS])}{more}.")
    note = f'<p class="muted">{html_text(" ".join(notes))}</p>' if notes else ""
    table = f'<div class="scroll"><table>{head}{shown}</table></div>{note}'
    return f"<h3>Accuracy by class, lowest first</h3>{table}"


def _matrix(names: Sequence[str], counts: Mapping[int, Mapping[int, int]]) -> str:
    head = "".join(f"<th>{html_text(name)}" for name in names)
    rows = []
    for label, name in enumerate(names):
        row = counts.get(label, {})
        total = sum(row.values()) or 1
        cells = "".join(_cell(row.get(predicted, 0), total) for predicted in range(len(names)))
        rows.append(f"<tr><th>{html_text(name)}</th>{cells}</tr>")
    caption = (
        "Rows are the true classes, columns the predicted ones; a color is the share of a row. Look for colored cells off the "
        "diagonal: they are pairs of classes that the model confuses. If both cells of a pair are colored, the model cannot "
        "tell the two apart; if only one is, it prefers one class."
    )
    table = f'<div class="scroll"><table class="matrix"><tr><th class="muted">true</th>{head}</tr>{"".join(rows)}</table></div>'
    return f"<h3>Confusion matrix</h3><figure>{table}<figcaption>{caption}</figcaption></figure>"


def _cell(count: int, total: int) -> str:
    if not count:
        return "<td></td>"
    return f'<td style="background: rgb(var(--share) / {0.1 + 0.45 * count / total:.2f})">{count:,}</td>'


def _pairs(names: Sequence[str], counts: Mapping[int, Mapping[int, int]]) -> str:
    """Return an HTML table of up to ten pairs of true and predicted classes that are confused most often.

    ``names`` lists the class names by label. ``counts`` maps each true label to the number of samples by predicted label.
    """
    pairs = [
        (count, label, predicted)
        for label, row in counts.items()
        for predicted, count in row.items()
        if predicted != label
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    rows = "".join(
        f'<tr><td>{html_text(names[label])}</td><td>{html_text(names[predicted])}</td><td class="n">{count:,}</td></tr>'
        for count, label, predicted in pairs[:MOST_PAIRS]
    )
    head = '<tr><th>true class<th>predicted class<th class="n">samples</tr>'
    more = (
        f" {plural(len(pairs) - MOST_PAIRS, 'pair')} with fewer or as many samples not shown."
        if len(pairs) > MOST_PAIRS
        else ""
    )
    note = (
        f'<p class="muted">A confusion matrix is drawn for up to {MOST_CLASSES} classes, and these are {len(names):,}; '
        f"{CLASSES} in the folder of the run has all pairs.{more}</p>"
    )
    return f'<h3>Most confused classes</h3><div class="scroll"><table>{head}{rows}</table></div>{note}' if rows else ""


def _mistakes(names: Sequence[str], mistakes: Sequence[Mapping[str, Any]]) -> str:
    figures = []
    for mistake in mistakes:
        data = mistake["picture"]
        # The text goes into an attribute of the page without escaping.
        if not re.fullmatch(r"[A-Za-z0-9+/]+=*", data):
            raise ValueError("a picture is not base64")
        label, predicted = html_text(names[mistake["label"]]), html_text(names[mistake["predicted"]])
        text = (
            f"<b>{label}</b> taken for <b>{predicted}</b><br>{predicted}: {_share(mistake['probability'])}<br>"
            f"{label}: {_share(mistake['label_probability'])}"
        )
        if name := mistake.get("name"):  # runs of earlier versions have none
            text += f'<br><span class="muted">{html_text(str(name))}</span>'
        image = f'<img alt="{label} taken for {predicted}" src="data:image/png;base64,{data}">'
        figures.append(f"<figure>{image}<figcaption>{text}</figcaption></figure>")
    if not figures:
        return ""
    note = (
        "Samples whose true class got the lowest probability, with the model's probabilities. Look for wrong labels, several "
        "objects, and cuts that hide the object, before you change the model."
    )
    return f'<h3>Worst mistakes</h3><p class="muted">{note}</p><div class="mistakes">{"".join(figures)}</div>'


def _share(probability: float | None) -> str:
    """Format a probability as a percentage. None stands for NaN, which JSON cannot represent, and becomes ``NaN``."""
    return "NaN" if probability is None else f"{float(probability):.1%}"
