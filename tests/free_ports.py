"""A port for a server whose address must be known before it starts."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = range(10_000, 20_000)
"""Below those that systems give out for port 0 and to clients: there another test could get the port before the server
has it. Meeting points of schedulers are above."""


_given: set[int] = set()


def free_port() -> int:
    """A port that is free now, on all interfaces; another one at every call in this process."""
    choose = random.SystemRandom()  # tests seed the other one, and would choose alike
    while True:
        port = choose.choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            if port not in _given:
                _given.add(port)
                return port
