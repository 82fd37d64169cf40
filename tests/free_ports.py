"""A port for a server whose address must be known before it starts."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = range(10_000, 20_000)
"""Below those that systems give out for port 0 and to clients: there another test could get the port before the server
has it. Meeting points of schedulers are above."""


def free_port() -> int:
    """A port that is free now, on all interfaces."""
    choose = random.SystemRandom()  # tests seed the other one, and would choose alike
    while True:
        with contextlib.suppress(OSError), socket.create_server(("", choose.choice(PORTS))) as server:
            return int(server.getsockname()[1])
