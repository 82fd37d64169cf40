"""The loop round a training function: restore, meet again, synchronize, go on."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from hoop.horovod.context import current
from hoop.horovod.elastic.state import State
from hoop.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from hoop.horovod.optimizer import reset_optimizers
from hoop.horovod.process_sets import forget_process_sets

log = logging.getLogger("hoop.horovod")


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``function(state, …)``: it is called again, from the last commit, when ranks are lost or join.

    Without ``hoop run --min-np`` it is called once, and a lost rank raises HorovodInternalError.
    """

    @functools.wraps(function)
    def call(state: State, *arguments: Any, **options: Any) -> Any:
        needs_reset = skip_sync = False
        while True:
            try:
                if needs_reset:
                    _reset()
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                result = function(state, *arguments, **options)
            except HorovodInternalError as error:
                if current().rendezvous is None:
                    raise
                log.warning("rank %d: %s; going back to the last commit", current().rank_info.rank, error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as update:
                skip_sync = update.skip_sync
            else:
                rendezvous = current().rendezvous
                if rendezvous is not None:
                    rendezvous.finish()
                return result
            needs_reset = True

    return call


def _reset() -> None:
    forget_process_sets()
    reset_optimizers()
    current().reset()
