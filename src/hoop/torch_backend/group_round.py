"""One round in torch's store: the ranks of a new group join, exchange values, and all learn at once what is wrong.

Keys below ``hoop/`` (``<round>`` counts how often a rank has used this store, so a group that is made again has
keys of its own):

    round/<rank>                 the counter of this rank
    <round>/process/<rank>       the process that joined as this rank
    <round>/joined, left         how many ranks have joined, and how many of them have read an error
    <round>/members              the global ranks of the group, by the first rank that joined
    <round>/<exchange>/<rank>    the value of this rank: of "host", then of "place"
    <round>/<exchange>/count     how many ranks have published theirs
    <round>/<exchange>/outcome   COMPLETE when all have, or an error; the first one written stays, for all ranks

A rank waits for the outcome only, so an error ends its wait as the last value does. ``rendezvous`` makes the rounds.
Ranks that torchrun starts again, or that try again after a timeout, may be in different rounds: those behind follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hoop.errors import DeadlineExceeded, FailedPrecondition, HoopError, InvalidArgument, MembershipChanged
from hoop.torch_backend.errors import torch_error

HOST, PLACE = "host", "place"
"""The exchanges of a round, in their order."""
COMPLETE = "complete"
LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.5, 10.0
"""After this time a waiting rank looks whether another is in a newer round or makes this group with Gloo, and then
after twice as long, until the longest."""
_POLL_SHARE, _LONGEST_POLL_SECONDS = 0.1, 0.05
"""A rank polls the store again after this share of the time that it has waited, up to the longest. It does not call
``Store.wait``: that cannot wait for one of two events, and a TCPStore prints a warning whenever it times out."""
_LEAVE_SECONDS = 2.0
_PROCESS_ID = secrets.token_hex(8)  # forked processes share it and differ in their pid


class GroupRound:
    """One rank's part in making one group."""

    def __init__(
        self, name: str, store: Any, rank: int, world: Sequence[int], timeout: timedelta, deadline: float | None = None
    ) -> None:
        """Joins the round; raises where this rank cannot be a rank of this group, and then fails it for all ranks.

        ``world``: the global rank of each rank of the group. ``deadline``: of the rounds for this group together; None:
        ``timeout`` from now.
        """
        self._store, self._rank, self._size, self._timeout = store, rank, len(world), timeout
        self._deadline = time.monotonic() + timeout.total_seconds() if deadline is None else deadline
        self._label = f"group {name!r} of {self._size}"
        self._joined = False
        self._process = f"{_PROCESS_ID} process {os.getpid()} on {socket.gethostname()}"
        if not 0 <= rank < self._size:
            self._number = self._round_of_others()
            raise self.fail(
                InvalidArgument,
                f"{_name(self._process)} has rank {rank}, which is not in 0..{self._size - 1}; give each process its "
                "own rank (RANK) below the number of ranks (WORLD_SIZE)",
            )
        self._number = store.add(f"hoop/round/{rank}", 1)
        self._check_rank_is_free()
        store.set(self._key("process", rank), self._process)
        store.add(self._key("joined"), 1)
        self._joined = True
        self._check_members([int(one) for one in world])

    def exchange(self, exchange: str, value: str) -> list[str]:
        """Publishes this rank's value, waits until all ranks have, and returns all values in rank order.

        Raises MembershipChanged if another rank is in a newer round: this rank must then join a new one too.
        """
        self._store.set(self._key(exchange, self._rank), value)
        if self._store.add(self._key(exchange, "count"), 1) == self._size:
            self._store.compare_set(self._key(exchange, "outcome"), "", COMPLETE)
        self._wait(exchange)
        outcome = self._store.get(self._key(exchange, "outcome")).decode()
        if outcome != COMPLETE:
            self._leave()
            raise torch_error(FailedPrecondition, f"rank {self._rank}: {self._label} cannot be made: {outcome}")
        return [self._store.get(self._key(exchange, peer)).decode() for peer in range(self._size)]

    def fail(self, kind: type[HoopError], reason: str) -> HoopError:
        """Makes the ranks that are in this round, or come to it, raise ``reason``; returns this rank's own error."""
        with contextlib.suppress(RuntimeError):  # the store is gone: this rank's own error says more
            for exchange in (PLACE, HOST):  # the last first: ranks that read the error may end, and the store with them
                self._store.compare_set(self._key(exchange, "outcome"), "", reason)
        self._leave()
        return torch_error(kind, f"rank {self._rank}: {self._label} cannot be made: {reason}")

    def _leave(self) -> None:
        """Waits until the other ranks have read the error too: the store may be in this process, and end with it."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(RuntimeError):
            left = self._store.add(self._key("left"), int(self._joined))
            while left < self._store.add(self._key("joined"), 0) and time.monotonic() < deadline:
                time.sleep(_LONGEST_POLL_SECONDS)
                left = self._store.add(self._key("left"), 0)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("hoop", self._number, *parts)))

    def _is_decided(self) -> bool:
        return bool(self._store.check([self._key(HOST, "outcome")]))

    def _round_of_others(self) -> int:
        """The round in which the ranks of this group are, or which they will begin next."""
        self._number = max([1, *(self._store.add(f"hoop/round/{peer}", 0) for peer in range(self._size))])
        return self._number + self._is_decided()

    # ---- ranks that contradict each other

    def _check_rank_is_free(self) -> None:
        """Raises if another process is this rank in the previous round, which still waits for a rank.

        torchrun numbers its processes itself, and starts them again on the same store.
        """
        if self._number == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
            return
        self._number -= 1
        holder = self._store.get(self._key("process", self._rank)).decode()
        if holder != self._process and not self._is_decided():
            self._store.add(f"hoop/round/{self._rank}", -1)
            raise self.fail(
                InvalidArgument,
                f"{_name(holder)} and {_name(self._process)} both have rank {self._rank}; give each process its own "
                "rank (RANK), and each run a new store or file",
            )
        self._number += 1

    def _check_members(self, world: list[int]) -> None:
        """Raises if this rank and the first one that joined do not mean the same group."""
        own = json.dumps([self._rank, world])
        first_rank, first = json.loads(self._store.compare_set(self._key("members"), "", own))
        if first != world:
            raise self.fail(
                InvalidArgument,
                f"rank {first_rank} makes it of {_describe(first)}, rank {self._rank} of {_describe(world)}",
            )

    def _check_backends(self, missing: Sequence[int]) -> None:
        """Raises if a missing rank makes this group with Gloo: its keys are in the store, and none of this rank's."""
        if self._store.check([_gloo_key(self._rank)]):
            return  # this process had a Gloo group of this name before
        for peer in missing:
            if self._store.check([_gloo_key(peer)]):
                raise self.fail(
                    FailedPrecondition,
                    f"rank {peer} makes it with the backend gloo, rank {self._rank} with hoop; name one for all ranks",
                )

    # ---- waiting

    def _wait(self, exchange: str) -> None:
        """Waits for the outcome of an exchange."""
        start, look = time.monotonic(), LOOK_SECONDS
        next_look = start + look
        while not self._store.check([self._key(exchange, "outcome")]):
            now = time.monotonic()
            waited = now - start
            if now >= self._deadline:
                raise self._deadline_exceeded(self._missing(exchange))
            if start + waited >= next_look:
                self._check_newer_round(exchange)
                if exchange == HOST:
                    self._check_backends(self._missing(exchange))
                look = min(2 * look, LONGEST_LOOK_SECONDS)
                next_look = start + waited + look
            time.sleep(min(0.001 + _POLL_SHARE * waited, _LONGEST_POLL_SECONDS))

    def _check_newer_round(self, exchange: str) -> None:
        """Raises MembershipChanged if another rank has left this round, which therefore will not be completed."""
        for peer in range(self._size):
            number = self._store.add(f"hoop/round/{peer}", 0)
            if peer == self._rank or number <= self._number or not self._store.check([f"hoop/{number}/process/{peer}"]):
                continue
            if not self._store.check(
                [self._key(exchange, "outcome")]
            ):  # else it has left after the round was completed
                raise MembershipChanged(f"rank {peer} is in round {number}, rank {self._rank} in {self._number}")

    def _missing(self, exchange: str) -> list[int]:
        return [peer for peer in range(self._size) if not self._store.check([self._key(exchange, peer)])]

    def _deadline_exceeded(self, missing: list[int]) -> HoopError:
        return torch_error(
            DeadlineExceeded,
            f"rank {self._rank}: {self._label}: rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))} "
            f"did not come within the timeout of {self._timeout.total_seconds():g} s",
        )


def _name(process: str) -> str:
    return process.partition(" ")[2]


def _describe(world: list[int]) -> str:
    if world == list(range(len(world))):
        return f"{len(world)} rank{'s' * (len(world) != 1)}"
    return f"the global ranks {', '.join(map(str, world))}"


def _gloo_key(rank: int) -> str:
    """The key under which Gloo publishes the address of a rank."""
    return f"0/{rank}"
