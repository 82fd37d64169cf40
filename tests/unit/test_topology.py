"""Parsing and formatting of addresses, and the description of a device."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.errors import InvalidArgument
from hoop.topology import Address, DeviceInfo, DeviceRange


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:4021", "127.0.0.1", 4021),
        ("localhost:0", "localhost", 0),
        ("node-7.cluster.local:65535", "node-7.cluster.local", 65535),
        ("[::1]:4021", "::1", 4021),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("[fe80::1%br-lan.7]:1", "fe80::1%br-lan.7", 1),
        (" 10.0.0.1:80\n", "10.0.0.1", 80),
        ("10.0.0.1:00080", "10.0.0.1", 80),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "host",
        "host:",
        ":4021",
        "[]:4021",
        "[::1]",
        "host:port",
        "host:-1",
        "host:+1",
        "host:65536",
        "host:99999999999999999999",
        "host:80.0",
        "host:0x50",
        "host:1_0",
        "host: 80",
        "host:80/path",
        "host:²",
        "host:٣",
    ],
)
def test_invalid_addresses_are_rejected_with_field_and_value(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Address.parse(text, "join")
    assert str(caught.value) == f"join: {text!r} is not host:port, e.g. 127.0.0.1:4021 or [::1]:4021"


@pytest.mark.parametrize(
    "text",
    [
        "::1",
        "::1:4021",
        "[::1:4021",
        "::1]:4021",
        "[[::1]]:4021",
        "[127.0.0.1]:80",
        "[host]:80",
        "[1:2]:80",
        "a b:80",
        "http://host:80",
        "host:1:2",
        "x" * 254 + ":80",
    ],
)
def test_invalid_hosts_are_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"join: .* is not host:port"):
        Address.parse(text, "join")


def test_an_overlong_port_raises_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="join: "):
        Address.parse("host:" + "9" * 5000, "join")


hosts = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda number: str(IPv4Address(number))),
    st.integers(0, 2**128 - 1).map(lambda number: str(IPv6Address(number))),
    st.text("abc019-.", min_size=1, max_size=20),
)


@given(hosts, st.integers(0, 65535))
def test_an_address_round_trips_through_text(host: str, port: int) -> None:
    address = Address(host, port)
    assert Address.parse(str(address)) == address
    assert str(address).startswith("[") == (":" in host)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "0:0:0:0:0:0:0:1"])
def test_loopback(host: str) -> None:
    assert Address(host, 1).is_loopback


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "fe80::1", "example.com", "localhost.evil.com", "127.1", ""],
)
def test_not_loopback(host: str) -> None:
    assert not Address(host, 1).is_loopback


def test_addresses_are_ordered_and_hashable() -> None:
    assert sorted([Address("b", 1), Address("a", 2), Address("a", 1)])[0] == Address("a", 1)
    assert {Address("a", 1): 1}[Address.parse("a:1")] == 1


def test_device_info_shows_capacity_and_identity() -> None:
    info = DeviceInfo(3, Address("::1", 1), Address("::1", 2), 0x1000, 0x3000, "host", 42, "incarnation")
    assert info.capacity == 0x2000
    assert str(info) == "device 3 (pid 42, [::1]:1)"


@pytest.mark.parametrize(
    ("value", "first", "most", "processes"),
    [(4, 4, 0, 4), ("4", 4, 0, 4), ("4:16", 4, 16, 16), ((4, 16), 4, 16, 16), ([1, 1], 1, 1, 1), (" 2 : 3 ", 2, 3, 3)],
)
def test_a_number_of_devices_or_a_range(value: object, first: int, most: int, processes: int) -> None:
    found = DeviceRange.parse(value)
    assert (found.first, found.most, found.processes) == (first, most, processes)
    assert DeviceRange.parse(str(found)) == found


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (0, "devices: 0 is not a whole number of at least 1, nor a range of two, such as 4:16"),
        (True, "devices: True is not a whole number"),
        (2.0, "devices: 2.0 is not a whole number"),
        ("4:", "devices: '4:' is not a whole number"),
        ("1:2:3", "devices: '1:2:3' is not a whole number"),
        ((), "devices: () is not a whole number"),
        ("-1", "devices: '-1' is not a whole number"),
        (None, "devices: None is not a whole number"),
        ("16:4", "devices: 16:4 ends before it begins; write 4:16"),
        ("4:5000", "devices: 5000 is more than 4096, the most of a cluster"),
    ],
)
def test_a_wrong_number_of_devices_is_named(value: object, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        DeviceRange.parse(value)
    assert str(caught.value).startswith(sentence)
