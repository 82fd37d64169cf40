"""The command line: one file a command.

May import: every room above it.
"""

PUBLIC = ("main",)
"""Modules that other rooms may import."""
