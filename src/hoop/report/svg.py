"""SVG elements, number formatting, and an estimate of text widths."""

from __future__ import annotations

import re
from html import escape

from hoop.report.palette import FONT, STYLE

SMALL, NORMAL, LARGE = 11, 12, 16
"""Text sizes in pixels."""

_NARROW = set("ijltfrI.,:;'|!()[] /-")
_WIDE = set("mwMW%@")


def number(value: float) -> str:
    """Format with at most two decimals: a hundredth of a pixel is invisible."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def clean(words: object) -> str:
    """Escape a text for XML and remove the characters that XML forbids."""
    return escape(_FORBIDDEN.sub("", str(words)))


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """An element. ``class_`` is ``class``, ``stroke_width`` is ``stroke-width``; None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{number(value) if isinstance(value, float) else clean(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(
    x: float,
    y: float,
    words: object,
    *,
    class_: str = "soft",
    size: int = SMALL,
    anchor: str | None = None,
    weight: int | None = None,
    turn: float | None = None,
) -> str:
    return tag(
        "text",
        clean(words),
        x=float(x),
        y=float(y),
        class_=class_,
        font_size=size,
        text_anchor=anchor,
        font_weight=weight,
        transform=None if turn is None else f"rotate({turn:g} {number(x)} {number(y)})",
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str, **attributes: object) -> str:
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_, **attributes)


def box(x: float, y: float, width: float, height: float, class_: str, content: str = "", **attributes: object) -> str:
    place = {"x": float(x), "y": float(y), "width": float(width), "height": float(height)}
    return tag("rect", content, **place, class_=class_, **attributes)


def width_of(words: object, size: int = SMALL) -> float:
    """Estimated width of a text in pixels. There is no font to measure, so the estimate is generous."""
    units = sum(0.34 if c in _NARROW else 0.9 if c in _WIDE else 0.62 if c.isupper() else 0.57 for c in str(words))
    return units * size


def shortened(words: str, width: float, size: int = SMALL) -> str:
    """The text, cut to ``width`` with an ellipsis."""
    if width_of(words, size) <= width:
        return words
    while words and width_of(words + "…", size) > width:
        words = words[:-1]
    return words + "…" if words else ""


def document(title: str, width: float, height: float, content: list[str]) -> str:
    """A self-contained SVG document, without external fonts, scripts or styles."""
    return tag(
        "svg",
        f"<title>{clean(title)}</title><style>{STYLE}</style>"
        + box(0, 0, width, height, "paper")
        + "\n".join(content)
        + "\n",
        xmlns="http://www.w3.org/2000/svg",
        class_="hoop",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=float(width),
        height=float(height),
        role="img",
        font_family=FONT,
    )
