"""A ``DeviceGroup`` over Gloo on loopback: emulated GPUs exchange rows with the code that GPUs use over NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from hoop.collectives.communicator import Communicator, all_gather_object
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.device_group import DeviceGroup

LOOPBACK = "127.0.0.1"


def open_gloo_group(communicator: Communicator, accelerator: Accelerator, timeout: float) -> DeviceGroup | str:
    """Collective. Takes the place of ``peer_row_selection.open_group`` where ranks are emulated, on one host."""
    distributed: Any = torch.distributed
    waits, rank = timedelta(seconds=timeout), communicator.rank
    store = None
    if rank == 0:
        store = distributed.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=waits)
    port = all_gather_object(communicator, store.port if store is not None else 0, timeout)[0]
    if store is None:
        store = distributed.TCPStore(LOOPBACK, port, is_master=False, timeout=waits)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout, options._threads = waits, 1
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    backend = distributed.ProcessGroupGloo(store, rank, communicator.size, options)
    return DeviceGroup(backend, communicator.endpoint, accelerator.device)
