"""``hoop status``: devices, communicators and jobs of a coordinator."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hoop.cli import options
from hoop.cli.output import plain
from hoop.config import format_size, parse_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hoop.wire.generated import hoop_pb2 as pb

MAX_SHOWN = 4
"""Number of buffers of a GPU that the table names; ``--json`` has more."""
WHY = "why"
"""Key of a row's text that says why a device or an operation is not well; printed below the table."""
_COLOURS = {"alive": "green", "suspect": "yellow", "dead": "red", "left": "dim"}


def status(
    coordinator: options.CoordinatorAddress,
    connect_timeout: Annotated[str, typer.Option(help="How long to try to reach the coordinator.")] = "5s",
    token_file: options.TokenFile = None,
    tls: options.Tls = None,
    json: options.Json = False,
) -> None:
    """Show the devices, communicators and jobs of a running coordinator."""
    import hoop
    from hoop.wire.auth import find_credentials
    from hoop.wire.roles import Role

    credentials = find_credentials(Role.CLIENT, token_file=token_file, tls=tls)
    seconds = parse_duration(connect_timeout, "--connect-timeout")
    with hoop.connect(coordinator, connect_timeout=seconds, credentials=credentials) as cluster:
        found = cluster.status()
    if json:
        typer.echo(json_module.dumps(as_plain(found)))
    else:
        _print(found)


def as_plain(found: pb.GetStatusResponse) -> dict[str, Any]:
    """The status as JSON-able values."""
    return {
        "coordinator": {"address": found.address, "pid": found.pid},
        "devices": [
            {
                "id": member.device.device_id,
                "pid": member.device.pid,
                "host": member.device.host,
                "versions": {
                    "hoop": member.device.hoop_version,
                    "torch": member.device.torch_version,
                    "python": member.device.python_version,
                },
                "address": member.device.address,
                "data_address": member.device.data_address,
                "state": member.state,
                "reason": member.reason,
                "unreachable": member.unreachable,
                "left_out": member.left_out,
                "silent_s": round(member.silent_s, 3),
                "min_address": member.device.min_address,
                "max_address": member.device.max_address,
                "memory": {
                    "capacity": member.memory.capacity,
                    "used": member.memory.used,
                    "buffers": member.memory.buffers,
                },
                "gpu_memory": _plain_gpu(member.memory.gpu) if member.memory.HasField("gpu") else None,
            }
            for member in found.devices
        ],
        "communicators": [
            {
                "id": one.id,
                "generation": one.generation,
                "devices": [member.device_id for member in one.members],
                "status": one.status,
                "reason": one.reason,
            }
            for one in found.communicators
        ],
        "jobs": [
            {
                "id": one.id,
                "job": one.name,
                "devices": list(one.device_ids),
                "min_devices": one.min_devices,
                "max_devices": one.max_devices or None,
                "can_use": _can_use(one),
                "status": one.status,
                "reason": one.reason,
            }
            for one in found.jobs
        ],
    }


def _plain_gpu(gpu: pb.GpuMemory) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "total": gpu.total,
        "free": gpu.free,
        "capacity": gpu.capacity,
        "used": gpu.used,
        "buffers": [{"name": one.name, "address": one.address, "bytes": one.bytes} for one in gpu.buffers],
    }


def _gpu_line(gpu: pb.GpuMemory) -> str:
    """A device's memory on its GPU, with the largest buffers."""
    shown = [f"{one.name} {format_size(one.bytes)}" for one in gpu.buffers[:MAX_SHOWN]]
    more = [f"{len(gpu.buffers) - MAX_SHOWN} more"] if len(gpu.buffers) > MAX_SHOWN else []
    buffers = f" ({', '.join(shown + more)})" if shown else ""
    return (
        f"{gpu.name}: {format_size(gpu.used)} of {format_size(gpu.capacity)} used{buffers}; "
        f"{format_size(gpu.free)} of {format_size(gpu.total)} free on the GPU"
    )


def _print(found: pb.GetStatusResponse) -> None:
    from rich.console import Console

    console = Console()
    console.print(plain(f"coordinator {found.address} (pid {found.pid})"))
    versions = [_versions(member.device) for member in found.devices]
    rows = [
        {
            "device": str(member.device.device_id),
            "state": member.state,
            "memory": f"{format_size(member.memory.used)} of {format_size(member.memory.capacity)}",
            "buffers": str(member.memory.buffers),
            "address": member.device.address,
            "pid": f"{member.device.pid}@{member.device.host}",
            "versions": version if len(set(versions)) > 1 else "",
            WHY: "; ".join(filter(None, (member.reason, member.unreachable))),
        }
        for member, version in zip(found.devices, versions, strict=True)
    ]
    _print_table(console, rows, "no devices yet")
    for member in found.devices:
        if member.memory.HasField("gpu"):
            console.print(plain(f"device {member.device.device_id} on {_gpu_line(member.memory.gpu)}"))
    rows = [
        {
            "communicator": str(one.id),
            "generation": str(one.generation),
            "devices": " ".join(str(member.device_id) for member in one.members),
            "status": one.status,
            WHY: one.reason,
        }
        for one in found.communicators
    ]
    _print_table(console, rows, "no communicators")
    rows = [
        {
            "job": str(one.id),
            "of": one.name,
            "devices": " ".join(map(str, one.device_ids)),
            "can use": f"{more} more" if (more := _can_use(one)) else "",
            "status": one.status,
            WHY: one.reason,
        }
        for one in found.jobs
    ]
    if rows:
        _print_table(console, rows, "")


def _can_use(job: pb.Job) -> int | None:
    """How many more devices a running job takes; None: it has ended, or states no limit."""
    if job.status != "running" or not job.max_devices:
        return None
    return max(0, job.max_devices - len(job.device_ids))


def _versions(device: pb.DeviceDescription) -> str:
    return f"hoop {device.hoop_version}, torch {device.torch_version or 'none'}, python {device.python_version}"


def _print_table(console: Console, rows: list[dict[str, str]], otherwise: str) -> None:
    """Print a table, and below it each row's reason: a terminal of 80 columns has no room for it in the table."""
    console.print(_table(rows) if rows else otherwise)
    for row in rows:
        if row[WHY]:
            name, *_ = row
            console.print(plain(f"{name} {row[name]}: {row[WHY]}"))


def _table(rows: list[dict[str, str]]) -> Table:
    """A table without empty columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    names = [name for name in rows[0] if name != WHY and any(row[name] for row in rows)]
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=True)
    for row in rows:
        table.add_row(*(plain(row[name], _COLOURS.get(row[name], "") if name == "state" else "") for name in names))
    return table
