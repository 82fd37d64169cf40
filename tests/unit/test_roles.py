"""Every call that Hoop's own processes make is one that their role may make."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hoop
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import ALLOWED, Role

PACKAGE = Path(hoop.__file__).parent
SERVICES = [*pb.DESCRIPTOR.services_by_name.values(), *lab.DESCRIPTOR.services_by_name.values()]
METHODS = {service.full_name: [method.name for method in service.methods] for service in SERVICES}
COORDINATOR, DEVICE, LAB_DEVICE = "hoop.v1.Coordinator", "hoop.v1.Device", "gpu_sim.GPUDevice"
OF_DEVICES = {"servers/heartbeat.py": COORDINATOR, "servers/lab_device.py": LAB_DEVICE}
"""Modules of the room ``servers`` that a device runs and that call a service, with that service."""
SOURCES: dict[Role, dict[Path, tuple[str, ...]]] = {
    Role.CLIENT: dict.fromkeys((PACKAGE / "client").glob("*.py"), (COORDINATOR, DEVICE)),
    Role.DEVICE: {PACKAGE / name: (service,) for name, service in OF_DEVICES.items()},
    Role.COORDINATOR: {
        path: (DEVICE,)
        for path in (PACKAGE / "servers").glob("*.py")
        if str(path.relative_to(PACKAGE)) not in OF_DEVICES
    },
}
"""By role: the modules that make its calls, with the services that these call."""


def calls(path: Path, services: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """File and line, and path, of each call.

    As ``stub.Join``, ``device.Free``, ``self._call("GetStatus", …)``, or by its whole path.
    """
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id="pb" | "lab" | "m")):
                continue  # a message or an event
            case ast.Constant(value=str(path_of_method)) if path_of_method in ALLOWED:
                yield f"{path.name}:{node.lineno}", path_of_method
            case ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr="_call"), args=[ast.Constant(name), *_]):
                for service in services:
                    if name in METHODS[service]:
                        yield f"{path.name}:{node.lineno}", f"/{service}/{name}"


@pytest.mark.parametrize("role", list(Role))
def test_a_role_may_make_all_calls_that_its_code_makes(role: Role) -> None:
    made = [one for path, services in SOURCES[role].items() for one in calls(path, services)]
    refused = {place: call for place, call in made if role not in ALLOWED[call]}
    assert refused == {}
    # The search finds calls in all their forms.
    known = {
        Role.CLIENT: ("Coordinator/GetStatus", "Coordinator/KeepSession", "Coordinator/Run", "Device/Write"),
        Role.DEVICE: ("Coordinator/Join", "Coordinator/SendHeartbeats", "GPUDevice/StreamSend"),
        Role.COORDINATOR: ("Device/Free", "Device/WatchTask", "Device/Abort", "Device/StartTask", "Device/Write"),
    }
    assert {one for one in known[role] if not any(call.endswith(one) for _, call in made)} == set()


def test_a_role_may_make_no_call_that_nobody_makes() -> None:
    """Of the calls between Hoop's own servers; other programs may be clients too."""
    for role in (Role.COORDINATOR, Role.DEVICE):
        made = {call for path, services in SOURCES[role].items() for _, call in calls(path, services)}
        assert {call for call, allowed in ALLOWED.items() if role in allowed} == made
