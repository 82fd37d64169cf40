"""A page is self-contained, escapes its texts, and has the values of every series of its charts."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'hoop[dashboard]'")

from page_charts import assert_offline, charts_in, texts_of

from hoop.report.chart import Bars, Chart, ChartLine, Lines, Panel, Timeline, TimeSplit
from hoop.report.html_page import html_page
from hoop.report.page import Block, Facts, Page, Section, prose
from hoop.report.page_files import write_page
from hoop.report.spans import Span
from hoop.report.tables import Column, Table

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>$$x$$"
CHART = Chart("loss", "Loss", [Lines("y", [ChartLine("a", [1, 2], [2, 1])])], "step", subtitle="It falls.")
TABLE = Table([Column("a"), Column("b", "ms")], [["x<y", 1.5]], "T")
PAGE = Page(
    "Title <b>",
    [
        Section("One & two", ["Prose with `code`.", TABLE, Facts({"name <i>": "value"})]),
        Section("Three", [CHART, "- a\n- **b**"]),
    ],
    "The lead.",
    {"command": "hoop reproduce <name>"},
    ["a note with [no link](https://a.b)"],
)


class Elements(HTMLParser):
    """Checks that tags are balanced, and collects tags and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(*panels: Lines | Bars | TimeSplit | Timeline, **options: object) -> str:
    return html_page(Page("p", [Section("s", [Chart("c", "t", panels, **options)])]))  # type: ignore[arg-type]


def test_the_page_is_complete_and_self_contained() -> None:
    page = html_page(PAGE)
    assert_offline(page)
    parsed = Elements(page)
    for tag in ("h1", "h2", "table", "figcaption", "dl", "ul", "strong", "code"):
        assert tag in parsed.tags
    for tag in ("link", "img", "iframe", "object", "a"):
        assert tag not in parsed.tags
    for text in ("Title <b>", "One & two", "x<y", "hoop reproduce <name>", "b (ms)", "name <i>", "It falls."):
        assert text in parsed.text
    assert "[no link](https://a.b)" in parsed.text, "notes are no Markdown"
    assert 'data-save-svg="loss"' in page
    assert "data-toggle-theme" in page


def test_every_line_is_in_the_page_with_its_values() -> None:
    first = [ChartLine("ring", [2, 4], [1.5, 2.5]), ChartLine("tree", [2, 4], [3.5, math.nan], dashed=True)]
    page = shown(
        Lines("time (ms)", first, "log", {"paper: 83 ms": 83.0}),
        Lines("speed-up", [ChartLine("tree", [2, 4], [1, 2])]),
        x_label="devices",
        x_kind="log",
    )
    times, speed = charts_in(page)
    assert times.legend == ["ring", "tree", "paper: 83 ms"]
    assert times.columns("ring") == {"x": [2.0, 4.0], "y": [1.5, 2.5]}
    assert times.columns("tree")["y"][0] == 3.5
    assert math.isnan(times.columns("tree")["y"][1])
    assert times.columns("paper: 83 ms") == {"x": [2.0, 4.0], "y": [83.0, 83.0]}
    assert speed.columns("tree") == {"x": [2.0, 4.0], "y": [1.0, 2.0]}
    assert (times.labels, speed.labels) == ((None, "time (ms)"), ("devices", "speed-up")), "one label below both"
    assert times.model.x_range.id == speed.model.x_range.id, "they zoom together"
    colour = [
        chart.model.legend[0].items[place].renderers[0].glyph.line_color for chart, place in ((times, 1), (speed, 0))
    ]
    assert colour[0] == colour[1], "a name has one colour in all panels"
    assert all(chart.model.legend[0].click_policy == "hide" for chart in (times, speed))
    with pytest.raises(KeyError, match="naive"):
        times.columns("naive")


def test_every_bar_is_in_the_page_with_its_value() -> None:
    (chart,) = charts_in(shown(Bars("s", ["a", "b"], {"x": [10, -5], "y": [math.nan, 2.5]}, rules={"paper": 7.0})))
    assert chart.legend == ["x", "y", "paper"]
    assert chart.columns("x") == {"group": ["a", "b"], "value": [10.0, -5.0], "text": ["10", "-5"]}
    assert chart.columns("y") == {"group": ["b"], "value": [2.5], "text": ["2.5"]}
    assert chart.columns("paper") == {"x": [7.0]}
    assert chart.model.x_range.start < -5 < 10 < chart.model.x_range.end
    (logarithmic,) = charts_in(shown(Bars("s", ["a", "a"], {"x": [0.001, 0]}, "log")))
    assert logarithmic.all_columns() == [{"group": ["1: a"], "value": [0.001], "text": ["0.001"]}]


