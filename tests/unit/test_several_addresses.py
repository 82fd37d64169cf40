"""Addresses: parsing several addresses of one server, and calling the one that answers."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.errors import InvalidArgument, NotFound
from hoop.topology import Address, Addresses
from hoop.wire.auth import Credentials, grpc_target
from hoop.wire.channels import LEASE_S, channel_options
from hoop.wire.roles import Role

addresses = st.builds(Address, st.sampled_from(["127.0.0.1", "::1", "example.com"]), st.integers(0, 65535))


@given(st.lists(addresses, min_size=1, max_size=4))
def test_addresses_round_trip_through_text(listed: list[Address]) -> None:
    assert Addresses.parse(str(Addresses(tuple(listed)))).addresses == tuple(listed)


@pytest.mark.parametrize("text", ["", ",", "a:1,", ",a:1", "a:1;b:2", "a:1,b"])
def test_an_invalid_address_is_rejected_with_its_field(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^--join: '.*' is not host:port"):
        Addresses.parse(text, "--join")


@pytest.mark.parametrize("text", ["127.0.0.1:1,[::1]:2", "127.0.0.1:1,nowhere.invalid:2"])
def test_addresses_without_a_common_ip_version_are_rejected(text: str) -> None:
    with pytest.raises(NotFound, match="neither IPv4 nor IPv6 leads to all of them: "):
        Credentials(Role.CLIENT).channel(Addresses.parse(text), Role.COORDINATOR, channel_options(LEASE_S))


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("unix-abstract:77", "dns:///unix-abstract:77"),
        ("unix:77", "dns:///unix:77"),
        ("dns:5", "dns:///dns:5"),
        ("localhost:4021", "dns:///localhost:4021"),
        ("127.0.0.1:4021", "ipv4:127.0.0.1:4021"),
        ("[::1]:4021", "ipv6:[::1]:4021"),
        ("[fe80::1%eth0]:4021", "ipv6:[fe80::1%25eth0]:4021"),
    ],
)
def test_a_host_is_never_taken_for_a_scheme_of_grpc(text: str, target: str) -> None:
    assert grpc_target(Address.parse(text)) == target


def test_a_host_like_a_scheme_is_looked_up_and_no_unix_socket_is_opened() -> None:
    with socket.socket(socket.AF_UNIX) as squatted:
        squatted.bind("\x0077")
        squatted.listen()
        squatted.setblocking(False)
        address = Address.parse("unix-abstract:77")
        with (
            Credentials(Role.CLIENT).channel(address, Role.COORDINATOR, channel_options(LEASE_S)) as channel,
            pytest.raises(grpc.RpcError, match="resol"),
        ):
            channel.unary_unary("/who/Answers", None, None)(b"", timeout=60)
        with pytest.raises(BlockingIOError):
            squatted.accept()


def test_a_channel_switches_to_the_address_that_answers() -> None:
    """First only the second server runs, then only the first."""
    servers, ports = [], []
    for name in (b"first", b"second"):
        echo = grpc.unary_unary_rpc_method_handler(lambda _, __, name=name: name)
        server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("who", {"Answers": echo})])
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        servers.append(server)
    targets = Addresses.parse(",".join(f"localhost:{port}" for port in ports))
    first, second = servers
    second.start()
    with Credentials(Role.CLIENT).channel(targets, Role.COORDINATOR, channel_options(LEASE_S)) as channel:
        call = channel.unary_unary("/who/Answers", None, None)
        assert call(b"", timeout=240, wait_for_ready=True) == b"second"
        first.start()
        second.stop(0).wait()
        assert call(b"", timeout=240, wait_for_ready=True) == b"first"
        first.stop(0).wait()
