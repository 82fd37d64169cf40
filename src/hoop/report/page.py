"""A report as data: headings, text, tables and charts, and its Markdown and JSON.

``hoop reproduce``, ``bench``, ``simulate``, ``plan`` and the report of a run make such pages; ``html_page`` makes one
HTML file of them, ``page_files`` writes all files. Text is a subset of Markdown: paragraphs, ``- `` lists, **bold**,
`code`, [links](https://…). Captions, facts and notes are plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hoop.report.chart import Chart
from hoop.report.tables import Table, clean

if TYPE_CHECKING:
    from bokeh.plotting import figure

_Kind = TypeVar("_Kind")
_INLINE = re.compile(r"`([^`]+)`|\*\*(.+?)\*\*|\[([^\]]+)\]\((https?://[^)\s]+|[\w./#-][^):\s]*)\)")
"""A link target is an http(s) address or a relative path. Other schemes are excluded: ``javascript:`` runs code."""


@dataclass(frozen=True)
class Facts:
    """A list of names and values, as plain text."""

    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A figure that is drawn already. ``text``: what it shows, for readers who do not see it; plain text."""

    name: str
    figure: figure
    text: str


Block = str | Table | Chart | Drawn | Facts


@dataclass(frozen=True)
class Section:
    """A heading and its blocks in order."""

    heading: str
    blocks: Sequence[Block] = ()


@dataclass(frozen=True)
class Page:
    """A whole report. ``facts``: its command, date and machine; ``notes``: what a reader must know first."""

    title: str
    sections: Sequence[Section]
    lead: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def markdown(self, page: str = "report.html") -> str:
        """The report as Markdown. A chart is named; it is in the file ``page``."""
        parts = [f"# {self.title}"]
        parts += [self.lead.strip()] if self.lead else []
        parts += ["\n".join(f"- {key}: `{value}`" for key, value in self.facts.items())] if self.facts else []
        for section in self.sections:
            parts.append(f"## {section.heading}")
            for block in section.blocks:
                match block:
                    case Table():
                        parts += [f"**{block.title}**"] if block.title else []
                        parts.append(block.markdown().rstrip())
                    case Chart():
                        about = f"{block.title}; {block.subtitle}" if block.subtitle else block.title
                        parts.append(f"Chart in [{page}]({page}): {about}")
                    case str():
                        parts.append(block.strip())
        return "\n\n".join(parts) + "\n"

    def plain(self) -> dict[str, Any]:
        """Title, facts and every table, as JSON values."""
        return {"title": self.title, "facts": self.facts, "tables": [table.plain() for table in self.all(Table)]}

    def all(self, kind: type[_Kind]) -> list[_Kind]:
        """Every block of this class, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, kind)]


def prose(text: str) -> str:
    """Convert paragraphs and lists to HTML."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = paragraph.split("\n")
        if all(re.match(r"\s*- ", line) for line in lines):
            items = "".join(f"<li>{_inline(line.strip()[2:])}</li>" for line in lines)
            parts.append(f"<ul>{items}</ul>")
        else:
            parts.append(f"<p>{_inline(paragraph)}</p>")
    return "\n".join(parts)


def _inline(text: str) -> str:
    """Convert code, bold and links to HTML; everything else is escaped."""
    out, reached = [], 0
    for match in _INLINE.finditer(text):
        code, bold, words, target = match.groups()
        out.append(clean(text[reached : match.start()]))
        if code:
            out.append(f"<code>{clean(code)}</code>")
        elif bold:
            out.append(f"<strong>{_inline(bold)}</strong>")
        else:
            out.append(f'<a href="{clean(target)}">{clean(words)}</a>')
        reached = match.end()
    return "".join([*out, clean(text[reached:])])
