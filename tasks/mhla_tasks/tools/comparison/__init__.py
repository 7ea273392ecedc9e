"""Comparison of training runs, for ``lightning compare`` and the end of a sweep.

``runs`` reads the folders of runs, ``groups`` averages runs that differ only in their seed, ``table`` builds the table, and
``formats`` writes it for the terminal, Markdown, CSV and LaTeX. ``curves`` draws the metrics, and ``page`` writes
``compared.html``.
"""
