"""The dialects of the lab's protocol: which numbers operations and statuses have, and what a count means.

    starter      the lab's own file. SUM is 0; a count is in bytes
    nil-first    the file of the paper dsml. NIL is 0 and SUM is 1; a count is in elements; a receive may
                 reduce into its buffer, and a device is set up by the coordinator of another program

The messages of both are in ``gpu_sim.proto``. With ``--lab-dialect auto`` the coordinator finds out the dialect of each
communicator's client (``detect``), and a device that of each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

AUTO = "auto"


class Dialect(StrEnum):
    """A dialect that a client speaks."""

    STARTER = "starter"
    NIL_FIRST = "nil-first"


@dataclass(frozen=True)
class Numbers:
    """The numbers and the unit of one dialect."""

    ops: Mapping[int, str]
    """By number, Hoop's name of the operation."""
    statuses: Mapping[str, int]
    count_unit: str

    def describe_ops(self) -> str:
        return " ".join(f"{name.upper()}={number}" for number, name in self.ops.items())


NUMBERS = {
    Dialect.STARTER: Numbers(
        {0: "sum", 1: "prod", 2: "min", 3: "max", 4: "avg"},
        {"READY": 0, "IN_PROGRESS": 0, "SUCCESS": 1, "FAILED": 2},  # a new communicator is in progress
        "bytes",
    ),
    Dialect.NIL_FIRST: Numbers(
        {1: "sum", 2: "prod", 3: "min", 4: "max", 5: "avg"},
        {"READY": 0, "IN_PROGRESS": 1, "SUCCESS": 2, "FAILED": 3},
        "elements",
    ),
}


def detect(op: int, shown_unit: str, grouped: bool) -> Dialect | None:
    """The dialect of the client that asks for an all-reduce; None if the call does not show it.

    ``shown_unit``: what the copies to the vectors show (``lab_counts.find_unit``). Only starter has an operation 0, and
    counts in bytes. Clients of nil-first count elements and use no groups.
    """
    if op == 0 or shown_unit == "bytes":
        return Dialect.STARTER
    if op == 5 or (shown_unit == "elements" and not grouped):
        return Dialect.NIL_FIRST
    return None
