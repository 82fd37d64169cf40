"""Runs ``train_driver`` on devices that communicate over TCP only, with a short lease.

All devices are forked from one process that has imported PyTorch: several trainings a minute instead of one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "process"))

import train_driver

import hoop.launch.forked
import hoop.servers.device

LEASE_S = 3.0
"""Twice the default, because the machine may be busy."""

if __name__ == "__main__":
    hoop.launch.forked.LEASE_S = LEASE_S
    # ``patch`` raises if the name does not exist; with a plain assignment the devices would silently use shared memory.
    with mock.patch("hoop.servers.device.open_shm_transport", return_value=None):
        train_driver.main()
