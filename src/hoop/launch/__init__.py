"""Starts clusters: ``local`` (subprocesses), ``forked`` (processes forked after PyTorch is loaded), ``ray_cluster``
(actors of a Ray cluster), ``rank_processes`` (the ranks of any program). Jobs are unknown here.

May import: memory wire transport membership servers.
"""

PUBLIC = (
    "forked",
    "local",
    "mps",
    "processes",
    "rank_processes",
    "ray_cluster",
    "rendezvous_client",
    "rendezvous_server",
    "run_coordinator",
)
"""Modules that other rooms may import."""
