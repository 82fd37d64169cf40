"""A signal whose exception Python drops ends the command nevertheless."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal, time
from hoop.cli import running

send_later, sent = running._send_later, []

def send(number):
    sent.append(number)
    if len(sent) == 1 and {at_once}:
        os.kill(os.getpid(), number)  # the handler runs here, in the hook
    else:
        send_later(number)

running._send_later = send
running.end_by_signals()

class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

one = Dropping()
del one
print(len(sent), flush=True)
time.sleep(60)
"""


def run(at_once: bool) -> tuple[int, str]:
    script = SCRIPT.format(at_once=at_once)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout


def test_a_signal_in_a_destructor_ends_the_command() -> None:
    assert run(at_once=False) == (143, "1\n")


def test_a_signal_that_is_sent_again_before_the_hook_has_ended_ends_it_too() -> None:
    assert run(at_once=True) == (143, "2\n")
