"""A rank that waits prefetches samples of the next step: the same weights, also if a rank dies meanwhile."""

from __future__ import annotations

import itertools

import pytest
from faulty_ranks import Fault, run_with_faults
from forked_ranks import Outcome, checkpoint, differing, tensors_in, train
from small_jobs import JOBS, SHARDS, alone, settings

from hoop.engine import executor

SLOW = 8.0
"""How many times slower the last rank computes; the others wait for it in every step."""
CHANGES = {"balance": False, "pin": False}


@pytest.fixture(autouse=True)
def two_ranks_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MIN_PREFETCH_RANKS", 2)  # ranks are forked


def prefetches(outcome: Outcome) -> int:
    """How often the rank loaded samples between its last backward of a step and the sum of the gradients."""
    names = [name for name, *_ in outcome.account["spans"] if name != "wait"]
    return sum("B" in before and "L" in name and after == "0A" for before, name, after in triples(names))


def triples(names: list[str]) -> list[tuple[str, str, str]]:
    return list(zip(names, names[1:], names[2:], strict=False))


@pytest.mark.parametrize(("job", "size"), [("mlp", 2), ("normed", 2), ("mlp", SHARDS + 1)])
def test_samples_loaded_while_a_rank_waits_change_no_bit(job: str, size: int) -> None:
    """Shards of 5 and 6 samples, and empty ones; of more ranks than shards one has none."""
    slowdown = [1.0] * (min(size, SHARDS) - 1) + [SLOW] + [1.0] * (size > SHARDS)
    outcomes = train("shm", size, settings("data", slowdown=slowdown, **CHANGES), JOBS[job])
    assert not differing(tensors_in(checkpoint(outcomes)), alone(job))
    assert prefetches(outcomes[0]) > 0
    if size > SHARDS:
        assert prefetches(outcomes[-1]) == 0
    for outcome in outcomes:
        spans = sorted((start, start + seconds) for _, _, start, seconds in outcome.account["spans"])
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans)), "spans do not overlap"


def test_a_single_rank_and_few_ranks_prefetch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (outcome,) = train("shm", 1, settings("data", epochs=1), JOBS["mlp"])
    assert prefetches(outcome) == 0
    monkeypatch.undo()
    outcomes = train("shm", 2, settings("data", epochs=1, slowdown=[1.0, SLOW], **CHANGES), JOBS["mlp"])
    assert [prefetches(one) for one in outcomes] == [0, 0]


@pytest.mark.parametrize("occurrence", [pytest.param(13, marks=pytest.mark.slow), 14, 25])
def test_a_rank_that_dies_while_others_prefetch_changes_no_bit(occurrence: int) -> None:
    """The others have loaded for the next step; they finish this one without it, with other shards, and go on."""
    slowdown = [1.0, 1.0, SLOW]
    fault = Fault(2, "instruction", occurrence)
    results = run_with_faults(3, settings("data", slowdown=slowdown, **CHANGES), JOBS["mlp"], [fault])
    assert len(results) == 2
    outcomes = [results[rank].outcome for rank in sorted(results)]
    assert not differing(tensors_in(checkpoint(outcomes)), alone("mlp"))
    assert sum(len(one.of("recovered")) for one in outcomes) == 1
    assert prefetches(outcomes[0]) > 0
