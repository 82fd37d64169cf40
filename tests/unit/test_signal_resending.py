"""A signal whose exception Python drops ends the command nevertheless."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import _thread, os, signal, threading, time
from hoop.cli import running

send_later, sent, printed = running._send_later, [], threading.Event()

def send_when_printed(number):  # else it may come first on a busy machine
    printed.wait(300)
    send_later(number)

def send(number):
    sent.append(number)
    if len(sent) == 1 and {at_once}:
        os.kill(os.getpid(), number)  # the handler runs here, in the hook
    else:
        _thread.start_new_thread(send_when_printed, (number,))

running._send_later = send
running.end_by_signals()

class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

one = Dropping()
del one
print(len(sent), flush=True)
printed.set()
time.sleep(300)
"""


def run(at_once: bool) -> tuple[int, str]:
    script = SCRIPT.format(at_once=at_once)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout


def test_a_signal_in_a_destructor_ends_the_command() -> None:
    assert run(at_once=False) == (143, "1\n")


def test_a_signal_that_is_sent_again_before_the_hook_has_ended_ends_it_too() -> None:
    assert run(at_once=True) == (143, "2\n")


SWALLOWED = """
import os, signal, time
from hoop.cli import running

running.end_by_signals()
try:
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(300)
except BaseException:
    pass  # as a library does while it is imported
time.sleep(300)
"""
REPLACED = """
import os, signal, sys, time
from hoop.cli import commands, running

def broken(_):
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(300)
    except BaseException:
        raise ImportError("a library cannot be imported")

commands.command_line = broken
sys.argv = ["hoop"]
from hoop.cli.main import main
main()
"""


@pytest.mark.parametrize("script", [SWALLOWED, REPLACED])
def test_a_signal_that_a_library_swallows_or_replaces_ends_the_command(script: str) -> None:
    """The terminal was closed while PyTorch was imported: the training began, and nobody was there."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (129, "")