@pytest.mark.parametrize("devices", [3, 64])
def test_every_device_is_in_the_page(devices: int) -> None:
    names = [f"device {number}" for number in range(devices)]
    rows = [{"device": name, "compute": 60.0 + index, "idle": 40.0 - index / 2} for index, name in enumerate(names)]
    spans = [Span(name, "0F1", "forward", 1000.0, 500.0) for name in names]
    split, line = charts_in(shown(TimeSplit("share (%)", rows, ("compute", "idle")), Timeline(spans)))
    assert split.legend == ["compute", "idle"]
    assert split.columns("idle") == {
        "device": names,
        "compute": [row["compute"] for row in rows],
        "idle": [row["idle"] for row in rows],
    }
    assert line.columns("forward")["device"] == names
    assert line.columns("forward")["duration"] == [0.5] * devices
    assert line.columns("forward")["name"] == ["0F1"] * devices


def test_hostile_texts_are_text_everywhere() -> None:
    panels: list[Panel] = [
        Lines(HOSTILE, [ChartLine(HOSTILE, [1, 2], [1, 2])], rules={HOSTILE: 1.0}),
        Bars(HOSTILE, [HOSTILE], {HOSTILE: [1.0], "b": [2.0]}),
        TimeSplit(HOSTILE, [{"device": HOSTILE, "idle": 1.0}], ("idle",)),
        Timeline([Span(HOSTILE, HOSTILE, "forward", 0.0, 1.0)]),
    ]
    chart = Chart("c", HOSTILE, panels, x_label=HOSTILE, subtitle=HOSTILE)
    blocks: list[Block] = [HOSTILE, Table([Column(HOSTILE)], [[HOSTILE]], HOSTILE), Facts({HOSTILE: HOSTILE}), chart]
    page = html_page(Page(HOSTILE, [Section(HOSTILE, blocks)], HOSTILE, {HOSTILE: HOSTILE}, [HOSTILE]))
    assert_offline(page)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert texts_of(page).count(HOSTILE) >= 14
    lines, bars, split, line = charts_in(page)
    inert = HOSTILE.replace("$$", "$\u200b$")
    assert lines.legend == [inert, inert], "it is the text, and no formula"
    assert bars.columns(inert)["group"] == [inert]
    assert split.columns("idle")["device"] == line.columns("forward")["device"] == [inert]


def test_charts_without_values() -> None:
    page = shown(
        Lines("y", []),
        Lines("y", [ChartLine("a", [1], [-1])], "log"),
        Bars("y", [], {}),
        Bars("y", ["a"], {"b": [math.nan]}),
        TimeSplit("y", [], ("idle",)),
        Timeline([]),
    )
    assert len(charts_in(page)) == 6


def test_prose() -> None:
    assert prose("a\nb\n\n- c\n- **d `e`**") == (
        "<p>a\nb</p>\n<ul><li>c</li><li><strong>d <code>e</code></strong></li></ul>"
    )
    assert prose("`<b>` <b> **&**") == "<p><code>&lt;b&gt;</code> &lt;b&gt; <strong>&amp;</strong></p>"
    assert prose("[x](https://a.b/?c&d)") == '<p><a href="https://a.b/?c&amp;d">x</a></p>'
    assert prose("[x](docs/papers.md)") == '<p><a href="docs/papers.md">x</a></p>'
    for bad in ("[x](javascript:alert(1))", "[x](data:text/html,hi)", '[x](" onclick=")'):
        assert "<a" not in prose(bad)
    assert prose("") == "<p></p>"


def test_markdown_and_files(tmp_path: Path) -> None:
    written = write_page(PAGE, tmp_path / "out", "mnist")
    names = ["charts.json", "mnist-1.csv", "mnist.html", "mnist.json", "mnist.md"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert sorted(path.name for path in written) == names
    markdown = (tmp_path / "out" / "mnist.md").read_text()
    assert markdown.startswith("# Title <b>\n\nThe lead.\n\n- command: `hoop reproduce <name>`\n\n## One & two\n")
    assert "| x&lt;y |   1.50 |" in markdown
    assert "Chart in [mnist.html](mnist.html): Loss; It falls." in markdown
    assert json.loads((tmp_path / "out" / "mnist.json").read_text())["tables"][0]["rows"] == [{"a": "x<y", "b": 1.5}]
    (chart,) = json.loads((tmp_path / "out" / "charts.json").read_text())
    assert chart["panels"][0]["lines"] == [{"name": "a", "x": [1.0, 2.0], "y": [2.0, 1.0]}]


WITHOUT_BOKEH = """
import importlib.util as util, sys

find = util.find_spec
util.find_spec = lambda name, *rest: None if name == "bokeh" else find(name, *rest)
sys.modules["bokeh"] = sys.modules["jinja2"] = None
from hoop.report.chart import Chart, ChartLine, Lines
from pathlib import Path
from hoop.report.page import Page, Section
from hoop.report.page_files import can_draw, write_page
assert not can_draw()
chart = Chart("loss", "Loss", [Lines("y", [ChartLine("a", [1, 2], [2, 1])])])
print([path.name for path in write_page(Page("t", [Section("s", [chart])]), Path(sys.argv[1]))])
"""


def test_without_bokeh_everything_but_the_page_is_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_BOKEH, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['report.json', 'charts.json', 'report.md']"
    assert re.search('"y":.*2.0', (tmp_path / "charts.json").read_text())
