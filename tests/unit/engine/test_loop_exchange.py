"""Messages between the training thread and a user's own loop."""

from __future__ import annotations

import threading

from hoop.engine.custom.loss import ShardLoss
from hoop.engine.custom.own_loop import LoopExchange, Shard, Updated
from hoop.engine.data_feed import Position

LONG_S = 60.0


def test_the_loop_sees_that_a_step_is_done_before_the_next_shard() -> None:
    """Else ``step.loss`` is None, and the loop takes the step for one that comes again."""
    exchange = LoopExchange()
    next_shard = Shard(Position(0, 1, 1), 0, None, 4, 0)
    asks = threading.Event()

    def train() -> None:
        exchange.tell(Updated(Position(0, 0, 0), 0.5))
        asks.set()
        exchange.ask(next_shard)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert asks.wait(LONG_S)
    thread.join(0.2)  # it waits in ``ask``
    assert isinstance(exchange.peek(), Updated)
    exchange.take()
    assert exchange.peek() == next_shard
    exchange.answer(ShardLoss(None, 0.0, {}))  # type: ignore[arg-type]
    thread.join(LONG_S)
    assert not thread.is_alive()
