"""docs/training.md lists every setting, and no other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.settings import Settings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "training.md"


def test_the_table_lists_every_setting() -> None:
    table = PAGE.read_text("utf-8").partition("## Settings")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    settings = {one.name for kind in (Settings, OptimizerSettings) for one in dataclasses.fields(kind)}
    assert named == settings - {"job", "name"}
