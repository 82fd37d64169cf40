"""The server processes: coordinator and device. They do the I/O; ``membership`` and ``collectives`` hold the rules."""
