"""Tables with output for a terminal, Markdown and HTML, and as CSV and JSON.

The first three show rounded, aligned numbers with the unit in the heading; CSV and JSON keep every digit.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import rich.table
import rich.text

from hoop.errors import InvalidArgument
from hoop.report import strict_json

MISSING = "–"
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def clean(text: object) -> str:
    """Escape a text for HTML, and remove the control characters that a page cannot have."""
    return escape(_FORBIDDEN.sub("", str(text)))


@dataclass(frozen=True)
class Column:
    """A column. ``digits``: digits after the decimal point; by default about three significant ones."""

    name: str
    unit: str = ""
    digits: int | None = None

    @property
    def heading(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Table:
    """Columns and rows. A value is a text, a number, a bool, or None if it is missing."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(self.columns):
                raise InvalidArgument(
                    f"table {self.title!r}, row {number}: {len(row)} values for {len(self.columns)} columns"
                )

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str = "") -> Table:
        """A table from rows by column name. A missing key becomes None; a key without a column is ignored."""
        return cls(columns, [[row.get(column.name) for column in columns] for row in rows], title)

    def cells(self) -> list[list[str]]:
        """Every value, formatted."""
        formatted = [_format_column([row[i] for row in self.rows], one) for i, one in enumerate(self.columns)]
        return [list(row) for row in zip(*formatted, strict=True)]

    def numeric(self) -> list[bool]:
        """Whether each column holds numbers, which are aligned right."""
        values = ([row[index] for row in self.rows] for index in range(len(self.columns)))
        return [_is_numeric(column) for column in values]

    def rich(self) -> rich.table.Table:
        """The table for a terminal: ``Console().print(table.rich())``."""
        title = rich.text.Text(self.title) if self.title else None
        shown = rich.table.Table(title=title, title_justify="left")
        for column, right in zip(self.columns, self.numeric(), strict=True):
            shown.add_column(rich.text.Text(column.heading), justify="right" if right else "left")
        for row in self.cells():
            shown.add_row(*map(rich.text.Text, row))  # as Text, so that [brackets] are not markup
        return shown

    def markdown(self) -> str:
        """The table as Markdown, padded so that it is aligned as plain text too."""
        if not self.columns:
            return ""
        right = self.numeric()
        lines = [
            [_escape_markdown(one.heading) for one in self.columns],
            *([_escape_markdown(c) for c in row] for row in self.cells()),
        ]
        widths = [max(3, *(len(line[index]) for line in lines)) for index in range(len(right))]
        padded = [
            [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)]
            for line in lines
        ]
        rule = ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right, strict=True)]
        return "".join(f"| {' | '.join(line)} |\n" for line in [padded[0], rule, *padded[1:]])

    def html(self) -> str:
        right = self.numeric()
        caption = f"<caption>{clean(self.title)}</caption>" if self.title else ""
        head = _row("th", [one.heading for one in self.columns], right)
        body = "\n".join(_row("td", row, right) for row in self.cells())
        return f'<div class="wide"><table>{caption}<thead>{head}</thead>\n<tbody>{body}</tbody></table></div>'

    def csv(self) -> str:
        """The table as CSV with every digit; a missing value is empty."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([one.heading for one in self.columns])
        writer.writerows([_plain(value) for value in row] for row in self.rows)
        return out.getvalue()

    def plain(self) -> dict[str, Any]:
        """Columns with their units, and rows by column name."""
        names = [column.name for column in self.columns]
        return {
            "title": self.title,
            "columns": [{"name": column.name, "unit": column.unit} for column in self.columns],
            "rows": [{name: _plain(v) for name, v in zip(names, row, strict=True)} for row in self.rows],
        }

    def json(self) -> str:
        return strict_json.dumps(self.plain(), indent=2) + "\n"


def _plain(value: Any) -> Any:
    """Convert a NumPy number to Python's."""
    return value.item() if hasattr(value, "item") else value


def _is_number(value: Any) -> bool:
    return isinstance(_plain(value), int | float) and not isinstance(_plain(value), bool)


def _is_numeric(values: Sequence[Any]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(map(_is_number, known))


def _format_column(values: Sequence[Any], column: Column) -> list[str]:
    """Format a column's values with the same number of digits after the decimal point."""
    digits = column.digits
    if digits is None and _is_numeric(values):
        sizes = sorted(abs(value) for value in values if value is not None and math.isfinite(value) and value)
        middle = sizes[(len(sizes) - 1) // 2] if sizes else 1
        all_whole = all(isinstance(_plain(value), int) for value in values if value is not None)
        digits = 0 if all_whole else min(max(2 - math.floor(math.log10(middle)), 0), 6)
    return [_format_value(_plain(value), digits) for value in values]


def _format_value(value: Any, digits: int | None) -> str:
    match value:
        case None:
            return MISSING
        case bool():
            return "yes" if value else "no"
        case int() | float() if not math.isfinite(value):
            return str(value)
        case int() | float():
            text = f"{value:,.{digits if digits is not None else 0 if isinstance(value, int) else 3}f}"
            return text.replace(",", " ")
    return str(value)


def _escape_markdown(words: str) -> str:
    """Escape characters that would end a Markdown cell or row."""
    return words.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _row(name: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    sides = (' class="number"' if side else "" for side in right)
    return "<tr>" + "".join(f"<{name}{s}>{clean(c)}</{name}>" for c, s in zip(cells, sides, strict=True)) + "</tr>"
