"""Runs ``train_driver`` on devices that communicate over TCP only, with a short lease.

All devices are forked from one process that has imported PyTorch: several trainings a minute instead of one.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "process"))

import train_driver

from hoop.runs.clean_process import CleanProcess, idle_process

LEASE_S = 3.0
"""Twice the default, because the machine may be busy."""

if __name__ == "__main__":
    # ``patch`` raises if the name does not exist; with a plain assignment the devices would silently use shared memory.
    with (
        mock.patch("hoop.launch.forked.LOCAL_LEASE_S", LEASE_S),
        mock.patch("hoop.servers.device.open_shm_transport", return_value=None),
        # This process has loaded PyTorch and computes with one thread; a fork of it has what is patched.
        mock.patch.object(CleanProcess, "execute", partial(CleanProcess.fork, loaded=False)),
    ):
        train_driver.main()
        if (clean := idle_process()) is not None:  # a fork of this process, which has its files
            clean.close()
