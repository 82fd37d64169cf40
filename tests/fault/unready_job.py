"""The job of ``train_driver``, on devices of which one dies while it gets ready: when it measures a first batch."""

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
"""Names a file that the first to be asked for samples makes, and dies."""


class Deadly(hoop.TensorData):
    """The same samples."""

    def batch(self, *arguments: Any, **more: Any) -> Any:
        if FLAG in os.environ and not os.path.exists(os.environ[FLAG]):
            try:
                os.close(os.open(os.environ[FLAG], os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return super().batch(*arguments, **more)


def data() -> hoop.Splits:
    given = train_driver.data()
    assert isinstance(given.train, hoop.TensorData)
    return hoop.Splits(Deadly(given.train.inputs, given.train.targets), given.test)


job = hoop.Job(train_driver.chain, data, settings=train_driver.job.settings)
