"""docs/papers.md, from the stored results: every claim of every study, on every machine it was run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hoop.lab.papers.catalog import STUDIES
from hoop.lab.papers.findings import stored_claims
from hoop.report.tables import Column, Table

_INTRO = """# The papers

Five studies of distributed training, each run again with Hoop. `hoop reproduce NAME` makes the whole report, with every
table and plot; this page is its claims.

```sh
hoop reproduce --list
hoop reproduce mnist-pipeline --quick
hoop reproduce hybrid --accelerator cuda
hoop reproduce all
```

A report is a folder, `runs/papers/NAME` unless `--out` says otherwise: `report.html`, one page that needs nothing else,
the same as `report.md`, every table as `report-N.csv` and all of them in `report.json`, every plot as SVG.

- **measured**: real devices, real processes, real kills, on the machine that is named. **simulated**: the same plans in
  virtual time, with costs that were measured.
- **holds**, **in part**, **does not hold**: of the claim, here. **not shown**: this run could not decide it, and says
  why.
- A machine of two cores shows what is right, what is sent, what is held and what survives; it cannot show how four
  machines share work. Where that matters, the simulator's figure stands beside, or the verdict is *not shown*.

This page is written by `scripts/papers` from the results in [papers](papers), each a file with its command, date and
machine.
"""

_BESIDE = {
    "mnist-pipeline": "The MLP's speed-up on 16 real cores, 1 to 16 devices: "
    "[training](../benchmarks/training/README.md).",
    "hybrid": "More about the runs on the GPU: [hybrid-gpu](../benchmarks/papers/hybrid-gpu/README.md).",
}
"""What was measured on machines that a study was not run on."""


def summary(folder: Path) -> str:
    """The page, from files ``STUDY@MACHINE.json``."""
    parts = [_INTRO]
    for study in STUDIES.values():
        parts.append(f"## {study.name}\n\n{study.paper}.\n\n{study.question}\n")
        for path in sorted(folder.glob(f"{study.name}@*.json")):
            parts.append(_result(json.loads(path.read_text("utf-8"))))
        if study.name in _BESIDE:
            parts.append(f"{_BESIDE[study.name]}\n")
    return "\n".join(parts)


def _result(report: dict[str, Any]) -> str:
    facts = report["facts"]
    names = ("claim", "the paper", "ours", "how", "verdict", "why")
    table = Table.of(stored_claims(report), [Column(name) for name in names])
    return f"`{facts['command']}`, {facts['date']}, {facts['took']}: {facts['machine']}\n\n{table.markdown()}"
