"""The coordinator that ``hoop run`` hosts for scripts with ``hoop.elastic``: in a thread, for the time of the run."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from hoop.errors import HoopError
from hoop.membership.heartbeats import DetectorConfig
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.wire.auth import Credentials
from hoop.wire.channels import LOCAL_LEASE_S
from hoop.wire.roles import Role

COORDINATOR = "HOOP_RUN_COORDINATOR"
"""Environment variable of the ranks with the coordinator's address."""
START_TIMEOUT_S = 60.0


class RunCoordinator:
    """A coordinator on loopback for processes of this user. A context manager."""

    def __init__(self) -> None:
        self._started, self._ending = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="hoop-run-coordinator", daemon=True)
        self.variables: dict[str, str] = {}
        """Environment variables that the ranks need."""

    def __enter__(self) -> RunCoordinator:
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S) or self._error is not None:
            raise HoopError(f"the coordinator of the run did not start: {self._error or 'no answer'}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join(START_TIMEOUT_S)

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _run(self) -> None:
        credentials = Credentials(Role.COORDINATOR, local=True)
        server = CoordinatorServer(
            CoordinatorConfig(
                detector=DetectorConfig(lease_s=LOCAL_LEASE_S), credentials=credentials, command="hoop run"
            )
        )
        address = await server.start()
        self.variables = {COORDINATOR: str(address)}
        self._started.set()
        ends = [asyncio.to_thread(self._ending.wait), server.coordinator.wait_failed()]
        await asyncio.wait(map(asyncio.ensure_future, ends), return_when="FIRST_COMPLETED")
        await server.stop()
