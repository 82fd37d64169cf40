"""A rank of a partitioned model that is left out before it has its part: the run begins again, to the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import differing
from short_jobs import JOBS, alone
from small_jobs import settings

from hoop import job_events as ev
from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext
from hoop.engine.setup import TrainingSetup, prepare
from hoop.engine.trainer import Trainer
from hoop.errors import HoopError, PeerLost
from hoop.memory import Arena
from hoop.transport import open_transport

CHANGES: dict[str, Any] = {"epochs": 1, "optimizer": "adam", "pin": False}


def test_a_run_whose_only_rank_was_left_out_before_it_had_state_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstacles: list[HoopError | None] = []

    def fail_once(*arguments: Any, **more: Any) -> TrainingSetup:
        monkeypatch.setattr("hoop.engine.trainer.prepare", prepare)
        raise PeerLost("a peer is gone")

    with Arena.create(tmp_path / "arena", 24 << 20) as arena, open_transport("inproc://one:0") as transport:

        def world(number: int) -> RankContext:
            one = Communicator(transport.endpoint(number, 1, 0, [transport.address]))

            def reassign(timeout: float, error: HoopError | None = None) -> RankContext:
                obstacles.append(error)
                assert error is None, error
                return replace(world(number + 1), left_out=True)

            return RankContext(arena, one, lambda ranks: one, wait_reassignment=reassign)

        events: list[ev.JobEvent] = []
        monkeypatch.setattr("hoop.engine.trainer.prepare", fail_once)
        rank = Trainer(world(1), settings("pipeline:1f1b", **CHANGES), JOBS["normed"], events.append, lambda: False)
        rank.train()
        assert obstacles == [None], "the rank was left out once, and lost no state"
        assert [one.step for one in events if isinstance(one, ev.Recovered)] == [0]
        last = rank._role.restore_targets(rank._setup.model)
        assert not differing(last, alone("normed", tuple(CHANGES.items()))), "differs from an undisturbed run"
        rank.close()
