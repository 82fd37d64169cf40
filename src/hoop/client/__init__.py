"""``hoop.connect``: clusters, communicators, buffers, handles and jobs, as a program uses them.
How servers work is unknown here.

May import: memory wire collectives.
"""

PUBLIC = ("cluster", "communicator", "device", "handle", "jobs")
"""Modules that other rooms may import."""
