"""The chart of a training run from its metrics: loss above accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hoop.report.chart import Chart, ChartLine, Lines, smoothed

_MAX_RAW_POINTS = 120
"""A line with more points is smoothed, with the measured values drawn faintly behind it."""


def training_chart(
    rows: Sequence[Mapping[str, Any]], title: str, subtitle: str = "", rules: Mapping[str, float] | None = None
) -> Chart:
    """Chart of metrics rows.

    In a row ``loss`` belongs to the step, ``test_loss`` and ``test_accuracy`` to the test data, and ``train_loss`` and
    ``train_accuracy`` to an evaluation on the training data, where there is no test data. Accuracies and ``rules``
    (named reference levels) are fractions, shown as percentages. A panel without values is left out.
    """
    percent = {name: 100 * level for name, level in (rules or {}).items()}
    loss, accuracy = _lines(rows, "loss", 1), _lines(rows, "accuracy", 100)
    panels = [Lines("loss", loss)] if loss or not accuracy else []
    panels += [Lines("accuracy (%)", accuracy, rules=percent)] if accuracy else []
    return Chart(title, panels, x_label="step", subtitle=subtitle)


def _lines(rows: Sequence[Mapping[str, Any]], field: str, factor: float) -> list[ChartLine]:
    lines = []
    evaluated = "training" if field == "accuracy" else "training, evaluated"
    for name, key in (("training", field), (evaluated, f"train_{field}"), ("test", f"test_{field}")):
        points = [(row["step"], factor * row[key]) for row in rows if row.get(key) is not None]
        steps, values = [step for step, _ in points], [value for _, value in points]
        if len(points) > _MAX_RAW_POINTS:
            lines.append(ChartLine(name, steps, values, "faint"))
            lines.append(ChartLine(name, steps, smoothed(values, len(values) // 50)))
        elif points:
            lines.append(ChartLine(name, steps, values))
    return lines
