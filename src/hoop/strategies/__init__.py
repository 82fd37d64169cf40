"""Parallel strategies: data parallel, parameter server, ring, pipeline, hybrid. Each returns a plan, or rules.
A strategy runs nothing.

May import: plan.
"""

PUBLIC = (
    "balancing",
    "base",
    "catalog",
    "data_parallel",
    "hybrid",
    "memory_fit",
    "parameter_server",
    "pipeline",
    "ring",
)
"""Modules that other rooms may import."""
