"""What is known of a communicator's failed links; the rules are in ``links``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TRIES = 3
"""How often at most a pair gets new links within …"""
WINDOW_S = 60.0
"""… this time; and how long the first eviction lasts."""

Pair = tuple[int, int]
"""Two devices, the lower number first."""


@dataclass(frozen=True)
class Trouble:
    """What is known of a communicator's failed links."""

    generation: int = 0
    """Of the complaints."""
    complaints: frozenset[tuple[int, int]] = frozenset()
    """Who complains of whom."""
    since: float = 0.0
    """When the first of them came."""
    closed: int = 0
    """Up to this generation everything is decided."""
    worked: int = 0
    """The newest generation in which everybody reached everybody."""
    tried: tuple[tuple[Pair, int, float], ...] = ()
    """Which pairs got new links, after which generation, and when."""
    out: Mapping[int, float] = field(default_factory=dict)
    """Who was evicted, and until when."""
    evictions: Mapping[int, int] = field(default_factory=dict)
    """How often each was."""

    def failed_again(self, pair: Pair, now: float) -> bool:
        tries = [generation for one, generation, when in self.tried if one == pair and now - when < WINDOW_S]
        return bool(tries) and (tries[-1] >= self.worked or len(tries) >= TRIES)
