"""Options of gRPC channels and servers, and the backoff of a caller that waits for a server."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from hoop.errors import DeadlineExceeded
from hoop.topology import Address, Addresses

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
STREAM_CHUNK_BYTES = 2 * 1024 * 1024
"""Bytes of payload in one message of a streamed copy; below every gRPC library's default message limit of 4 MiB. A Unix
socket, which buffers less than TCP, is slower with smaller ones (benchmarks/calls)."""

STAGING_PREFIX = "hoop.staging."
"""Beginning of the names of staging buffers. The client's session id follows; the buffers are freed when that client
ends."""

LEASE_S = 1.5
"""Default lease of devices where processes are on several hosts (``membership.heartbeats``)."""
LOCAL_LEASE_S = 20.0
"""Default lease on one machine: a process that ends is known there at once, and one that waits for a core is not dead.
"""
MIN_TIMEOUT_S = 2.0
"""Shortest time limit of a connection attempt and of a ping, however short the lease."""
MIN_PING_INTERVAL_S = 1.0
HANDSHAKE_MS = 5000
"""Milliseconds that a server gives to the beginning of a connection; a client gives up after a lease."""
IDLE_MS = 300_000
"""Milliseconds without calls after which a server closes a connection. Its client opens another one with the next
call."""

Options = list[tuple[str, int]]


def default_lease_s(address: Address | Addresses) -> float:
    """The lease of a cluster whose coordinator is at this address, unless its user has given another."""
    return LOCAL_LEASE_S if all(endpoint.is_loopback for endpoint in address.addresses) else LEASE_S


def channel_options(lease_s: float, max_message: int = MAX_MESSAGE_BYTES) -> Options:
    """Options of a channel in a cluster with this lease: a peer that is silent for less keeps its connection."""
    timeout_ms = round(1000 * max(MIN_TIMEOUT_S, lease_s))
    interval_ms = round(1000 * max(MIN_PING_INTERVAL_S, lease_s / 4))
    # A stopped peer keeps its socket open; without ping_timeout_ms gRPC notices after a minute.
    return [
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", max_message),
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # gRPC's name for the limit of one connection attempt. A server whose process waits for a core is not dead.
        ("grpc.min_reconnect_backoff_ms", timeout_ms),
        # Well within the lease in which devices must reconnect to a restarted coordinator.
        ("grpc.max_reconnect_backoff_ms", 250),
        ("grpc.enable_http_proxy", 0),
        # Otherwise channels to the same address share a subchannel and its backoff.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(max_message: int = MAX_MESSAGE_BYTES, max_connections: int | None = None) -> Options:
    """``max_connections``: a further one is closed at once; None: no limit."""
    limit = [] if max_connections is None else [("grpc.max_allowed_incoming_connections", max_connections)]
    return [
        *limit,
        # A connection that does not speak gRPC, or makes no call, does not hold a descriptor of the server for long.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", max_message),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", 4096),
        # Of a request that is not read yet, 64 KiB come (``service.Receiving``). Measurements of the connection would
        # raise that to megabytes. What is read has a window as large as its message.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_metadata_size", 64 * 1024),
    ]


NO_COORDINATOR = (
    "Is a coordinator running there, and does no firewall block its port? hoop up starts a cluster on this machine, "
    "hoop coordinator one that others join"
)
"""Remedy if a coordinator does not answer."""


class Backoff:
    """Exponential backoff with jitter and a deadline, for one server.

    The caller iterates over ``delays``, reports each failed attempt with ``record_failure`` and sleeps.
    """

    INITIAL_S, MAX_S = 0.05, 1.0

    def __init__(self, peer: str, address: Address | Addresses, timeout_s: float, remedy: str = "") -> None:
        """``remedy``: what the user can do about it, for the error."""
        self.peer = peer
        self.remedy = remedy
        self.address = address
        self.timeout_s = timeout_s
        self._started = time.monotonic()
        self._attempts = 0
        self._reason = "no answer"

    def record_failure(self, reason: str) -> None:
        """Count a failed attempt; ``reason`` of the last one goes into the timeout error."""
        self._attempts += 1
        self._reason = reason

    def delays(self) -> Iterator[float]:
        """Seconds to wait before each next attempt; raises DeadlineExceeded after ``timeout_s``."""
        for attempt in range(1000):
            delay = min(self.INITIAL_S * 2**attempt, self.MAX_S) * random.uniform(0.5, 1.0)
            remaining = self._started + self.timeout_s - time.monotonic()
            if remaining <= 0:
                break
            yield min(delay, remaining)
        raise self.timeout_error()

    def timeout_error(self) -> DeadlineExceeded:
        waited = time.monotonic() - self._started
        return DeadlineExceeded(
            f"{self.peer} at {self.address} did not answer within {waited:.1f} s "
            f"({self._attempts} tries): {self._reason}{f'. {self.remedy}' if self.remedy else ''}"
        )
