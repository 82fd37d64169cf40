"""Untrusted text is made printable and short, and malformed JSON does not crash its readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.engine.settings import Settings
from hoop.errors import HoopError, InvalidArgument, error_from_name
from hoop.events import EventLog
from hoop.plan.plan import Plan
from hoop.report import strict_json
from hoop.runs.run_recorder import saved_settings
from hoop.simulate.cluster import read_cluster
from hoop.simulate.cost_model import Costs
from hoop.texts import MAX_TEXT_BYTES, counted, parse_json, parse_printable_json, printable, printable_json
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.job_settings import MAX_SETTINGS_BYTES, check_settings, job_name

ANY_TEXT = st.text(st.characters(), max_size=300)
"""Every code point, surrogates included."""


@given(ANY_TEXT, st.integers(0, 400))
def test_any_text_becomes_printable_and_short(text: str, max_bytes: int) -> None:
    shown = printable(text, max_bytes)
    assert len(shown.encode()) <= max(max_bytes, 0)
    assert all(one.isprintable() or one in "\n\t" for one in shown)
    assert printable(shown, max_bytes) == shown
    assert pb.Job(reason=shown).SerializeToString() is not None


@given(ANY_TEXT)
def test_short_printable_text_is_unchanged(text: str) -> None:
    plain = "".join(one for one in text if one.isprintable() or one in "\n\t")
    assert printable(plain) == plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\ud800", r"\ud800"),
        ("a\udcffb", r"a\udcffb"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\x9b2J\r\0", r"\x9b2J\r\x00"),
        ("\u202eabc", r"\u202eabc"),
        ("Zürich\n\tα", "Zürich\n\tα"),
    ],
)
def test_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_long_text_keeps_both_ends() -> None:
    shown = printable("begin" + "x" * (1 << 20) + "end")
    assert (shown[:5], shown[-3:], len(shown)) == ("begin", "end", MAX_TEXT_BYTES)


@given(ANY_TEXT)
def test_errors_and_events_make_their_text_printable(text: str) -> None:
    log = EventLog(max_bytes=MAX_TEXT_BYTES)
    event = log.publish("kind" + text, text * 100, field=text)
    for kind in ("PeerLost", "NotFound", "OutOfMemory", "INTERNAL", "UNKNOWN"):
        assert str(error_from_name(kind, text)) == printable(text)
    pb.Event(kind=event.kind, text=event.text, fields=event.fields).SerializeToString()
    assert max(map(len, (event.kind, event.text, *event.fields.values()))) <= MAX_TEXT_BYTES


def test_a_log_without_a_limit_keeps_json_whole() -> None:
    text = json.dumps({"samples": list(range(50_000)), "text": "\ud800"})
    assert EventLog().publish("steps", text).text == text


def test_printable_json_cleans_every_level() -> None:
    assert printable_json(json.loads(r'{"\ud800":["\u001b",{"a":1.5}],"b":null}')) == {
        r"\ud800": [r"\x1b", {"a": 1.5}],
        "b": None,
    }


@given(st.recursive(st.none() | st.floats(allow_nan=False) | ANY_TEXT, st.lists) | st.dictionaries(ANY_TEXT, ANY_TEXT))
def test_json_is_parsed_and_made_printable(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert parse_printable_json(text) == printable_json(json.loads(text))


def test_a_long_text_in_json_is_cut() -> None:
    short, long = "x" * MAX_TEXT_BYTES, "y" * (MAX_TEXT_BYTES + 1)
    found = parse_printable_json(json.dumps([1, short, {long: long}]))
    assert found == [1, short, {printable(long): printable(long)}]
    with pytest.raises(ValueError, match="nested too deep"):
        parse_printable_json("[" * 100_000)


# ---- deeply nested JSON: each reader raises its usual error


DEEP = ["[" * 100_000, '{"a":' * 100_000, "[" * 50_000 + "]" * 50_000]


def _read_run_config(text: str, folder: Path) -> object:
    (folder / "config.json").write_text(text)
    return saved_settings(folder)


def _read_cluster_file(text: str, folder: Path) -> object:
    (folder / "cluster.toml").write_text(f"host = {text}")
    return read_cluster(folder / "cluster.toml")


READERS: dict[str, tuple[Callable[[str, Path], object], type[Exception]]] = {
    "parse_json": (lambda text, _: parse_json(text), ValueError),
    "strict_json": (lambda text, _: strict_json.loads(text), ValueError),
    "job settings": (lambda text, _: check_settings(text), InvalidArgument),
    "engine settings": (lambda text, _: Settings.from_json(text), InvalidArgument),
    "plan": (lambda text, _: Plan.from_json(text), InvalidArgument),
    "costs": (lambda text, _: Costs.from_json(text), InvalidArgument),
    "a run's config": (_read_run_config, HoopError),
    "a cluster file": (_read_cluster_file, HoopError),
}


@pytest.mark.parametrize("text", DEEP, ids=["list", "object", "closed list"])
@pytest.mark.parametrize("reader", READERS)
def test_deep_nesting_raises_an_error_in_every_reader(reader: str, text: str, tmp_path: Path) -> None:
    read, kind = READERS[reader]
    with pytest.raises(kind):
        read(text, tmp_path)


# ---- job settings


def test_settings_of_exactly_the_limit_are_accepted() -> None:
    text = json.dumps({"job": "x" * (MAX_SETTINGS_BYTES - 11)})
    assert len(text) == MAX_SETTINGS_BYTES
    check_settings(text)
    with pytest.raises(InvalidArgument, match=f"{MAX_SETTINGS_BYTES + 1} bytes are more than"):
        check_settings(text + " ")
    with pytest.raises(InvalidArgument, match="bytes are more than"):
        check_settings('{"job":"' + "é" * (MAX_SETTINGS_BYTES // 2) + '"}')  # the limit counts bytes, not characters


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ('{"job": "mnist"}', "mnist"),
        ('{"job": 7}', "?"),
        ("{}", "?"),
        ("[" * 9, "?"),
        (r'{"job": "\ud800\u001b"}', r"\ud800\x1b"),
        (json.dumps({"job": "x" * 1000}), "x" * 125 + " [...] " + "x" * 124),
    ],
)
def test_job_name(settings: str, name: str) -> None:
    assert job_name(settings) == name


def test_numbers_of_things_are_in_words() -> None:
    shown = [counted(number, "device") for number in (0, 1, 2, 1024)] + [counted(2, "recovery"), counted(1, "recovery")]
    assert shown == ["0 devices", "1 device", "2 devices", "1,024 devices", "2 recoveries", "1 recovery"]
