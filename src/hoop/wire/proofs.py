"""Proofs of calls: caller and server prove to each other, for each call, that they have the cluster's keys. No secret
is sent, no request before the server has proven itself, and no answer counts without its proof.

    caller ── Ask, nonce ────────────────────────▶ server      unless it has proven itself within the last second
           ◀── UNAUTHENTICATED, challenge, mac ───             random, of this process; its mac proves the server's key
           ── call, proof ───────────────────────▶             and all calls of the next second
           ◀── answer, mac of the proof ──────────             in its trailing or, for a stream, initial metadata

A proof is HMAC(key of caller's and server's role; method, target, challenge, nonce, digest of the request). So it is
valid once, for this request, at the server process that made the challenge. The target is the advertised address of a
device; a coordinator, which callers may know by several addresses, is just that. No validity depends on a clock.
A channel connects again by itself: so a server's proof holds for ``FRESH_S``, and a call that fails ends it.

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
from hoop.wire.roles import Role
from hoop.wire.tokens import Token

SCHEME = "Hoop-Proof"
NOTHING = "-"
"""Value in place of a challenge that the caller does not have, and of the digest of a stream of requests."""
COORDINATOR_TARGET = "coordinator"
CALLS = 16384
"""Number of calls after which a server makes a new challenge; the one before is valid until then."""
FRESH_S = 1.0
"""Seconds for which a server that has proven itself is not asked again. It cannot make a new challenge in this time:
one call takes it longer than FRESH_S / CALLS, 61 us."""

_HEX = 32
"""Hexadecimal digits of a challenge and of a nonce, which are random."""
HEADER = "authorization"
ASK_PATH = "/hoop.v1.Challenge/Ask"
"""Path of a method that no server has. A server that checks proofs answers with its challenge."""
CHALLENGE_KEY = "hoop-challenge"
"""Key of the trailing metadata in which a server sends its challenge."""
ANSWER_KEY = "hoop-proof"
"""Key of the metadata in which a server proves itself with an answer."""


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


def answer_mac(key: bytes, method: str, proof: Proof) -> str:
    """What only a server with the key can answer to a call with this proof."""
    return _mac(key, "hoop v1 answer", method, *proof)


class Unproven(grpc.RpcError):
    """A call was answered by a process that does not prove that it has the cluster's key."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._details = (
            f"the process that answers for {target} has not proven that it belongs to this cluster: another one may "
            "have its port, or the server has no token (--insecure; then unset HOOP_TOKEN and HOOP_TOKEN_FILE)"
        )

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAUTHENTICATED

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return ()

    def __str__(self) -> str:
        return self._details


