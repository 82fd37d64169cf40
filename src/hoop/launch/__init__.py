"""Starts clusters: ``local`` (subprocesses), ``forked`` (processes forked after PyTorch is loaded), ``ray_cluster``
(actors of a Ray cluster). Jobs are unknown here.

May import: memory wire membership servers.
"""

PUBLIC = ("forked", "local", "mps", "processes", "ray_cluster")
"""Modules that other rooms may import."""
