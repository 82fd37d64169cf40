"""A coordinator with its services in place."""

from __future__ import annotations

from hoop.servers import coordinator_service, lab_coordinator
from hoop.servers.conductor import Conductor
from hoop.servers.coordinator import Coordinator, CoordinatorConfig
from hoop.servers.groups import Groups
from hoop.topology import Address
from hoop.wire.rpc import handlers


class CoordinatorServer:
    """The coordinator, serving both the lab's protocol and Hoop's."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.coordinator = Coordinator(config)
        conductor, groups = Conductor(self.coordinator), Groups()
        service = coordinator_service.CoordinatorService(self.coordinator, conductor, groups)
        self._jobs = service.jobs
        self._services = (
            handlers(
                lab_coordinator.SERVICE, lab_coordinator.LabCoordinator(self.coordinator, conductor, groups)
            ),
            handlers(coordinator_service.SERVICE, service),
        )

    async def start(self) -> Address:
        await self.coordinator.open()
        self._jobs.resume()
        return await self.coordinator.start(self._services)

    async def stop(self) -> None:
        await self.coordinator.stop()
