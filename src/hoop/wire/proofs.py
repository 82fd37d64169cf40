"""Proofs of calls: a caller with a token proves its role for one call to one server, and never sends a secret.

    caller ── call, proof without a challenge ───▶ server      the first call of a channel
           ◀── UNAUTHENTICATED, challenge, mac ───             random, of this process; its mac proves the server's key
           ── the call again, proof ─────────────▶             and all later calls of the channel

A proof is HMAC(key of caller's and server's role; method, target, challenge, nonce, digest of the request). So it is
valid once, for this request, at the server process that made the challenge. The target is the advertised address of a
device; a coordinator, which callers may know by several addresses, is just that. No validity depends on a clock.

``Prover`` is the caller's side, ``Verifier`` the server's; ``ProvedChannel`` and ``auth`` carry the texts over gRPC.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import grpc

from hoop.signals import defer_signals
from hoop.wire.channels import Repeatable
from hoop.wire.roles import Role
from hoop.wire.tokens import Token

SCHEME = "Hoop-Proof"
NOTHING = "-"
"""Value in place of a challenge that the caller does not have, and of the digest of a stream of requests."""
COORDINATOR_TARGET = "coordinator"
CALLS = 16384
"""Number of calls after which a server makes a new challenge; the one before is valid until then."""
FRESH_S = 1.0
"""Seconds in which a server cannot make a new challenge: one call takes it longer than FRESH_S / CALLS, 61 us."""

_HEX = 32
"""Hexadecimal digits of a challenge and of a nonce, which are random."""
HEADER = "authorization"
ASK_PATH = "/hoop.v1.Challenge/Ask"
"""Path of a method that no server has. A server that checks proofs answers with its challenge."""
CHALLENGE_KEY = "hoop-challenge"
"""Key of the trailing metadata in which a server sends its challenge."""


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


class ProofResult(NamedTuple):
    """The result of the check of a proof: ``proof`` if it is valid, else ``problem`` and maybe a ``challenge``."""

    proof: Proof | None = None
    problem: str = ""
    challenge: str = ""
    """Challenge to send to the caller, which can then make the call again."""


class Verifier:
    """Checks the proofs of the calls to one server. Its memory is bounded: at most four times ``calls`` nonces."""

    def __init__(self, token: Token, role: Role, target: Callable[[], str], calls: int = CALLS) -> None:
        """``role`` is the server's; ``target`` its name in proofs, which a device learns while it starts."""
        self._keys = {caller.value: token.key(caller, role) for caller in Role}
        self._target, self._calls = target, calls
        self._challenge = secrets.token_hex(_HEX // 2)
        self._nonces: dict[str, set[str]] = {self._challenge: set()}
        """Nonces that were used with the current challenge and with the one before, by challenge."""

    def check(self, method: str, text: str) -> ProofResult:
        *fields, mac = text.split(" ")
        if len(fields) != len(Proof._fields) or fields[0] not in self._keys or len(fields[3]) != _HEX:
            return ProofResult(problem=f"this is not a proof of Hoop's: {text[:20]!r}")
        proof, target = Proof(*fields), self._target()
        key = self._keys[proof.role]
        if proof.target != target:
            return ProofResult(problem=f"the call is for {proof.target[:100]}, and this is {target}")
        used = self._nonces.get(proof.challenge)
        if used is None or len(used) >= 2 * self._calls:
            own_mac = _challenge_mac(key, target, self._challenge, proof.nonce)
            return ProofResult(problem="this token is not of this cluster", challenge=f"{self._challenge} {own_mac}")
        if not hmac.compare_digest(mac.encode(), _call_mac(key, method, proof).encode()):
            return ProofResult(problem="this token is not of this cluster")
        if proof.nonce in used:
            return ProofResult(problem="this proof was used before")
        used.add(proof.nonce)
        if proof.challenge == self._challenge and len(used) >= self._calls:
            self._renew()
        return ProofResult(proof)

    def _renew(self) -> None:
        before, self._challenge = self._challenge, secrets.token_hex(_HEX // 2)
        self._nonces = {before: self._nonces[before], self._challenge: set()}


# ---- channels whose calls carry proofs


class ProvedChannel:
    """Wraps a channel of ``grpc``, or with ``is_async`` of ``grpc.aio``: its methods that stubs and callers use.

    A server that does not know the challenge of a proof refuses the call before it reads a message; the call is then
    made again, once, with the challenge of the refusal. So a stream of requests must be ``Repeatable``. With
    ``grpc.aio`` a refusal during a stream of requests can be lost: there such a call asks for the challenge first, and
    is made once.
    """

    def __init__(self, channel: Any, prover: Prover, is_async: bool) -> None:
        self._channel, self._prover = channel, prover
        self._ask = channel.unary_unary(ASK_PATH) if is_async else None
        self._unary: type[_Method] = _AsyncUnaryMethod if is_async else _UnaryMethod
        self._stream: type[_Method] = _AsyncStreamMethod if is_async else _StreamMethod

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    # A single request is serialized here, because its digest is part of the proof.

    def unary_unary(self, path: str, request_serializer: Any = None, *rest: Any, **options: Any) -> Any:
        call = self._channel.unary_unary(path, None, *rest, **options)
        return self._unary(call, self._prover, path, request_serializer or bytes)

    def unary_stream(self, path: str, request_serializer: Any = None, *rest: Any, **options: Any) -> Any:
        call = self._channel.unary_stream(path, None, *rest, **options)
        return self._stream(call, self._prover, path, request_serializer or bytes)

    def stream_unary(self, path: str, *rest: Any, **options: Any) -> Any:
        return self._unary(self._channel.stream_unary(path, *rest, **options), self._prover, path, ask=self._ask)

    def stream_stream(self, path: str, *rest: Any, **options: Any) -> Any:
        return self._stream(self._channel.stream_stream(path, *rest, **options), self._prover, path, ask=self._ask)

    def __enter__(self) -> ProvedChannel:
        self._channel.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.__exit__(*error)

    async def __aenter__(self) -> ProvedChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.__aexit__(*error)


class _Attempts:
    """The attempts of one call: two, or one if it has a stream of requests that cannot be sent again."""

    def __init__(self, call: Any, prover: Prover, path: str, request: Any, options: dict[str, Any]) -> None:
        """``request`` is bytes, or a stream."""
        self._call, self._prover, self._path = call, prover, path
        self._request, self._options = request, options
        self._proof: Proof | None = None
        self._last = False

    def start(self) -> Any:
        request = self._request
        self._proof, text = self._prover.prove(self._path, request if isinstance(request, bytes) else None)
        stream = isinstance(request, Repeatable)
        return self._call(iter(request) if stream else request, metadata=((HEADER, text),), **self._options)

    def end(self) -> None:
        """There is no further attempt."""
        self._last = True

    def repeats(self, refusal: Any) -> bool:
        """Whether the call must be started again: the server refused it, and sent its challenge."""
        if self._last or refusal.code() != grpc.StatusCode.UNAUTHENTICATED:
            return False
        assert self._proof is not None, "the call was started"
        found = [str(value) for key, value in refusal.trailing_metadata() or () if key == CHALLENGE_KEY]
        self._last = True
        return bool(found) and self._prover.learn(self._proof, found[0])


class _Method:
    """A method of a server. Each call of it is the calls of one ``_Attempts``."""

    def __init__(
        self,
        call: Any,
        prover: Prover,
        path: str,
        serialize: Callable[[Any], bytes] | None = None,
        ask: Any = None,
    ) -> None:
        """``serialize`` None: the request is a stream, before which ``ask``, if given, gets the challenge."""
        self._call, self._prover, self._path, self._serialize, self._ask = call, prover, path, serialize, ask

    def attempts(self, request: Any, options: dict[str, Any], call: Any = None) -> _Attempts:
        content = request if self._serialize is None else self._serialize(request)
        return _Attempts(call or self._call, self._prover, self._path, content, options)

    def __call__(self, request: Any, **options: Any) -> Any:
        raise NotImplementedError


class _UnaryMethod(_Method):
    def __call__(self, request: Any, **options: Any) -> Any:
        attempts = self.attempts(request, options)
        try:
            return attempts.start()
        except grpc.RpcError as error:
            if not attempts.repeats(error):
                raise
        return attempts.start()

    def future(self, request: Any, **options: Any) -> Any:
        return _Future(self.attempts(request, options, self._call.future))


class _StreamMethod(_Method):
    def __call__(self, request: Any, **options: Any) -> Any:
        return _Answers(self.attempts(request, options))


class _AsyncMethod(_Method):
    async def ready_attempts(self, request: Any, options: dict[str, Any]) -> _Attempts:
        attempts = self.attempts(request, options)
        if self._ask is not None:
            attempts.end()
            if not self._prover.is_fresh():
                await self._ask_challenge(options.get("timeout"))
        return attempts

    async def _ask_challenge(self, timeout: float | None) -> None:
        self._prover.forget()
        asking = _Attempts(self._ask, self._prover, ASK_PATH, b"", {"timeout": timeout})
        try:
            await asking.start()
        except grpc.RpcError as error:
            asking.repeats(
                error
            )  # without a challenge the server checks no proofs, or the call will fail like this one

    def failed(self, attempts: _Attempts, error: grpc.RpcError) -> bool:
        """Whether the call must be started again."""
        if self._ask is not None:
            self._prover.forget()
        return attempts.repeats(error)


class _AsyncUnaryMethod(_AsyncMethod):
    async def __call__(self, request: Any, **options: Any) -> Any:
        attempts = await self.ready_attempts(request, options)
        try:
            return await attempts.start()
        except grpc.RpcError as error:
            if not self.failed(attempts, error):
                raise
        return await attempts.start()


class _AsyncStreamMethod(_AsyncMethod):
    async def __call__(self, request: Any, **options: Any) -> AsyncIterator[Any]:
        attempts = await self.ready_attempts(request, options)
        while True:
            call = attempts.start()
            try:
                async for answer in call:
                    attempts.end()
                    yield answer
                return
            except grpc.RpcError as error:
                if not self.failed(attempts, error):
                    raise
            finally:
                call.cancel()


class _Future:
    """The result of a call that runs in the background."""

    def __init__(self, attempts: _Attempts) -> None:
        self._attempts = attempts
        self._ended = threading.Event()
        self._start()

    def _start(self) -> None:
        self._call = self._attempts.start()
        self._call.add_done_callback(self._on_end)

    def _on_end(self, call: Any) -> None:
        if self._attempts.repeats(call):
            self._start()
        else:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._ended.wait(timeout):
            raise grpc.FutureTimeoutError
        return self._call.result()


class _Answers:
    """The answers of a call, as an iterator."""

    def __init__(self, attempts: _Attempts) -> None:
        self._attempts = attempts
        self._call = attempts.start()
        self._cancelled = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            answer = next(self._call)
        except grpc.RpcError as error:
            if not self._attempts.repeats(error):
                raise
            self._start_again()
            return next(self._call)
        self._attempts.end()
        return answer

    def _start_again(self) -> None:
        with defer_signals():
            self._call = self._attempts.start()
        if self._cancelled:
            self._call.cancel()

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """``callback`` gets gRPC's call when it has ended, unless it is made again: then when that one has."""

        def on_end(call: Any) -> None:
            if self._attempts.repeats(call):
                self._start_again()
                self._call.add_done_callback(callback)
            else:
                callback(call)

        self._call.add_done_callback(on_end)
