"""One table as cells, Markdown, CSV, JSON, HTML and terminal output."""

from __future__ import annotations

import csv
import io
import json
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console

from hoop.errors import InvalidArgument
from hoop.report.tables import Column, Table

TABLE = Table(
    [Column("strategy"), Column("step", "ms"), Column("bytes"), Column("idle", "%", 1), Column("exact")],
    [
        ["data parallel", 4.2123, 1_437_544, np.float32(3.25), True],
        ["a|b [red]<i>", None, np.int64(9), math.nan, False],
        ["PS, BSP", 12.0, None, -31, None],
    ],
    "Strategies",
)


def test_cells_line_up() -> None:
    assert TABLE.cells() == [
        ["data parallel", "4.21", "1 437 544", "3.2", "yes"],
        ["a|b [red]<i>", "–", "9", "nan", "no"],
        ["PS, BSP", "12.00", "–", "-31.0", "–"],
    ]
    assert TABLE.numeric() == [False, True, True, True, False]
    assert Table([Column("x")], [[0.00123], [0.00456]]).cells() == [["0.00123"], ["0.00456"]]
    assert Table([Column("x")], [[0.0], [12345.6]]).cells() == [["0"], ["12 346"]]


def test_markdown() -> None:
    assert TABLE.markdown() == (
        "| strategy         | step (ms) |     bytes | idle (%) | exact |\n"
        "| ---------------- | --------: | --------: | -------: | ----- |\n"
        "| data parallel    |      4.21 | 1 437 544 |      3.2 | yes   |\n"
        "| a\\|b [red]&lt;i> |         – |         9 |      nan | no    |\n"
        "| PS, BSP          |     12.00 |         – |    -31.0 | –     |\n"
    )
    assert Table([], []).markdown() == ""


def test_csv_and_json_keep_every_digit() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows[0] == ["strategy", "step (ms)", "bytes", "idle (%)", "exact"]
    assert rows[1] == ["data parallel", "4.2123", "1437544", "3.25", "True"]
    assert rows[3] == ["PS, BSP", "12.0", "", "-31", ""]
    plain = json.loads(TABLE.json())
    assert plain["columns"][1] == {"name": "step", "unit": "ms"}
    first = {"strategy": "data parallel", "step": 4.2123, "bytes": 1437544, "idle": 3.25, "exact": True}
    assert plain["rows"][0] == first
    assert plain["rows"][1]["idle"] == "NaN"


def test_html_and_terminal_show_text_unchanged() -> None:
    root = ET.fromstring(TABLE.html())
    cells = [[cell.text for cell in row] for row in root.iter("tr")]
    assert cells[2] == ["a|b [red]<i>", "–", "9", "nan", "no"]
    assert [cell.get("class") for cell in root.findall(".//thead/tr/*")] == [
        None,
        "number",
        "number",
        "number",
        None,
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(TABLE.rich())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in ("Strategies", "step (ms)", "a|b [red]<i>", "1 437 544"):
        assert expected in shown


def test_rows_by_name() -> None:
    table = Table.of([{"a": 1, "c": 3}, {"b": 2}], [Column("b"), Column("a")])
    assert table.rows == [[None, 1], [2, None]]


def test_a_row_of_the_wrong_length_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="table 'T', row 2: 1 values for 2 columns"):
        Table([Column("a"), Column("b")], [[1, 2], [1]], "T")
