"""Where the devices of ``hoop train`` come from: this machine, a cluster that is up, a scheduler's processes, or Ray.

find_devices(options) -> DeviceSource        checks the options that name a source: one of four, and what fits to it
DeviceSource.place(launch) -> Launch         the run, on these devices
run_rank_of_scheduler                        a process of a scheduler with a rank other than 0: it is a device
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoop import torch_versions
from hoop.cli import options
from hoop.config import parse_duration
from hoop.errors import HoopError, InvalidArgument
from hoop.resources import LEAST_GROWING, TRAINING, Request, admit
from hoop.schedulers.catalog import RAY, find_placement
from hoop.topology import Address, Addresses, DeviceRange, PortRange

if TYPE_CHECKING:
    from hoop.launch.ray_cluster import Ray
    from hoop.runs.training import Launch
    from hoop.schedulers.base import Placement
    from hoop.wire.auth import Credentials


@dataclass(frozen=True)
class SchedulerOptions:
    """The options of the panel Schedulers, as they were given."""

    on: str | None
    meet: str | None
    port: int | None
    meet_timeout: str
    interface: str | None
    device_ports: str | None


@dataclass(frozen=True)
class DeviceSource:
    """Where the devices come from. Without coordinator, placement and Ray: forked from this process."""

    devices: int | None
    """Number of devices with which the run begins; None: not given."""
    timeout_s: float
    """Seconds that ranks wait for each other, and that a range of devices is waited for until its first number is
    there."""
    coordinator: Addresses | None = None
    """Address of the coordinator of a cluster that is up."""
    placement: Placement | None = None
    """This process's rank, if a scheduler started it."""
    ray: Ray | None = None
    credentials: Credentials | None = None
    """Credentials for the cluster, or for the coordinator of rank 0 (``with_credentials``)."""
    host: str = ""
    """Only with a placement: the address that this rank's device listens on; empty: all addresses, or loopback."""
    ports: PortRange = field(default_factory=PortRange)

    @property
    def forked(self) -> bool:
        """Devices are forked from this process, also that of rank 0, and share the data that it has loaded."""
        return self.coordinator is None and self.ray is None

    def check_restarts(self, max_restarts: int | None) -> None:
        """Raises InvalidArgument if ``--max-restarts`` is wrong, or has no effect on these devices; None: not given."""
        if max_restarts is not None:
            from hoop.runs.training import check_restarts

            check_restarts(max_restarts, self.coordinator or self.placement or self.ray)

    def with_credentials(self, token_file: Path | None, tls: Path | None) -> DeviceSource:
        """This, with the credentials of the cluster, or those that the ranks of a scheduler share."""
        if self.coordinator is None and ((token_file and self.placement is None) or tls):
            raise InvalidArgument("--token-file, --tls: for a cluster that is up, with --coordinator")
        if self.placement is not None:
            from hoop.runs.meeting import rank_credentials

            return replace(self, credentials=rank_credentials(self.placement, token_file))
        if self.coordinator is None:
            return self
        from hoop.wire.auth import find_credentials
        from hoop.wire.roles import Role

        return replace(self, credentials=find_credentials(Role.CLIENT, token_file=token_file, tls=tls))

    def admit(self, memory: int | None) -> None:
        """Refuses more devices than this machine has memory for. One process of a host checks for all of them.

        ``memory``: bytes of a device's arena; None: it grows with what the job needs.
        """
        memory = memory or LEAST_GROWING
        if self.placement is not None:
            if self.placement.local_rank == 0:
                processes = self.placement.local_world_size
                admit(Request(processes, memory, TRAINING, options=("processes on this host", "--memory")))
        elif self.forked and self.devices is not None:
            admit(Request(self.devices, memory, options=("--devices", "--memory")))

    def place(self, launch: Launch) -> Launch:
        """The run on these devices. ``launch.devices`` is how many it begins with."""
        launch = replace(
            launch,
            coordinator=self.coordinator,
            placement=self.placement,
            credentials=self.credentials,
            device_host=self.host,
            device_ports=self.ports,
            meet_timeout_s=self.timeout_s,
        )
        if self.ray is None:
            return launch
        from hoop.runs.device_count import DEFAULT_DEVICES

        return replace(launch, ray=self.ray.with_range(DeviceRange(launch.devices or DEFAULT_DEVICES)))


