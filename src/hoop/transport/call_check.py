"""How the ranks of a collective check that they make the same call.

A ``Call`` is created once for each operation and used for every run of it. Its text contains everything that all ranks
must agree on (operation, reduction, count, element type, root, …). Its fingerprint is 64 bits of a hash of the text.
Ranks compare fingerprints where they communicate anyway:

    shared memory   every rank writes its fingerprint before the first barrier of an operation and compares the
                    fingerprints of all ranks after it
    messages        every message of an operation carries a stamp: the fingerprint and the operation's sequence number

Ranks exchange texts only after fingerprints differed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from hoop.errors import CollectiveMismatch

_FINGERPRINT = struct.Struct("=Q")
SEQUENCE_BITS = 24
_SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
_STAMP_MASK = (1 << 64) - 1
MAX_TEXT_CHARS = 1000
"""The longest text that is sent or shown. A longer one is cut; the fingerprint covers all of it."""
REMEDY = "no more operations can run here: fix the calls, then make the communicator (or process group) again"


class Call:
    """One operation as all ranks of a communicator must call it."""

    __slots__ = ("_for_size", "_high", "_size", "fingerprint", "fingerprints", "text")

    def __init__(self, text: str, size: int) -> None:
        """``size``: the number of ranks that compare it."""
        self.text = text
        digest = hashlib.blake2b(text.encode(), digest_size=_FINGERPRINT.size).digest()
        self.fingerprint: int = _FINGERPRINT.unpack(digest)[0]
        self.fingerprints = memoryview(digest * size).cast("Q")
        """The expected fingerprints of all ranks in shared memory; a memoryview because that compares fastest."""
        self._high = (self.fingerprint << SEQUENCE_BITS) & _STAMP_MASK
        self._size, self._for_size = size, self

    def for_size(self, size: int) -> Call:
        """The same call, compared by ``size`` of the ranks: those of one host."""
        if self._for_size._size != size:
            self._for_size = Call(self.text, size)
        return self._for_size

    def stamp(self, sequence: int) -> int:
        """The stamp of the ``sequence``-th operation's messages; never 0, which means no collective."""
        return self._high | (sequence & _SEQUENCE_MASK) or 1

    @property
    def short_text(self) -> str:
        """The text, cut to ``MAX_TEXT_CHARS``."""
        return _shorten(self.text)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 2]} …"


def operations_ahead(stamp: int, sequence: int) -> int:
    """How many operations a stamp is ahead of the ``sequence``-th one (negative: behind)."""
    ahead = (stamp - sequence) & _SEQUENCE_MASK
    return ahead - (1 << SEQUENCE_BITS) if ahead >> (SEQUENCE_BITS - 1) else ahead


def mismatch_error(calls: Iterable[tuple[int, str]]) -> CollectiveMismatch:
    """The error that names the call of each of these ranks; ranks with the same call are listed together."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in sorted(calls):
        ranks_by_text.setdefault(text, []).append(rank)
    listed = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_by_text.items()
    ]
    return CollectiveMismatch(f"ranks called different collectives: {'; '.join(listed)}; {REMEDY}")


def length_mismatch_error(call: Call, rank: int, peer: int, expected: int, received: str) -> CollectiveMismatch:
    """The error for a message of the same collective that has the wrong length: splits that do not match."""
    return CollectiveMismatch(
        f"ranks called a collective with sizes that do not match: in {call.short_text} rank {rank} expects "
        f"{expected} bytes of rank {peer}, which sends {received}; {REMEDY}"
    )
