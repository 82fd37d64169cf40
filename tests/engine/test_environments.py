"""Ranks compare versions and arithmetic before they train: a rank that differs is named, unless the user allows it."""

from __future__ import annotations

import os

import pytest
import torch
from forked_ranks import train
from short_jobs import JOBS
from small_jobs import settings

from hoop.engine import numeric_probe, setup


def test_the_probe_notices_another_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    known = numeric_probe.probe_arithmetic.__wrapped__(1)
    assert numeric_probe.probe_arithmetic.__wrapped__(1) == known
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *parts: linear(*parts) * (1 + 2**-23))
    assert numeric_probe.probe_arithmetic.__wrapped__(1) != known


def test_the_probe_leaves_the_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    numeric_probe.probe_arithmetic.__wrapped__(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_rank_with_another_arithmetic_is_refused_if_the_bits_must_be_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks are forked, so the replacement gives each of them another value."""
    monkeypatch.setattr(setup, "rank_environment", lambda: {"arithmetic": str(os.getpid())})
    named = r"rank 1 \(device \d on .*\) has the result of the numeric probe \d+, where the others have"
    with pytest.raises(AssertionError, match=named):
        train("shm", 2, settings("data").replaced({"require_same_bits": True}), JOBS["mlp"])


def test_a_rank_with_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "rank_environment", lambda: {"torch": f"2.{os.getpid()}"})
    named = r"rank 1 \(device \d on .*\) has PyTorch 2\.\d+, where the others have PyTorch 2\.\d+"
    with pytest.raises(AssertionError, match=named):
        train("shm", 2, settings("data"), JOBS["mlp"])


@pytest.mark.parametrize(("key", "allowed"), [("arithmetic", {}), ("torch", {"allow_mixed": True})])
def test_a_mixture_is_trained(monkeypatch: pytest.MonkeyPatch, key: str, allowed: dict[str, bool]) -> None:
    monkeypatch.setattr(setup, "rank_environment", lambda: {key: str(os.getpid())})
    train("shm", 2, settings("data").replaced({**allowed, "max_steps": 1}), JOBS["mlp"])