def find_devices(
    scheduler: SchedulerOptions,
    ray: Mapping[str, Any],
    coordinator: str | None,
    wanted: DeviceRange | None,
) -> DeviceSource:
    """Where the devices of this command come from; raises InvalidArgument for options that exclude each other.

    ``ray``: the options of the panel Ray, by the name of ``hoop.Ray``'s field; None: not given.
    """
    there = Addresses.parse(coordinator, "--coordinator") if coordinator else None
    placement = _placement(scheduler, wanted, there)
    timeout_s = parse_duration(scheduler.meet_timeout, "--meet-timeout")
    cluster = _ray(scheduler.on, wanted, timeout_s, ray)
    host, ports = _listening(placement, scheduler.interface, scheduler.device_ports)
    devices = wanted.first if wanted else placement.world_size if placement is not None else None
    return DeviceSource(devices, timeout_s, there, placement, cluster, host=host, ports=ports)


def _placement(scheduler: SchedulerOptions, devices: DeviceRange | None, there: Addresses | None) -> Placement | None:
    """The place of this process in a run that a scheduler started; None: it is a run of its own, or a client."""
    if there is not None:
        if scheduler.on is not None:
            raise InvalidArgument(
                "--on: with --coordinator the devices are those of that cluster; leave out one of them"
            )
        return None
    meet = Address.parse(scheduler.meet, "--meet") if scheduler.meet else None
    placement = find_placement(os.environ, scheduler.on, meet, scheduler.port)
    if placement is None or devices is None:
        return placement
    size = placement.world_size
    if devices.first > size or (devices.most or devices.first) < size:
        raise InvalidArgument(
            f"--devices: {devices}, where {placement.scheduler} has started {size} processes, each of "
            f"which is a device; leave it out, give a range such as 1:{size}, or add --on local for a run of this "
            "process alone"
        )
    return placement


def _listening(placement: Placement | None, interface: str | None, ports: str | None) -> tuple[str, PortRange]:
    """The address and the ports that this rank's device listens on; an empty address: all, or loopback."""
    if placement is None:
        if interface is not None or ports is not None:
            raise InvalidArgument(
                f"{'--interface' if interface is not None else '--device-ports'}: for ranks that a scheduler started; "
                "devices of this machine use loopback, and hoop device has --interface, --port and --data-port"
            )
        return "", PortRange()
    chosen = PortRange.parse(ports, "--device-ports") if ports is not None else PortRange()
    if interface is None:
        return "", chosen
    from hoop.servers.advertised_address import interface_address

    assert placement.meeting_point is not None, "checked by find_placement"
    if placement.meeting_point.is_loopback:
        raise InvalidArgument(f"--interface: {interface}, where all ranks are on this host and meet on loopback")
    return interface_address(interface), chosen


def _ray(on: str | None, devices: DeviceRange | None, timeout_s: float, given: Mapping[str, Any]) -> Ray | None:
    """The options of a run on Ray; None: it is not on Ray, and must have none of them."""
    found = {name: value for name, value in given.items() if value is not None}
    if on != RAY:
        if found:
            raise InvalidArgument(f"{', '.join(f'--ray-{name}' for name in found)}: for --on {RAY}, which is missing")
        return None
    from hoop.launch.ray_cluster import Ray, import_ray

    import_ray()
    where = Ray(timeout_s=timeout_s, **found)
    return where if devices is None else where.with_range(devices)


def run_rank_of_scheduler(source: DeviceSource, job: str | None, changes: Mapping[str, Any], memory: int | None) -> int:
    """Loads the job and its data, and runs the device of a rank other than 0; returns the exit code.

    Errors name the rank and its host: the job's code or data may be missing on one of many.
    """
    torch_versions.check_version(torch_versions.installed_version())  # before these imports load it
    from hoop.cli.rank_device import run_rank
    from hoop.engine.entrypoint import train_rank
    from hoop.runs.job_lookup import load_job, with_absolute_path
    from hoop.runs.meeting import rank_device

    placement, credentials = source.placement, source.credentials
    assert placement is not None, "called for a process of a scheduler"
    assert credentials is not None, "a rank has some"
    assert placement.meeting_point is not None, "checked by find_placement"
    # What a user's own code prints goes to standard error, as in rank 0.
    with contextlib.redirect_stdout(sys.stderr):
        config = rank_device(placement, memory, credentials, source.timeout_s, source.host, source.ports)
        try:
            if job is not None:  # else rank 0 takes it from its run
                name = with_absolute_path(job)
                load_job(name).defaults(name).replaced(changes).check()
            return run_rank(placement.meeting_point, config, partial(train_rank, jobs=options.check_jobs(None)))
        except HoopError as error:
            raise type(error)(f"{placement} on {socket.gethostname()}: {error}") from None
