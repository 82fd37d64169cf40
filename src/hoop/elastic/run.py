"""``Run``: a user's own training loop on several devices.

    each process of the script   Run ──▶ a device in this process, which joins the coordinator (``run_cluster.py``)
                                      ──▶ a training thread, which takes turns with the loop (``own_loop.py``)

The process of rank 0 starts the job when all devices have joined. The coordinator invites a process that ``hoop run``
has started again to the running job. Without a launcher the script is the only device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hoop.client.cluster import Cluster, connect
from hoop.collectives.rank_context import RankContext
from hoop.config import parse_size
from hoop.data.user_data import user_data
from hoop.elastic.loop_checkpoints import LoopCheckpoints, Resume
from hoop.elastic.objects import LoopTrainableState
from hoop.elastic.run_cluster import MEET_TIMEOUT_S, find_cluster
from hoop.elastic.step import Step
from hoop.engine.custom.own_loop import OWN_LOOP_LOSS, Computed, Ended, LoopExchange, OwnLoopJob, Shard, error_of
from hoop.engine.settings import Settings
from hoop.engine.trainer import Trainer
from hoop.errors import DeadlineExceeded, FailedPrecondition
from hoop.job_events import Emit
from hoop.launch.forked import start_coordinator
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.device import DeviceServer
from hoop.topology import Address, Addresses
from hoop.wire.auth import Credentials
from hoop.wire.roles import Role

log = logging.getLogger("hoop.elastic")
JOB = "elastic:run"
LOOK_S = 1.0
"""Seconds between two checks, by a process that waits for the first step, whether the run is over."""
POLL_S = 0.05
LEAVE_TIMEOUT_S = 20.0
"""Seconds that a process that has finished waits for its device to leave, and rank 0 for the other devices."""


class _NothingLeft(Exception):
    """The others have finished the run before this process, which was started again, could take part."""


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
        out: str | Path | None = None,
        resume: Resume = False,
        on: str | None = None,
        memory: int | str | None = None,
        **settings: Any,
    ) -> None:
        """``model``, ``optimizer``, ``scheduler``: one, or a list or dict of them, equal on every device.

        ``scheduler`` steps after every step. ``state``: further objects with ``state_dict``, by name. ``data``: as in
        ``hoop.train``. ``out``: folder for a checkpoint after every epoch (``checkpoint_every``; the last ``keep``);
        with ``resume`` the run goes on from the newest one there, with ``resume="auto"`` if there is one. ``on``: the
        scheduler that started the processes, where it is not detected. ``memory``: bytes of this device's arena, or as
        "2GiB"; without it, it takes what the run needs. ``settings``: epochs, batch_size, shards, seed, clip, shuffle,
        drop_last, max_steps, timeout_s.
        """
        self.objects = LoopTrainableState(model, optimizer, scheduler, state)
        splits, stated = user_data(data, collate_fn)
        every = {} if out is not None else {"checkpoint_every": 0}
        # The loop computes in its own thread, and decides there whether denormal numbers count as zero.
        usual = {"accelerator": "cpu", "trace_steps": 0, "flush_denormals": False}
        chosen = {**usual, **every, **stated, **settings}
        self.settings = Settings(job=JOB, hang_s=0.0).replaced(chosen).check()
        self._checkpoints = LoopCheckpoints(out, self.settings.keep, resume)
        self._exchange = LoopExchange()
        self._job = OwnLoopJob(
            lambda seed: nn.ModuleList(self.objects.modules),
            lambda: splits,
            OWN_LOOP_LOSS,
            objects=self.objects,
            exchange=self._exchange,
        )
        self._cluster = find_cluster(os.environ, None if memory is None else parse_size(memory, "memory"), on)
        self._began = threading.Event()
        """Set when the training thread has started."""
        self._leaving = threading.Event()
        """Set when the user wants this device to leave."""
        self._over = threading.Event()
        """Set when the run has ended on this device."""
        self._ending = threading.Event()
        """Set with ``_leaving`` and with ``_over``."""
        self.rank = self._cluster.rank
        """Number of this process among those that the launcher started."""

    def steps(self) -> Iterator[Step]:
        """The steps of the run, in order. A step comes again if a device is lost, with the shards that are missing.

        A process that was started again and comes after the end of the run ends here, with code 0: its model is not
        trained, and what follows the loop must not be done with it.
        """
        device = threading.Thread(target=self._serve, name="hoop-elastic", daemon=True)
        device.start()
        try:
            while not isinstance(message := self._exchange.peek(), Ended):
                if isinstance(message, Shard | Computed):
                    yield Step(self._exchange, message.position, self.objects.device)
                else:
                    self._exchange.take()
        finally:
            self._exchange.close()
            self._over.set()
            self._ending.set()
            device.join(2 * LEAVE_TIMEOUT_S)
        if isinstance(message.error, _NothingLeft):
            log.warning("rank %d: the others have finished the run; nothing is left for this process", self.rank)
            raise SystemExit(0)
        if error := error_of(message):
            raise error

    def leave(self) -> None:
        """Makes this device leave after a step: nothing is lost, the others go on, the loop over ``steps`` ends here.

        For a machine that will be taken away: call it in a signal handler, or where the notice comes. A run whose other
        devices are all gone goes on until its end.
        """
        self._leaving.set()
        self._ending.set()

    # ---- the device in this process

    def _serve(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._run_device())
        except BaseException as failed:
            error = failed
        self._exchange.tell(Ended(error))  # also if the device left before its training thread began

    async def _run_device(self) -> None:
        cluster, config = self._cluster, self._cluster.device
        hosted: CoordinatorServer | None = None
        if cluster.coordinator is not None:
            hosted, address = await start_coordinator(cluster.coordinator)
            if cluster.size == 1:
                config = replace(config, coordinator=address)
        if not config.credentials.required:
            config = replace(config, credentials=Credentials(Role.DEVICE, local=True))
        server = DeviceServer(config, self._train)
        try:
            await server.start()
            watching = asyncio.create_task(asyncio.to_thread(self._await_begin, config.coordinator, config.credentials))
            ending = asyncio.create_task(self._wait_ending())
            await asyncio.wait([watching, ending], return_when="FIRST_COMPLETED")
            if watching.done():
                watching.result()
            await ending
            if not self._over.is_set():
                await server.hand_over()
                await asyncio.to_thread(self._over.wait, LEAVE_TIMEOUT_S)
        except BaseException as error:
            self._exchange.tell(Ended(error))  # before the end of this loop, which waits for its threads
            raise
        finally:
            await server.stop()
            if hosted is not None:
                await _stop_when_alone(hosted)

    async def _wait_ending(self) -> None:
        """Returns when ``_ending`` is set.

        A daemon thread waits. A thread of the loop's executor would keep the script from ending if the loop over
        ``steps`` was left and its iterator was not closed: the interpreter joins these threads first.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wait() -> None:
            self._ending.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: the device has failed
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=wait, name="hoop-elastic-ending", daemon=True).start()
        await ended.wait()

    def _await_begin(self, address: Address | Addresses, credentials: Credentials) -> None:
        """Starts the job, if this process does, and returns when the training thread of this device is there.

        Raises if the run ends, or does not begin, while this device waits for it.
        """
        deadline = time.monotonic() + MEET_TIMEOUT_S
        with connect(address, credentials=credentials.for_role(Role.CLIENT)) as client:
            if self._cluster.starts_job:
                self._start_job(client)
            while not self._began.wait(LOOK_S) and not self._over.is_set():
                jobs = client.status().jobs
                if jobs and jobs[-1].status == "ended" and self._cluster.restarted:
                    raise _NothingLeft
                if jobs and all(job.status != "running" for job in jobs):
                    raise FailedPrecondition(
                        f"rank {self.rank}: the run has ended before this process could take part: "
                        f"{jobs[-1].reason or jobs[-1].status}"
                    )
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"rank {self.rank}: the run has not begun within {MEET_TIMEOUT_S:g} s: "
                        f"{'this device got no part in it' if jobs else 'rank 0 has not started it'}"
                    )

    def _start_job(self, client: Cluster) -> None:
        data = self._checkpoints.newest()
        client.wait_for_devices(self._cluster.size, MEET_TIMEOUT_S)
        devices = sorted(one.device.device_id for one in client.status().devices if one.state == "alive")
        buffer = "" if data is None else client.stage(data, devices)
        client.start_job(self.settings.to_json(), devices, buffer)

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
        self._began.set()
        error: BaseException | None = None
        try:
            checked = Settings.from_json(settings).check()
            writing = self._checkpoints.writing(emit, context)
            trainer = Trainer(context, checked, self._job, writing, stopping, resume, "elastic.")
            try:
                trainer.join() if context.joining else trainer.train()
            finally:
                trainer.close()
                self._checkpoints.close()
        except BaseException as failed:
            error = failed
            raise
        finally:
            self._exchange.tell(Ended(None if self._leaving.is_set() else error))


async def _stop_when_alone(server: CoordinatorServer) -> None:
    """Stops a coordinator when all devices have left it: one that leaves waits for its answer."""
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    for _ in iter(lambda: server.coordinator.state.usable(), []):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(POLL_S)
    await server.stop()
