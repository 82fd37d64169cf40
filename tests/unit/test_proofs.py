"""Proofs of calls: valid once, for one request, at one server process; nothing depends on a clock."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hoop.errors import InvalidArgument
from hoop.wire.proofs import NOTHING, SCHEME, ProofResult, Prover, Unproven, Verifier
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

JOIN = Token.parse(new_token())
DEVICE = Token.parse(JOIN.role_token(Role.DEVICE))
CLIENT = Token.parse(JOIN.role_token(Role.CLIENT))
HERE = "10.0.0.2:4022"
READ = "/hoop.v1.Device/Read"


def verifier(token: Token = DEVICE, role: Role = Role.DEVICE, target: str = HERE, calls: int = 100) -> Verifier:
    return Verifier(token, role, lambda: target, calls)


def attempt(prover: Prover, server: Verifier, method: str = READ, request: bytes | None = b"request") -> ProofResult:
    """One call as a channel makes it, again with the challenge if there is one."""
    proof, text = prover.prove(method, request, prover.challenge)
    verdict = server.check(method, text.removeprefix(f"{SCHEME} "))
    if verdict.challenge and prover.learn(proof, verdict.challenge):
        _, text = prover.prove(method, request, prover.challenge)
        return server.check(method, text.removeprefix(f"{SCHEME} "))
    return verdict


@pytest.mark.parametrize(
    ("caller", "role", "server", "to"),
    [
        (JOIN, Role.COORDINATOR, DEVICE, Role.DEVICE),
        (CLIENT, Role.CLIENT, DEVICE, Role.DEVICE),
        (DEVICE, Role.DEVICE, DEVICE, Role.DEVICE),
        (DEVICE, Role.DEVICE, JOIN, Role.COORDINATOR),
        (CLIENT, Role.CLIENT, JOIN, Role.COORDINATOR),
        (JOIN, Role.CLIENT, JOIN, Role.COORDINATOR),
    ],
)
def test_join_and_role_tokens_verify_each_other(caller: Token, role: Role, server: Token, to: Role) -> None:
    prover, checking = Prover(caller, role, to, HERE), verifier(server, to)
    for request in (b"one", b"", None):
        verdict = attempt(prover, checking, request=request)
        assert verdict.proof is not None
        assert Role(verdict.proof.role) is role


def test_no_proof_contains_a_secret() -> None:
    """Nor the text that a device sends to a process at the coordinator's port that does not have its key."""
    prover, server = Prover(DEVICE, Role.DEVICE, Role.COORDINATOR, "coordinator"), verifier(JOIN, Role.COORDINATOR)
    texts = [prover.prove(READ, b"request", prover.challenge)[1]]
    assert attempt(prover, verifier(JOIN, Role.COORDINATOR, "coordinator")).proof is not None
    texts.append(prover.prove(READ, b"request", prover.challenge)[1])
    secrets = [*JOIN.secrets.values(), JOIN.link_key.hex()]
    secrets += [JOIN.key(caller, server_role).hex() for caller in Role for server_role in Role]
    assert not [one for one in secrets for text in texts if one in text]
    assert server.check(READ, texts[1].removeprefix(f"{SCHEME} ")).proof is None


def test_a_proof_is_valid_once_and_only_for_its_call() -> None:
    server, other = verifier(), verifier()
    prover = Prover(JOIN, Role.COORDINATOR, Role.DEVICE, HERE)
    assert attempt(prover, server).proof is not None
    _, text = prover.prove(READ, b"request", prover.challenge)
    text = text.removeprefix(f"{SCHEME} ")
    assert server.check("/hoop.v1.Device/StartTask", text).proof is None  # another method
    assert other.check(READ, text).proof is None  # another process, or this one after a restart
    assert verifier(target="10.0.0.3:4022").check(READ, text).problem == (
        "the call is for 10.0.0.2:4022, and this is 10.0.0.3:4022"
    )
    for field in range(6):  # every field is signed
        words = text.split(" ")
        words[field] = {0: "client", 1: "10.0.0.9:1"}.get(field, "0" * len(words[field]))
        assert server.check(READ, " ".join(words)).proof is None, words
    assert server.check(READ, text).proof is not None
    assert server.check(READ, text).problem == "this proof was used before"


def test_a_device_cannot_act_as_coordinator_or_client_towards_the_coordinator() -> None:
    for role in (Role.COORDINATOR, Role.CLIENT):
        with pytest.raises(InvalidArgument, match="needs the join token"):
            Prover(DEVICE, role, Role.COORDINATOR, "coordinator")
        # Not with the keys either by which it verifies calls of that role.
        forged = dataclasses.replace(DEVICE, secrets={role: DEVICE.key(role, Role.DEVICE).hex()}, keys={})
        verdict = attempt(Prover(forged, role, Role.COORDINATOR, "coordinator"), verifier(JOIN, Role.COORDINATOR))
        assert verdict.proof is None


