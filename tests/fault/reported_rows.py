"""What every disturbed run must have reported: each step, once, with the loss of the undisturbed run.

check_events    the events that ranks of the engine emitted, without a coordinator
check_run       the folder of ``--out``: the ledger's audit, and the metrics
check_same      two results and their folders: the weights too
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hoop.report.metrics import read_metrics
from hoop.runs.audit import Audit, audit

Told = Mapping[str, Any]


def check_events(ranks: Iterable[Iterable[Told]], losses: Sequence[float], begun: int = 0) -> None:
    """The events of the ranks that are left, which are all that anybody has read: every step after ``begun`` is there.

    A rank that was killed has taken its events with it. A step may be reported by several ranks, always with the same
    loss and samples. ``losses``: of the undisturbed run, to the bit.
    """
    found: dict[int, tuple[float, str]] = {}
    for events in ranks:
        for told in events:
            if told["kind"] != "steps":
                continue
            for step, (loss, fed) in enumerate(zip(told["loss"], told["fed"], strict=True), told["first"] + 1):
                assert fed is not None, f"step {step}: reported without what went into it"
                assert min(fed[0]) >= 0, f"step {step}: a shard is in it twice: {fed}"
                before = found.setdefault(step, (loss, fed[1]))
                assert before == (loss, fed[1]), f"step {step}: reported twice, with other values"
    steps = range(begun + 1, begun + 1 + len(losses))
    assert sorted(found) == list(steps), f"not reported: {sorted(set(steps) - set(found))}"
    wrong = [step for step, loss in zip(steps, losses, strict=True) if found[step][0] != loss]
    assert not wrong, f"other losses than the undisturbed run's at steps {wrong}"


def losses_in(out: Path) -> dict[int, float]:
    """Each step's loss, as the metrics have it; a step that is there twice fails."""
    rows = [(row["step"], row["loss"]) for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    found = dict(rows)
    assert len(found) == len(rows), "a step is in the metrics twice"
    return found


def check_run(out: Path, steps: int, undisturbed: Path | None = None) -> Audit:
    """The audit holds over ``steps`` steps, and every loss is that of the ``undisturbed`` run, where it is given.

    ``undisturbed``: a run of at least as many steps, by a synchronous strategy.
    """
    found = audit(out)
    assert found.violation is None, found.violation
    assert found.steps == steps, f"{found.steps} steps are in the ledger, {steps} were done"
    losses = losses_in(out)
    assert list(losses) == list(range(1, steps + 1)), "the metrics do not have every step in order"
    if undisturbed is not None:
        wanted = losses_in(undisturbed)
        differing = [step for step, loss in losses.items() if loss != wanted[step]]
        assert not differing, f"other losses than the undisturbed run's at steps {differing[:10]}"
    return found


def check_same(result: Told, undisturbed: Told) -> None:
    """The results of two runs by a synchronous strategy, each with the folder of its ``--out`` in ``out``.

    They have the same weights after as many steps, and the disturbed one reported each step once, with the same loss.
    """
    assert result["weights_sha256"] == undisturbed["weights_sha256"], "other weights than the undisturbed run's"
    assert result["steps"] == undisturbed["steps"]
    check_run(Path(result["out"]), result["steps"], Path(undisturbed["out"]))
