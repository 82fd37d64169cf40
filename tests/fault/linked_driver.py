"""``train_driver``, on devices that have nothing but TCP between them, and a lease as short as that of a cluster.

Forked from one process that has PyTorch: several trainings a minute, instead of one.
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
"""Twice the default: the machine that tests run on may be busy."""

if __name__ == "__main__":
    hoop.launch.forked.LEASE_S = LEASE_S
    # ``patch`` raises where there is no such name; an assignment would leave the devices their shared memory.
    with mock.patch("hoop.servers.device.open_shm_transport", return_value=None):
        train_driver.main()