class Prover:
    """Makes the proofs of the calls to one server, and checks the server's."""

    def __init__(self, token: Token, role: Role, to: Role, target: str) -> None:
        self._key, self._role, self._target = token.key(role, to), role.value, target
        self._challenge = NOTHING
        self._proven = 0.0
        """When the server last proved itself."""

    @property
    def challenge(self) -> str:
        """The challenge of a server that proved itself within the last ``FRESH_S`` seconds, else ``NOTHING``."""
        return self._challenge if time.monotonic() - self._proven < FRESH_S else NOTHING

    def prove(self, method: str, request: bytes | None, challenge: str) -> tuple[Proof, str]:
        """The proof of a call, and the text to send; ``request`` None: a stream."""
        content = NOTHING if request is None else digest(request)
        proof = Proof(self._role, self._target, challenge, secrets.token_hex(_HEX // 2), content)
        return proof, " ".join((SCHEME, *proof, _call_mac(self._key, method, proof)))

    def learn(self, proof: Proof, answer: str) -> str:
        """The challenge in the server's refusal of ``proof``; empty: the server has not proven itself with it."""
        challenge, _, mac = answer.partition(" ")
        expected = _challenge_mac(self._key, self._target, challenge, proof.nonce)
        if not hmac.compare_digest(mac.encode(), expected.encode()):
            return ""  # not a server of this cluster
        self._challenge, self._proven = challenge, time.monotonic()
        return challenge

    def check(self, method: str, proof: Proof, metadata: Any) -> None:
        """Raise ``Unproven`` unless this metadata of an answer proves the server."""
        mac = next((str(value) for key, value in metadata or () if key == ANSWER_KEY), "")
        if not hmac.compare_digest(mac.encode(), answer_mac(self._key, method, proof).encode()):
            raise self.unproven()
        if proof.challenge == self._challenge:
            self._proven = time.monotonic()

    def unproven(self) -> Unproven:
        self.forget()
        return Unproven(self._target)

    def forget(self) -> None:
        """The server may be another process now."""
        self._challenge = NOTHING


class ProofResult(NamedTuple):
    """The result of the check of a proof: ``proof`` if it is valid, else ``problem`` and maybe a ``challenge``."""

    proof: Proof | None = None
    problem: str = ""
    challenge: str = ""
    """Challenge to send to the caller, which can then make the call again."""
    answer: str = ""
    """What proves the server to the caller."""


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
        return ProofResult(proof, answer=answer_mac(key, method, proof))

    def _renew(self) -> None:
        before, self._challenge = self._challenge, secrets.token_hex(_HEX // 2)
        self._nonces = {before: self._nonces[before], self._challenge: set()}


# ---- channels whose calls carry proofs


class ProvedChannel:
    """Wraps a channel of ``grpc``, or with ``is_async`` of ``grpc.aio``: its methods that stubs and callers use.

    A call asks for the server's challenge first, unless the server has just proven itself. A call with a single request
    that the server refuses for its challenge, because it was restarted since, is made again, once; one with a stream of
    requests always asks, and is made once.
    """

    def __init__(self, channel: Any, prover: Prover, is_async: bool) -> None:
        self._channel, self._prover = channel, prover
        self._unary: type[_Method] = _AsyncUnaryMethod if is_async else _UnaryMethod
        self._stream: type[_Method] = _AsyncStreamMethod if is_async else _StreamMethod
        self._asks: dict[type[_Method], Any] = {
            self._unary: channel.unary_unary(ASK_PATH),
            self._stream: channel.unary_stream(ASK_PATH),
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    # A single request is serialized here, because its digest is part of the proof.

    def unary_unary(self, path: str, request_serializer: Any = None, *rest: Any, **options: Any) -> Any:
        call = self._channel.unary_unary(path, None, *rest, **options)
        return self._method(self._unary, call, path, request_serializer or bytes)

    def unary_stream(self, path: str, request_serializer: Any = None, *rest: Any, **options: Any) -> Any:
        call = self._channel.unary_stream(path, None, *rest, **options)
        return self._method(self._stream, call, path, request_serializer or bytes)

    def stream_unary(self, path: str, *rest: Any, **options: Any) -> Any:
        return self._method(self._unary, self._channel.stream_unary(path, *rest, **options), path)

    def stream_stream(self, path: str, *rest: Any, **options: Any) -> Any:
        return self._method(self._stream, self._channel.stream_stream(path, *rest, **options), path)

    def _method(
        self, kind: type[_Method], call: Any, path: str, serialize: Callable[[Any], bytes] | None = None
    ) -> _Method:
        return kind(call, self._asks[kind], self._prover, path, serialize)

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


class _Method:
    """A method of a server. Each call of it is the calls of one ``_Attempts``."""

    def __init__(
        self, call: Any, ask: Any, prover: Prover, path: str, serialize: Callable[[Any], bytes] | None
    ) -> None:
        """``ask`` asks for the server's challenge. ``serialize`` None: the request is a stream."""
        self.call, self.ask, self.prover, self.path, self._serialize = call, ask, prover, path, serialize

    def attempts(self, request: Any, options: dict[str, Any]) -> _Attempts:
        return _Attempts(self, request if self._serialize is None else self._serialize(request), options)

    def __call__(self, request: Any, **options: Any) -> Any:
        raise NotImplementedError


class _Attempts:
    """The attempts of one call: it asks for the server's challenge if it must, and then makes the call."""

    MOST = 3
    """Three attempts: the question; the call, which a restarted server refuses for its challenge; the call again."""

    def __init__(self, method: _Method, request: Any, options: dict[str, Any]) -> None:
        """``request`` is bytes, or a stream."""
        self._method, self._request, self._options = method, request, options
        timeout = options.get("timeout")
        self._until = None if timeout is None else time.monotonic() + timeout
        self._single = isinstance(request, bytes)
        self._made, self._asking, self._proven = 0, False, False
        self._learned = ""
        """The challenge that the last attempt got."""
        self._proof: Proof | None = None

    def start(self, kind: Callable[[Any], Any] = lambda call: call) -> Any:
        """Begin the next attempt; ``kind`` selects the way in which it is called."""
        prover, method = self._method.prover, self._method
        challenge = self._learned or (prover.challenge if self._single else NOTHING)
        self._asking = challenge == NOTHING
        self._made += 1
        path, call, request = method.path, method.call, self._request
        if self._asking:
            path, call, request, challenge = ASK_PATH, method.ask, b"", NOTHING
        self._proof, text = prover.prove(path, request if isinstance(request, bytes) else None, challenge)
        options = self._options
        if self._until is not None:
            options = {**options, "timeout": max(0.0, self._until - time.monotonic())}
        return kind(call)(request, metadata=((HEADER, text),), **options)

    def repeats(self, refusal: Any) -> bool:
        """Whether there must be another attempt: this one was refused, and the server has sent its challenge."""
        if self._proven:
            return False
        assert self._proof is not None, "the call was started"
        self._method.prover.forget()
        if refusal.code() != grpc.StatusCode.UNAUTHENTICATED or self._made >= self.MOST:
            return False
        answer = next((str(value) for key, value in refusal.trailing_metadata() or () if key == CHALLENGE_KEY), "")
        self._learned = self._method.prover.learn(self._proof, answer)
        return bool(self._learned) and (self._asking or self._single)

    def failure(self, error: Any) -> Any:
        """What to raise for the failed attempt: another program does not know the question."""
        unknown = self._asking and error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.OK)
        return self._method.prover.unproven() if unknown else error

    def check(self, metadata: Any) -> None:
        """Raise ``Unproven`` unless the answer, whose metadata these are, is the server's. No attempt follows."""
        if self._proven:
            return
        if self._asking:
            raise self._method.prover.unproven()
        assert self._proof is not None, "the call was started"
        self._method.prover.check(self._method.path, self._proof, metadata)
        self._proven = True


class _UnaryMethod(_Method):
    def __call__(self, request: Any, **options: Any) -> Any:
        attempts = self.attempts(request, options)
        while True:
            try:
                answer, call = attempts.start(lambda method: method.with_call)
            except grpc.RpcError as error:
                if not attempts.repeats(error):
                    raise attempts.failure(error) from None
                continue
            attempts.check(call.trailing_metadata())
            return answer

    def future(self, request: Any, **options: Any) -> Any:
        return _Future(self.attempts(request, options))


class _StreamMethod(_Method):
    def __call__(self, request: Any, **options: Any) -> Any:
        return _Answers(self.attempts(request, options))


class _AsyncUnaryMethod(_Method):
    async def __call__(self, request: Any, **options: Any) -> Any:
        attempts = self.attempts(request, options)
        while True:
            call = attempts.start()
            try:
                answer = await call
            except grpc.RpcError as error:
                if not attempts.repeats(error):
                    raise attempts.failure(error) from None
                continue
            attempts.check(await call.trailing_metadata())
            return answer


class _AsyncStreamMethod(_Method):
    async def __call__(self, request: Any, **options: Any) -> AsyncIterator[Any]:
        attempts = self.attempts(request, options)
        while True:
            call = attempts.start()
            try:
                async for answer in call:
                    attempts.check(await call.initial_metadata())
                    yield answer
                attempts.check(await call.initial_metadata())
                return
            except grpc.RpcError as error:
                if not attempts.repeats(error):
                    raise attempts.failure(error) from None
            finally:
                call.cancel()


class _Future:
    """The result of a call that runs in the background."""

    def __init__(self, attempts: _Attempts) -> None:
        self._attempts = attempts
        self._ended = threading.Event()
        self._start()

    def _start(self) -> None:
        self._call = self._attempts.start(lambda method: method.future)
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
        try:
            answer = self._call.result()
        except grpc.RpcError as error:
            raise self._attempts.failure(error) from None
        self._attempts.check(self._call.trailing_metadata())
        return answer


class _Answers:
    """The answers of a call, as an iterator."""

    def __init__(self, attempts: _Attempts) -> None:
        self._attempts = attempts
        self._call = attempts.start()
        self._cancelled = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                answer = next(self._call)
                break
            except StopIteration:
                self._check()
                raise
            except grpc.RpcError as error:
                if not self._attempts.repeats(error):
                    raise self._attempts.failure(error) from None
                self._start_again()
        self._check()
        return answer

    def _check(self) -> None:
        try:
            self._attempts.check(self._call.initial_metadata())
        except Unproven:
            self._call.cancel()
            raise

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
                self._call.add_done_callback(on_end)
            else:
                callback(self._attempts.failure(call))

        self._call.add_done_callback(on_end)
