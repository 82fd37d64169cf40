"""The picture of a training run: loss above accuracy, from its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hoop.report.chart import Chart, ChartLine, Lines, smoothed

_RAW = 120
"""A line of more points than this is drawn smooth, with what was measured faint behind it."""


def training_chart(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    subtitle: str = "",
    rules: Mapping[str, float] | None = None,
) -> Chart:
    """``loss`` of rows is of a step, ``test_loss`` and ``test_accuracy`` are of the test data.

    ``train_loss`` and ``train_accuracy`` are of the training data, evaluated where there is no test data.

    Accuracies are shares of one and shown as percentages; so are the ``rules``, levels to compare with. A panel
    that no row has values for is left out.
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
        if len(points) > _RAW:
            lines.append(ChartLine(name, steps, values, "faint"))
            lines.append(ChartLine(name, steps, smoothed(values, len(values) // 50)))
        elif points:
            lines.append(ChartLine(name, steps, values))
    return lines
