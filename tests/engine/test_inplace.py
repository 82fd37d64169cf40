"""A replica's state as its arena tells of it: all of it after each step, and nothing of what a forward is doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from forked_ranks import differing
from small_jobs import JOBS, alone, settings

from hoop.collectives.communicator import Communicator
from hoop.engine.fault_tolerance.local_persistence import filled, load_from_arena
from hoop.engine.rank_context import RankContext
from hoop.engine.trainer import Trainer
from hoop.memory import Arena
from hoop.transport import open_transport

RUN = "a run"
CHANGES: dict[str, Any] = {"epochs": 1, "optimizer": "adam", "pin": False}


def test_all_of_the_state_is_found_again(tmp_path: Path) -> None:
    """Weights, Adam's moments, batch norm's means and counters; then a second process goes on from it."""
    changed = settings("data", **CHANGES)
    with Arena.create(tmp_path / "arena", 24 << 20) as arena, open_transport("inproc://one:0") as transport:

        def world(number: int) -> RankContext:
            one = Communicator(transport.endpoint(number, 1, 0, [transport.address]))
            seats = lambda patience, lacks=None: world(number + 1)  # noqa: E731
            return RankContext(arena, one, lambda ranks: one, reseated=seats, outlives=True, run=RUN)

        told: list[dict[str, Any]] = []
        first = Trainer(
            world(1), changed.replaced({"max_steps": 5}), JOBS["normed"], told.append, lambda: False
        )
        first.go()
        wanted = {name: one.clone() for name, one in first._role.wanted(first._ready.model).items()}
        held = first.worker.held[0]
        held.state_array[held.layout.trained :] += 1  # as a forward does, for a while
        second = Trainer(world(9), changed, JOBS["normed"], told.append, lambda: False, joins=True)
        assert second._done == 5
        (newest, *_) = second._arrival.left
        assert newest.step == 5
        found = filled(wanted, newest)
        assert found is not None
        restored = second._role.wanted(second._ready.model)
        for name, one in wanted.items():
            assert torch.equal(found[name], one), name
            assert torch.equal(restored[name], one), name
        told.clear()
        second.join()
        assert [one["source"] for one in told if one["kind"] == "state"] == ["its own arena"]
        assert [one["done"] for one in told if one["kind"] == "started"] == [5]
        losses = [(one["first"], len(one["loss"])) for one in told if one["kind"] == "steps"]
        assert losses[0][0] == 0, "the steps before are told again: who heard them is gone"
        assert sum(count for _, count in losses) == second._course.limit
        last = second._role.wanted(second._ready.model)
        assert not differing(last, alone("normed", tuple(CHANGES.items()))), "as if nothing had happened"
        second.close()
        assert [one.name for one in arena.buffers() if not one.name.startswith("snapshot")] == []
        third = load_from_arena(arena, "", RUN)
        assert [one.step for one in third] == [second._course.limit], "the final snapshot"
