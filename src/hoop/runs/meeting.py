"""A run whose processes a scheduler started: credentials and device of a rank, and the meeting at rank 0's coordinator.

    every rank   ── joins as device RANK + 1 (rank_device) ──▶ coordinator of rank 0, at the meeting point
    rank 0       ── wait_for_ranks ──▶ all are there: the job starts
    rank 0       ── dismiss_ranks ──▶ every other rank leaves, and ends with the exit code of the run

``runs/training.py`` calls the last two in the head process of rank 0. The other ranks are in ``cli/rank_device.py``.
``hoop.elastic`` runs a rank's device inside the user's process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hoop.client.cluster import Cluster, DrainProgress
from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument, PeerLost
from hoop.resources import TRAINING, largest_arena
from hoop.schedulers.base import Placement
from hoop.servers.advertised_address import wildcard_towards
from hoop.servers.device import DeviceConfig
from hoop.topology import PortRange
from hoop.wire.auth import Credentials, find_credentials
from hoop.wire.roles import Role

LOOK_S = 1.0
"""Seconds between two checks, while ranks are awaited, whether the run is to stop."""
DISMISS_S = 60.0
"""Seconds that a rank that is dismissed may take to leave."""
DISMISSED_AT_ONCE = 32


def rank_credentials(placement: Placement, token_file: Path | None = None) -> Credentials:
    """The credentials of this rank; without credentials only if all ranks are processes of this user on this host."""
    found = find_credentials(Role.DEVICE if placement.rank else Role.COORDINATOR, token_file=token_file)
    if found.given is not None:
        raise InvalidArgument(
            "HOOP_TLS: ranks that a scheduler started use a token, not certificates (HOOP_TOKEN_FILE)"
        )
    assert placement.meeting_point is not None, "checked by find_placement"
    if not found.required and not placement.meeting_point.is_loopback:
        raise InvalidArgument(
            f"token: the ranks of this run meet at {placement.meeting_point}, which other machines reach, and there is "
            "no token; make one with: hoop token FILE, in a folder that all hosts share, and set HOOP_TOKEN_FILE to "
            "it, or HOOP_TOKEN to its text"
        )
    return found


def rank_device(
    placement: Placement,
    memory: int | None,
    credentials: Credentials,
    timeout_s: float,
    host: str = "",
    ports: PortRange | None = None,
) -> DeviceConfig:
    """The device of this rank. ``host``: the address that it listens on; empty: all, or loopback if all meet there.

    ``memory``: bytes of its arena; None: it grows with what the job needs, up to the rank's share of this machine.
    """
    point = placement.meeting_point
    assert point is not None, "checked by find_placement"
    return DeviceConfig(
        point,
        memory=memory or largest_arena(placement.local_world_size, TRAINING),
        grows=memory is None,
        host=host or (point.host if point.is_loopback else wildcard_towards(point.host)),
        port=ports or PortRange(),
        data_port=ports or PortRange(),
        device_id=placement.device_id,
        join_timeout_s=timeout_s,
        credentials=credentials,
    )


def wait_for_ranks(
    cluster: Cluster, placement: Placement, timeout_s: float, stopping: Callable[[], bool], count: int | None = None
) -> None:
    """Returns when the devices of ``count`` ranks are there; None: of all. Raises DeadlineExceeded, with the ranks that
    did not come.

    ``stopping``: whether the run is to stop; then it raises PeerLost.
    """
    enough = min(count or placement.world_size, placement.world_size)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            cluster.wait_for_devices(enough, max(0.1, min(LOOK_S, deadline - time.monotonic())))
            return
        except DeadlineExceeded:
            alive = [one.device for one in cluster.status().devices if one.state == "alive"]
        missing = sorted({*range(placement.world_size)} - {one.device_id - 1 for one in alive})
        if stopping():
            raise PeerLost(f"stopped while it waited for {_ranks(missing)} of {placement.world_size}")
        if missing and time.monotonic() >= deadline:
            hosts = ", ".join(sorted({one.host for one in alive}))
            point = placement.meeting_point
            needed = f", and {enough} are needed" if enough < placement.world_size else ""
            raise DeadlineExceeded(
                f"{_ranks(missing)} of {placement.world_size} did not come to {point} within {timeout_s:g} s; "
                f"{len(alive)} are there, from {hosts}{needed}. What a missing rank printed says why; its host needs "
                f"Hoop, the same token, and a way to {point} (--meet names another address, --meet-timeout waits "
                "longer)"
            )


def dismiss_ranks(cluster: Cluster, own: int, exit_code: int) -> None:
    """Makes every device but ``own`` leave, and its process end with ``exit_code``. Returns when they have left."""
    others = [one.device.device_id for one in cluster.status().devices if one.state != "dead"]
    deadline = time.monotonic() + DISMISS_S

    def until_deadline(_: DrainProgress) -> None:
        if time.monotonic() > deadline:
            raise DeadlineExceeded("a rank did not leave")

    def dismiss(device_id: int) -> None:
        with contextlib.suppress(HoopError):  # it is lost, or leaves already
            cluster.drain(device_id, timeout=0.0, progress=until_deadline, exit_code=exit_code)

    with ThreadPoolExecutor(DISMISSED_AT_ONCE) as pool:
        for device_id in others:
            if device_id != own:
                pool.submit(partial(dismiss, device_id))


def _ranks(numbers: list[int]) -> str:
    return (
        f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:20]))}{' …' if len(numbers) > 20 else ''}"
    )
