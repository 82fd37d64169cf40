"""Collective operations: plans for every algorithm, the executors that run them, reductions, compression, work queues.
A communicator is one rank's view of a group of ranks.

May import: memory native transport.
"""

PUBLIC = (
    "communicator",
    "compression",
    "link_executor",
    "ordered_all_reduce",
    "ordered_multi_host",
    "plan",
    "rank_context",
    "reduction",
    "registry",
    "selection",
    "shard_tree",
    "sharded_reduction",
    "work_queue",
)
"""Modules that other rooms may import."""
