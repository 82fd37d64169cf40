"""The address that a device advertises: the one at which its coordinator and other devices reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hoop.errors import DeadlineExceeded, InvalidArgument
from hoop.servers import device
from hoop.servers.advertised_address import Route, _ipv6_of, advertised_host, interface_address, routes_to
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.servers.heartbeat import HeartbeatClient
from hoop.topology import Address, Addresses, DeviceInfo

HERE, THERE = Route("127.0.0.1", "127.0.0.1"), Route("10.0.0.2", "10.0.0.1")
OUT = [Route("192.168.1.7", "192.0.2.1"), Route("2a00::7", "2001:db8::1")]


@pytest.mark.parametrize(
    ("listening", "routes", "outside", "host"),
    [
        ("0.0.0.0", [THERE], OUT, "10.0.0.2"),
        ("0.0.0.0", [HERE, THERE], OUT, "10.0.0.2"),
        ("0.0.0.0", [HERE], OUT, "192.168.1.7"),
        ("0.0.0.0", [HERE], [], "127.0.0.1"),
        ("::", [THERE, Route("fd00::2", "fd00::1")], OUT, "fd00::2"),
        ("::", [Route("::1", "::1")], OUT, "2a00::7"),
        ("::", [Route("::1", "::1")], OUT[:1], "::1"),
    ],
)
def test_a_device_that_listens_on_all_addresses_advertises_one(
    listening: str, routes: list[Route], outside: list[Route], host: str
) -> None:
    assert advertised_host(Address(listening, 5), routes, outside) == host


@pytest.mark.parametrize(("listening", "route", "remedy"), [("::", THERE, "0.0.0.0"), ("0.0.0.0", OUT[1], "::")])
def test_the_wrong_version_of_ip_is_refused(listening: str, route: Route, remedy: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^host: {listening} listens on IPv\d only.* --host {remedy}, or"):
        advertised_host(Address(listening, 5), [route], OUT)


def test_a_route_begins_at_the_local_address() -> None:
    assert asyncio.run(routes_to([Address("127.0.0.1", 1), Address("127.0.0.3", 1)])) == [
        HERE,
        Route("127.0.0.1", "127.0.0.3"),
    ]
    assert not Route("127.0.0.1", "127.0.0.3").leaves_machine
    assert not Route("10.0.0.2", "10.0.0.2").leaves_machine
    assert THERE.leaves_machine
    with pytest.raises(OSError, match=r"not known|resolution"):
        asyncio.run(routes_to([Address("nowhere.invalid", 1)]))


def test_the_coordinator_gets_no_wildcard_address() -> None:
    async def run() -> None:
        server = CoordinatorServer(CoordinatorConfig())
        address = await server.start()
        one = DeviceServer(DeviceConfig(address, memory=1 << 20, host="0.0.0.0", insecure=True))
        try:
            info = await one.start()
            (known,) = (member.info for member in server.coordinator.state.members.values())
            assert known == info
            assert info.address.host == info.data_address.host
            for reached in (info.address, info.data_address):
                assert not reached.is_wildcard
                _, writer = await asyncio.open_connection(reached.host, reached.port)
                writer.close()
            await one.stop()
        finally:
            await server.stop()

    asyncio.run(run())


def started(monkeypatch: pytest.MonkeyPatch, routes: Sequence[Route], advertise: Address | None = None) -> None:
    """Starts a device on loopback whose coordinator, on another machine, is reached by these routes."""

    async def found(addresses: Sequence[Address]) -> list[Route]:
        assert list(addresses) == [Address("10.0.0.1", 4021)]
        return list(routes)

    async def join(_: HeartbeatClient, info: DeviceInfo, timeout_s: float) -> DeviceInfo:
        raise DeadlineExceeded(f"{info.address.host} joins")

    async def run() -> None:
        coordinator = Addresses.parse("127.0.0.1:1,10.0.0.1:4021")
        config = DeviceConfig(coordinator, memory=1 << 20)
        await DeviceServer(replace(config, advertise=advertise)).start()

    monkeypatch.setattr(device, "routes_to", found)
    monkeypatch.setattr(HeartbeatClient, "join", join)
    asyncio.run(run())


def test_a_device_on_loopback_is_refused_if_the_coordinator_is_on_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It used to join, was shown as alive, and failed every job."""
    with pytest.raises(
        InvalidArgument, match=r"^host: the coordinator at 10\.0\.0\.1 .* 127\.0\.0\.1 .*--host 10\.0\.0\.2$"
    ):
        started(monkeypatch, [THERE])


@pytest.mark.parametrize("proxied", [True, False])
def test_it_joins_if_it_is_advertised_or_the_coordinator_is_here(
    monkeypatch: pytest.MonkeyPatch, proxied: bool
) -> None:
    advertise = Address("10.0.0.9", 1) if proxied else None
    with pytest.raises(DeadlineExceeded, match=r"^10\.0\.0\.9 joins" if proxied else r"^127\.0\.0\.1 joins"):
        started(monkeypatch, [THERE if proxied else Route("10.0.0.1", "10.0.0.1")], advertise)


def test_the_address_of_an_interface() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(
        InvalidArgument, match=r"^--interface: 'eth99' is no network interface of this machine; it has .*lo"
    ):
        interface_address("eth99")


def test_an_ipv6_address_of_an_interface_is_no_link_local_one(tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe80000000000000000000000000a001 02 40 20 80     eth1\n"
        "fd000000000000000000000000000007 02 40 00 80     eth1\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert _ipv6_of(2, table) == "fd00::7"
    assert _ipv6_of(1, table) == "::1"
    assert _ipv6_of(3, table) == ""
