"""What came of a run under faults, as a table: a line a kind of fault."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from hoop.chaos.blows import Outcome
from hoop.chaos.run import Chaos
from hoop.chaos.schedule import KINDS
from hoop.report.tables import Column, Table


def table(found: Chaos) -> Table:
    """Counts, and the usual and the worst of each time."""
    rows = []
    for kind in KINDS:
        of = [one for one in found.outcomes if one.kind == kind]
        if of:
            known, paused = _times(of, "detected_s"), _times(of, "pause_s")
            again, replaced = sum(one.repeated for one in of), sum(one.replaced for one in of)
            rows.append([kind, len(of), *known, *paused, *_times(of, "settled_s"), again, replaced])
    columns = [Column("fault"), Column("count", digits=0)]
    for name in ("known after", "pause", "all there again after"):
        columns += [Column(name, "s", 2), Column("at most", "s", 2)]
    columns += [Column("steps repeated", digits=0), Column("did not come back", digits=0)]
    return Table(columns, rows, "Faults and what came of them")


def _times(of: Sequence[Outcome], name: str) -> tuple[float | None, float | None]:
    values = [value for one in of if (value := getattr(one, name)) is not None]
    return (median(values), max(values)) if values else (None, None)


def verdict(found: Chaos) -> str:
    """One sentence."""
    config = found.config
    count, same = len(found.outcomes), "the same as" if found.equal else f"NOT those of ({found.undisturbed})"
    record = (
        f"; THE RECORD DOES NOT HOLD: {found.violation}"
        if found.violation
        else "; each step in the ledger once"
    )
    weights = f"{found.steps} steps, weights {found.weights}, {same} the undisturbed run's{record}"
    return (
        f"{count} faults in {found.seconds:.0f} s, one every {found.seconds / max(1, count):.1f} s "
        f"({found.faults_an_hour:.0f} an hour), on {config.devices} devices, {config.job} by {config.strategy} "
        f"{config.pace} times slower than they could, seed {config.seed}; goodput {found.goodput:.2f}; "
        + ("the next was not survived" if found.failed else weights)
    )
