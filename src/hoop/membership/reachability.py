"""Which devices cannot connect to each other, by the checks that follow a join. Pure: no clock, no I/O.

``servers.link_checks`` tries connections and reports them by the event ``LinksChecked``; ``State.unreachable`` holds
those that failed. A link between two devices needs both directions, because each end connects to the other. Devices
that share memory need neither.

The job does without the device to which most others cannot connect, else the one with the higher id, until no failed
connection is left. The coordinator uses no data port: where only it fails to connect, that is reported and no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from hoop.membership.state import COORDINATOR, Connection, State
from hoop.topology import DeviceInfo


def share_memory(one: DeviceInfo, other: DeviceInfo) -> bool:
    """Whether the two are on one host and need no connection for their links."""
    return (
        one.shared_address is not None
        and other.shared_address is not None
        and one.shared_address.host == other.shared_address.host
    )


def left_out(state: State, device_ids: Collection[int]) -> list[int]:
    """The devices without which all others of ``device_ids`` can connect to each other."""
    failed = [one for one in _failed(state) if one.target in device_ids]
    found = {one.target for one in failed if not one.data}
    pairs = [one for one in failed if one.data and one.source in device_ids]
    while pairs := [one for one in pairs if not found & {one.source, one.target}]:
        against = Counter(one.target for one in pairs)
        involved = {key for one in pairs for key in (one.source, one.target)}
        found.add(max(involved, key=lambda key: (against[key], key)))
    return sorted(found)


def cut_off(state: State, device_id: int, members: Collection[int]) -> bool:
    """Whether a device cannot join these members, because a connection between it and one of them failed."""
    for one in _failed(state):
        if one.data and {one.source, one.target} <= {device_id, *members} and device_id in (one.source, one.target):
            return True
        if not one.data and one.target == device_id:
            return True
    return False


def describe(state: State, device_id: int) -> str:
    """The failed connections to a device, else from it, and the remedy; empty if there is none."""
    failed = [one for one in state.unreachable if _usable(state, one)]
    to_device = [one for one in failed if one.target == device_id]
    if to_device:
        return describe_failures(state, device_id, to_device)
    from_device = [one for one in failed if one.source == device_id]
    return "; ".join(
        f"it cannot connect to the data port {info.data_address} of device {one.target} ({state.unreachable[one]})"
        for one in from_device
        if (info := state.members[one.target].info)
    )


def describe_failures(state: State, device_id: int, failed: Collection[Connection]) -> str:
    """Who cannot connect to a device, why, and the remedy."""
    info, texts = state.members[device_id].info, []
    for data, what, option in ((False, "services", "--advertise"), (True, "data port", "--advertise-data")):
        chosen = sorted(one for one in failed if one.data == data)
        if not chosen:
            continue
        sources = [_source(state, one.source) for one in chosen[:4]]
        sources += [f"{len(chosen) - 4} more"] if len(chosen) > 4 else []
        address = info.data_address if data else info.address
        reasons = sorted({state.unreachable[one] for one in chosen})
        texts.append(
            f"{' and '.join(sources)} cannot connect to its {what} at {address} ({', '.join(reasons)}): open port "
            f"{address.port} there, or name an address that leads to it with hoop device {option} HOST:PORT"
        )
    return "; ".join(texts)


def _source(state: State, device_id: int) -> str:
    if device_id == COORDINATOR:
        return "the coordinator"
    return f"device {device_id} ({state.members[device_id].info.address.host})"


def _failed(state: State) -> list[Connection]:
    """The failed connections that matter to jobs: all but those of the coordinator to data ports."""
    return [one for one in state.unreachable if _usable(state, one) and (one.source != COORDINATOR or not one.data)]


def _usable(state: State, one: Connection) -> bool:
    """Whether both ends are members that are alive."""
    ends = [key for key in (one.source, one.target) if key != COORDINATOR]
    return all(key in state.members and state.members[key].usable for key in ends)


def without_device(unreachable: Mapping[Connection, str], device_id: int) -> dict[Connection, str]:
    return {one: text for one, text in unreachable.items() if device_id not in (one.source, one.target)}
