"""A ``Page`` as one HTML file: Bokeh's scripts, the charts' data and the style are in it, and it loads nothing.

Its content security policy forbids the browser to load anything. Every text is escaped, but for the Markdown of the
page's own prose.

This module imports Bokeh: import it only where a page is made (``pip install 'hoop[dashboard]'``).
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.plotting import figure
from bokeh.resources import INLINE
from jinja2 import Environment
from markupsafe import Markup

from hoop.report.chart import Chart
from hoop.report.components import PAGE_SCRIPT, draw
from hoop.report.page import Block, Drawn, Facts, Page, prose
from hoop.report.palette import DARK, FONT, LIGHT, page_colours
from hoop.report.tables import Table

_TEMPLATE = "page.html"


def html_page(page: Page) -> str:
    """The page as HTML."""
    figures: list[figure] = []
    sections = [(one.heading, [_block(block, figures) for block in one.blocks]) for one in page.sections]
    variables = {
        "title": page.title,
        "lead": _markup(prose(page.lead)) if page.lead else "",
        "facts": page.facts,
        "notes": list(page.notes),
        "sections": sections,
        "style": _markup(_style()),
        "script": _markup(PAGE_SCRIPT),
    }
    text = resources.files("hoop.report").joinpath(_TEMPLATE).read_text("utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    if not figures:  # Bokeh makes no page without a figure
        return template.render({**variables, "bokeh_js": "", "bokeh_css": "", "plot_script": ""})
    document = Document()
    with document.models.freeze():  # else Bokeh collects all models again for every figure
        for one in figures:
            document.add_root(one)
    return str(file_html(document, INLINE, page.title, template=template, template_variables=variables))


def _markup(html: str) -> Markup:
    """HTML of this package, in which every text from outside is escaped already."""
    return Markup(html)  # noqa: S704


def _block(block: Block, figures: list[figure]) -> dict[str, Any]:
    """What the template shows of a block; figures are added to ``figures`` under their root's name."""
    match block:
        case Table():
            return {"html": _markup(block.html())}
        case Facts():
            return {"facts": {str(name): str(value) for name, value in block.facts.items()}}
        case Chart():
            return _chart(block.name, block.title, block.subtitle, draw(block), figures)
        case Drawn():
            return _chart(block.name, "", block.text, [block.figure], figures)
    return {"html": _markup(prose(block))}


def _chart(name: str, title: str, text: str, drawn: list[figure], figures: list[figure]) -> dict[str, Any]:
    for one in drawn:
        one.name = f"chart{len(figures)}"
        figures.append(one)
    return {"name": name, "title": title, "text": text, "roots": [one.name for one in drawn]}


def _style() -> str:
    light, dark = page_colours(LIGHT), page_colours(DARK)
    return (
        f":root{{color-scheme:light;{light}}}:root[data-theme=dark]{{color-scheme:dark;{dark}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme]){{color-scheme:dark;{dark}}}}}"
        f"body{{font:16px/1.55 {FONT}}}"
    )
