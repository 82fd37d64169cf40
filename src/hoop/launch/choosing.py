"""Which devices of a cluster a job gets."""

from __future__ import annotations

from hoop.client.cluster import Cluster
from hoop.errors import FailedPrecondition
from hoop.topology import DeviceInfo
from hoop.wire.convert import device_info


def members(cluster: Cluster) -> dict[int, DeviceInfo]:
    """The devices that are alive, by id."""
    alive = [one for one in cluster.status().devices if one.state == "alive"]
    return {one.device.device_id: device_info(one.device) for one in alive}


def chosen(cluster: Cluster, count: int | None) -> list[int]:
    """So many devices of a cluster, or all of them."""
    alive = sorted(members(cluster))
    if not alive or (count or 0) > len(alive):
        raise FailedPrecondition(
            f"devices: {count or 'at least 1'} asked for, {len(alive)} are alive at {cluster.address}; "
            f"start more with: hoop device --join {cluster.address}"
        )
    return alive[: count or len(alive)]
