"""How Hoop's gRPC channels and servers are set up, and how long a caller knocks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from hoop.errors import DeadlineExceeded
from hoop.topology import Address, Addresses

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
STREAM_CHUNK_BYTES = 1024 * 1024
"""What one message of a streamed copy carries; below every gRPC library's default limit of 4 MiB."""

STAGING = "hoop.staging."
"""Buffers whose names begin so, and go on with a client's session, are freed with the client."""

CONNECT_MS = 2000
"""How long an attempt to connect may take, the first frame of the other side included: as long as a ping."""

Options = list[tuple[str, int]]


def channel_options(max_message: int = MAX_MESSAGE_BYTES) -> Options:
    # A stopped peer keeps its socket open; without ping_timeout_ms gRPC notices after a minute.
    return [
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", max_message),
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.http2.ping_timeout_ms", 2000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # gRPC's name for how long one attempt to connect may take. A server whose process waits for a core is not gone.
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        # Well within the lease that a restarted coordinator gives its devices to come back.
        ("grpc.max_reconnect_backoff_ms", 250),
        ("grpc.enable_http_proxy", 0),
        # A subchannel of one's own: another channel's back-off is not ours.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(max_message: int = MAX_MESSAGE_BYTES) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", max_message),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", 4096),
        ("grpc.max_metadata_size", 64 * 1024),
    ]


class Backoff:
    """Tries with growing, jittered pauses until a deadline; the error at its end tells the whole story."""

    FIRST_S, LONGEST_S = 0.05, 1.0

    def __init__(self, whom: str, address: Address | Addresses, patience_s: float) -> None:
        self.whom = whom
        self.address = address
        self.patience_s = patience_s
        self._started = time.monotonic()
        self._tries = 0
        self._reason = "no answer"

    def heard(self, reason: str) -> None:
        """Why the latest try failed."""
        self._tries += 1
        self._reason = reason

    def pauses(self) -> Iterator[float]:
        """How long to wait before each next try; raises when the patience is at its end."""
        for attempt in range(1000):
            pause = min(self.FIRST_S * 2**attempt, self.LONGEST_S) * random.uniform(0.5, 1.0)
            left = self._started + self.patience_s - time.monotonic()
            if left <= 0:
                break
            yield min(pause, left)
        raise self.failure()

    def failure(self) -> DeadlineExceeded:
        waited = time.monotonic() - self._started
        return DeadlineExceeded(
            f"{self.whom} at {self.address} did not answer within {waited:.1f} s "
            f"({self._tries} tries): {self._reason}"
        )
