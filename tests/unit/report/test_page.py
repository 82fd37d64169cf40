"""A report page is self-contained and escapes its text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hoop.errors import InvalidArgument
from hoop.report.chart import Chart, ChartLine, Lines
from hoop.report.page import Page, Picture, Section, prose
from hoop.report.tables import Column, Table

PICTURE = Picture("loss", Chart("loss", [Lines("y", [ChartLine("a", [1, 2], [2, 1])])]).svg(), "It **falls**.")
TABLE = Table([Column("a"), Column("b", "ms")], [["x<y", 1.5]], "T")
PAGE = Page(
    "Title <script>",
    [Section("One & two", ["Prose with `code`.", TABLE]), Section("Three", [PICTURE, "- a\n- **b**"])],
    "The lead.",
    {"command": "hoop reproduce <name>"},
)


class Elements(HTMLParser):
    """Checks that tags are balanced, and collects tags, link targets and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_complete_and_self_contained() -> None:
    page = PAGE.html()
    parsed = Elements(page)
    for tag in ("h1", "h2", "table", "svg", "figcaption", "dl", "ul", "strong", "code"):
        assert tag in parsed.tags
    for tag in ("script", "link", "img", "iframe", "object"):
        assert tag not in parsed.tags
    assert parsed.targets == []
    assert re.findall(r"url\(|@import", page) == []
    assert "default-src 'none'" in page
    for text in ("Title <script>", "One & two", "x<y", "hoop reproduce <name>", "b (ms)"):
        assert text in parsed.text


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
    written = PAGE.write(tmp_path / "out", "mnist")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in written)
    assert {path.name for path in written} == {
        "mnist.html",
        "mnist.md",
        "mnist.json",
        "mnist-1.csv",
        "loss.svg",
    }
    markdown = (tmp_path / "out" / "mnist.md").read_text()
    assert markdown.startswith("# Title <script>\n\nThe lead.\n\n- command: `hoop reproduce <name>`\n\n## One & two\n")
    assert "| x&lt;y |   1.50 |" in markdown
    (target,) = re.findall(r"!\[It \*\*falls\*\*\.\]\((.+)\)", markdown)
    assert (tmp_path / "out" / target).read_text() == PICTURE.svg
    assert json.loads((tmp_path / "out" / "mnist.json").read_text())["tables"][0]["rows"] == [{"a": "x<y", "b": 1.5}]


def test_invalid_pictures_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match=r"picture name: '\.\./x'"):
        Picture("../x", PICTURE.svg)
    with pytest.raises(InvalidArgument, match="picture a: not SVG"):
        Picture("a", "<html>")
