"""Checks that a run under faults reported each step once, with the loss of the undisturbed run.

check_events    the events that the engine's ranks emitted, without a coordinator
check_run       the run folder (``--out``): audit of the ledger, and metrics
check_same      two results and their run folders, including the weights
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hoop.report.metrics import read_metrics
from hoop.runs.audit import Audit, audit

Fields = Mapping[str, Any]


def check_events(ranks: Iterable[Iterable[Fields]], losses: Sequence[float], after_step: int = 0) -> None:
    """Checks that the events of the surviving ranks contain every step after ``after_step``.

    Events of a killed rank are lost. Several ranks may report a step, with the same loss and samples. ``losses``: those
    of the undisturbed run, which must be bitwise equal.
    """
    reported: dict[int, tuple[float, str]] = {}
    for events in ranks:
        for event in events:
            if event["kind"] != "steps":
                continue
            for step, (loss, fed) in enumerate(zip(event["loss"], event["fed"], strict=True), event["first"] + 1):
                assert fed is not None, f"step {step}: reported without its samples"
                assert min(fed[0]) >= 0, f"step {step}: a shard was counted twice: {fed}"
                known = reported.setdefault(step, (loss, fed[1]))
                assert known == (loss, fed[1]), f"step {step}: reported twice, with different values"
    steps = range(after_step + 1, after_step + 1 + len(losses))
    assert sorted(reported) == list(steps), f"not reported: {sorted(set(steps) - set(reported))}"
    differing = [step for step, loss in zip(steps, losses, strict=True) if reported[step][0] != loss]
    assert not differing, f"losses differ from the undisturbed run at steps {differing}"


def losses_in(out: Path) -> dict[int, float]:
    """Returns the loss of each step from the metrics; fails if a step occurs twice."""
    rows = [(row["step"], row["loss"]) for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    losses = dict(rows)
    assert len(losses) == len(rows), "a step occurs twice in the metrics"
    return losses


def check_run(out: Path, steps: int, undisturbed: Path | None = None) -> Audit:
    """Checks that the audit holds over ``steps`` steps and that every loss equals that of the ``undisturbed`` run.

    ``undisturbed``: folder of a synchronous run of at least as many steps; None: losses are not compared.
    """
    audited = audit(out)
    assert audited.violation is None, audited.violation
    assert audited.steps == steps, f"{audited.steps} steps in the ledger, {steps} were expected"
    losses = losses_in(out)
    assert list(losses) == list(range(1, steps + 1)), "the metrics do not contain every step in order"
    if undisturbed is not None:
        expected = losses_in(undisturbed)
        differing = [step for step, loss in losses.items() if loss != expected[step]]
        assert not differing, f"losses differ from the undisturbed run at steps {differing[:10]}"
    return audited


def check_same(result: Fields, undisturbed: Fields) -> None:
    """Checks that two runs of a synchronous strategy have the same number of steps, losses and weights.

    ``out`` of each result is its run folder. The run under faults must have reported each step once.
    """
    assert result["weights_sha256"] == undisturbed["weights_sha256"], "weights differ from the undisturbed run"
    assert result["steps"] == undisturbed["steps"]
    check_run(Path(result["out"]), result["steps"], Path(undisturbed["out"]))
