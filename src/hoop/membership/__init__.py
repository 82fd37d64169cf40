"""Who takes part: pure state machines, events in and instructions out, with time as an event.

    state_machine      devices, heartbeats, communicators of a cluster: ``step(state, event) -> state, instructions``
    job_membership     the coordinator's side of a job: ``advance(job, event, cluster, now) -> job, instructions``
    job_view           what the coordinator knows of a job, and questions about it
    task_membership    a device's side of a job: which rank assignment it uses, takes next, or waits for
    recovery           the agreement of all ranks: from which step, and which rank provides which state
    replication        which rank holds whose replica

Sockets, clocks and threads are in ``servers``; ``tests/model`` runs the same code under generated faults.

May import: wire plan.
"""

PUBLIC = (
    "events",
    "heartbeats",
    "job_membership",
    "journal",
    "reachability",
    "recovery",
    "replication",
    "state",
    "state_machine",
    "task_membership",
)
"""Modules that other rooms may import."""
