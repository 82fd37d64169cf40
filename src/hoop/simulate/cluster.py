"""The cluster of a simulation: hosts with devices and cores, and the links between them.

    host 0: devices 0 1 2 3 on 2 cores ──NIC──┐
    host 1: devices 4 5 6 7 on 2 cores ──NIC──┤ link: bandwidth and latency, each way

Ranks are assigned host by host. Devices of one host share its NIC, its cores and, without a link ``inside``, its
memory: then they reduce gradients in shared memory, as the engine does. With fewer cores than devices, devices are
assigned to cores in turn, as the engine pins them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hoop.config import parse_duration, parse_size
from hoop.errors import InvalidArgument, NotFound
from hoop.topology import MAX_DEVICES

_MAX_SPEED = 1e9
_BITS_PER_SECOND = {"bps": 1, "kbps": 10**3, "mbps": 10**6, "gbps": 10**9, "tbps": 10**12}


@dataclass(frozen=True)
class Link:
    """A full-duplex link: bandwidth and latency of each direction."""

    bandwidth: float
    """Bytes per second."""
    latency: float = 0.0
    """Seconds from sending the first byte to its arrival."""
    shared: bool = True
    """Whether the devices of a host share one NIC, or each device has its own."""

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise InvalidArgument(f"bandwidth: {self.bandwidth} is not above 0 bytes a second")
        if not self.latency >= 0:
            raise InvalidArgument(f"latency: {self.latency} is not 0 s or more")

    @classmethod
    def parse(cls, text: str, field: str = "link", shared: bool = True) -> Link:
        """Parses ``1Gbps,0.5ms``: bandwidth in bits or bytes (``125MB``) per second, and an optional latency."""
        speed, _, latency = text.partition(",")
        return cls(parse_bandwidth(speed, field), parse_duration(latency or 0.0, field), shared)

    def __str__(self) -> str:
        return f"{8 * self.bandwidth / 1e9:g} Gbit/s, {1e3 * self.latency:g} ms"


def parse_bandwidth(text: str, field: str = "bandwidth") -> float:
    """Bytes per second, parsed from ``10Gbps`` (bits), ``125MB`` or ``125MB/s`` (bytes)."""
    word = text.strip()
    for unit in sorted(_BITS_PER_SECOND, key=len, reverse=True):
        if word.lower().endswith(unit):
            number = word[: -len(unit)].strip()
            try:
                bandwidth = float(number) * _BITS_PER_SECOND[unit] / 8
            except ValueError:
                bandwidth = 0.0
            if not 0 < bandwidth < 1e18:
                raise _no_bandwidth(text, field)
            return bandwidth
    try:
        return float(parse_size(word.removesuffix("/s"), field))
    except InvalidArgument:
        raise _no_bandwidth(text, field) from None


def _no_bandwidth(text: str, field: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {text[:40]!r} is no bandwidth; write e.g. 1Gbps, 125MB/s")


@dataclass(frozen=True)
class Host:
    """One machine of the cluster and its devices."""

    devices: int = 1
    cores: int | None = None
    """None: one core per device."""
    speed: float = 1.0
    """Speed of a core, relative to the machine on which costs were measured."""
    memory: int | None = None
    """Bytes per device; None: unlimited."""
    speeds: tuple[float, ...] = ()
    """Additional speed factor of each device; empty: all 1."""
    gpus: int | None = None
    """GPUs of the host, which its devices take in turn; None: 1, if the costs are those of a GPU."""
    gpu_memory: int | None = None
    """Bytes of each GPU, which its devices share; None: as much as the GPU that costs were measured on."""

    def __post_init__(self) -> None:
        if self.devices < 1 or (self.cores is not None and self.cores < 1):
            raise InvalidArgument(f"host: {self.devices} devices on {self.cores} cores; both are at least 1")
        if self.gpus is not None and self.gpus < 1:
            raise InvalidArgument(f"gpus: {self.gpus} is not at least 1")
        if self.speeds and len(self.speeds) != self.devices:
            raise InvalidArgument(f"speeds: {len(self.speeds)} values for {self.devices} devices")
        if not self.speed > 0 or not all(one > 0 for one in self.speeds):
            raise InvalidArgument(f"speed: {self.speed} {list(self.speeds)} are not all above 0")


@dataclass(frozen=True)
class Cluster:
    """Hosts and the links that connect their devices."""

    hosts: tuple[Host, ...]
    link: Link = Link(1.25e8, 5e-4)
    """Between hosts; the default is 1 Gbit/s and 0.5 ms."""
    inside: Link | None = None
    """Between devices of one host; None: they share memory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if not self.hosts:
            raise InvalidArgument("hosts: none; a cluster has at least 1")
        if self.size > MAX_DEVICES:
            raise InvalidArgument(f"devices: {self.size} are more than the {MAX_DEVICES} of the largest cluster")

    @classmethod
    def even(cls, devices: int, per_host: int = 1, link: Link | None = None, **host: Any) -> Cluster:
        """A cluster of equal hosts with ``per_host`` devices each; the last host has the remainder.

        ``host``: fields of ``Host`` for every host.
        """
        if devices < 1 or per_host < 1:
            raise InvalidArgument(f"devices: {devices}, {per_host} a host; both are at least 1")
        if devices > MAX_DEVICES:
            raise InvalidArgument(f"devices: {devices} are more than the {MAX_DEVICES} of the largest cluster")
        counts = [min(per_host, devices - low) for low in range(0, devices, per_host)]
        hosts = tuple(Host(count, **host) for count in counts)
        return cls(hosts) if link is None else cls(hosts, link)

    @property
    def size(self) -> int:
        return sum(host.devices for host in self.hosts)

    @property
    def host_of(self) -> list[int]:
        """Each rank's host."""
        return [number for number, host in enumerate(self.hosts) for _ in range(host.devices)]

    @property
    def speeds(self) -> list[float]:
        """Each rank's speed."""
        return [
            host.speed * (host.speeds[index] if host.speeds else 1.0)
            for host in self.hosts
            for index in range(host.devices)
        ]

    @property
    def memory(self) -> list[int | None]:
        """Each rank's memory."""
        return [host.memory for host in self.hosts for _ in range(host.devices)]

    @property
    def gpu_memory(self) -> list[tuple[int | None, int]]:
        """For each rank: bytes of its GPU (None: unlimited), and how many devices share it."""
        return [
            (host.gpu_memory, -(-host.devices // (host.gpus or 1))) for host in self.hosts for _ in range(host.devices)
        ]

    def on_gpus(self, memory: int | None) -> Cluster:
        """The cluster whose devices compute on its GPUs: those of a GPU share it, as devices share a core.

        ``memory``: bytes of a GPU, where the host does not say.
        """
        hosts = tuple(
            replace(host, cores=host.gpus or 1, gpus=host.gpus or 1, gpu_memory=host.gpu_memory or memory)
            for host in self.hosts
        )
        return replace(self, hosts=hosts)

    def first(self, devices: int) -> Cluster:
        """The cluster reduced to its first ``devices`` devices."""
        if not 1 <= devices <= self.size:
            raise InvalidArgument(f"devices: {devices} of a cluster of {self.size}")
        hosts, remaining = [], devices
        for host in self.hosts:
            if remaining:
                count = min(remaining, host.devices)
                hosts.append(_with_devices(host, count))
                remaining -= count
        return Cluster(tuple(hosts), self.link, self.inside)

    def describe(self) -> str:
        many = f"{len(self.hosts)} hosts" if len(self.hosts) > 1 else "1 host"
        cores = sum(min(host.devices, host.cores or host.devices) for host in self.hosts)
        what = "cores" if not any(host.gpus for host in self.hosts) else "GPUs" if cores > 1 else "GPU"
        between = f", {self.link}" if len(self.hosts) > 1 else ""
        return f"{self.size} device{'s' if self.size > 1 else ''} on {cores} {what} of {many}{between}"


def _with_devices(host: Host, count: int) -> Host:
    return replace(host, devices=count, speeds=host.speeds[:count])


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster from a TOML file (example in docs/simulator.md); errors name the unknown or malformed field."""
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFound(f"--cluster: there is no file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{path}: not TOML: {error}") from None
    try:
        return _cluster(data)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None


def _cluster(data: Mapping[str, Any]) -> Cluster:
    _check_fields(data, ("link", "inside", "host"), "cluster")
    hosts = data.get("host", [])
    if not isinstance(hosts, list) or not hosts:
        raise InvalidArgument("no [[host]]; give at least one, e.g. [[host]] devices = 4")
    found: list[Host] = []
    for number, one in enumerate(hosts):
        found += _hosts(one, f"host {number}")
    links = {name: _link(data[name], name) for name in ("link", "inside") if name in data}
    return Cluster(tuple(found), **links)


def _hosts(data: Any, where: str) -> list[Host]:
    own = [field.name for field in fields(Host)]
    _check_fields(data, [*own, "count"], where)
    values = dict(data)
    for name in ("devices", "cores", "count", "gpus"):
        if name in values:
            _check_whole(values[name], f"{where}: {name}")
    for number in (values.get("speed", 1.0), *_speeds(values, where)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < _MAX_SPEED:
            raise InvalidArgument(f"{where}: speed: {number!r} is not a number above 0 and below {_MAX_SPEED:g}")
    for name in ("memory", "gpu_memory"):
        if name in values:
            values[name] = parse_size(values[name], f"{where}: {name}")
    if "speeds" in values:
        values["speeds"] = tuple(values["speeds"])
    count = values.pop("count", 1)
    try:
        return [Host(**values)] * int(count)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None


def _speeds(values: Mapping[str, Any], where: str) -> list[Any]:
    found = values.get("speeds", [])
    if not isinstance(found, list):
        raise InvalidArgument(f"{where}: speeds: {found!r} is not a list, one number a device")
    return found


def _check_whole(value: Any, field: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DEVICES:
        raise InvalidArgument(f"{field}: {value!r} is not a whole number in 1..{MAX_DEVICES}")


def _link(data: Any, where: str) -> Link:
    if isinstance(data, str):
        return Link.parse(data, where)
    if not isinstance(data, Mapping):
        raise InvalidArgument(f'{where}: {data!r} is no link; write "1Gbps,0.5ms" or a table')
    _check_fields(data, ("bandwidth", "latency", "shared"), where)
    shared = data.get("shared", True)
    if not isinstance(shared, bool):
        raise InvalidArgument(f"{where}: shared: {shared!r} is neither true nor false")
    latency = parse_duration(data.get("latency", 0.0), f"{where}: latency")
    return Link(parse_bandwidth(str(data.get("bandwidth", "")), f"{where}: bandwidth"), latency, shared)


def _check_fields(data: Any, names: Sequence[str], where: str) -> None:
    if not isinstance(data, Mapping):
        raise InvalidArgument(f"{where}: {data!r} is no table; it has {', '.join(names)}")
    if unknown := sorted(set(data) - set(names)):
        raise InvalidArgument(f"{where}: unknown {', '.join(unknown)}; there is {', '.join(names)}")
