"""The result of a study: the paper's claims with Hoop's figures, and the tables and charts behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hoop.report.page import Page, Picture, Section
from hoop.report.tables import Column, Table

How = Literal["measured", "simulated"]
Verdict = Literal["holds", "in part", "does not hold", "not shown"]
CLAIMS = "Claims"
"""Title of the table of claims; ``stored_claims`` finds the table by it."""
_COLUMNS = ("claim", "the paper", "ours", "how", "verdict", "why")


@dataclass(frozen=True)
class PaperClaim:
    """One claim of the paper with its figure, and Hoop's figure.

    The verdict ``not shown`` means that this run could not decide it: the machine is too small, or data is missing.
    """

    claim: str
    paper: str
    ours: str
    how: How
    verdict: Verdict
    why: str = ""


@dataclass
class Findings:
    """A report under construction: a study adds to it after each experiment."""

    claims: list[PaperClaim] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    """Limits of this run, with reasons; the report shows them before any figure."""

    def claim(self, claim: str, *, paper: str, ours: str, how: How, verdict: Verdict, why: str = "") -> None:
        self.claims.append(PaperClaim(claim, paper, ours, how, verdict, why))

    def section(self, heading: str, *blocks: str | Table | Picture) -> None:
        self.sections.append(Section(heading, blocks))

    def page(self, title: str, lead: str, facts: dict[str, str]) -> Page:
        """The report, claims first."""
        top = [Section("What holds", [self.table()])]
        if self.limits:
            top.append(Section("What this run cannot show", ["\n".join(f"- {one}" for one in self.limits)]))
        return Page(title, [*top, *self.sections], lead, facts)

    def table(self) -> Table:
        make_table = [[one.claim, one.paper, one.ours, one.how, one.verdict, one.why or None] for one in self.claims]
        return Table([Column(name) for name in _COLUMNS], make_table, CLAIMS)


def grade(value: float, good: float, fair: float) -> Verdict:
    """Verdict on a figure that should be large."""
    return "holds" if value >= good else "in part" if value >= fair else "does not hold"


def make_table(found: Sequence[Mapping[str, Any]], title: str, **units: str) -> Table:
    """A table with the columns of the first row. ``units`` by column name, with ``_`` for a space."""
    names = list(found[0]) if found else []
    return Table.of(found, [Column(name, units.get(name.replace(" ", "_"), "")) for name in names], title)


def stored_claims(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The claims of a report that was stored as JSON."""
    return [row for table in report["tables"] if table["title"] == CLAIMS for row in table["rows"]]
