"""The entry point of the command line: Ctrl-C while it loads, shell completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hoop.cli import main as entry_point

SRC = Path(__file__).resolve().parents[2] / "src"
PROGRAM = "import sys; sys.argv[0] = 'hoop'; from hoop.cli.main import main; main()"


def test_nothing_slow_is_imported_outside_of_main() -> None:
    """A Ctrl-C during such an import would end in a traceback."""
    program = "import sys, hoop.cli.main; print(*sorted(set(sys.modules) & {'typer', 'rich', 'asyncio', 'numpy'}))"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "\n"


def test_ctrl_c_while_the_command_loads_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry_point, "_run", interrupted)
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")  # main sets it
    with pytest.raises(SystemExit) as caught:
        entry_point.main()
    assert caught.value.code == 130


@pytest.mark.parametrize(
    ("words", "position", "found"),
    [("hoop co", 1, ["coordinator"]), ("hoop train --ep", 2, ["--epochs"]), ("hoop plan --clu", 2, ["--cluster"])],
)
def test_a_shell_completes_commands_and_options(words: str, position: int, found: list[str]) -> None:
    asked = {"_HOOP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(SRC), **asked},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == found, done.stderr
