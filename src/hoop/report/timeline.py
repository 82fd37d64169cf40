"""A timeline of the devices' spans as an SVG picture, one row per device.

    device 1  ▇▇F0▇▇▇▇F1▇▇      ▒▒B0▒▒▒▒B1▒▒ ░   12 % idle
    device 2          ▇▇F0▇▇▒▒B0▒▒▇▇F1▇▇ …

Idle time is the background of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hoop.report.palette import KINDS
from hoop.report.panel import Area
from hoop.report.scale import scale
from hoop.report.spans import COMMUNICATE, COMPUTE, Span, by_track, shares, window
from hoop.report.svg import LARGE, NORMAL, SMALL, box, clean, document, line, shortened, text, width_of

MAX_ROWS = 64
"""With more devices an even selection is shown, and the picture says so."""

_MARGIN = 20.0
_UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "us"))


def kind_of(category: str) -> str | None:
    """The kind that determines the colour of a span; None is idle."""
    if category in COMMUNICATE:
        return "communicate"
    return category if category in COMPUTE else None


@dataclass(frozen=True)
class TimelineChart:
    """A timeline. ``start_us`` and ``end_us``: the window to show; by default all spans."""

    title: str
    spans: Sequence[Span]
    subtitle: str = ""
    start_us: float | None = None
    end_us: float | None = None
    width: float = 960.0

    def svg(self) -> str:
        first, last = window(self.spans)
        first = first if self.start_us is None else self.start_us
        last = last if self.end_us is None else self.end_us
        every = by_track(self.spans)
        rows = _selection(list(every))
        idle = {track: f"{100 * share.idle:.0f} % idle" for track, share in shares(self.spans, first, last).items()}
        factor, unit = next(((f, u) for f, u in _UNITS if last - first >= 2 * f), _UNITS[-1])
        names = min(max((width_of(row, NORMAL) for row in rows), default=0), 200)
        left = _MARGIN + names + 12
        note = f"{len(rows)} of {len(every)} devices shown" if len(rows) < len(every) else ""
        subtitle = "; ".join(filter(None, (self.subtitle, note)))
        top = 34 + (20 if subtitle else 0) + 40
        height = 26.0 if len(rows) <= 16 else 14.0 if len(rows) <= 32 else 9.0
        gap = height * 0.25
        area = Area(left, top, self.width - left - _MARGIN - 62, max(len(rows) * (height + gap), 30))
        axis = scale([[0, (last - first) / factor]], about=8, tight=True)

        parts = [text(_MARGIN, 34, shortened(self.title, self.width - 40, LARGE), class_="ink", size=LARGE, weight=600)]
        if subtitle:
            parts.append(text(_MARGIN, 54, shortened(subtitle, self.width - 40, NORMAL), size=NORMAL))
        parts += _legend(self.spans, _MARGIN, top - 18)
        for share, words in zip(axis.at(axis.ticks), axis.labels(), strict=True):
            x = area.x(float(share))
            parts.append(line(x, area.top, x, area.bottom + 4, "grid"))
            parts.append(text(x, area.bottom + 18, words, anchor="middle"))
        for index, row in enumerate(rows):
            place = Area(area.left, area.top + index * (height + gap), area.width, height)
            parts.append(box(place.left, place.top, place.width, height, "idle", rx=2))
            parts += _bars(every[row], place, first, last)
            size = NORMAL if height > 12 else SMALL - 2
            middle = place.top + height / 2 + size * 0.35
            parts.append(text(left - 10, middle, shortened(row, names, size), class_="ink", size=size, anchor="end"))
            parts.append(text(area.right + 8, middle, idle[row], size=min(size, SMALL)))
        if not rows:
            parts.append(text(area.left + area.width / 2, area.top + 18, "no data", anchor="middle"))
        parts.append(
            text(
                area.left + area.width / 2,
                area.bottom + 36,
                f"time ({unit})",
                class_="ink",
                size=NORMAL,
                anchor="middle",
            )
        )
        return document(self.title, self.width, area.bottom + 54, parts)


def _selection(rows: list[str]) -> list[str]:
    """All rows, or MAX_ROWS evenly spaced ones with the first and the last."""
    if len(rows) <= MAX_ROWS:
        return rows
    return [rows[round(index * (len(rows) - 1) / (MAX_ROWS - 1))] for index in range(MAX_ROWS)]


def _legend(spans: Iterable[Span], x: float, y: float) -> list[str]:
    """The legend: the kinds that occur, in the order of the palette, and idle."""
    there = {kind_of(span.category) for span in spans}
    parts = []
    for kind in [*(kind for kind in KINDS if kind in there), "idle"]:
        parts.append(box(x, y - 9, 11, 11, f"f{KINDS[kind]}" if kind in KINDS else "idle", rx=1.5))
        parts.append(text(x + 17, y, kind, class_="ink"))
        x += 17 + width_of(kind) + 18
    return parts


def _bars(spans: list[Span], row: Area, first: float, last: float) -> list[str]:
    """The bars of a row. Its lanes share the height; the first lane gets twice as much as the others."""
    busy = [span for span in spans if kind_of(span.category) and span.end_us > first and span.start_us < last]
    lanes = sorted({span.lane for span in busy})
    unit = row.height / (len(lanes) + 1)
    parts = []
    for index, lane in enumerate(lanes):
        top = row.top + (index + 1) * unit if index else row.top
        place = Area(row.left, top, row.width, unit if index else 2 * unit)
        own = sorted((span for span in busy if span.lane == lane), key=lambda span: span.start_us)
        for span in _merged(own, 0.6 * (last - first) / row.width):
            parts += _bar(span, place, first, last)
    return parts


def _bar(span: Span, lane: Area, first: float, last: float) -> list[str]:
    """The bar of one span, with its name if that fits, and a tooltip."""
    left = lane.x(max((span.start_us - first) / (last - first), 0.0))
    wide = max(lane.x(min((span.end_us - first) / (last - first), 1.0)) - left, 0.4)
    colour = KINDS[kind_of(span.category) or "compute"]
    hint = f"<title>{clean(f'{span.track}: {span.name}, {span.duration_us:.6g} us')}</title>"
    edge = {"rx": 1.5, "stroke_width": 0.75} if wide > 5 else {"stroke_width": 0}
    parts = [box(left, lane.top, wide, lane.height, f"f{colour} halo", hint, **edge)]
    if lane.height >= 11 and width_of(span.name, SMALL - 1) + 4 < wide:
        middle, y = left + wide / 2, lane.top + lane.height / 2 + 3.5
        parts.append(text(middle, y, span.name, class_="onbar", size=SMALL - 1, anchor="middle"))
    return parts


def _merged(spans: Iterable[Span], least_us: float) -> list[Span]:
    """Join spans that are too narrow to be seen with a neighbour of their kind: the file stays small."""
    kept: list[Span] = []
    for span in spans:
        before = kept[-1] if kept else None
        narrow = span.duration_us < least_us or (before is not None and before.duration_us < least_us)
        alike = before is not None and kind_of(before.category) == kind_of(span.category)
        if before is not None and alike and narrow and span.start_us - before.end_us < least_us:
            end = max(before.end_us, span.end_us)
            kept[-1] = replace(before, name="several", duration_us=end - before.start_us)
        else:
            kept.append(span)
    return kept
