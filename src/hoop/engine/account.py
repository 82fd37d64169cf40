"""What a rank's part in a job took: told once, at the end."""

from __future__ import annotations

from typing import Any

from hoop.engine.worker import Worker


def account(worker: Worker, seconds: float, done: int, stopped: bool) -> dict[str, Any]:
    """Time by kind of work, bytes, memory, and the first steps' instructions, each with its place in time."""
    return {
        "kind": "account",
        "rank": worker.rank,
        "seconds": seconds,
        "shares": worker.clock.seconds,
        "instructions": worker.clock.instructions,
        "bytes_sent": worker.bytes_sent,
        "memory": worker.world.arena.used,
        "spans": worker.clock.spans,
        "done": done,
        "stopped": stopped,
    }
