"""An ended job leaves nothing in the memory of its device, whether or not garbage is collected meanwhile."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from short_jobs import JOBS
from small_jobs import settings

from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext
from hoop.engine.trainer import Trainer
from hoop.memory import Arena
from hoop.transport import open_transport

LONG_S = 60.0


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    ("job", "strategy"), [("normed", "data"), ("mlp", "data"), ("mlp", "ring"), ("mlp", "pipeline")]
)
def test_the_model_is_released_with_the_trainer(tmp_path: Path, job: str, strategy: str) -> None:
    with Arena.create(tmp_path / "arena", 24 << 20) as arena, open_transport("inproc://one:0") as transport:
        communicator = Communicator(transport.endpoint(1, 1, 0, [transport.address]))
        context = RankContext(arena, communicator, lambda ranks: communicator)
        changes = settings(strategy, epochs=1, max_steps=3, pin=False)
        trainer = Trainer(context, changes, JOBS[job], lambda event: None, lambda: False)
        trainer.train()
        model, executor = weakref.ref(trainer._setup.model), weakref.ref(trainer.executor)
        trainer.close()
        del trainer
        deadline = time.monotonic() + LONG_S
        while (model() or executor()) and time.monotonic() < deadline:
            time.sleep(0.001)  # a thread that the trainer has ended may still hold its last task
        left = [one() for one in (model, executor)]
        assert left == [None, None], [[type(holder) for holder in gc.get_referrers(one)] for one in left if one]
