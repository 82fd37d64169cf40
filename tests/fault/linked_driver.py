"""``train_driver``, on devices that have nothing but TCP between them, and a lease as short as that of a cluster.

Forked from one process that has PyTorch: several trainings a minute, instead of one.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "process"))

import train_driver

import hoop.launch.forked
import hoop.servers.device

LEASE_S = 3.0
"""Twice the default: the machine that tests run on may be busy."""

if __name__ == "__main__":
    hoop.servers.device.share = lambda address, arena: None
    hoop.launch.forked.LEASE_S = LEASE_S
    train_driver.main()
