"""Where a prediction is wrong: seconds of a rank's step by kind of instruction, simulated beside measured.

    python benchmarks/prediction/terms.py --devices 2,4 --only data,ring
    python benchmarks/prediction/terms.py --save /tmp/runs          keeps what was measured, one file a run
    python benchmarks/prediction/terms.py --from /tmp/runs          simulates those runs again, without training

A run of ``hoop train`` measures its costs before the first step and records every instruction of its first steps. The
simulation of those costs has the same instructions. ``between`` is what a rank does between the instructions of a step
and the next one: messages of replicas, the agreement on stopping, the loop itself; ``wait`` is waiting for a peer in
an instruction. Times are the means of a rank's steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HOOP_NO_REPORT"] = "1"

from predict import CASES, foreign_seconds, numbers

from hoop.engine.settings import Settings
from hoop.job_events import Balanced, Started, Steps
from hoop.plan.instructions import Instruction
from hoop.report.tables import Column, Table
from hoop.report.trace import read_spans
from hoop.runs.job_lookup import load_job, with_absolute_path
from hoop.runs.prediction import predicted_step, usual_seconds
from hoop.runs.training import Launch, Training

WARM, TRACED = 15, 50
"""Steps at the beginning that are left out; steps that are traced. The time of a step is that of the later ones:
tracing takes time too."""


def train(job: str, devices: int, spec: str, further: Mapping[str, int]) -> dict[str, Any]:
    """A run: its settings, measured costs, seconds of each step, and spans of each rank."""
    changes = {"strategy": spec, "evaluate_every": 0, "checkpoint_every": 0, "trace_steps": TRACED, **further}
    settings = load_job(with_absolute_path(job), load=True).defaults(with_absolute_path(job)).replaced(changes).check()
    found: dict[str, Any] = {"settings": settings.to_json(), "devices": devices, "spec": spec}
    seconds: list[float] = []
    shares: list[tuple[int, list[int]]] = []
    began, others = time.monotonic(), foreign_seconds()
    with tempfile.TemporaryDirectory(prefix="hoop-terms-") as folder:
        for observed in Training(Launch(settings, devices, out=Path(folder))).events():
            match observed.event:
                case Started() as started:
                    found |= {"costs": started.costs, "started_s": started.seconds}
                case Steps() as steps:
                    seconds += steps.seconds
                case Balanced() as balanced:
                    shares.append((balanced.step, balanced.shards))
        spans: dict[str, list[tuple[str, str, float, float]]] = {}
        for one in read_spans(Path(folder) / "trace.json"):
            span = (one.name, one.category, one.start_us / 1e6, one.duration_us / 1e6)
            spans.setdefault(one.track, []).append(span)
    found["disturbance"] = (foreign_seconds() - others) / (time.monotonic() - began)
    return {**found, "seconds": seconds, "shares": shares, "spans": list(spans.values())}


def kind_of(name: str) -> str:
    """The kind of an instruction by its name in the plan: ``0F3`` is a forward."""
    letters = [one for one in name.partition("@")[0] if not one.isdigit() and one not in ",."]
    return name if name in ("wait", "between steps", "commit", "replicate") else "".join(letters) or name


def measured_by_kind(spans: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Seconds of a step by kind, from the trace of one rank."""
    ends = [start + seconds for name, _, start, seconds in spans if kind_of(name) in ("U", "P")][WARM:]
    if not ends:
        return {}
    low, steps = ends[0], len(ends) - 1
    inside = [one for one in spans if one[2] >= low and one[2] + one[3] <= ends[-1]]
    found: dict[str, float] = defaultdict(float)
    for name, _, _, seconds in inside:
        found["between" if name == "between steps" else kind_of(name)] += seconds / steps
    if "between" not in found:  # a role that follows a rule
        found["between"] = (ends[-1] - low) / steps - sum(found.values())
    return found


def simulated_by_kind(spans: Sequence[Any], step_seconds: float) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for what, _, _, seconds in spans:
        found[kind_of(str(what)) if isinstance(what, Instruction) else what] += seconds
    found["between"] = max(0.0, step_seconds - sum(found.values()))
    return found


def show(run: Mapping[str, Any]) -> None:
    settings = Settings.from_json(run["settings"])
    predicted = predicted_step(run["costs"], settings, trace=True)
    assert predicted is not None
    measured = usual_seconds(run["seconds"][TRACED:]) or 0.0
    error = measured / predicted.step_seconds - 1
    print(f"{run['spec']} on {run['devices']}: predicted {1e3 * predicted.step_seconds:.2f} ms, ", end="")
    print(f"measured {1e3 * measured:.2f} ms, {error:+.0%}; started in {run['started_s']:.2f} s; ", end="")
    print(f"other processes used {run['disturbance']:.0%} of a core\n")
    kinds: dict[str, None] = {}
    ranks = []
    for rank, spans in enumerate(run["spans"]):
        ours = simulated_by_kind(predicted.accounts[rank].spans, predicted.step_seconds)
        theirs = measured_by_kind(spans)
        kinds |= dict.fromkeys([*theirs, *ours])
        ranks.append((ours, theirs))
    rows = []
    for kind in sorted(kinds):
        row: list[Any] = [kind]
        for ours, theirs in ranks:
            row += [1e3 * ours.get(kind, 0.0), 1e3 * theirs.get(kind, 0.0)]
        rows.append(row)
    columns = [Column("kind")]
    for rank in range(len(ranks)):
        columns += [Column(f"{rank} simulated", "ms"), Column(f"{rank} measured", "ms")]
    print(Table(columns, rows).markdown())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="mnist")
    parser.add_argument("--devices", type=numbers, default=[1, 2, 3, 4], help="e.g. 1,2,16")
    parser.add_argument("--only", default="", help="strategies that begin so, e.g. data,pipeline")
    parser.add_argument("--steps", type=int, default=120, help="of each run [default: %(default)s]")
    parser.add_argument("--batch-size", type=int, help="[default: the job's]")
    parser.add_argument("--shards", type=int, help="of a batch [default: the job's]")
    parser.add_argument("--save", type=Path, help="a folder for what is measured")
    parser.add_argument("--from", dest="source", type=Path, help="a folder that --save has filled: nothing is measured")
    options = parser.parse_args()
    if options.source is not None:
        for path in sorted(options.source.glob("*.json")):
            show(json.loads(path.read_text()))
        return
    further = {"max_steps": options.steps, "epochs": 1_000_000}
    further |= {name: given for name in ("batch_size", "shards") if (given := getattr(options, name))}
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    for devices in options.devices:
        for spec in CASES.get(devices, ()):
            if not spec.startswith(tuple(options.only.split(","))):
                continue
            print(f"{spec} on {devices} …", file=sys.stderr)
            run = train(options.job, devices, spec, further)
            if options.save is not None:
                (options.save / f"{devices}-{spec.replace(':', '-')}.json").write_text(json.dumps(run))
            show(run)


if __name__ == "__main__":
    main()
