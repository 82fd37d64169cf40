"""The barriers of one rank in the native core, on the counts of entered barriers in the ranks' segments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from hoop.native.library import EndpointState, NativeLibrary, addresses
from hoop.transport.call_check import Call
from hoop.transport.semaphore import yields_before_sleep
from hoop.transport.shm_segment import ShmSegment

_PREPARED_FINGERPRINTS = 1024


class NativeBarrier:
    """One rank's state in the native core; made by its endpoint when every rank's memory is mapped."""

    def __init__(self, library: NativeLibrary, rank: int, segments: Sequence[ShmSegment], polls: int) -> None:
        """``polls``: before each yield; 0: the ranks of this host share cores."""
        self.library = library
        # The counts of entered barriers are the first words of the segments.
        entered = addresses([_buffer_address(segment.memory) for segment in segments])
        self._memory = entered, tuple(segments)
        """Keeps alive what the state points to."""
        self.state = EndpointState(
            rank=rank,
            size=len(segments),
            polls=polls,
            yields=yields_before_sleep(polls),
            entered=ctypes.addressof(entered),
            sleepers=_buffer_address(segments[0].sleepers),
            peer_left=_buffer_address(segments[rank].peer_left),
        )
        for turn, row in enumerate(segments[0].call_fingerprints):
            self.state.fingerprints[turn] = ctypes.addressof(ctypes.c_char.from_buffer(row))
        self.address = ctypes.addressof(self.state)
        self._barrier, self._meet, self._meet_comparing = library.barrier, library.meet, library.meet_comparing
        self._pointer = ctypes.c_void_p(self.address)
        self._fingerprints: dict[int, ctypes.c_uint64] = {}
        """Prepared arguments."""

    def wake(self) -> None:
        """Wakes the ranks that sleep in a barrier, so that this one finds that ``failed`` is set."""
        self.library.wake(self.address)

    def enter(self, call: Call | None, sleep_ns: int = 0) -> int:
        """Enters a barrier, or goes on with one that is not finished; returns the library's code.

        ``sleep_ns``: how long it may sleep; 0: it polls and does not sleep.
        """
        if sleep_ns:
            fingerprint = call.fingerprint if call is not None else 0
            return self._barrier(self.address, call is not None, fingerprint, sleep_ns)
        if call is None:
            return self._meet(self._pointer)
        prepared = self._fingerprints.get(call.fingerprint)
        if prepared is None:
            if len(self._fingerprints) >= _PREPARED_FINGERPRINTS:
                self._fingerprints.clear()
            prepared = self._fingerprints[call.fingerprint] = ctypes.c_uint64(call.fingerprint)
        return self._meet_comparing(self._pointer, prepared)


def _buffer_address(memory: object) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # type: ignore[arg-type]
