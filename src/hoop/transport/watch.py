"""What can be seen of a rank's links from outside, while it waits for them.

A rank that computes for long and a link that has gone silent look alike to whoever waits. Two counters tell them apart:
bytes that a link has taken at one end, and bytes that have come out of it at the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class LinkWatch:
    """Of one endpoint; read from any thread. Ranks that share memory have no links, and nothing to see."""

    def __init__(self, moved: Callable[[int], tuple[int, int]] = lambda peer: (0, 0)) -> None:
        self.moved = moved
        """Bytes that the link to a peer has taken, and bytes that have come from it."""
        self.waits_for: tuple[int, ...] = ()
        """Peers of whom this rank needs something before it goes on."""
        self.connecting = False
        """Whether what it needs is that they take its connection."""
        self.failed: int | None = None
        """The peer to whom the link failed: not one who gave up for another's sake, and said so."""
        self._seen: object = None
        self._since = 0.0

    def stalled(self, now: float, patience: float) -> tuple[int, ...]:
        """Asked again and again: those whom it has been waiting for, for so long, without a byte from any of them."""
        peers = self.waits_for
        seen = peers, self.connecting, self._came(peers)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return peers if now - self._since >= patience else ()

    def _came(self, peers: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.moved(peer)[1] for peer in peers)
