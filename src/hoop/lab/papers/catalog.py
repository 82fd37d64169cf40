"""The studies by name, for ``hoop reproduce``, and the text of docs/papers.md.

``summary`` writes that page: the claims of every study from the stored results, by machine.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoop.errors import NotFound
from hoop.lab.papers.experiment import CLAIM_COLUMNS, Experiment, Findings, stored_claims
from hoop.report.tables import Column, Table


@dataclass(frozen=True)
class Study:
    """A paper and its question. The module of this name has a ``run`` that repeats its experiments."""

    name: str
    paper: str
    question: str

    def run(self, experiment: Experiment) -> Findings:
        module = importlib.import_module(f"hoop.lab.papers.{self.name.replace('-', '_')}")
        run: Callable[[Experiment], Findings] = module.run
        return run(experiment)


STUDIES = {
    study.name: study
    for study in (
        Study(
            "mnist-pipeline",
            "H. Zheng: Distributed Machine Learning Pipeline for MNIST. Yale, CS526, 2024",
            "How well and how fast does an MLP learn MNIST over a ring, and what is the ring worth?",
        ),
        Study(
            "dsml",
            "A. Tibrewal, J. Baehring, M. Tu: Distributed Machine Learning. Yale, CPSC 426",
            "Is a chunked ring better, when is a device dead, and does training survive that?",
        ),
        Study(
            "ringtmp",
            "C. Hopkins: Distributed Machine Learning Systems (RingTMP). Swansea University, 2020",
            "Is a ring of model parts better than a parameter server? It set seven aims and reports no result.",
        ),
        Study(
            "parallel-mnist",
            "B. França Sobreira, C. Guedes Carneiro: Distributed Neural Network Training. Unicamp, 2024",
            "How does softmax regression speed up with cores, nodes and larger images?",
        ),
        Study(
            "hybrid",
            "M. M. H. Riyadh, K. M. S. Anjar, M. F. Mahde: Distributed Machine Learning Utilizing Multi-node "
            "Hybrid Approach. BRAC University",
            "Does a mesh of replicas and stages train MobileNetV2 on CIFAR-10 five times as fast on four nodes?",
        ),
    )
}


def study_named(name: str) -> Study:
    if name not in STUDIES:
        raise NotFound(f"study: {name!r} is none; there are {', '.join(STUDIES)}, or all")
    return STUDIES[name]


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
the same as `report.md`, every table as `report-N.csv` and all of them in `report.json`, the values of every chart in
`charts.json`. The page needs Bokeh (`pip install 'hoop[dashboard]'`); a button beside each chart saves it as SVG.

- **measured**: real devices, real processes, real kills, on the machine that is named. **simulated**: the same plans in
  virtual time, with costs that were measured.
- **holds**, **in part**, **does not hold**: of the claim, here. **not shown**: this run could not decide it, and says
  why.
- A machine of two cores shows correct results, bytes sent, memory used and recovery; it cannot show how four
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
    table = Table.of(stored_claims(report), [Column(name) for name in CLAIM_COLUMNS])
    return f"`{facts['command']}`, {facts['date']}, {facts['took']}: {facts['machine']}\n\n{table.markdown()}"
