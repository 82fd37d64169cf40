"""A rank that was left out says so in every recovery until one is complete: its state may differ from the others'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from short_jobs import JOBS
from small_jobs import settings

import hoop.engine.fault_tolerance.manager as engine_manager
import hoop.engine.fault_tolerance.recovery as engine_recovery
import hoop.engine.trainer as engine_trainer
from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext
from hoop.engine.trainer import Trainer
from hoop.errors import HoopError, PeerLost
from hoop.membership.recovery import RankStatus, RecoveryPlan, agree
from hoop.memory import Arena
from hoop.transport import open_transport


def failing(original: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The function, whose call of this number fails: a peer is lost there."""
    calls = [0]

    def function(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise PeerLost("a peer is gone")
        return original(*arguments, **more)

    return function


@pytest.mark.parametrize(
    ("strategy", "step", "recovery"),
    [
        pytest.param("pipeline:1f1b", (engine_manager, "any_rank"), (engine_manager, "prepare"), id="pipeline"),
        pytest.param("data", (engine_trainer, "evaluate"), (engine_recovery, "_all_statuses"), id="data"),
    ],
)
def test_a_rank_that_was_left_out_says_so_again_after_a_recovery_that_failed(
    strategy: str, step: tuple[Any, str], recovery: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survived: list[bool] = []

    def recording(statuses: list[RankStatus], whole: dict[str, int]) -> RecoveryPlan:
        survived.extend(one.survived for one in statuses)
        return agree(statuses, whole)

    with Arena.create(tmp_path / "arena", 24 << 20) as arena, open_transport("inproc://one:0") as transport:

        def world(number: int) -> RankContext:
            one = Communicator(transport.endpoint(number, 1, 0, [transport.address]))

            def reassign(timeout: float, error: HoopError | None = None) -> RankContext:
                assert error is None, error
                return replace(world(number + 1), left_out=number == 1)  # of the first generation without it

            return RankContext(arena, one, lambda ranks: one, wait_reassignment=reassign)

        monkeypatch.setattr(engine_recovery, "agree", recording)
        for (place, name), call in ((step, 4 if strategy != "data" else 1), (recovery, 1)):
            monkeypatch.setattr(place, name, failing(getattr(place, name), call))
        wanted = settings(strategy, epochs=1, optimizer="adam", pin=False)
        rank = Trainer(world(1), wanted, JOBS["normed"], lambda event: None, lambda: False)
        rank.train()
        assert survived == [False], "one recovery, as a rank that was left out"
        rank.close()
