"""``Run``: a user's own training loop on several devices.

    hoop run (launcher)          a coordinator
    each process of the script   Run ──▶ a device in this process, which joins the coordinator
                                      ──▶ a training thread, which takes turns with the loop (``own_loop.py``)

The process with RANK 0 starts the job when all devices have joined. The coordinator invites a process that is started
again to the running job. Without a launcher the script is the only device.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hoop.client.cluster import connect
from hoop.collectives.rank_context import RankContext
from hoop.config import parse_size
from hoop.elastic.objects import LoopObjects
from hoop.elastic.step import Step
from hoop.engine.custom.own_loop import OWN_LOOP_LOSS, Computed, Ended, LoopExchange, OwnLoopJob, Shard, error_of
from hoop.engine.settings import Settings
from hoop.engine.trainer import Trainer
from hoop.job_events import Emit
from hoop.launch.rank_processes import RESTART_COUNT
from hoop.launch.run_coordinator import COORDINATOR, TOKEN
from hoop.runs.user_data import user_data
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

JOB = "elastic:run"
START_TIMEOUT_S = 300.0
LEAVE_TIMEOUT_S = 20.0
"""How long a process that has finished waits for its device to leave."""


class Run:
    """A run of a user's own loop; see the module ``hoop.elastic``."""

    def __init__(
        self,
        *,
        model: nn.Module | Mapping[str, nn.Module] | list[nn.Module],
        optimizer: Any,
        data: Any,
        scheduler: Any = None,
        state: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        memory: int | str = "256MiB",
        **settings: Any,
    ) -> None:
        """``model``, ``optimizer``, ``scheduler``: one, or a list or dict of them, equal on every device.

        ``scheduler`` steps after every step. ``state``: further objects with ``state_dict``, by name. ``data``: as in
        ``hoop.train``. ``settings``: epochs, batch_size, shards, seed, clip, shuffle, drop_last, max_steps, timeout_s.
        """
        self.objects = LoopObjects(model, optimizer, scheduler, state)
        splits, stated = user_data(data, collate_fn)
        chosen = {"accelerator": "cpu", "trace_steps": 0, "checkpoint_every": 0, **stated, **settings}
        self.settings = Settings(job=JOB).replaced(chosen).check()
        self._exchange = LoopExchange()
        self._job = OwnLoopJob(
            lambda seed: nn.ModuleList(self.objects.modules),
            lambda: splits,
            OWN_LOOP_LOSS,
            objects=self.objects,
            exchange=self._exchange,
        )
        self._memory = parse_size(memory, "memory")
        self._over = threading.Event()
        """The run has ended on this device."""
        self.rank = int(os.environ.get("RANK", "0"))
        """Number of this process among those that the launcher started."""

    def steps(self) -> Iterator[Step]:
        """The steps of the run, in order. A step comes again if a device is lost, with the shards that are missing."""
        device = threading.Thread(target=self._serve, name="hoop-elastic", daemon=True)
        device.start()
        try:
            while not isinstance(message := self._exchange.peek(), Ended):
                if isinstance(message, Shard | Computed):
                    yield Step(self._exchange, message.position)
                else:
                    self._exchange.take()
        finally:
            self._exchange.close()
            self._over.set()
            device.join(LEAVE_TIMEOUT_S)
        if error := error_of(message):
            raise error

    # ---- the device in this process

    def _serve(self) -> None:
        try:
            asyncio.run(self._run_device())
        except BaseException as error:
            self._exchange.tell(Ended(error))

    async def _run_device(self) -> None:
        text = os.environ.get(COORDINATOR)
        own: CoordinatorServer | None = None
        token = Token.parse(os.environ[TOKEN], TOKEN) if TOKEN in os.environ else Token.parse(new_token())
        if text is None:
            own = CoordinatorServer(CoordinatorConfig(credentials=Credentials(Role.COORDINATOR, token)))
            address = await own.start()
        else:
            address = Address.parse(text)
        config = DeviceConfig(address, memory=self._memory, credentials=Credentials(Role.DEVICE, token))
        server = DeviceServer(config, self._train)
        await server.start()
        try:
            if self.rank == 0 and os.environ.get(RESTART_COUNT, "0") == "0":
                await asyncio.to_thread(self._start_job, address, token)
            await asyncio.to_thread(self._over.wait)
        finally:
            await server.stop()
            if own is not None:
                await own.stop()

    def _start_job(self, address: Address, token: Token) -> None:
        size = int(os.environ.get("WORLD_SIZE", "1")) if COORDINATOR in os.environ else 1
        with connect(address, credentials=Credentials(Role.CLIENT, token)) as cluster:
            cluster.wait_for_devices(size, START_TIMEOUT_S)
            devices = [one.device.device_id for one in cluster.status().devices if one.state == "alive"]
            cluster.start_job(self.settings.to_json(), sorted(devices))

    def _train(
        self,
        context: RankContext,
        settings: str,
        emit: Emit,
        stopping: Callable[[], bool],
        resume: bytes | None,
        jobs: Path | None = None,
    ) -> None:
        """Called on the training thread of this device when the job starts, or when this device joins it."""
        error: BaseException | None = None
        try:
            checked = Settings.from_json(settings).check()
            trainer = Trainer(context, checked, self._job, emit, stopping, resume, "elastic.", context.joining)
            try:
                trainer.join() if context.joining else trainer.train()
            finally:
                trainer.close()
        except BaseException as failed:
            error = failed
            raise
        finally:
            self._exchange.tell(Ended(error))
