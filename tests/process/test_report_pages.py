"""Pages of charts in a real browser: no error, zoom, hover, legends that hide series, themes, SVG, hostile names."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'hoop[dashboard]'")

from hoop.report.chart import Bars, Chart, ChartLine, Lines, Timeline
from hoop.report.html_page import html_page
from hoop.report.page import Page, Section
from hoop.report.spans import Span
from hoop.report.tables import Column, Table
from hoop.runs.simulation_report import simulation_page, table_of
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import shipped_costs
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse

WITHIN_MS = 300_000.0
HOSTILE = "<img src=x onerror=document.title='owned'>$$x$$"
FINISHED = "() => window.Bokeh && Bokeh.index.roots.length && Bokeh.index.roots.every((one) => one.has_finished())"
CENTRE_OF_THE_FIRST_BAR = """(name) => {
  const view = Bokeh.index.roots.find((one) => one.model.name === name);
  const [legend] = [...view.renderer_views.values()].filter((one) => one.model.type === "Legend");
  const item = legend.model.items[0];
  const source = item.renderers[0].data_source.data;
  const kind = item.label.value;
  const index = source.kind ? [...source.kind].indexOf(kind) : 0;
  const canvas = view.canvas_view.el.getBoundingClientRect();
  const {x_scale, y_scale} = view.frame;
  const middle = source.start ? (source.start[index] + source.end[index]) / 2 : source[kind][index] / 2;
  return {
    x: canvas.left + x_scale.compute(middle),
    y: canvas.top + y_scale.compute(source.device[index]),
    legend_x: canvas.left + legend.bbox.left + 16,
    legend_y: canvas.top + legend.bbox.top + 13,
  };
}"""
FIRST_SERIES_VISIBLE = """(name) => {
  const view = Bokeh.index.roots.find((one) => one.model.name === name);
  return view.model.above.concat(view.model.center).find((one) => one.type === "Legend").items[0].renderers[0].visible;
}"""


def simulated_page(devices: int) -> Page:
    """The page of ``hoop simulate`` for two strategies, and a section with charts that have hostile names."""
    costs, cluster = shipped_costs("mnist"), Cluster.even(devices, devices)
    found = [simulate(parse(one), costs, cluster, num_microbatches=devices, trace=True) for one in ("data", "ps:bsp")]
    page = simulation_page(found, table_of(found, "title"), "mnist", {"cluster": cluster.describe()})
    lines = Lines("ms", [ChartLine(HOSTILE, [1, 10, 100], [1, 20, 3])], "log", {HOSTILE: 5.0})
    bars = Bars(HOSTILE, [HOSTILE, "b"], {HOSTILE: [1.0, 2.0], "y": [3.0, 4.0]})
    spans = Timeline([Span(HOSTILE, HOSTILE, "forward", 0.0, 900.0)])
    chart = Chart("hostile", HOSTILE, [lines, bars, spans], x_label=HOSTILE, x_kind="log", subtitle=HOSTILE)
    table = Table([Column(HOSTILE)], [[HOSTILE]])
    return Page(page.title, [*page.sections, Section(HOSTILE, [chart, table])], facts={HOSTILE: HOSTILE})


@pytest.mark.parametrize("devices", [3, 64])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_works_in_a_browser(browser: Any, tmp_path: Path, width: int, devices: int) -> None:
    file = tmp_path / "report.html"
    file.write_text(html_page(simulated_page(devices)))
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light", accept_downloads=True)
    page.set_default_timeout(WITHIN_MS)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda one: None if one.url.startswith(("file:", "data:", "blob:")) else problems.append(one.url)
    )
    page.goto(file.as_uri())
    page.wait_for_function(FINISHED)

    assert page.evaluate("document.documentElement.scrollWidth") <= width, "no scrolling to the side"
    assert page.locator(".bk-Figure").count() == page.locator("[data-root-id]").count() == 9

    # chart3: the timeline of the first strategy. Hover tells what a bar is; a click on the legend hides the series.
    # A figure of 64 rows is higher than the window: its top must be visible.
    page.locator(".bk-Figure").nth(3).evaluate("(one) => one.scrollIntoView({block: 'start'})")
    places = page.evaluate(CENTRE_OF_THE_FIRST_BAR, "chart3")
    page.mouse.move(places["x"], places["y"])
    page.locator(".bk-Tooltip", has_text="device 0").first.wait_for()
    assert page.evaluate(FIRST_SERIES_VISIBLE, "chart3")
    page.mouse.click(places["legend_x"], places["legend_y"])
    assert not page.evaluate(FIRST_SERIES_VISIBLE, "chart3")

    before = page.evaluate("Bokeh.index.roots[0].model.background_fill_color")
    page.get_by_role("button", name="Dark").press("Enter")
    page.locator("html[data-theme=dark]").wait_for()
    assert page.evaluate("Bokeh.index.roots[0].model.background_fill_color") != before
    if folder := os.environ.get("HOOP_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"page-{devices}-{width}.png", full_page=True)

    assert page.title() == "mnist: simulated"
    assert page.locator("img[src=x]").count() == 0
    assert page.get_by_text(HOSTILE).count() >= 4
    assert problems == []
    page.close()


def test_charts_are_saved_as_svg(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(html_page(simulated_page(3)))
    page = browser.new_page(viewport={"width": 1000, "height": 900}, accept_downloads=True)
    page.set_default_timeout(WITHIN_MS)
    page.goto(file.as_uri())
    page.wait_for_function(FINISHED)
    saved: list[Any] = []
    page.on("download", lambda download: saved.append(download))
    page.locator("[data-save-svg=hostile]").click()
    while len(saved) < 3:
        page.wait_for_event("download")
    assert sorted(one.suggested_filename for one in saved) == ["hostile-2.svg", "hostile-3.svg", "hostile.svg"]
    for one in saved:
        one.save_as(tmp_path / one.suggested_filename)
        root = ET.parse(tmp_path / one.suggested_filename).getroot()
        assert not [element.tag for element in root.iter() if element.tag.endswith(("script", "foreignObject"))]
        texts = ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]
        assert any("<img src=x" in text for text in texts), "a hostile name is text"
        assert [element for element in root.iter() if element.tag.endswith("path")], "shapes are vectors"
    page.close()
