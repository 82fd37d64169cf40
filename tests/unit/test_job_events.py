"""Job events: one dataclass per kind, converted to and from JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop import job_events as ev
from hoop.job_events import KINDS, JobEvent, Observed, from_fields, from_json

VALUES = {
    "int": st.integers(0, 2**31),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "str": st.text(max_size=20),
    "float | None": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "str | None": st.none() | st.text(max_size=20),
    "list[int]": st.lists(st.integers(0, 99), max_size=3),
    "list[str]": st.lists(st.text(max_size=5), max_size=3),
    "list[float]": st.lists(st.floats(0, 9), max_size=3),
    "list[Any]": st.lists(st.none() | st.integers(0, 9), max_size=3),
    "dict[str, float]": st.dictionaries(st.text(max_size=5), st.floats(0, 9), max_size=3),
    "dict[str, list[float]]": st.dictionaries(st.text(max_size=5), st.lists(st.floats(0, 9), max_size=3), max_size=3),
    "dict[str, Any]": st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    "dict[str, Any] | None": st.none() | st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    "dict[str, str]": st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
}
"""A Hypothesis strategy for each field type."""


def events() -> st.SearchStrategy[JobEvent]:
    kinds = [kind for kind in KINDS.values() if kind is not ev.Finished]
    return st.one_of(
        [st.builds(kind, **{one.name: VALUES[str(one.type)] for one in dataclasses.fields(kind)}) for kind in kinds]
    )


@given(events())
def test_every_event_round_trips_through_json(event: JobEvent) -> None:
    assert from_json(event.kind, event.to_json()) == event


@given(events(), st.integers(0, 9))
def test_an_observed_event_round_trips_through_its_fields(event: JobEvent, rank: int) -> None:
    observed = Observed(event, rank=rank, time=1.5)
    fields = json.loads(json.dumps(observed.to_fields()))
    assert Observed.from_fields(fields).event == event
    assert fields["kind"] == event.kind


def test_a_result_is_flattened_into_the_fields() -> None:
    observed = Observed(ev.Finished({"loss": 0.25, "steps": 3}), time=1.0)
    assert observed.to_fields() == {"rank": 0, "time": 1.0, "kind": "result", "loss": 0.25, "steps": 3}
    assert Observed.from_fields(observed.to_fields()) == observed


def test_kinds_are_unique() -> None:
    assert len(KINDS) == len(JobEvent.__subclasses__())


def test_a_field_of_a_newer_version_is_ignored() -> None:
    assert from_fields("left", {"kind": "left", "text": "x", "colour": "red"}) == ev.Left("x")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("steps", '{"first": 0}', "'steps': a field is missing; it has first"),
        ("weather", "{}", "unknown kind 'weather'"),
        ("left", "[]", "'left' is not a JSON object"),
        ("left", "{", "Expecting property name"),
    ],
)
def test_malformed_events_are_rejected(kind: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(kind, text)
