"""Proofs of calls: a caller with a token proves its role for one call to one server, and never sends a secret.

    caller ── call, proof without a challenge ───▶ server      the first call of a channel
           ◀── UNAUTHENTICATED, challenge, mac ───             random, of this process; its mac proves the server's key
           ── the call again, proof ─────────────▶             and all later calls of the channel

A proof is HMAC(key of caller's and server's role; method, target, challenge, nonce, digest of the request). So it is
valid once, for this request, at the server process that made the challenge. The target is the advertised address of a
device; a coordinator, which callers may know by several addresses, is just that. No validity depends on a clock.

``Prover`` is the caller's side, ``Verifier`` the server's; ``proved_channel`` and ``auth`` carry the texts over gRPC.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from hoop.wire.roles import Role
from hoop.wire.tokens import Token

SCHEME = "Hoop-Proof"
NOTHING = "-"
"""In place of a challenge that the caller does not have, and of the digest of a stream of requests."""
COORDINATOR_TARGET = "coordinator"
CALLS = 16384
"""A server makes a new challenge after this number of calls; the one before is valid until then."""
FRESH_S = 1.0
"""In this time a server cannot make a new challenge: one call takes it longer than FRESH_S / CALLS, 61 us."""

_HEX = 32
"""Digits of a challenge and of a nonce, which are random."""


class Proof(NamedTuple):
    """The proof of one call, without its mac."""

    role: str
    target: str
    challenge: str
    nonce: str
    digest: str


def digest(request: bytes) -> str:
    return hashlib.sha256(request).hexdigest()


def _mac(key: bytes, *parts: str) -> str:
    """No part contains the separator: all come from headers."""
    return hmac.digest(key, "\n".join(parts).encode(), "sha256").hex()


def _call_mac(key: bytes, method: str, proof: Proof) -> str:
    return _mac(key, "hoop v1 call", method, *proof)


def _challenge_mac(key: bytes, target: str, challenge: str, nonce: str) -> str:
    return _mac(key, "hoop v1 challenge", target, challenge, nonce)


class Prover:
    """Makes the proofs of the calls to one server."""

    def __init__(self, token: Token, role: Role, to: Role, target: str) -> None:
        self._key, self._role, self._target = token.key(role, to), role.value, target
        self._challenge = NOTHING
        self._learned = 0.0

    def prove(self, method: str, request: bytes | None) -> tuple[Proof, str]:
        """The proof of a call, and the text to send; ``request`` None: a stream."""
        content = NOTHING if request is None else digest(request)
        proof = Proof(self._role, self._target, self._challenge, secrets.token_hex(_HEX // 2), content)
        return proof, " ".join((SCHEME, *proof, _call_mac(self._key, method, proof)))

    def learn(self, proof: Proof, answer: str) -> bool:
        """Take the challenge in the server's refusal of ``proof``. Whether the call can be made again with it."""
        challenge, _, mac = answer.partition(" ")
        expected = _challenge_mac(self._key, self._target, challenge, proof.nonce)
        if not hmac.compare_digest(mac.encode(), expected.encode()):
            return False  # not a server of this cluster
        self._challenge, self._learned = challenge, time.monotonic()
        return True

    def is_fresh(self) -> bool:
        """Whether the server's process, if it is still the same, surely knows the challenge."""
        return self._challenge != NOTHING and time.monotonic() - self._learned < FRESH_S

    def forget(self) -> None:
        """The server may be another process now."""
        self._challenge = NOTHING


class Verdict(NamedTuple):
    """The result of the check of a proof: ``proof`` if it is valid, else ``problem`` and maybe a ``challenge``."""

    proof: Proof | None = None
    problem: str = ""
    challenge: str = ""
    """To be sent to the caller, which can then make the call again."""


class Verifier:
    """Checks the proofs of the calls to one server. Its memory is bounded: at most four times ``calls`` nonces."""

    def __init__(self, token: Token, role: Role, target: Callable[[], str], calls: int = CALLS) -> None:
        """``role`` is the server's; ``target`` its name in proofs, which a device learns while it starts."""
        self._keys = {caller.value: token.key(caller, role) for caller in Role}
        self._target, self._calls = target, calls
        self._challenge = secrets.token_hex(_HEX // 2)
        self._nonces: dict[str, set[str]] = {self._challenge: set()}
        """Nonces that were used, by challenge: of the current one and of the one before."""

    def check(self, method: str, text: str) -> Verdict:
        *fields, mac = text.split(" ")
        if len(fields) != len(Proof._fields) or fields[0] not in self._keys or len(fields[3]) != _HEX:
            return Verdict(problem=f"this is not a proof of Hoop's: {text[:20]!r}")
        proof, target = Proof(*fields), self._target()
        key = self._keys[proof.role]
        if proof.target != target:
            return Verdict(problem=f"the call is for {proof.target[:100]}, and this is {target}")
        used = self._nonces.get(proof.challenge)
        if used is None or len(used) >= 2 * self._calls:
            own_mac = _challenge_mac(key, target, self._challenge, proof.nonce)
            return Verdict(problem="this token is not of this cluster", challenge=f"{self._challenge} {own_mac}")
        if not hmac.compare_digest(mac.encode(), _call_mac(key, method, proof).encode()):
            return Verdict(problem="this token is not of this cluster")
        if proof.nonce in used:
            return Verdict(problem="this proof was used before")
        used.add(proof.nonce)
        if proof.challenge == self._challenge and len(used) >= self._calls:
            self._renew()
        return Verdict(proof)

    def _renew(self) -> None:
        before, self._challenge = self._challenge, secrets.token_hex(_HEX // 2)
        self._nonces = {before: self._nonces[before], self._challenge: set()}
