"""The job of ``train_driver``, with data that kills one device while it prepares: when it profiles the first batch."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import hoop

sys.path.append(str(Path(__file__).resolve().parents[1] / "process"))

import train_driver

FLAG = "HOOP_TEST_FLAG"
"""Environment variable with the path of a file: the first process that reads a batch creates it and kills itself."""


class DeadlyData(hoop.TensorData):
    """The same samples, until ``batch`` kills the process."""

    def batch(self, *arguments: Any, **options: Any) -> Any:
        if FLAG in os.environ and not os.path.exists(os.environ[FLAG]):
            try:
                os.close(os.open(os.environ[FLAG], os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return super().batch(*arguments, **options)


def data() -> hoop.Splits:
    splits = train_driver.data()
    assert isinstance(splits.train, hoop.TensorData)
    return hoop.Splits(DeadlyData(splits.train.inputs, splits.train.targets), splits.test)


job = hoop.Job(train_driver.chain, data, settings=train_driver.job.settings)
