"""Charts that change all the time, as HTML and SVG in a text block: curves, and bars by device.

A chart of Bokeh draws axes, grid and labels again for every new point, which takes a browser on two cores 30 to 50 ms.
Of these charts only what has changed is set in the page (``updates``), with the text beside them: 2 ms. The pointer
shows the values of a curve (``updates``) and of a part of a bar (its title).

Every text here is a number or a literal, or escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from bokeh.models import Div, InlineStyleSheet

GRID = 1000
"""Coordinates of a drawing go from 0 to this, in both directions."""
TICKS = 4
"""About how many lines of a grid there are."""
HEADROOM = 1.1
"""A chart that is full gets this many times as long: until then its old points stay where they are."""
PIECE = 40
"""A line is drawn in pieces of this many points: the browser draws only those that have changed."""
_STYLE = """
:host { color: var(--hoop-text); font: 12px/1.4 system-ui, sans-serif; contain: content; }
.bk-clearfix { display: block !important; }
p { margin: 2px 0 8px; font-size: 13px; font-weight: 600; }
p span { margin-left: 12px; font-weight: 400; white-space: nowrap; }
i { display: inline-block; width: 14px; height: 10px; margin-right: 5px; }
.plot { position: relative; height: 170px; margin: 0 16px 26px 60px; outline: 1px solid var(--hoop-grid); }
.plot svg { position: absolute; width: 100%; height: 100%; }
.plot path, .plot polyline { fill: none; vector-effect: non-scaling-stroke; }
.grid { stroke: var(--hoop-grid); }
.level { stroke: #d55e00; stroke-width: 2px; stroke-dasharray: 6 4; }
.y { position: absolute; right: 100%; padding-right: 6px; transform: translateY(-50%); }
.x { position: absolute; top: 100%; padding-top: 3px; transform: translateX(-50%); }
.bars { position: relative; margin: 0 16px 0 130px; border-left: 1px solid var(--hoop-muted); }
.bar { position: relative; display: flex; height: 20px; margin: 4px 0; }
.bar i { height: 100%; margin: 0; flex: none; }
.bar b { position: absolute; right: 100%; padding-right: 8px; font-weight: 400; white-space: nowrap; }
.axis { position: relative; height: 20px; border-top: 1px solid var(--hoop-muted); }
.predicted { position: absolute; top: 0; bottom: 20px; border-left: 2px dashed #d55e00; }
"""


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    name: str = ""
    """In the chart's title."""
    width: int = 2


def chart_block(name: str, min_width: int = 0) -> Div:
    """A place for a chart."""
    return Div(
        name=name,
        text="",
        disable_math=True,
        sizing_mode="stretch_width",
        min_width=min_width or None,
        stylesheets=[InlineStyleSheet(css=_STYLE)],
    )


def ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``TICKS`` of them, which differ by ``least`` or more."""
    if not (math.isfinite(high - low) and high > low):
        return [low] if math.isfinite(low) else []
    step = _step(high - low, least)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * at for at in range(first, last + 1)]


def _step(span: float, least: float = 0.0) -> float:
    """A round number of which about ``TICKS`` are in ``span``."""
    rough = max(span / TICKS, least)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * one for one in (1, 2, 5, 10) if power * one >= 0.999 * rough)


def curves_html(
    title: str, lines: Sequence[Line], y_text: Callable[[float], str], level: float | None = None, unit: str = ""
) -> str:
    """Lines by step. ``y_text`` writes a value; ``level`` is a dashed line at a value; ``unit`` is for the pointer."""
    xs = [x for line in lines if line.x for x in (line.x[0], line.x[-1])] or [0.0, 1.0]
    ys = [y for line in lines for y in line.y] or [0.0, 1.0]
    if level is not None:
        ys.append(level)
    x0, x1 = min(xs), _end(min(xs), max(xs))
    y0, y1 = _rounded(min(ys), max(ys))
    x_scale, y_scale = GRID / (x1 - x0), GRID / (y1 - y0)
    x_ticks, y_ticks = ticks(x0, x1, least=1.0), ticks(y0, y1)
    grid = "".join(f"M{x_scale * (one - x0):.0f} 0V{GRID}" for one in x_ticks)
    grid += "".join(f"M0 {y_scale * (y1 - one):.0f}H{GRID}" for one in y_ticks)
    at_level = f"M0 {y_scale * (y1 - level):.0f}H{GRID}" if level is not None else ""
    drawn = [f'<path class="grid" d="{grid}"></path><path class="level" d="{at_level}"></path>']
    for line in lines:
        points = list(map("{},{}".format, _places(line.x, x0, x_scale), _places(line.y, y1, -y_scale)))
        pieces = [points[first : first + PIECE + 1] for first in range(0, max(1, len(points) - 1), PIECE)]
        drawn.append(f'<g fill="none" stroke="{line.colour}" stroke-width="{line.width}">')
        drawn += [f'<polyline points="{" ".join(piece)}"></polyline>' for piece in pieces]
        drawn.append("</g>")
    names = [(line.name, line.colour) for line in lines if line.name]
    labels = [
        f'<span class="y" style="top:{100 - 100 * (one - y0) / (y1 - y0):.1f}%">{html.escape(y_text(one))}</span>'
        for one in y_ticks
    ]
    labels += [f'<span class="x" style="left:{100 * (one - x0) / (x1 - x0):.1f}%">{one:,.0f}</span>' for one in x_ticks]
    ranges = f'data-x0="{x0:.10g}" data-x1="{x1:.10g}" data-y0="{y0:.10g}" data-y1="{y1:.10g}"'
    return (
        f"<p>{html.escape(title)}{_legend(names)}</p>"
        f'<div class="plot" {ranges} data-unit="{html.escape(unit)}">'
        f'<svg viewBox="0 0 {GRID} {GRID}" preserveAspectRatio="none" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(drawn)}</svg>{''.join(labels)}</div>"
    )


def bars_html(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    unit: str,
    predicted: float | None = None,
) -> str:
    """One bar a row, of its parts side by side; ``predicted`` is a dashed line."""
    whole = max([sum(parts.values()) for _, parts in rows] + [predicted or 0.0])
    end = 1.05 * whole or 1.0
    found = []
    for name, parts in rows:
        pieces = "".join(
            f'<i style="width:{100 * value / end:.1f}%;background:{colours[part]}" '
            f'title="{part} {value:.2f} {unit}"></i>'
            for part, value in parts.items()
        )
        total = f"{sum(parts.values()):.2f} {unit}"
        found.append(f'<div class="bar" title="{html.escape(name)}: {total}"><b>{html.escape(name)}</b>{pieces}</div>')
    labels = "".join(
        f'<span class="x" style="top:0;left:{100 * one / end:.1f}%">{one:g}</span>' for one in ticks(0.0, end)
    )
    line = f'<div class="predicted" style="left:{100 * predicted / end:.1f}%"></div>' if predicted else ""
    return (
        f"<p>{html.escape(title)}{_legend(list(colours.items()))}</p>"
        f'<div class="bars">{"".join(found)}<div class="axis">{labels}</div>{line}</div>'
    )


def _legend(names: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in names)


def _places(values: Sequence[float], origin: float, scale: float) -> list[int]:
    """Coordinates of values."""
    found: list[int] = np.rint(scale * (np.asarray(values, float) - origin)).astype(int).tolist()
    return found


def _end(first: float, last: float) -> float:
    """Where a chart of steps ends: at ``last`` or up to a tenth later, and for a while at the same step."""
    return first + HEADROOM ** math.ceil(math.log(max(1.0, last - first), HEADROOM) - 1e-9)


def _rounded(low: float, high: float) -> tuple[float, float]:
    """The range between round numbers: it stays while new values are in it."""
    if not high > low:
        margin = abs(low) / 2 or 0.5
        low, high = low - margin, high + margin
    step = _step(high - low)
    return step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
