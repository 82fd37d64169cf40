"""Experiments: ``chaos`` (training under random faults), ``papers`` (five studies), ``bench`` (beside Gloo and MPI).

May import: every room above it.
"""

PUBLIC = (
    "bench.contest",
    "bench.links",
    "chaos.campaign",
    "chaos.run",
    "papers.catalog",
    "papers.experiment",
)
"""Modules that other rooms may import."""
