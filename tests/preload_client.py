"""``python …`` of a shell, forked by tests/preload_server.py, with the standard streams of this process.

    python -I -S preload_client.py '{"control": DESCRIPTOR, "environment": {…}}' -m hoop status

This process passes signals on to the command and ends as it ends. What the server cannot fork is executed here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parent))

from preload_server import SIGNALS, forkable, read_at_import, report, send, started


def main() -> None:
    given, words = json.loads(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    if not forkable(words) or read_at_import(os.environ) != given["environment"]:
        os.execv(sys.executable, words)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with socket.socket(fileno=given["control"]) as control:
        status = send(control, words, None, None, start_new_session=False, streams=[0, 1, 2])
    pid = started(status)

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(pid, number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = os.waitstatus_to_exitcode(int(report(status).removeprefix("ended ")))
    if code < 0:
        if -code in SIGNALS:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
