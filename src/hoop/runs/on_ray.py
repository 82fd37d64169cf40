"""A training on Ray: starts the actors, waits until there are enough devices, and names the job's code to them.

``runs/training.py`` calls these functions, and then follows the job as on any cluster. The actors are in
``launch/ray_cluster.py``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hoop.client.cluster import Cluster, connect
from hoop.engine.entrypoint import train_rank
from hoop.errors import DeadlineExceeded, InvalidArgument, PeerLost
from hoop.launch.ray_cluster import DeviceCode, RayCluster
from hoop.runs.by_value import Encoded
from hoop.runs.job_lookup import load_for_devices
from hoop.servers.tasks import TrainFunction
from hoop.texts import counted
from hoop.topology import Address

LOOK_S = 0.5
"""Seconds between two looks, while devices are awaited, at Ray's actors and whether the run is to stop."""
REPORT_S = 5.0
PATIENCE_S = 10.0
"""Seconds that an elastic job with its least number of devices waits for those with which it should start."""
IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that ``ray job submit`` sets, which has brought the program's folder to all nodes."""


def device_code(name: str, job: Encoded | None) -> DeviceCode:
    """How a device of Ray's finds a job: ``job`` if it was made of a program's objects, else by its name.

    A job in a file is found in the working directory of the actors. Ray brings the file's folder there, unless
    ``ray job submit`` has brought the current folder, which must contain the file then.
    """
    where, colon, _ = name.rpartition(":")
    if job is not None:
        return DeviceCode(trainer_of_given, (name, job))
    if not colon or not where.endswith(".py"):
        return DeviceCode(trainer)
    folder = Path(where).resolve().parent
    if IN_RAY_JOB not in os.environ:
        return DeviceCode(trainer, working_dir=folder)
    if not folder.is_relative_to(Path.cwd()):
        raise InvalidArgument(f"job: {where} is not below {Path.cwd()}, the folder that ray job submit has sent")
    return DeviceCode(trainer, jobs=str(folder.relative_to(Path.cwd())))


def trainer(_: None, jobs: str) -> TrainFunction:
    """The train function of a device that finds jobs by their names. An actor calls this in its working directory."""
    return partial(train_rank, jobs=Path(jobs).resolve())


def trainer_of_given(payload: tuple[str, Encoded], jobs: str) -> TrainFunction:
    """The train function of a device that Ray has brought the job to."""
    load_for_devices(*payload)
    return partial(train_rank, jobs=Path(jobs).resolve())


def waiting_for_devices(ray: RayCluster, address: Address, stopping: Callable[[], bool]) -> Iterator[str]:
    """Waits until the devices are there that the job starts with; yields what it waits for, every few seconds.

    Raises DeadlineExceeded, with what the devices need and Ray has, or PeerLost if ``stopping``.
    """
    where, began = ray.where, time.monotonic()
    reported, enough_since = began, None
    with connect(address, credentials=ray.credentials, connect_timeout=where.timeout_s) as cluster:
        while (there := _alive(cluster, where.start)) < where.start:
            ray.check()
            now = time.monotonic()
            enough_since = None if there < where.least else enough_since or now
            if enough_since is not None and now - enough_since > PATIENCE_S:
                yield f"starting with {counted(there, 'device')}; up to {where.most} join as Ray finds room for them"
                return
            if stopping():
                raise PeerLost(
                    f"stopped while it waited for {counted(where.start, 'device')} on Ray; {there} were there"
                )
            if now - began > where.timeout_s:
                raise DeadlineExceeded(
                    f"ray: {there} of {counted(where.start, 'device')} were there after {where.timeout_s:g} s; "
                    f"{ray.shortage()}; add nodes, or ask for fewer devices or less for each (--devices, "
                    "--ray-cpus, --ray-gpus)"
                )
            if now - reported > REPORT_S:
                reported = now
                yield f"{there} of {counted(where.start, 'device')} are there; {ray.shortage()}"


def _alive(cluster: Cluster, count: int) -> int:
    """The number of devices that are alive; waits a little for ``count``."""
    with contextlib.suppress(DeadlineExceeded):
        cluster.wait_for_devices(count, LOOK_S)
    return sum(one.state == "alive" for one in cluster.status().devices)
