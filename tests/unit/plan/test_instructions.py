"""Instructions and plans as text and JSON: round trips, and errors for malformed input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.errors import InvalidArgument
from hoop.plan.instructions import PER_MICRO, RECEIVES, SENDS, WITH_PEER, Instruction, InstructionKind
from hoop.plan.plan import Plan, split_by_speed, split_evenly

numbers = st.integers(0, 5000)


@st.composite
def instructions(draw: st.DrawFn) -> Instruction:
    kind = draw(st.sampled_from(list(InstructionKind)))
    micro = draw(numbers) if kind in PER_MICRO else -1
    peer = draw(numbers) if kind in WITH_PEER else -1
    return Instruction(kind, draw(numbers), micro, peer)


@given(instructions())
def test_instructions_round_trip_through_text(one: Instruction) -> None:
    assert Instruction.parse(str(one)) == one


def test_letters_are_distinct() -> None:
    assert len({kind.value for kind in InstructionKind}) == len(InstructionKind) == 16


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not an instruction"),
        ("F", "is not an instruction"),
        ("2X0", "is not an instruction"),
        ("2F0 ", "is not an instruction"),
        ("-1F0", "is not an instruction"),
        ("2F", "lacks a micro-batch"),
        ("2A0", "has a micro-batch"),
        ("2T1@3", "has a micro-batch"),
        ("2>0", "lacks a peer"),
        ("2V", "lacks a peer"),
        ("2F0@1", "has a peer"),
    ],
)
def test_malformed_text_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        Instruction.parse(text)


@pytest.mark.parametrize(
    ("rank", "text", "peer", "expected"),
    [
        (1, "2>0@3", 3, "3<0@1"),
        (3, "2)5@1", 1, "1(5@3"),
        (0, "1P@4", 4, "1T@0"),
        (4, "1V@0", 0, "1G@4"),
    ],
)
def test_the_counterpart_of_a_message(rank: int, text: str, peer: int, expected: str) -> None:
    one = Instruction.parse(text)
    other = one.counterpart(rank)
    assert (one.peer, str(other)) == (peer, expected)
    assert other.counterpart(peer) == one


def test_a_compute_instruction_has_no_counterpart() -> None:
    with pytest.raises(KeyError):
        Instruction.parse("2F0").counterpart(0)


def test_every_send_has_one_receive() -> None:
    assert set(SENDS) | set(RECEIVES) == WITH_PEER
    assert not set(SENDS) & set(RECEIVES)
    assert {RECEIVES[receive] for receive in SENDS.values()} == set(SENDS)


@given(
    st.lists(st.lists(instructions(), max_size=8), min_size=1, max_size=4),
    st.lists(st.lists(numbers, max_size=3), max_size=3),
    st.lists(numbers, max_size=2),
)
def test_plans_round_trip_through_json(
    ranks: list[list[Instruction]], holders: list[list[int]], servers: list[int]
) -> None:
    plan = Plan(7, tuple(map(tuple, holders)), tuple(map(tuple, ranks)), tuple(servers))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{}",
        '{"micros": 1, "holders": 3, "ranks": []}',
        '{"micros": "x", "holders": [], "ranks": []}',
        '{"micros": 1, "holders": [], "ranks": ["2Q"]}',
        '{"micros": 1, "holders": [], "ranks": [3]}',
        '{"micros": 1, "holders": [], "ranks": [], "servers": 1}',
    ],
)
def test_malformed_json_is_an_invalid_argument(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Plan.from_json(text)


def test_grid_with_and_without_messages() -> None:
    plan = Plan.from_json(
        '{"micros": 1, "holders": [[0], [1]], "ranks": ["0L0 0F0 0>0@1 0(0@1 0B0", "1<0@0 1F0 1B0 1)0@0"]}'
    )
    assert plan.grid() == "rank 0 | 0L0 0F0 0B0\nrank 1 | 1F0 1B0"
    assert plan.grid(messages=True).splitlines() == [
        "rank 0 | 0L0   0F0   0>0@1 0(0@1 0B0",
        "rank 1 | 1<0@0 1F0   1B0   1)0@0",
    ]


@given(st.integers(0, 60), st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_shares_are_contiguous_and_finish_together(items: int, speeds: list[float]) -> None:
    parts = split_by_speed(items, speeds)
    assert [item for part in parts for item in part] == list(range(items))
    end = max(len(part) / speed for part, speed in zip(parts, speeds, strict=True))
    # No part could take one more item and still finish before the last part.
    assert all((len(part) + 1) / speed >= end - 1e-9 for part, speed in zip(parts, speeds, strict=True))


@given(st.integers(0, 60), st.integers(1, 9))
def test_equal_speeds_give_even_shares(items: int, parts: int) -> None:
    assert split_by_speed(items, [2.0] * parts) == split_evenly(items, parts)


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf")])
def test_an_invalid_speed_is_refused(speed: float) -> None:
    with pytest.raises(InvalidArgument, match=r"speeds: .* of part 1"):
        split_by_speed(4, [1.0, speed])
