"""Fault specifications: parsing, due times, and refusal of faults that are malformed or can never happen."""

from __future__ import annotations

import pytest

from hoop.errors import InvalidArgument
from hoop.plan.faults import FAULT_FIELDS, Fault, check_reachable, parse_faults
from hoop.plan.instructions import InstructionKind
from hoop.strategies.catalog import parse


@pytest.mark.parametrize("kind", FAULT_FIELDS)
def test_a_fault_is_parsed_from_its_text(kind: str) -> None:
    instruction = "send-output" if "instruction" in FAULT_FIELDS[kind] else ""
    fault = Fault(kind, step=7, instruction=instruction)
    assert parse_faults(str(fault)) == (fault,)
    assert parse_faults(f" {fault} ; {fault};") == (fault, fault)


def test_the_example_of_the_documentation_is_parsed() -> None:
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
        ("slow@factor=nan", "factor 1 or more"),
        ("stop@seconds=inf", "seconds not negative"),
        ("disk-full@rank=1", "is none of step"),
    ],
)
def test_malformed_faults_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        parse_faults(text)


def test_a_fault_is_due_before_its_instruction_in_its_step_or_later() -> None:
    fault = Fault("kill", step=3, instruction="reduce")
    assert not fault.is_due(2, InstructionKind.REDUCE)
    assert not fault.is_due(3, InstructionKind.FORWARD)
    assert fault.is_due(3, InstructionKind.REDUCE)
    assert fault.is_due(4, InstructionKind.REDUCE)
    assert Fault("kill", step=3).is_due(3, InstructionKind.LOAD)


STEPS, SHARDS = 14, 4


@pytest.mark.parametrize(
    ("strategy", "devices", "fault"),
    [
        ("data", 4, "kill@rank=3,step=14"),
        ("data", 4, "disk-full@step=14"),
        ("data", 5, "kill@rank=4,instruction=forward"),  # rank 4 has no shard yet, and may get one
        ("ps:bsp", 3, "kill@rank=2,instruction=take; kill@rank=0,instruction=push"),
        ("ps:asp", 3, "kill@rank=2,step=14,instruction=update"),
        ("ring", 3, "kill@rank=1,instruction=recv-input"),
        ("pipeline", 3, "kill@rank=0,instruction=send-output; slow@rank=2,instruction=send-gradient"),
        ("pipeline:zero-bubble", 2, "kill@rank=1,instruction=backward-weight"),
        ("hybrid:replicas=2", 4, "corrupt@rank=3; drop@rank=0; partition@rank=1"),
    ],
)
def test_a_fault_that_can_happen_is_accepted(strategy: str, devices: int, fault: str) -> None:
    check_reachable(parse_faults(fault), parse(strategy).plan(devices, SHARDS), STEPS)


@pytest.mark.parametrize(
    ("strategy", "devices", "fault", "complaint"),
    [
        (
            "data",
            4,
            "kill@rank=9",
            r"rank 9 does not exist, the job begins with ranks 0\.\.3.* or use 10 devices",
        ),
        ("data", 4, "slow@rank=1; stop@rank=4,step=2", "stop@rank=4.*: rank 4 does not exist"),
        ("data", 4, "kill@step=15", r"step 15 never comes, the job has 14 steps; name one of 1\.\.14"),
        ("data", 4, "disk-full@step=15", "step 15 never comes"),
        (
            "data",
            2,
            "kill@instruction=send-output",
            "rank 0 has no send-output.*no rank of this strategy has it",
        ),
        (
            "pipeline",
            3,
            "kill@rank=2,instruction=send-output",
            "rank 2 has no send-output.*ranks 0, 1 have it",
        ),
        (
            "pipeline",
            3,
            "kill@rank=1,instruction=load",
            "rank 1 has no load; it has forward.*ranks 0 have it",
        ),
        (
            "ps:bsp",
            3,
            "kill@rank=2,instruction=forward",
            "it has reduce, update, take, give; ranks 0, 1 have it",
        ),
    ],
)
def test_a_fault_that_can_never_happen_is_refused(strategy: str, devices: int, fault: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        check_reachable(parse_faults(fault), parse(strategy).plan(devices, SHARDS), STEPS)


def test_faults_of_steps_or_tcp_links_that_a_job_lacks_are_refused() -> None:
    plan = parse("data").plan(2, SHARDS)
    with pytest.raises(InvalidArgument, match="step 1 never comes, the job has 0 steps"):
        check_reachable(parse_faults("kill@rank=0"), plan, 0)
    for kind in ("corrupt", "drop", "partition"):
        with pytest.raises(InvalidArgument, match=f"{kind} needs TCP connections"):
            check_reachable(parse_faults(f"{kind}@rank=0"), plan, STEPS, has_tcp_links=False)
