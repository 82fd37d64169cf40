"""State of a data-parallel replica in its arena: complete after each step, without changes of a running forward."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from forked_ranks import differing
from short_jobs import JOBS, alone
from small_jobs import settings

from hoop import job_events as ev
from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext
from hoop.engine.fault_tolerance.local_persistence import load_from_arena, tensors_from_shard
from hoop.engine.trainer import Trainer
from hoop.memory import Arena
from hoop.transport import open_transport

RUN = "a run"
CHANGES: dict[str, Any] = {"epochs": 1, "optimizer": "adam", "pin": False}


def test_a_restarted_process_restores_all_of_the_state(tmp_path: Path) -> None:
    """Weights, Adam's moments, batch norm's buffers and counters; then a second trainer continues from them."""
    base = settings("data", **CHANGES)
    with Arena.create(tmp_path / "arena", 24 << 20) as arena, open_transport("inproc://one:0") as transport:

        def world(number: int) -> RankContext:
            one = Communicator(transport.endpoint(number, 1, 0, [transport.address]))
            reassign = lambda timeout, error=None: world(number + 1)  # noqa: E731
            return RankContext(
                arena, one, lambda ranks: one, wait_reassignment=reassign, persistent_memory=True, run=RUN
            )

        events: list[ev.JobEvent] = []
        first = Trainer(world(1), base.replaced({"max_steps": 3}), JOBS["normed"], events.append, lambda: False)
        first.train()
        expected = {name: one.clone() for name, one in first._role.restore_targets(first._setup.model).items()}
        stage = first.executor.stage_states[0]
        stage.state_array[stage.layout.trained :] += 1  # as during a forward
        joining = dataclasses.replace(world(9), joining=True)
        second = Trainer(joining, base, JOBS["normed"], events.append, lambda: False)
        assert second._done == 3
        (newest, *_) = second._startup.arena_shards
        assert newest.step == 3
        found = tensors_from_shard(expected, newest)
        assert found is not None
        restored = second._role.restore_targets(second._setup.model)
        for name, one in expected.items():
            assert torch.equal(found[name], one), name
            assert torch.equal(restored[name], one), name
        events.clear()
        second.join()
        assert [one.source for one in events if isinstance(one, ev.StateLoaded)] == ["its own arena"]
        assert [one.done for one in events if isinstance(one, ev.Started)] == [3]
        losses = [(one.first, len(one.loss)) for one in events if isinstance(one, ev.Steps)]
        assert losses[0][0] == 0, "earlier steps are reported again: the process that received their events is gone"
        assert sum(count for _, count in losses) == second._schedule.total_steps
        last = second._role.restore_targets(second._setup.model)
        assert not differing(last, alone("normed", tuple(CHANGES.items()))), "differs from a run without a restart"
        second.close()
        assert [one.name for one in arena.buffers() if not one.name.startswith("snapshot")] == []
        shards = load_from_arena(arena, "", RUN)
        assert [one.step for one in shards] == [second._schedule.total_steps], "only the final snapshot is left"
