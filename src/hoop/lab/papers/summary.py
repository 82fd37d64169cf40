"""The text of docs/papers.md: the claims of every study from the stored results, by machine."""

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

_OTHER_RESULTS = {
    "mnist-pipeline": "The MLP's speed-up on 16 real cores, 1 to 16 devices: "
    "[training](../benchmarks/training/README.md).",
    "hybrid": "More about the runs on the GPU: [hybrid-gpu](../benchmarks/papers/hybrid-gpu/README.md).",
}
"""Links to results from machines on which the study itself was not run."""


def summary(folder: Path) -> str:
    """The page, from the files ``STUDY@MACHINE.json`` in ``folder``."""
    parts = [_INTRO]
    for study in STUDIES.values():
        parts.append(f"## {study.name}\n\n{study.paper}.\n\n{study.question}\n")
        for path in sorted(folder.glob(f"{study.name}@*.json")):
            parts.append(_result(json.loads(path.read_text("utf-8"))))
        if study.name in _OTHER_RESULTS:
            parts.append(f"{_OTHER_RESULTS[study.name]}\n")
    return "\n".join(parts)


def _result(report: dict[str, Any]) -> str:
    facts = report["facts"]
    names = ("claim", "the paper", "ours", "how", "verdict", "why")
    table = Table.of(stored_claims(report), [Column(name) for name in names])
    return f"`{facts['command']}`, {facts['date']}, {facts['took']}: {facts['machine']}\n\n{table.markdown()}"
