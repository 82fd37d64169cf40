"""Where a process is in a run that a scheduler started: rank, world size and meeting point, from its environment.
One module a scheduler, each with the two methods of ``base.Scheduler``; ``catalog`` finds the one of this process.

May import: nothing but the modules directly in hoop.
"""

PUBLIC = ("base", "catalog")
"""Modules that other rooms may import."""
