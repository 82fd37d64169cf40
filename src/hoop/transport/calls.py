"""What a rank says about the collective it runs, so that ranks notice when their calls do not match.

A ``Call`` is made once for each operation and used for every run of it. Its text holds everything that all ranks must
agree on (operation, reduction, count, element type, root, …); its word is 64 bits of a hash of the text. Ranks compare
words where they meet anyway:

    shared memory   every rank writes its word before the first meeting of an operation and compares all words after it
    messages        every message of an operation carries its ``stamp``: the word and the operation's sequence number

Texts are exchanged only after words differed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from hoop.errors import CollectiveMismatch

_WORD = struct.Struct("=Q")
SEQUENCE_BITS = 24
_SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
_STAMP_MASK = (1 << 64) - 1
TEXT_BYTES = 1000
"""The longest text that is sent or shown; a longer one is cut, its hash is of all of it."""
REMEDY = "no more operations can run here: fix the calls, then make the communicator (or process group) again"


class Call:
    """One operation as all ranks of a communicator must call it."""

    __slots__ = ("_high", "_part", "_size", "text", "word", "words")

    def __init__(self, text: str, size: int) -> None:
        """``size``: the number of ranks that compare it."""
        self.text = text
        digest = hashlib.blake2b(text.encode(), digest_size=_WORD.size).digest()
        self.word: int = _WORD.unpack(digest)[0]
        self.words = memoryview(digest * size).cast("Q")
        """The words of all ranks in shared memory, if all of them call this; a view because that compares fastest."""
        self._high = (self.word << SEQUENCE_BITS) & _STAMP_MASK
        self._size, self._part = size, self

    def among(self, size: int) -> Call:
        """The same call, compared by some of the ranks: those of one host."""
        if self._part._size != size:
            self._part = Call(self.text, size)
        return self._part

    def stamp(self, sequence: int) -> int:
        """What the messages of the ``sequence``-th operation carry; never 0, which stands for no collective."""
        return self._high | (sequence & _SEQUENCE_MASK) or 1

    @property
    def short(self) -> str:
        """The text, cut to what is sent and shown."""
        return shortened(self.text)


def shortened(text: str) -> str:
    return text if len(text) <= TEXT_BYTES else f"{text[: TEXT_BYTES - 2]} …"


def distance(stamp: int, sequence: int) -> int:
    """How many operations a stamp is ahead of the ``sequence``-th one (negative: behind)."""
    ahead = (stamp - sequence) & _SEQUENCE_MASK
    return ahead - (1 << SEQUENCE_BITS) if ahead >> (SEQUENCE_BITS - 1) else ahead


def mismatch(calls: Iterable[tuple[int, str]]) -> CollectiveMismatch:
    """The error that names the call of each of these ranks; ranks with the same call are named together."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(calls):
        ranks.setdefault(text, []).append(rank)
    named = [f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {text}" for text, who in ranks.items()]
    return CollectiveMismatch(f"ranks called different collectives: {'; '.join(named)}; {REMEDY}")


def wrong_length(call: Call, rank: int, peer: int, expected: int, came: str) -> CollectiveMismatch:
    """For a message of the same collective that is not as long as it should be: splits that do not match."""
    return CollectiveMismatch(
        f"ranks called a collective with sizes that do not match: in {call.short} rank {rank} expects {expected} bytes "
        f"of rank {peer}, which sends {came}; {REMEDY}"
    )
