"""Labels: short key-value pairs that an arena stores beside its buffers."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hoop.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from hoop.memory import Arena

Python = Callable[..., subprocess.Popen[str]]


def test_labels_are_set_and_replaced_and_default_to_empty(arena: Arena) -> None:
    assert arena.label("device_id") == ""
    arena.set_label("device_id", "3")
    arena.set_label("größe", "§ 7")
    assert (arena.label("device_id"), arena.label("größe")) == ("3", "§ 7")
    arena.set_label("device_id", "4")
    assert (arena.label("device_id"), arena.label("größe")) == ("4", "§ 7")
    arena.set_label("k" * 128, "v" * 128)
    assert arena.label("k" * 128) == "v" * 128


@pytest.mark.parametrize("enter", [Arena.open, Arena.attach, lambda path: Arena.open_or_create(path, 65536)])
def test_labels_survive_close_and_open(arena: Arena, path: Path, enter: Callable[[Path], Arena]) -> None:
    arena.set_label("device_id", "3")
    arena.set_label("job", "a")
    arena.close()
    with enter(path) as reopened:
        assert (reopened.label("device_id"), reopened.label("job")) == ("3", "a")


def test_labels_and_buffers_do_not_affect_each_other(arena: Arena, path: Path) -> None:
    arena.set_label("device_id", "3")
    arena.allocate("gone", 64)
    kept = arena.allocate("kept", 64)
    arena.write(kept.address, b"bytes")
    arena.free("gone")
    assert arena.label("device_id") == "3"
    arena.set_label("device_id", "4")
    assert arena.buffers() == [kept]
    assert arena.used == 64
    arena.close()
    with Arena.open(path) as reopened:
        assert reopened.label("device_id") == "4"
        assert reopened.buffers() == [kept]
        assert reopened.read(kept.address, 5) == b"bytes"


def test_labels_survive_a_kill(path: Path, python: Python) -> None:
    program = (
        "import sys\nfrom hoop.memory import Arena\n"
        "arena = Arena.create(sys.argv[1], 65536)\n"
        "arena.set_label('device_id', '3')\n"
        "arena.allocate('w', 64)\n"
        "arena.set_label('job', 'a')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = python(program, path)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.kill()
    assert child.wait(timeout=300) == -signal.SIGKILL
    with Arena.open(path) as arena:
        assert (arena.label("device_id"), arena.label("job")) == ("3", "a")
        assert [buffer.name for buffer in arena.buffers()] == ["w"]


def test_an_attached_process_reads_labels_and_cannot_set_them(arena: Arena, path: Path, python: Python) -> None:
    arena.set_label("device_id", "3")
    with Arena.attach(path) as other:
        arena.set_label("device_id", "4")
        assert other.label("device_id") == "3"
        other.refresh()
        assert other.label("device_id") == "4"
        with pytest.raises(FailedPrecondition, match="cannot set label 'device_id': this process is attached"):
            other.set_label("device_id", "5")
        assert other.label("device_id") == "4"
    program = (
        "import sys\nfrom hoop.errors import FailedPrecondition\nfrom hoop.memory import Arena\n"
        "with Arena.attach(sys.argv[1]) as arena:\n"
        "    try:\n        arena.set_label('device_id', '5')\n"
        "    except FailedPrecondition as error:\n        print(arena.label('device_id'), error)\n"
    )
    output, _ = python(program, path).communicate(timeout=300)
    assert output.startswith("4 arena ")
    assert "ask its owner" in output
    assert arena.label("device_id") == "4"


TEXTS = {"too long": "x" * 129, "not encodable": "\ud800", "two lines": "a\nb", "a zero": "\0"}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_invalid_labels_are_refused_and_change_nothing(arena: Arena, path: Path, text: str) -> None:
    arena.set_label("device_id", "3")
    for key, value in (("device_id", text), (text, "3")):
        with pytest.raises(InvalidArgument, match=r"label .*128 printable characters"):
            arena.set_label(key, value)
    assert arena.label("device_id") == "3"
    assert arena.label(text) == ""
    arena.allocate("w", 64)
    arena.close()
    with Arena.open(path) as reopened:
        assert reopened.label("device_id") == "3"
        assert [buffer.name for buffer in reopened.buffers()] == ["w"]


def test_a_label_that_does_not_fit_is_refused_and_not_stored(path: Path) -> None:
    with Arena.create(path, 64 * 1024, table_size=4096) as arena:
        arena.set_label("device_id", "3")
        for number in range(15):  # 261 bytes each: 106 of the table are left
            arena.set_label(f"{number:0128}", "x" * 128)
        with pytest.raises(ResourceExhausted, match="table_size"):
            arena.set_label("y" * 128, "x" * 128)
        assert arena.label("y" * 128) == ""
        assert arena.label(f"{number:0128}") == "x" * 128
        with pytest.raises(ResourceExhausted, match="table_size"):
            arena.set_label("device_id", "x" * 128)
        assert arena.label("device_id") == "3"
        arena.allocate("w", 64)
    with Arena.open(path) as reopened:
        assert reopened.label("device_id") == "3"
        assert reopened.label("y" * 128) == ""
        assert [buffer.name for buffer in reopened.buffers()] == ["w"]
