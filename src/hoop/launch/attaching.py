"""Coming back to a job that runs on a cluster, or has ended there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hoop.client.cluster import Cluster, connect
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition, NotFound
from hoop.launch.conducting import Conducting
from hoop.launch.recording import saved_settings
from hoop.launch.training import AWAY_S
from hoop.topology import Addresses
from hoop.wire.generated import hoop_pb2 as pb


def find(cluster: Cluster, job_id: int | None) -> pb.Job:
    """The job of this number; without one, the only one that runs, or else the last."""
    known = {one.id: one for one in cluster.status().jobs}
    running = [one for one in known.values() if one.status == "running"]
    if job_id is not None and job_id not in known:
        raise NotFound(f"job: {job_id} is unknown at {cluster.address}; known: {sorted(known) or 'none'}")
    if not known:
        raise NotFound(f"job: none was started at {cluster.address}; see hoop train --coordinator --detach")
    if job_id is None and len(running) > 1:
        numbers = ", ".join(str(one.id) for one in running)
        raise FailedPrecondition(f"job: several run at {cluster.address}: {numbers}; name one of them")
    return known[job_id or (running or list(known.values()))[-1].id]


def attach(
    address: Addresses, job_id: int | None, out: Path | None = None, stop: bool = False
) -> Iterator[dict[str, Any]]:
    """Everything that a job told, and tells, from its beginning to its result; ``out`` gets its files.

    It is never stopped by whoever attached, unless ``stop`` asks it to, after a step.
    """
    with connect(address) as cluster:
        job = find(cluster, job_id)
        settings = Settings.from_json(cluster.job_settings(job.id))
        if out is not None and (out / "config.json").exists() and saved_settings(out)[0] != settings:
            raise FailedPrecondition(f"--out: {out} holds another run than job {job.id}; name another folder")
        conducting = Conducting(
            cluster, settings, list(job.device_ids), out, attached=job.id, patience=AWAY_S
        )
        if stop and job.status == "running":
            conducting.job.stop(AWAY_S)
        yield {
            "kind": "attached",
            "job": job.id,
            "name": job.name,
            "status": job.status,
        }
        yield from conducting.events()
