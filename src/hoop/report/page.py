"""A report with headings, text, tables and pictures, as one self-contained HTML page and as Markdown.

The page contains its style and its pictures, and its content security policy forbids the browser to load anything else.
Text is a subset of Markdown: paragraphs, ``- `` lists, **bold**, `code`, [links](https://…).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoop.errors import InvalidArgument
from hoop.files import write_text
from hoop.report import strict_json
from hoop.report.palette import DARK, FONT, LIGHT, Theme
from hoop.report.svg import clean
from hoop.report.tables import Table

_INLINE = re.compile(r"`([^`]+)`|\*\*(.+?)\*\*|\[([^\]]+)\]\((https?://[^)\s]+|[\w./#-][^):\s]*)\)")
"""A link target is an http(s) address or a relative path. Other schemes are excluded: ``javascript:`` runs code."""


@dataclass(frozen=True)
class Picture:
    """An SVG picture, with the name of its file and a caption."""

    name: str
    svg: str
    caption: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+", self.name):
            raise InvalidArgument(f"picture name: {self.name!r} is to be a file's; use letters, digits, - and _")
        if not self.svg.startswith("<svg"):
            raise InvalidArgument(f"picture {self.name}: not SVG, it begins {self.svg[:20]!r}")


@dataclass(frozen=True)
class Section:
    """A heading and its blocks in order."""

    heading: str
    blocks: Sequence[str | Table | Picture] = ()


@dataclass(frozen=True)
class Page:
    """A whole report. ``facts``: its command, date and machine."""

    title: str
    sections: Sequence[Section]
    lead: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    def html(self) -> str:
        body = [f"<h1>{clean(self.title)}</h1>"]
        if self.lead:
            body.append(f'<div class="lead">{prose(self.lead)}</div>')
        if self.facts:
            rows = "".join(f"<dt>{clean(key)}</dt><dd>{clean(value)}</dd>" for key, value in self.facts.items())
            body.append(f"<dl>{rows}</dl>")
        for section in self.sections:
            body.append(f"<section>\n<h2>{clean(section.heading)}</h2>")
            body += [_block(block) for block in section.blocks]
            body.append("</section>")
        return _FRAME.format(title=clean(self.title), style=_STYLE, body="\n".join(body))

    def markdown(self, pictures: str = ".") -> str:
        """The report as Markdown that links to pictures in the folder ``pictures``."""
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
                    case Picture():
                        parts.append(f"![{block.caption or block.name}]({pictures}/{block.name}.svg)")
                    case _:
                        parts.append(block.strip())
        return "\n\n".join(parts) + "\n"

    def plain(self) -> dict[str, Any]:
        """Title, facts and every table, as JSON values."""
        blocks = [block for section in self.sections for block in section.blocks]
        tables = [block.plain() for block in blocks if isinstance(block, Table)]
        return {"title": self.title, "facts": self.facts, "tables": tables}

    def write(self, folder: Path | str, name: str = "report") -> list[Path]:
        """Write ``name.html``, ``.md``, ``.json`` with all tables, a ``.csv`` per table and an ``.svg`` per picture."""
        blocks = [block for section in self.sections for block in section.blocks]
        tables = [block for block in blocks if isinstance(block, Table)]
        files = {f"{name}.json": strict_json.dumps(self.plain(), indent=2) + "\n"}
        files |= {f"{name}-{i}.csv": table.csv() for i, table in enumerate(tables, start=1)}
        files |= {f"{block.name}.svg": block.svg for block in blocks if isinstance(block, Picture)}
        files |= {f"{name}.md": self.markdown(), f"{name}.html": self.html()}
        for file, text in files.items():
            write_text(Path(folder) / file, text)
        return [Path(folder) / file for file in files]


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


def _block(block: str | Table | Picture) -> str:
    match block:
        case Table():
            return block.html()
        case Picture():
            caption = f"<figcaption>{_inline(block.caption)}</figcaption>" if block.caption else ""
            return f"<figure>{block.svg}{caption}</figure>"
    return prose(block)


def page_colours(theme: Theme) -> str:
    """The CSS variables of a page in this theme."""
    return (
        f"--paper:{theme.paper};--ink:{theme.ink};--soft:{theme.soft};--line:{theme.grid};"
        f"--shade:{theme.idle};--link:{theme.colours[0]}"
    )


_STYLE = f"""
:root{{color-scheme:light dark;{page_colours(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{page_colours(DARK)}}}}}
body{{margin:0 auto;max-width:60rem;padding:2.5rem 1.25rem 4rem;background:var(--paper);color:var(--ink);
font:16px/1.55 {FONT}}}
h1{{font-size:1.9rem;line-height:1.2;margin:0 0 .6rem}}
h2{{font-size:1.3rem;margin:2.6rem 0 .6rem;padding-top:1.2rem;border-top:1px solid var(--line)}}
.lead{{font-size:1.1rem;color:var(--soft)}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;font-size:.85rem;margin:1rem 0}}
dt{{color:var(--soft)}}dd{{margin:0;overflow-wrap:anywhere}}
a{{color:var(--link)}}
code{{background:var(--shade);border-radius:3px;padding:.1em .3em;font-size:.88em}}
.wide{{overflow-x:auto;margin:1.2rem 0}}
table{{border-collapse:collapse;font-size:.9rem;min-width:50%}}
caption{{text-align:left;font-weight:600;padding-bottom:.4rem}}
th{{text-align:left;color:var(--soft);font-weight:600;border-bottom:2px solid var(--line)}}
th,td{{padding:.35rem .9rem .35rem 0;vertical-align:top}}
td{{border-bottom:1px solid var(--line)}}
.number{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
figure{{margin:1.4rem 0}}
figure svg{{max-width:100%;height:auto}}
figcaption{{color:var(--soft);font-size:.88rem;margin-top:.3rem}}
@media print{{body{{max-width:none;padding:0}}figure,tr{{break-inside:avoid}}h2{{break-after:avoid}}}}
"""

_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
