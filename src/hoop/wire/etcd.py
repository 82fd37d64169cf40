"""etcd's v3 API, as far as a journal needs it: spoken to whichever of its endpoints answers.

Every call has a deadline. etcd ends connections that are pinged more often than every five seconds, so there is no
keepalive here: a call that gets no answer goes to the next endpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from hoop.errors import DeadlineExceeded, NotFound, named
from hoop.topology import Addresses
from hoop.wire.certificates import AUTHORITY, CERTIFICATE, KEY
from hoop.wire.channels import MAX_MESSAGE_BYTES
from hoop.wire.generated import etcd_pb2 as pb
from hoop.wire.rpc import Stub, unreachable
from hoop.wire.tokens import check_private

TRY_S = 1.0
"""How long one endpoint may take before the next is asked."""
_SERVICES = [pb.DESCRIPTOR.services_by_name[name] for name in ("KV", "Lease", "Watch")]
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class Etcd:
    """A connection to etcd. It may be used by several threads."""

    def __init__(self, endpoints: Addresses, tls: Path | None = None) -> None:
        """``tls``: a folder with the authority of etcd's certificate and, where etcd asks for one, our own."""
        self.endpoints = endpoints
        secure = _credentials(tls) if tls else None
        self._channels = [
            grpc.secure_channel(str(one), secure, options=_OPTIONS)
            if secure
            else grpc.insecure_channel(str(one), options=_OPTIONS)
            for one in endpoints.each
        ]
        self._methods = [
            {method.name: getattr(stub, method.name) for stub, service in stubs for method in service.methods}
            for channel in self._channels
            for stubs in [[(Stub(channel, service), service) for service in _SERVICES]]
        ]
        self._current = 0

    def ask(self, method: str, request: Any, within: float) -> Any:
        """The first answer to a call: of the endpoint that answered last, else of the others in turn."""
        for answer in self._answers(method, request, within):
            return answer
        raise DeadlineExceeded(f"etcd at {self.endpoints} ended {method} without an answer")

    def renew(self, lease: int, within: float) -> int:
        """For how many seconds from now on a lease is good; 0: it is over."""
        request = pb.LeaseKeepAliveRequest(ID=lease)
        answer: pb.LeaseKeepAliveResponse = self.ask("LeaseKeepAlive", request, within)
        return answer.TTL

    def until_deleted(self, key: bytes, since: int, within: float) -> None:
        """Returns when a key was deleted after that revision, or the time is over."""
        create = pb.WatchCreateRequest(key=key, start_revision=since)
        until = time.monotonic() + within
        try:
            for answer in self._answers("Watch", pb.WatchRequest(create_request=create), within, within):
                if answer.canceled or any(one.type == pb.Event.DELETE for one in answer.events):
                    return
        except DeadlineExceeded:
            if time.monotonic() < until:
                raise

    def _answers(self, method: str, request: Any, within: float, a_try: float = TRY_S) -> Iterator[Any]:
        until = time.monotonic() + within
        whom = f"etcd at {self.endpoints}"
        reason = "no answer"
        for _ in self._methods:
            index, left = self._current, until - time.monotonic()
            if left <= 0:
                break
            call = self._methods[index][method]
            streaming = method in ("Watch", "LeaseKeepAlive")
            try:
                answers = call(iter([request]) if streaming else request, timeout=min(a_try, left))
                yield from answers if streaming else [answers]
                return
            except grpc.RpcError as error:
                reason = f"{self.endpoints.each[index]}: {error.details() or error.code().name}"
                if not unreachable(error):
                    raise named(error.code().name, f"{whom}: {reason}") from None
            except ValueError as error:  # the channel was closed meanwhile
                reason = str(error)
            self._current = (index + 1) % len(self._methods)
        raise DeadlineExceeded(f"{whom} does not answer ({reason})")

    def close(self) -> None:
        """Ends what is under way, too."""
        for channel in self._channels:
            channel.close()


def _credentials(folder: Path) -> grpc.ChannelCredentials:
    def content(name: str) -> bytes:
        try:
            if name == KEY:
                check_private(folder / name, (folder / name).stat())
            return (folder / name).read_bytes()
        except OSError as error:
            raise NotFound(f"--journal-tls {folder}: {name}: {error.strerror}") from None

    pair = (content(KEY), content(CERTIFICATE)) if (folder / CERTIFICATE).exists() else (None, None)
    return grpc.ssl_channel_credentials(content(AUTHORITY), *pair)
