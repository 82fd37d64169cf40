"""Placed faults as they are written, and what is wrong with others."""

from __future__ import annotations

import pytest

from hoop.errors import InvalidArgument
from hoop.plan.faults import KINDS, Fault, parse_faults
from hoop.plan.instructions import Kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_reads_back_as_it_is_written(kind: str) -> None:
    instruction = "send-output" if "instruction" in KINDS[kind] else ""
    fault = Fault(kind, step=7, instruction=instruction)
    assert parse_faults(str(fault)) == (fault,)
    assert parse_faults(f" {fault} ; {fault};") == (fault, fault)


def test_a_fault_reads_as_in_the_documentation() -> None:
    assert parse_faults("kill@rank=2,step=7,instruction=reduce") == (Fault("kill", 2, 7, "reduce"),)
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kil@rank=2", "fault: 'kil' is unknown; there are kill, stop"),
        ("kill@rang=2", "'rang=2' in 'kill@rang=2' is none of rank, step, instruction"),
        ("kill@rank", "'rank' in 'kill@rank' is none of"),
        ("kill@rank=two", "rank 'two' in 'kill@rank=two' is not a number"),
        ("kill@instruction=think", "instruction 'think' is unknown; there are load, forward"),
        ("kill@rank=-1", "rank is 0 or more"),
        ("slow@factor=0.5", "factor 1 or more"),
        ("disk-full@rank=1", "is none of step"),
    ],
)
def test_what_is_wrong_is_named(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        parse_faults(text)


def test_a_fault_is_due_before_its_instruction_in_its_step_or_later() -> None:
    fault = Fault("kill", step=3, instruction="reduce")
    assert not fault.is_due(2, Kind.REDUCE)
    assert not fault.is_due(3, Kind.FORWARD)
    assert fault.is_due(3, Kind.REDUCE)
    assert fault.is_due(4, Kind.REDUCE)
    assert Fault("kill", step=3).is_due(3, Kind.LOAD)
