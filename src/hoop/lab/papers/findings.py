"""What comes of a study: its claims with our figures beside them, and the tables and charts they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hoop.report.page import Page, Picture, Section
from hoop.report.tables import Column, Table

How = Literal["measured", "simulated"]
Verdict = Literal["holds", "in part", "does not hold", "not shown"]
CLAIMS = "Claims"
"""The title of the table by which a stored report is read back."""
_COLUMNS = ("claim", "the paper", "ours", "how", "verdict", "why")


@dataclass(frozen=True)
class PaperClaim:
    """One sentence of the paper with its figure, and what came out here.

    ``not shown`` is for what this run could not decide: a machine too small, data that is not there.
    """

    claim: str
    paper: str
    ours: str
    how: How
    verdict: Verdict
    why: str = ""


@dataclass
class Findings:
    """A report in the making: a study adds to it as its experiments end."""

    claims: list[PaperClaim] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    """What this run cannot show, and why: said in the report before any figure."""

    def claim(self, claim: str, *, paper: str, ours: str, how: How, verdict: Verdict, why: str = "") -> None:
        self.claims.append(PaperClaim(claim, paper, ours, how, verdict, why))

    def section(self, heading: str, *blocks: str | Table | Picture) -> None:
        self.sections.append(Section(heading, blocks))

    def page(self, title: str, lead: str, facts: dict[str, str]) -> Page:
        """The whole report, claims first."""
        top = [Section("What holds", [self.table()])]
        if self.limits:
            top.append(Section("What this run cannot show", ["\n".join(f"- {one}" for one in self.limits)]))
        return Page(title, [*top, *self.sections], lead, facts)

    def table(self) -> Table:
        rows = [
            [one.claim, one.paper, one.ours, one.how, one.verdict, one.why or None] for one in self.claims
        ]
        return Table([Column(name) for name in _COLUMNS], rows, CLAIMS)


def graded(value: float, good: float, fair: float) -> Verdict:
    """Of a figure that should be large."""
    return "holds" if value >= good else "in part" if value >= fair else "does not hold"


def rows(found: Sequence[Mapping[str, Any]], title: str, **units: str) -> Table:
    """A table of rows by name, its columns those of the first row; ``units`` by column, ``_`` for a space."""
    names = list(found[0]) if found else []
    return Table.of(found, [Column(name, units.get(name.replace(" ", "_"), "")) for name in names], title)


def stored_claims(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The claims of a report that was written as JSON."""
    return [row for table in report["tables"] if table["title"] == CLAIMS for row in table["rows"]]
