"""Large point-to-point messages between GPUs of one host: the receiver copies them out of the sender's memory.

    sender                                        receiver
    DEVICE     where the tensor is, and a number  ──▶  maps the memory and copies the tensor on the GPU
    (the send is done)                            ◀──  DELIVERED   the number; or: cannot map, send the bytes
    DEVICE_DATA   the bytes, if it was asked to   ──▶  copies them to the GPU

So a send of more than ``EAGER_BYTES`` is done when it was received, as with NCCL. Smaller messages go through host
memory as those of CPU tensors do, and are buffered until they are received. Both ends decide by the size of their own
tensor, which is the same.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument
from hoop.torch_backend.device_links import ADDRESS_BYTES, NOWHERE, DeviceLinks
from hoop.torch_backend.device_memory import StreamOrder
from hoop.torch_backend.p2p import MessageKind, P2PRequest
from hoop.torch_backend.tensor_views import Array, as_contiguous, bytes_of
from hoop.torch_backend.work import HoopWork
from hoop.transport.base import SharedEndpoint

EAGER_BYTES = 1 << 20
"""Maximum bytes of a message that goes through host memory."""
_HEADER = struct.Struct(f"<{ADDRESS_BYTES}sQQ")  # where the message is, its bytes, its number
_COPIED, _SEND_BYTES = 0, 1
"""Answers in DELIVERED: the receiver has copied the message, or asks the sender for its bytes."""


class DeviceMessages:
    """The large messages of one rank in one process group, on one device."""

    def __init__(self, links: DeviceLinks) -> None:
        self._device_links, self._links, self._memory = links, links.links, links.memory
        self._numbers = itertools.count(1)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether messages of this size go this way; the same at both ends."""
        return tensor.nbytes > EAGER_BYTES and isinstance(self._links.endpoint, SharedEndpoint)

    def send(self, work: HoopWork, tensor: torch.Tensor, peer: int, tag: int, timeout: float) -> None:
        """Starts a send; ``work`` is finished when the receiver has the message."""
        with self._memory.stream_order():
            flat = as_contiguous(tensor).view(-1).view(torch.uint8)
            address = self._device_links.address_of(flat) if peer != self._links.rank else NOWHERE
            self._memory.synchronize()
        number, deadline = next(self._numbers), time.monotonic() + timeout
        header = np.frombuffer(_HEADER.pack(address, flat.numel(), number), np.uint8).copy()
        status = np.zeros(1, np.uint8)

        def on_delivered(error: HoopError | None, _: int) -> None:
            if error is None and status[0] == _SEND_BYTES:
                self._guarded(work, timeout, lambda: self._send_bytes(work, flat, peer, number, timeout))
            elif isinstance(error, DeadlineExceeded):
                late = f"{self._links.rank_label(peer)} has not received {flat.numel()} bytes with tag {tag}"
                self._finish(work, DeadlineExceeded(late), timeout, -1)
            else:
                self._finish(work, error, timeout, -1)

        self._receive(peer, MessageKind.DELIVERED, number, status, deadline, on_delivered)
        self._send(peer, MessageKind.DEVICE, tag, header, deadline, self._finish_if_failed(work, timeout))

    def _send_bytes(self, work: HoopWork, flat: torch.Tensor, peer: int, number: int, timeout: float) -> None:
        with self._memory.stream_order():
            host = self._device_links.host_copy(flat, {})
            self._memory.synchronize()

        def on_sent(error: HoopError | None, _: int) -> None:
            self._finish(work, error, timeout, -1)

        deadline = time.monotonic() + timeout
        self._send(peer, MessageKind.DEVICE_DATA, number, bytes_of(host), deadline, on_sent, owner=host)

    def receive(self, work: HoopWork, tensor: torch.Tensor, peer: int | None, tag: int, timeout: float) -> None:
        """Starts a receive, from any rank if ``peer`` is None; ``work`` is finished when ``tensor`` has the message."""
        header, order = np.zeros(_HEADER.size, np.uint8), self._memory.stream_order()
        order.before_queue()

        def on_header(error: HoopError | None, source: int) -> None:
            if error is None:
                self._guarded(
                    work, timeout, lambda: self._fetch(work, tensor, source, tag, header.tobytes(), order, timeout)
                )
            else:
                self._finish(work, error, timeout, source)

        self._receive(peer, MessageKind.DEVICE, tag, header, time.monotonic() + timeout, on_header)

    def _fetch(
        self,
        work: HoopWork,
        tensor: torch.Tensor,
        source: int,
        tag: int,
        header: bytes,
        order: StreamOrder,
        timeout: float,
    ) -> None:
        """Copies a message out of the sender's memory, or asks for its bytes."""
        address, size, number = _HEADER.unpack(header)
        if size != tensor.nbytes:
            self._answer(source, number, _COPIED, timeout)
            error = f"rank {source} sent {size} bytes with tag {tag}, the tensor to receive them has {tensor.nbytes}"
            self._finish(work, InvalidArgument(error), timeout, source)
            return
        if address != NOWHERE:
            try:
                with order:
                    self._device_links.copy_from(source, address, tensor)
            except HoopError:  # the memory cannot be mapped here
                address = NOWHERE
        if address != NOWHERE:
            self._answer(source, number, _COPIED, timeout)
            self._finish(work, None, timeout, source)
            return
        host = self._memory.host_buffer(tuple(tensor.shape), tensor.dtype)

        def on_bytes(error: HoopError | None, _: int) -> None:
            def copy_in() -> None:
                with order:
                    tensor.detach().copy_(host)
                    self._memory.synchronize()
                self._finish(work, None, timeout, source)

            if error is None:
                self._guarded(work, timeout, copy_in)
            else:
                self._finish(work, error, timeout, source)

        deadline = time.monotonic() + timeout
        self._receive(source, MessageKind.DEVICE_DATA, number, bytes_of(host), deadline, on_bytes, owner=host)
        self._answer(source, number, _SEND_BYTES, timeout)

    def _answer(self, source: int, number: int, status: int, timeout: float) -> None:
        data = np.full(1, status, np.uint8)
        deadline = time.monotonic() + timeout
        self._send(source, MessageKind.DELIVERED, number, data, deadline, lambda error, peer: None)

    # ---- requests

    def _send(
        self, peer: int, kind: MessageKind, tag: int, data: Array, deadline: float, done: Any, **how: Any
    ) -> None:
        owner = how.get("owner", data)
        self._links.p2p.submit(P2PRequest(True, peer, kind, tag, data, owner, deadline, done))

    def _receive(
        self, peer: int | None, kind: MessageKind, tag: int, data: Array, deadline: float, done: Any, **how: Any
    ) -> None:
        owner = how.get("owner", data)
        self._links.p2p.submit(P2PRequest(False, peer, kind, tag, data, owner, deadline, done))

    def _finish(self, work: HoopWork, error: HoopError | None, timeout: float, source: int) -> None:
        if error is None:
            work.finish(None, source)
        else:
            work.finish(self._links.user_error(work.title, error, timeout))

    def _finish_if_failed(self, work: HoopWork, timeout: float) -> Callable[[HoopError | None, int], None]:
        def on_sent(error: HoopError | None, _: int) -> None:
            if error is not None:
                self._finish(work, error, timeout, -1)

        return on_sent

    def _guarded(self, work: HoopWork, timeout: float, action: Callable[[], None]) -> None:
        """Runs a part of an operation in the engine's thread, which goes on if it fails."""
        try:
            action()
        except HoopError as error:
            self._finish(work, error, timeout, -1)
        except Exception as error:
            work.finish(error)
