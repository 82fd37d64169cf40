"""``hoop doctor``: checks what a training needs, on this machine or on a cluster, and says what to do.

    examine_machine     this machine: versions, memory, /dev/shm, ports, open files, processor, GPU, a job and its data
    examine_cluster     a coordinator and its devices: connections, versions, processors, clocks, and the checks of
                        ``examine_machine`` that a device of each host runs (``servers/host_examination.py``)

Each check has a verdict: a problem keeps a training from running, a warning does not. ``cli/doctor.py`` prints them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoop import torch_versions
from hoop.client.cluster import Cluster, connect
from hoop.config import format_size
from hoop.environment import ARITHMETIC, PROCESSOR, REMEDIES, describe, differing, versions
from hoop.errors import HoopError
from hoop.events import wall_clock
from hoop.native import library
from hoop.resources import (
    SHARED_MEMORY,
    TRAINING,
    Footprint,
    Request,
    Resources,
    admission_error,
    can_listen,
    measure_resources,
)
from hoop.texts import counted, parse_json, printable
from hoop.topology import Address, Addresses, PortRange
from hoop.wire.generated import hoop_pb2 as pb

if TYPE_CHECKING:
    from hoop.wire.auth import Credentials

CLOCK_S = 1.0
"""Difference of clocks in seconds that gives a warning: the times of events of several hosts cannot be compared."""
CONNECT_S = 5.0
Say = Callable[[str], None]


class Verdict(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
    """Advice on what to do; empty if nothing has to be done."""
    host: str = ""
    """Name of the host; empty: this machine, or the whole cluster."""


@dataclass(frozen=True)
class Examination:
    """All checks, and facts of the machine to compare with other machines."""

    checks: tuple[Check, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> int:
        return sum(one.verdict is Verdict.PROBLEM for one in self.checks)

    def to_json(self) -> str:
        checks = [asdict(one) for one in self.checks]
        return json.dumps({"ok": not self.problems, "facts": dict(self.facts), "checks": checks})


@dataclass(frozen=True)
class MachineOptions:
    """What a machine is to be used for."""

    devices: int = 4
    memory: int = 256 << 20
    """Bytes of each device's arena; 0: the devices run already."""
    host: str = "127.0.0.1"
    port: PortRange = field(default_factory=PortRange)
    data_port: PortRange = field(default_factory=PortRange)
    job: str = ""
    jobs: Path | None = None
    """Folder with the code of jobs, as a device has it; None: the job is named as in ``hoop train``."""


# ---- this machine


def examine_machine(options: MachineOptions, say: Say) -> Examination:
    """Checks this machine. It loads PyTorch, and the job's code and data if one is named."""
    resources = measure_resources()
    checks = [_check_versions(), *_check_memory(options, resources), _check_open_files(resources)]
    checks += _check_ports(options)
    say("loading PyTorch …")
    facts = {"host": socket.gethostname(), **versions(), **_arithmetic()}
    checks.append(Check("processor", Verdict.OK, facts[PROCESSOR]))
    checks.append(_check_gpu())
    checks.append(_check_native())
    if options.job:
        say(f"loading {options.job} and its data …")
        check, fingerprint = _check_job(options)
        checks.append(check)
        facts |= {"data": fingerprint} if fingerprint else {}
    return Examination(tuple(checks), facts)


def _check_versions() -> Check:
    found = versions()
    text = describe(found, ["hoop", "torch", "python"])
    try:
        warning = torch_versions.check_version(torch_versions.installed_version())
    except HoopError as error:
        return Check("versions", Verdict.PROBLEM, text, str(error))
    return Check("versions", Verdict.WARNING if warning else Verdict.OK, text, warning or "")


