"""Ranks compare versions and arithmetic before they train: a rank that differs is named, unless the user allows it."""

from __future__ import annotations

import os

import pytest
import torch
from forked_ranks import train
from small_jobs import JOBS, settings

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


def test_a_rank_with_another_arithmetic_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are forked, so the replacement gives each of them another value."""
    monkeypatch.setattr(setup, "rank_environment", lambda: {"arithmetic": str(os.getpid())})
    with pytest.raises(AssertionError, match=r"rank 1 has the result of the numeric probe \d+, where the others have"):
        train("shm", 2, settings("data"), JOBS["mlp"])


def test_a_mixture_is_trained_if_the_user_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "rank_environment", lambda: {"arithmetic": str(os.getpid())})
    train("shm", 2, settings("data").replaced({"allow_mixed": True, "max_steps": 1}), JOBS["mlp"])