def test_a_challenge_of_another_server_is_not_answered() -> None:
    """A process without the key gets no proof, for no challenge of its choice."""
    prover = Prover(DEVICE, Role.DEVICE, Role.COORDINATOR, "coordinator")
    proof, _ = prover.prove(READ, b"", prover.challenge)
    for mac in ("0" * 64, "", "x"):
        assert not prover.learn(proof, f"{'ab' * 16} {mac}".strip())
    # One of the right server, for another call.
    server = verifier(JOIN, Role.COORDINATOR, "coordinator")
    earlier = server.check(READ, prover.prove(READ, b"", prover.challenge)[1].removeprefix(f"{SCHEME} ")).challenge
    assert not prover.learn(proof, earlier)
    assert re.search(" - [0-9a-f]{32} ", prover.prove(READ, b"", prover.challenge)[1]), "the proof has no challenge"


def test_only_a_server_with_the_key_can_answer() -> None:
    server, prover = verifier(), Prover(JOIN, Role.COORDINATOR, Role.DEVICE, HERE)
    answer = attempt(prover, server).answer
    proof, text = prover.prove(READ, b"request", prover.challenge)
    right = server.check(READ, text.removeprefix(f"{SCHEME} ")).answer
    for wrong in ((), (("hoop-proof", ""),), (("hoop-proof", answer),), (("other", right),)):
        assert prover.challenge != NOTHING
        with pytest.raises(Unproven, match=f"{HERE} has not proven that it belongs to this cluster"):
            prover.check(READ, proof, wrong)
        assert prover.challenge == NOTHING, "an answer of another process is a reason to ask"
        assert attempt(prover, server).proof is not None
    prover.check(READ, proof, (("hoop-proof", right),))


def test_a_server_is_asked_again_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    server, prover, clock = verifier(), Prover(JOIN, Role.COORDINATOR, Role.DEVICE, HERE), [50.0]
    monkeypatch.setattr("hoop.wire.proofs.time.monotonic", lambda: clock[0])
    assert attempt(prover, server).proof is not None
    for clock[0] in (50.9, 51.8):
        proof, text = prover.prove(READ, b"", prover.challenge)
        answer = server.check(READ, text.removeprefix(f"{SCHEME} ")).answer
        prover.check(READ, proof, (("hoop-proof", answer),))
    clock[0] = 52.9
    assert prover.challenge == NOTHING


def test_the_memory_for_nonces_is_bounded_and_callers_notice_nothing() -> None:
    server = verifier(calls=10)
    busy = Prover(JOIN, Role.COORDINATOR, Role.DEVICE, HERE)
    idle = Prover(CLIENT, Role.CLIENT, Role.DEVICE, HERE)
    assert attempt(idle, server).proof is not None
    _, recorded = idle.prove(READ, b"request", idle.challenge)
    recorded = recorded.removeprefix(f"{SCHEME} ")
    assert server.check(READ, recorded).proof is not None
    most = 0
    for number in range(200):
        assert attempt(busy, server).proof is not None
        if number % 50 == 0:
            assert attempt(idle, server).proof is not None
        assert server.check(READ, recorded).proof is None  # whether its nonce or its challenge is known or forgotten
        most = max(most, sum(map(len, server._nonces.values())))
    assert most <= 40
    assert len(server._nonces) == 2


def test_calls_with_the_challenge_before_are_bounded_too() -> None:
    server = verifier(calls=10)
    old, new = (Prover(JOIN, Role.COORDINATOR, Role.DEVICE, HERE) for _ in range(2))
    assert attempt(old, server).proof is not None
    for _ in range(11):
        assert attempt(new, server).proof is not None
    for _ in range(100):  # no call that would renew the challenge
        _, text = old.prove(READ, b"request", old._challenge)
        server.check(READ, text.removeprefix(f"{SCHEME} "))
    assert sum(map(len, server._nonces.values())) <= 40


def test_a_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock is not read at all (``tests/house/test_clocks.py``); the other one decides no validity."""
    server, prover = verifier(), Prover(JOIN, Role.COORDINATOR, Role.DEVICE, HERE)
    for now in (1000.0, 1e9, 4600.0, 0.0, -3600.0):
        monkeypatch.setattr("hoop.wire.proofs.time.monotonic", lambda now=now: now)
        assert attempt(prover, server).proof is not None


def test_a_call_without_a_key_takes_no_memory() -> None:
    server, stranger = verifier(), Prover(Token.parse(new_token()), Role.CLIENT, Role.DEVICE, HERE)
    for _ in range(500):
        assert attempt(stranger, server).problem == "this token is not of this cluster"
    assert sum(map(len, server._nonces.values())) == 0


def test_a_device_token_of_an_earlier_version_is_refused_with_the_remedy() -> None:
    text = "-".join(["hoop-device", *(["0" * 64] * 4)])
    with pytest.raises(InvalidArgument, match=r"^token file x: .* hoop token FILE --role device --token-file"):
        Token.parse(text, "token file x")
