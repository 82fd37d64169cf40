"""Texts of users, files and other processes are shown as they are: no markup, no terminal escapes."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hoop.cli import status as status_command
from hoop.cli.commands import COMMANDS, command_line
from hoop.cli.output import echo, plain
from hoop.report.tables import Column, Table
from hoop.wire.generated import hoop_pb2 as pb

HOSTILE = "[/INST] [red]x[/red] [fd00::7]:4021 :warning: \x1b]0;title\x07\x9b31m"
SHOWN = "[/INST] [red]x[/red] [fd00::7]:4021 :warning: \\x1b]0;title\\x07\\x9b31m"


def test_status_shows_names_addresses_and_errors_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = pb.DeviceDescription(device_id=1, address="[fd00::7]:4022", pid=2, host="[/h]")
    found = pb.GetStatusResponse(
        address="[fd00::7]:4021",
        pid=3,
        devices=[
            pb.Member(device=device, state="dead", reason=HOSTILE, memory=pb.DeviceMemory(capacity=1, used=0)),
            pb.Member(device=device, state="[/unknown]"),
        ],
        communicators=[pb.Communicator(id=1, members=[device], status="failed", reason=HOSTILE)],
        jobs=[pb.Job(id=1, name="a[/INST].py:job", device_ids=[1], status="failed", reason=HOSTILE)],
    )
    monkeypatch.setenv("COLUMNS", "400")
    status_command._print(found)
    output = capsys.readouterr().out
    assert output.startswith("coordinator [fd00::7]:4021 (pid 3)\n")
    assert output.count(SHOWN) == 3
    for text in ("[fd00::7]:4022", "2@[/h]", "[/unknown]", "a[/INST].py:job"):
        assert text in output
    assert "\x1b" not in output


def test_events_of_a_coordinator_are_shown_with_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeCluster:
        def __enter__(self) -> FakeCluster:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self, after: int, follow: bool) -> list[Any]:
            return [SimpleNamespace(sequence=1, time=0.0, kind="device_dead", text=HOSTILE, fields={})]

    monkeypatch.setattr("hoop.client.cluster.connect", lambda address, **_: FakeCluster())
    found = CliRunner().invoke(
        command_line(["events"]), ["events", "--coordinator", "127.0.0.1:1"], catch_exceptions=False
    )
    assert found.exit_code == 0
    assert found.stdout.rstrip().endswith(f"device_dead            {SHOWN}")


def test_a_long_text_is_not_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    echo("x" * 100_000)
    assert capsys.readouterr().out == "x" * 100_000 + "\n"


def test_a_rich_table_has_no_markup() -> None:
    file = io.StringIO()
    console = Console(file=file, width=400)
    console.print(Table([Column("[/a]")], [["[/b]"]], title="[/c]").rich())
    console.print(plain("[/d]"))
    for text in ("[/a]", "[/b]", "[/c]", "[/d]"):
        assert text in file.getvalue()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_in_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich cuts a word that is longer than its column: ``pipeline:gpipe|1…``."""
    monkeypatch.setenv("COLUMNS", "80")
    found = CliRunner().invoke(command_line([name]), [name, "--help"], catch_exceptions=False)
    assert found.exit_code == 0
    assert not [line for line in found.stdout.splitlines() if re.search(r"\S…", line) or len(line) > 80]


def test_help_texts_name_no_default_in_brackets() -> None:
    """Brackets are markup in a help text, so that it would not be shown: ``show_default`` takes words."""
    sources = Path(status_command.__file__).parent.glob("*.py")
    assert not [path.name for path in sources if "[default" in path.read_text()]
