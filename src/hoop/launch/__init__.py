"""Starts clusters on this machine: ``local`` (subprocesses), ``forked`` (processes forked after PyTorch is loaded).
Jobs are unknown here.

May import: memory wire membership servers.
"""

PUBLIC = ("forked", "local", "mps", "processes")
"""Modules that other rooms may import."""
