"""HOOP_LOG sets the log level of each package of Hoop."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from hoop.logs import parse_levels

PROGRAM = """
import logging
import hoop
logging.getLogger("hoop.transport").debug("a link")
logging.getLogger("hoop.wire").debug("a call")
"""


def test_parse_levels() -> None:
    assert parse_levels("debug") == {"": logging.DEBUG}
    assert parse_levels("info, transport=debug,wire=off") == {
        "": logging.INFO,
        "transport": logging.DEBUG,
        "wire": logging.CRITICAL + 1,
    }


@pytest.mark.parametrize("text", ["loud", "transport=", "=debug", "transport=loud"])
def test_an_invalid_level_lists_the_valid_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither a level \(debug, info, warning, error, off\) nor room=level"):
        parse_levels(text)


@pytest.mark.parametrize(
    ("value", "shown", "hidden"),
    [
        ("debug", ["hoop.transport DEBUG: a link", "hoop.wire DEBUG: a call"], []),
        ("error,transport=debug", ["a link"], ["a call"]),
        ("", [], ["a link", "a call"]),
        ("loud", ["hoop: HOOP_LOG='loud'"], ["a link"]),
    ],
)
def test_hoop_log_enables_loggers(value: str, shown: list[str], hidden: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "HOOP_LOG": value},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert all(text in done.stderr for text in shown)
    assert not any(text in done.stderr for text in hidden)
