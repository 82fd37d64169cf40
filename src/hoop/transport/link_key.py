"""The key with which the ranks of one program prove their links to each other, where no cluster gives them one.

    HOOP_TOKEN, HOOP_TOKEN_FILE    a token of the user's: the ranks may be on several machines
    HOOP_INSECURE=1                no key: every process that reaches a port of a rank can be its peer
    otherwise                      the user's token on this machine (``wire.tokens.token_of_user``)

The first that is there is used. Ranks find each other through a store that anyone may read and write, so all links have
a key, those on loopback too: otherwise another user of the machine could take the place of a rank, and what ranks send
each other may be pickled objects.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hoop.wire.private_files import environment_value
from hoop.wire.tokens import Token, token_of_user


class KeyOrigin(StrEnum):
    """Where a rank has its key from."""

    GIVEN = "given"
    """A token that was given to the rank."""
    USER = "user"
    """The user's token on this machine."""
    NONE = "none"
    """There is no key, because the user wants none."""


@dataclass(frozen=True, repr=False)
class LinkKey:
    """A key of links; ``repr`` does not show it."""

    secret: bytes
    origin: KeyOrigin

    def __repr__(self) -> str:
        return f"LinkKey({self.origin})"

    @property
    def fingerprint(self) -> str:
        """Equal for ranks with the same key; the key does not follow from it."""
        return hmac.new(self.secret, b"hoop fingerprint of a link key", hashlib.sha256).hexdigest()[:32]


def key_of_environment() -> bytes:
    """The link key of processes that were all started with one token; empty without one.

    Empty with a client's token too, which has no link key.
    """
    key = b""
    if text := environment_value("HOOP_TOKEN"):
        key = Token.parse(text, "HOOP_TOKEN").link_key
    elif path := environment_value("HOOP_TOKEN_FILE"):
        key = Token.read(Path(path)).link_key
    return key


def own_link_key() -> LinkKey:
    """The key of a rank of this process; raises HoopError or OSError if it cannot be read or made."""
    if key := key_of_environment():
        return LinkKey(key, KeyOrigin.GIVEN)
    if os.environ.get("HOOP_INSECURE") == "1":
        return LinkKey(b"", KeyOrigin.NONE)
    return LinkKey(token_of_user().link_key, KeyOrigin.USER)