def _arithmetic() -> dict[str, str]:
    """What is compared between machines: the numeric probe, as devices of one core compute it, and the processor."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is loaded, as a device does
    from hoop.engine.numeric_probe import rank_environment

    found = rank_environment()
    return {key: found[key] for key in (ARITHMETIC, PROCESSOR)}


def _check_memory(options: MachineOptions, resources: Resources) -> Iterator[Check]:
    footprint: Footprint = TRAINING if not options.memory else Request(1, 0).footprint
    request = Request(options.devices, options.memory, footprint, options=("--devices", "--memory"))
    available = "unknown" if resources.memory is None else format_size(resources.memory)
    size = f"of {format_size(options.memory)}" if options.memory else "that run"
    what = f"{counted(options.devices, 'device')} {size}"
    error = admission_error(request, resources)
    yield Check(
        "memory",
        Verdict.PROBLEM if error else Verdict.OK,
        f"{what}; {available} available",
        str(error) if error else "",
    )
    free, needed = resources.shared_memory, options.devices * options.memory
    found = "not there, or not writable" if free == 0 else "no limit" if free is None else f"{format_size(free)} free"
    if free is None or needed <= free:
        yield Check(str(SHARED_MEMORY), Verdict.OK, found)
        return
    yield Check(
        str(SHARED_MEMORY),
        Verdict.WARNING,
        f"{found}; {what} need {format_size(needed)}",
        f"arenas that do not fit are files in the temporary directory, and slower; enlarge it: mount -o "
        f"remount,size={-(-needed >> 30) + 1}G {SHARED_MEMORY}, docker run --shm-size, or an emptyDir of medium Memory",
    )


def _check_open_files(resources: Resources) -> Check:
    limit = resources.descriptors
    found = "no limit" if limit is None else f"up to {limit} a process"
    if limit is not None and limit < 1024:
        return Check("open files", Verdict.WARNING, found, "raise the hard limit: ulimit -Hn 65536, or LimitNOFILE=")
    return Check("open files", Verdict.OK, found)


def _check_ports(options: MachineOptions) -> Iterator[Check]:
    """Whether the ports that a device is to listen on are free; a free port is found if none is named."""
    for name, ports in (("port", options.port), ("data port", options.data_port)):
        free = [port for port in ports.ports if can_listen(options.host, port)]
        wanted = "any" if not ports.low else str(ports)
        if len(free) == len(ports.ports):
            yield Check(name, Verdict.OK, f"{options.host}, {wanted}: free")
        elif free:
            yield Check(name, Verdict.OK, f"{options.host}, {wanted}: {len(free)} of {len(ports.ports)} are free")
        else:
            yield Check(
                name,
                Verdict.PROBLEM,
                f"{options.host}, {wanted}: cannot be listened on",
                f"another process has it (ss -ltnp), or {options.host} is no address of this machine (ip address)",
            )


def _check_gpu() -> Check:
    import torch

    cards = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Check("GPU", Verdict.OK, ", ".join(names))
    if not cards:
        return Check("GPU", Verdict.OK, "none")
    built = f"PyTorch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "PyTorch is built without CUDA"
    remedy = "update the driver (nvidia-smi shows its version)" if torch.version.cuda else "install a CUDA build of it"
    return Check("GPU", Verdict.WARNING, f"{len(cards)}, and {built} that cannot use it", remedy)


def _check_native() -> Check:
    return Check("native core", Verdict.OK, library.status())


def _check_job(options: MachineOptions) -> tuple[Check, str]:
    """Whether the job's code and data are here; the data's fingerprint if they are."""
    from hoop.data.dataset import describe as describe_data
    from hoop.data.dataset import fingerprint
    from hoop.engine.job import job_for_a_device
    from hoop.engine.recipes import RECIPES
    from hoop.engine.user_code import attribute_exceptions
    from hoop.runs.job_lookup import load_job, with_absolute_path

    try:
        with attribute_exceptions(f"loading {options.job}"):
            if options.jobs is not None:
                job = job_for_a_device(options.job, RECIPES, options.jobs)
            else:
                job = load_job(with_absolute_path(options.job), load=False)
            data = job.data()
        return Check("job and data", Verdict.OK, f"{options.job}: {describe_data(data)}"), fingerprint(data)
    except HoopError as error:
        text = printable(str(error)).strip()
        return Check("job and data", Verdict.PROBLEM, f"{options.job} cannot be loaded", text[-600:]), ""


# ---- a cluster


def examine_cluster(address: Addresses, credentials: Credentials, job: str, say: Say) -> Examination:
    """Checks a coordinator, its devices and their hosts, as this client sees them."""
    try:
        with connect(address, connect_timeout=CONNECT_S, credentials=credentials) as cluster:
            began = time.monotonic()
            status = cluster.status()
            ahead, error = status.time - wall_clock(), time.monotonic() - began
            checks = [Check("coordinator", Verdict.OK, f"{status.address}, Hoop {status.hoop_version}")]
            checks += _check_client(status, ahead, error)
            say(f"asking the hosts of {counted(len(status.devices), 'device')} …")
            checks += [*_check_devices(cluster, status), *_check_hosts(cluster.examine_hosts(job))]
    except HoopError as error:
        remedy = (
            "is hoop coordinator running there, is its port open (docs/clusters.md#ports), and is the token its own?"
        )
        return Examination((Check("coordinator", Verdict.PROBLEM, f"{address}: {error}", remedy),))
    return Examination(tuple(checks), {"coordinator": str(address)})


def _check_client(status: pb.GetStatusResponse, ahead_s: float, error_s: float) -> Iterator[Check]:
    """This machine compared with the coordinator: its version and its clock."""
    here = versions().get("hoop", "")
    if status.hoop_version and here != status.hoop_version:
        text = f"Hoop {here} here, {status.hoop_version} at the coordinator"
        yield Check("versions", Verdict.PROBLEM, text, REMEDIES["hoop"])
    if (check := _clock(ahead_s, error_s, "the coordinator's clock", "this machine's")).verdict is not Verdict.OK:
        yield check


def _clock(ahead_s: float, error_s: float, whose: str, other: str, host: str = "") -> Check:
    text = f"{whose} is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} {other}"
    if abs(ahead_s) <= CLOCK_S + error_s:
        return Check("clock", Verdict.OK, f"within {CLOCK_S:g} s of {other}", host=host)
    remedy = "times in events and logs cannot be compared; synchronize the clocks (chronyd, ntpd, timedatectl set-ntp)"
    return Check("clock", Verdict.WARNING, text, remedy, host)


def _check_devices(cluster: Cluster, status: pb.GetStatusResponse) -> Iterator[Check]:
    alive = [one for one in status.devices if one.state in ("alive", "draining")]
    if not alive:
        start = f"start devices with: hoop device --join {cluster.address}"
        yield Check("devices", Verdict.PROBLEM, "none is alive", start)
        return
    yield Check("devices", Verdict.OK, f"{len(alive)} alive on {len({one.device.host for one in alive})} host(s)")
    for one in status.devices:
        name = f"device {one.device.device_id}"
        if one.state in ("suspect", "dead"):
            remedy = "restart it, or see what it printed"
            yield Check(name, Verdict.WARNING, f"{one.state}: {one.reason}", remedy, one.device.host)
        if one.unreachable:
            left_out = "jobs do without it: " if one.left_out else ""
            verdict = Verdict.PROBLEM if one.left_out else Verdict.WARNING
            yield Check("ports", verdict, f"{name}: {left_out}not reachable", one.unreachable, one.device.host)
        elif one in alive and (why := _cannot_connect(Address.parse(one.device.address))):
            yield Check(
                "ports",
                Verdict.WARNING,
                f"{name}: this machine cannot connect to {one.device.address} ({why})",
                "hoop train and hoop attach read checkpoints there: open the port, or run them on another machine",
                one.device.host,
            )
    yield from _check_equal((f"device {one.device.device_id}", one.device.host, _versions(one.device)) for one in alive)


def _versions(device: pb.DeviceDescription) -> dict[str, str]:
    found = {"hoop": device.hoop_version, "torch": device.torch_version, PROCESSOR: device.processor}
    return {key: value for key, value in found.items() if value}


def _check_equal(places: Iterable[tuple[str, str, Mapping[str, str]]]) -> Iterator[Check]:
    """Versions and processors of devices, compared with the first of them."""
    first: tuple[str, str, Mapping[str, str]] | None = None
    seen: set[tuple[str, str]] = set()
    differ = False
    for name, host, found in places:
        first = first or (name, host, found)
        for key in differing(found, first[2]):
            differ = True
            if (host, key) in seen:  # of many devices on one host, the first is named
                continue
            seen.add((host, key))
            text = f"{name} has {describe(found, [key])}, {first[0]} on {first[1]} has {describe(first[2], [key])}"
            if key in (PROCESSOR, ARITHMETIC):
                remedy = "the result is the same to rounding, not to the bit; hoop train --require-same-bits refuses it"
                yield Check("processor", Verdict.WARNING, text, remedy, host)
            else:
                yield Check("versions", Verdict.PROBLEM, text, REMEDIES[key], host)
    if first is not None and not differ:
        yield Check("versions", Verdict.OK, f"equal: {describe(first[2], ['hoop', 'torch'])}")


def _cannot_connect(address: Address) -> str:
    """Why this machine cannot connect to an address; empty if it can."""
    try:
        with contextlib.closing(socket.create_connection((address.host, address.port), CONNECT_S)):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _check_hosts(hosts: Iterable[pb.HostExamination]) -> Iterator[Check]:
    """The checks that each host ran, its clock, and a comparison of arithmetic and data."""
    arithmetic: list[tuple[str, str, Mapping[str, str]]] = []
    data: dict[str, str] = {}
    for one in hosts:
        if one.failure:
            remedy = "it runs hoop doctor there: see what the device printed, or run it by hand"
            yield Check("host", Verdict.PROBLEM, printable(one.failure, 500), remedy, one.host)
            continue
        yield _clock(one.clock_ahead_s, one.clock_error_s, "its clock", "the coordinator's", one.host)
        found, checks = read_examination(one.json)
        yield from (replace(check, host=one.host) for check in checks)
        if ARITHMETIC in found:
            arithmetic.append((one.host, one.host, {ARITHMETIC: found[ARITHMETIC]}))
        if "data" in found:
            data[one.host] = found["data"]
    yield from (one for one in _check_equal(arithmetic) if one.verdict is not Verdict.OK)
    if len(set(data.values())) > 1:
        text = ", ".join(f"{host}: {value}" for host, value in data.items())
        yield Check("job and data", Verdict.PROBLEM, f"the hosts have different data ({text})", "copy one to all")


def read_examination(text: str) -> tuple[dict[str, str], list[Check]]:
    """The facts and checks that ``hoop doctor --json`` printed on another host; what is not understood is left out."""
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return {}, [Check("host", Verdict.PROBLEM, "hoop doctor printed no JSON there", REMEDIES["hoop"])]
    facts: Any = found.get("facts")
    listed: Any = found.get("checks")
    checks = []
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict) and one.get("verdict") in tuple(Verdict):
            name, text, remedy = (printable(str(one.get(key, "")), 800) for key in ("name", "found", "remedy"))
            checks.append(Check(name, Verdict(one["verdict"]), text, remedy))
    return {str(key): str(value) for key, value in facts.items()} if isinstance(facts, dict) else {}, checks
