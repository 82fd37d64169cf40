"""Experiments: ``chaos`` (training under random faults), ``papers`` (five studies), ``bench`` (beside Gloo and MPI);
``demo`` (a cluster to disturb from its dashboard).

May import: every room above it.
"""

PUBLIC = (
    "bench.contest",
    "chaos.campaign",
    "chaos.processes",
    "chaos.run",
    "demo",
    "papers.catalog",
    "papers.experiment",
)
"""Modules that other rooms may import."""
