"""The files of a ``Page``: HTML if Bokeh is installed; Markdown, JSON and CSV everywhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hoop.files import write_text
from hoop.report import strict_json
from hoop.report.chart import Chart
from hoop.report.page import Page
from hoop.report.tables import Table

NEEDS_BOKEH = "no page was written: it needs Bokeh, which is not installed: pip install 'hoop[dashboard]'"
"""Text that a command prints once, beside its tables, where Bokeh is not installed."""


def can_draw() -> bool:
    """Whether Bokeh is installed, without importing it."""
    return importlib.util.find_spec("bokeh") is not None


def write_html(page: Page, path: Path) -> None:
    """Writes the page as one HTML file, atomically; needs Bokeh."""
    from hoop.report.html_page import html_page  # Bokeh takes a second to import

    write_text(path, html_page(page))


def write_page(page: Page, folder: Path, name: str = "report") -> list[Path]:
    """Writes ``name.json`` with all tables, a ``name-N.csv`` for each, ``charts.json`` with the values of all charts,
    ``name.md``, and if Bokeh is installed the page itself, ``name.html``. Returns their paths.
    """
    files = {f"{name}.json": strict_json.dumps(page.plain(), indent=2) + "\n"}
    files |= {f"{name}-{index}.csv": table.csv() for index, table in enumerate(page.all(Table), start=1)}
    if charts := page.all(Chart):
        files["charts.json"] = strict_json.dumps([chart.plain() for chart in charts]) + "\n"
    files[f"{name}.md"] = page.markdown(f"{name}.html")
    for file, text in files.items():
        write_text(folder / file, text)
    found = [folder / file for file in files]
    if can_draw():
        found.append(folder / f"{name}.html")
        write_html(page, found[-1])
    return found
